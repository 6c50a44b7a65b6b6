//! Removes the content of messages.

use diesel::PgConnection;
use uuid::Uuid;

use super::bulk::Bulk;
use super::sql::audit::Act;
use super::sql::expunge::{self as store, Expunged, Subject};
use super::waiting::Note;
use crate::endpoints::sql::missed::Bulked;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// Removes the content of a message wherever the outbox has it: payload, headers, responses and errors. This cannot be
/// undone.
///
/// | data | effect |
/// |---|---|
/// | live rows | Cancelled, so that they are not sent |
/// | dead letters | Discarded; ordering keys that they blocked continue |
/// | events of feeds | The content is blanked. The event stays at its position, without data |
/// | the ledger and the history of attempts | The content is blanked. What happened, when and where remains, with the keys |
///
/// All of it is one transaction. Rows that a relay holds are [`left`](Expunged::left). What a receiver got, log lines and
/// backups are not touched. The role needs the rights of the outbox's owner: no relay may change the ledger.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// # use uuid::Uuid;
/// fn remove(conn: &mut PgConnection, outbox: &OutboxName, message: Uuid) -> Result<bool, DatabaseError> {
///     let note = admin::Note::new("alice", "a card number by mistake");
///     let expunged = admin::expunge(conn, outbox, message, &note)?;
///     Ok(!expunged.is_unknown() && expunged.left.is_empty())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]: [`Schema`](DatabaseError::Schema) if the role lacks rights. Nothing is changed then.
pub fn expunge(
    conn: &mut PgConnection,
    name: &OutboxName,
    message: Uuid,
    note: &Note,
) -> Result<Expunged, DatabaseError> {
    pinned(conn, name, |conn, name| {
        store::check_rights(conn, name)?;
        let expunged = store::expunge(conn, name, &[message], note.as_str())?;
        if !expunged.is_unknown() {
            note.audit(conn, name, Act::ExpungeMessage, &message.to_string())?;
        }
        Ok(expunged)
    })
}

/// Removes the content of all messages of a subject, as [`expunge`] does for one.
///
/// Each transaction removes the content of at most 1,000 messages, and `bulk` watches them. After an error or a stop,
/// completed transactions stay, and the same call continues. Messages that are enqueued during the call may remain: stop
/// enqueueing for the subject first, or repeat the call. A dry run counts the live rows, dead letters and ledger entries of
/// the subject, and no attempts.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, Bulk, Note, Subject};
///
/// /// A person wants to be forgotten. Returns whether relays still hold messages of the person.
/// fn remove(conn: &mut PgConnection, outbox: &OutboxName, person: &str) -> Result<bool, DatabaseError> {
///     let note = Note::new("alice", "ticket 4711");
///     let expunged = admin::expunge_all(conn, outbox, &Subject::key(person), Bulk::new(&note))?;
///     Ok(!expunged.left.is_empty())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]: [`Schema`](DatabaseError::Schema) if the role lacks rights, before anything is changed.
pub fn expunge_all(
    conn: &mut PgConnection,
    name: &OutboxName,
    subject: &Subject,
    mut bulk: Bulk<'_>,
) -> Result<Expunged, DatabaseError> {
    pinned(conn, name, store::check_rights)?;
    if bulk.is_dry() {
        return Ok(pinned(conn, name, |conn, name| {
            store::count(conn, name, subject)
        })?);
    }
    let (note, mut done) = (bulk.note(), Expunged::default());
    for look in store::LOOKS {
        let mut after = None;
        loop {
            let found = pinned(conn, name, |conn, name| look(conn, name, subject, after))?;
            let mut rest = found.as_slice();
            let goes = bulk.steps(conn, |conn, most| {
                let (ids, later) = rest.split_at(most.min(rest.len()));
                rest = later;
                if ids.is_empty() {
                    return Ok(None);
                }
                done.add(pinned(conn, name, |conn, name| {
                    note.audit(conn, name, Act::ExpungeMessage, &subject.to_string())?;
                    store::expunge(conn, name, ids, note.as_str())
                })?);
                Ok::<_, DatabaseError>(Some(Bulked::of(ids.len(), ids.len())))
            })?;
            if goes.is_break() {
                return Ok(done);
            }
            if found.len() < store::LOOK {
                break;
            }
            after = found.last().copied();
        }
    }
    Ok(done)
}
