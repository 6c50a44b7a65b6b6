//! Messages in all tables, their history, and the ledger.

use diesel::PgConnection;

use super::sql::history::{self, HistoryEntry};
use super::sql::ledger;
use super::sql::messages::{self, MessageRecord};
use super::sql::payloads::{self, StoredPayload};
use super::sql::selection::Selection;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::outbox::sql::searched::Searched;
use crate::outbox::sql::seek::MessageKey;
use crate::sql::pinned::pinned;

/// All rows of a message: live rows, dead letters and ledger entries, for every destination and every replay.
/// Payloads and headers are included where they are kept.
///
/// An index finds a message by its idempotency key, or by its sequence until the message is delivered. The live
/// messages have no index of message ids. An id made by the library contains its time, which leads to the message.
/// For other ids, the tables are read for at most two seconds ([`Searched::is_complete`]).
///
/// # Errors
/// A [`DatabaseError`].
pub fn message(
    conn: &mut PgConnection,
    name: &OutboxName,
    key: &MessageKey,
) -> Result<Searched<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        messages::find(conn, name, key)
    })?)
}

/// The history of messages, oldest first: failed attempts, and actions of operators. At most 1,000 entries. A
/// message that was delivered at the first attempt has none.
///
/// # Errors
/// A [`DatabaseError`].
pub fn history(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_ids: &[uuid::Uuid],
) -> Result<Vec<HistoryEntry>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        history::history(conn, name, message_ids)
    })?)
}

/// The history of the messages of which these rows were found, oldest first. If there are no rows: of the message whose id
/// `which` is, or that had this sequence, as far as two seconds suffice. A repeat that was not sent has only its history.
///
/// # Errors
/// A [`DatabaseError`].
pub fn history_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &str,
    rows: &[MessageRecord],
) -> Result<Vec<HistoryEntry>, DatabaseError> {
    let mut ids: Vec<uuid::Uuid> = rows.iter().map(|one| one.message_id).collect();
    Ok(pinned(conn, name, |conn, name| {
        match which.trim().parse() {
            Ok(sequence) if rows.is_empty() => {
                return Ok(history::of_sequence(conn, name, sequence)?.unwrap_or_default());
            }
            _ if rows.is_empty() => ids.extend(which.trim().parse::<uuid::Uuid>()),
            _ => {}
        }
        history::history(conn, name, &ids)
    })?)
}

/// The live messages and the dead letters of an ordering key, in the order of the key, without payloads and
/// headers, at most `limit`.
///
/// # Errors
/// A [`DatabaseError`].
pub fn key_messages(
    conn: &mut PgConnection,
    name: &OutboxName,
    ordering_key: &str,
    limit: i64,
) -> Result<Vec<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        messages::of_ordering_key(conn, name, ordering_key, limit)
    })?)
}

/// The entries of the ledger, latest first, at most `limit`. A search for rare entries in a large ledger stops
/// after two seconds ([`Searched::is_complete`]).
///
/// # Errors
/// A [`DatabaseError`].
pub fn ledger(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> Result<Searched<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        ledger::ledger(conn, name, selection, limit)
    })?)
}

/// Calls `each` for each stored payload: of messages that are not settled, of dead letters, and of the ledger where it keeps
/// payloads. All of them are read, one at a time.
///
/// # Errors
/// A [`DatabaseError`].
pub fn for_each_payload(
    conn: &mut PgConnection,
    name: &OutboxName,
    each: impl FnMut(StoredPayload),
) -> Result<(), DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        payloads::for_each(conn, name, each)
    })?)
}
