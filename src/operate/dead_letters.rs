//! Dead letters: list, read, requeue, discard.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::bulk::Bulk;
use super::sql::audit::Act;
use super::sql::dead::{self, DeadGroup};
use super::sql::messages::{LetterId, MessageRecord};
use super::sql::selection::Selection;
use super::waiting::Note;
use crate::endpoints::sql::missed::Bulked;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// Dead letters without payloads, latest first, at most `limit`.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_letters(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> Result<Vec<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        dead::list(conn, name, selection, limit)
    })?)
}

/// Dead letters grouped by reason, topic and destination: the most frequent group first, at most `limit` groups.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_groups(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> Result<Vec<DeadGroup>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        dead::groups(conn, name, selection, limit)
    })?)
}

/// The dead letters with this sequence, with payloads and headers. There are several only if the sequence was used
/// again.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_letters_at(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequence: i64,
) -> Result<Vec<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        dead::find(conn, name, sequence)
    })?)
}

/// The dead letters of the message with this id, with payloads and headers: one for each destination that
/// did not get the message.
///
/// # Errors
/// A [`DatabaseError`].
pub fn dead_letters_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    message_id: uuid::Uuid,
) -> Result<Vec<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        dead::find_by_message_id(conn, name, message_id)
    })?)
}

/// The matching dead letters, oldest first.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, ReasonCode};
/// use diesel_outbox::admin::{self, Note, Selection};
///
/// /// Discards the messages that expired before delivery.
/// fn discard_expired(conn: &mut PgConnection, outbox: &OutboxName) -> Result<usize, DatabaseError> {
///     let expired = Selection::default().reason(ReasonCode::Expired);
///     let letters = admin::matching_dead_letters(conn, outbox, &expired)?;
///     admin::discard(conn, outbox, &letters, &Note::new("the nightly job", ""))
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn matching_dead_letters(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
) -> Result<Vec<LetterId>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        dead::matching(conn, name, selection)
    })?)
}

/// Puts dead letters back into the outbox: due at once, with no attempts, and without an expiry that has passed.
/// A letter stays dead if its idempotency key is in the outbox again. A letter whose sequence another message has by now
/// gets a new sequence, and goes behind later messages of its ordering key. The history records who requeued the
/// letters and why. Returns the number of requeued letters.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::OutboxName;
/// use diesel_outbox::admin::{self, LetterId, Note};
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// let letter: LetterId = "42.0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c".parse()?;
/// let note = Note::new("alice", "the receiver is fixed");
/// if admin::requeue(&mut conn, &OutboxName::default(), &[letter], &note)? == 0 {
///     println!("there is no dead letter {letter}, or its key is in the outbox again");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`]; letters requeued before the error stay requeued.
pub fn requeue(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    note: &Note,
) -> Result<usize, DatabaseError> {
    change(conn, name, letters, Change::Requeue, Bulk::new(note)).map(count)
}

/// Deletes dead letters for good. The ledger keeps their entries; the history records who discarded the letters
/// and why. Returns the number of discarded letters.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::OutboxName;
/// use diesel_outbox::admin::{self, Note, Selection};
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// let outbox = OutboxName::default();
/// let letters = admin::matching_dead_letters(&mut conn, &outbox, &Selection::default())?;
/// let note = Note::new("alice", "the orders were cancelled");
/// let discarded = admin::discard(&mut conn, &outbox, &letters, &note)?;
/// println!("{discarded} discarded");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`]; letters discarded before the error stay discarded.
pub fn discard(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    note: &Note,
) -> Result<usize, DatabaseError> {
    change(conn, name, letters, Change::Discard, Bulk::new(note)).map(count)
}

/// What an operator does with dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// As by [`requeue`].
    Requeue,
    /// As by [`discard`].
    Discard,
}

/// Requeues or discards dead letters in steps, at a limited rate.
///
/// # Errors
/// A [`DatabaseError`]; completed steps stay.
pub(crate) fn change(
    conn: &mut PgConnection,
    name: &OutboxName,
    letters: &[LetterId],
    change: Change,
    mut bulk: Bulk<'_>,
) -> Result<Bulked, DatabaseError> {
    if bulk.is_dry() {
        return Ok(Bulked::of(letters.len(), letters.len()));
    }
    let (note, mut rest) = (bulk.note(), letters);
    // The end is what the totals say, whoever ended the steps.
    let _ = bulk.steps(conn, |conn, most| {
        let (batch, later) = rest.split_at(most.min(rest.len()));
        if batch.is_empty() {
            return Ok(None);
        }
        rest = later;
        let count = pinned(conn, name, |conn, name| {
            let (act, count) = match change {
                Change::Requeue => {
                    let count = dead::requeue(conn, name, batch, note.as_str())?;
                    (Act::RequeueDead, count)
                }
                Change::Discard => {
                    let count = dead::discard(conn, name, batch, note.as_str())?;
                    (Act::DiscardDead, count)
                }
            };
            audited(conn, name, note, act, (batch, count))
        })?;
        Ok::<_, DatabaseError>(Some(Bulked::of(batch.len(), count)))
    })?;
    Ok(bulk.done())
}

fn count(done: Bulked) -> usize {
    usize::try_from(done.changed).unwrap_or(usize::MAX)
}

/// Records an act on some of these dead letters, if there are any. Returns their number.
fn audited(
    conn: &mut PgConnection,
    name: &OutboxName,
    note: &Note,
    act: Act,
    (letters, count): (&[LetterId], usize),
) -> QueryResult<usize> {
    let target = match letters {
        [one] => one.to_string(),
        _ => format!("{count} dead letters"),
    };
    if count > 0 {
        note.audit(conn, name, act, &target)?;
    }
    Ok(count)
}
