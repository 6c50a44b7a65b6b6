//! Removes the content of one message wherever it is. What happened to the message remains in the ledger.

use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, update};
use uuid::Uuid;

use super::dead::discard;
use super::forget::lacking;
use super::messages::LetterId;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::store::looking::looking;
use crate::store::sql::Json;
use crate::store::statement::unprepared;
use crate::store::table::{attempt, dead, ledger, outbox};
use crate::store::write::waiting::cancel_waiting;

/// What was changed, in rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) cancelled: usize,
    pub(crate) discarded: usize,
    pub(crate) entries: usize,
    pub(crate) attempts: usize,
    /// Live messages that relays hold.
    pub(crate) left: usize,
}

/// Cancels the live rows of the message, discards its dead letters, and blanks its entries, in the caller's transaction.
pub(crate) fn expunge(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: Uuid,
    operator: &str,
) -> QueryResult<Rows> {
    let rows = outbox::table(name.outbox()).filter(outbox::message_id.eq(id));
    let live: Vec<i64> = looking(conn, None, |conn| {
        unprepared(rows.select(outbox::sequence)).load(conn)
    })?;
    let cancelled = cancel_waiting(conn, name, &live, Some(operator))?;
    let letters = dead::table(name.dead()).filter(dead::message_id.eq(id));
    let letters: Vec<i64> = letters.select(dead::sequence).load(conn)?;
    let letter = |sequence| LetterId {
        sequence: Sequence(sequence),
        message_id: id,
    };
    let letters: Vec<LetterId> = letters.into_iter().map(letter).collect();
    let discarded = discard(conn, name, &letters, operator)?;
    // The digest stays: by it, the same key enqueued again is the same message.
    let entries = update(ledger::table(name.ledger()))
        .filter(ledger::message_id.eq(id))
        .set((
            ledger::payload.eq(None::<Json<'_>>),
            ledger::headers.eq(None::<Json<'_>>),
            ledger::error.eq(None::<String>),
            ledger::response.eq(None::<String>),
        ))
        .execute(conn)?;
    let attempts = update(attempt::table(name.attempt()))
        .filter(attempt::message_id.eq(id))
        .set((
            attempt::error.eq(None::<String>),
            attempt::response.eq(None::<String>),
        ))
        .execute(conn)?;
    Ok(Rows {
        cancelled,
        discarded,
        entries,
        attempts,
        left: live.len() - cancelled.min(live.len()),
    })
}

/// The table rights that this role lacks. Only the owner has all of them.
pub(crate) fn missing(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<String>> {
    let needed = [
        (name.outbox(), "DELETE"),
        (name.dead(), "DELETE"),
        (name.attempt(), "UPDATE"),
        (name.ledger(), "UPDATE"),
    ];
    lacking(conn, &needed)
}
