//! Removes the content of one message wherever it is. What happened to the message remains in the ledger.

use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, update};
use uuid::Uuid;

use super::dead::discard;
use super::forget::need;
use super::messages::LetterId;
use crate::error::DatabaseError;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::store::looking::looking;
use crate::store::sql::Json;
use crate::store::statement::unprepared;
use crate::store::table::{attempt, dead, ledger, outbox};
use crate::store::write::waiting::cancel_waiting;

/// What [`expunge`](crate::admin::expunge) has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expunged {
    /// Live rows cancelled: a message has one for each destination.
    pub cancelled: u64,
    /// Dead letters discarded.
    pub discarded: u64,
    /// Ledger entries blanked.
    pub ledger_entries: u64,
    /// Attempts blanked.
    pub attempts: u64,
    /// Live rows that remain because relays hold them. Call [`expunge`](crate::admin::expunge) again once they are settled.
    pub left: u64,
}

impl Expunged {
    /// Whether the outbox has nothing of this message.
    ///
    /// ```
    /// use diesel_outbox::admin::Expunged;
    ///
    /// assert!(Expunged::default().is_unknown());
    /// ```
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

/// Cancels the live rows of the message, discards its dead letters, and blanks its entries, in the caller's transaction.
pub(crate) fn expunge(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: Uuid,
    operator: &str,
) -> QueryResult<Expunged> {
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
    Ok(Expunged {
        cancelled: cancelled as u64,
        discarded: discarded as u64,
        ledger_entries: entries as u64,
        attempts: attempts as u64,
        left: (live.len() - cancelled.min(live.len())) as u64,
    })
}

/// Checks that this role may expunge a message. Only the owner has all of these rights.
pub(crate) fn check_rights(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<(), DatabaseError> {
    let needed = [
        (name.outbox(), "DELETE"),
        (name.dead(), "DELETE"),
        (name.attempt(), "UPDATE"),
        (name.ledger(), "UPDATE"),
    ];
    need(conn, name, "expunge the message", &needed)
}
