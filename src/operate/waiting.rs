//! Waiting messages: list, cancel, reschedule, or settle by hand.

use diesel::result::{Error, QueryResult};
use diesel::{Connection, PgConnection};
use uuid::Uuid;

use super::sql::audit::{self, Act, Cost};
use super::sql::messages::MessageRecord;
use super::sql::selection::{Selection, Several};
use super::sql::waiting::{list, retry_one};
use super::sql::why::{self, WaitReason};
use crate::error::DatabaseError;
use crate::message::{Due, Sequence};
use crate::name::OutboxName;
use crate::outbox::sql::searched::Searched;
use crate::outbox::sql::waiting::{self, Changed, End, MessageRef, PartState, Reach};
use crate::sql::pinned::pinned;

/// The characters that a [`Note`] keeps of a name.
const WHO: usize = 100;
/// The characters that a [`Note`] keeps of a reason.
const WHY: usize = 400;

/// Live messages (pending, sending, retrying) without payloads and headers, in the order in which they are
/// due, at most `limit`.
///
/// An index finds the messages, however many wait. If few of many messages match (a state, or a key or tenant with
/// hundreds of thousands of messages), the search stops after two seconds ([`Searched::is_complete`]).
///
/// # Errors
/// A [`DatabaseError`].
pub fn waiting(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> Result<Searched<MessageRecord>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        let selection = selection.with_routed(conn, name, Several::Selected)?;
        list(conn, name, &selection, limit)
    })?)
}

/// Why each of these messages is not sent yet, and until when. `None`: the message is not live.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, Enqueued, OutboxName, admin};
/// fn explain(conn: &mut PgConnection, outbox: &OutboxName, one: &Enqueued) -> Result<(), DatabaseError> {
///     for reason in admin::wait_reasons(conn, outbox, &[one.sequence])?.into_iter().flatten() {
///         println!("{} waits: {reason}", one.sequence);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn wait_reasons(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[Sequence],
) -> Result<Vec<Option<WaitReason>>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        why::of_sequences(conn, name, sequences)
    })?)
}

/// The same for records. `None`: the record is no live message.
///
/// # Errors
/// A [`DatabaseError`].
pub fn wait_reasons_of(
    conn: &mut PgConnection,
    name: &OutboxName,
    records: &[MessageRecord],
) -> Result<Vec<Option<WaitReason>>, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        why::wait_reasons(conn, name, records)
    })?)
}

/// Who acts on a message by hand, and why. The ledger keeps the note as the error of the message, such as
/// `alice: refunded by phone`. At most 100 characters of the name and 400 of the reason are kept.
///
/// ```
/// let note = diesel_outbox::admin::Note::new("alice", "refunded by phone");
/// assert_eq!(note.to_string(), "alice: refunded by phone");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    who: String,
    why: String,
    text: String,
    /// The tenant whose budget pays for the act.
    spends: Option<(Uuid, Cost)>,
}

impl Note {
    /// Joins name and reason, without control characters.
    ///
    /// ```
    /// let note = diesel_outbox::admin::Note::new("alice\n", "");
    /// assert_eq!(note.to_string(), "alice");
    /// ```
    pub fn new(who: &str, why: &str) -> Self {
        let part = |text: &str, most| -> String {
            let plain = text.trim().chars().filter(|c| !c.is_control());
            plain.take(most).collect()
        };
        let (who, why) = (part(who, WHO), part(why, WHY));
        let text = match why.is_empty() {
            true => who.clone(),
            false => format!("{who}: {why}"),
        };
        Self {
            who,
            why,
            text,
            spends: None,
        }
    }
}

impl Note {
    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// Why; empty: not said.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }

    /// Records an act.
    pub(crate) fn audit(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        act: Act,
        target: &str,
    ) -> QueryResult<()> {
        self.audit_made(conn, name, act, target, 0)
    }

    /// Records an act that has made so many messages.
    pub(crate) fn audit_made(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        act: Act,
        target: &str,
        made: usize,
    ) -> QueryResult<()> {
        let spent = self.spends.map(|(tenant, cost)| (tenant, cost, made));
        audit::audit(conn, name, act, target, (&self.who, &self.why), spent)
    }

    /// The budget of this tenant pays for the act.
    pub(crate) fn spending(self, tenant: Uuid, cost: Cost) -> Self {
        Self {
            spends: Some((tenant, cost)),
            ..self
        }
    }

    /// Runs `work` in a transaction and records the act in it, unless `work` has found nothing (`None`).
    pub(crate) fn recorded<T, E: From<Error>>(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        act: Act,
        target: &str,
        work: impl FnOnce(&mut PgConnection) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        conn.transaction(|conn| {
            let done = work(conn)?;
            if done.is_some() {
                pinned(conn, name, |conn, name| self.audit(conn, name, act, target))?;
            }
            Ok(done)
        })
    }

    /// Records an act that has changed something. Returns what was changed.
    fn audit_changed(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        act: Act,
        changed: Changed,
    ) -> QueryResult<Changed> {
        let done = changed.parts.iter();
        let done = done.filter(|part| part.state == PartState::Done);
        let done: Vec<String> = done.map(|part| part.sequence.to_string()).collect();
        if !done.is_empty() {
            self.audit(conn, name, act, &done.join(", "))?;
        }
        Ok(changed)
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Runs `work` in a transaction and records the act in it, if `work` has changed something (`true`).
///
/// # Errors
/// Those of `work` and of the database.
pub fn audited<E: From<Error>>(
    conn: &mut PgConnection,
    name: &OutboxName,
    note: &Note,
    act: Act,
    target: &str,
    work: impl FnOnce(&mut PgConnection) -> Result<bool, E>,
) -> Result<bool, E> {
    let changed = |conn: &mut PgConnection| work(conn).map(|is_done| is_done.then_some(()));
    Ok(note.recorded(conn, name, act, target, changed)?.is_some())
}

/// Cancels a waiting message, as [`Outbox::cancel`](crate::Outbox::cancel) does, and records who cancelled it
/// and why. [`cancel_all`](crate::admin::cancel_all) cancels many.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{Answer, DatabaseError, MessageRef, OutboxName};
/// use diesel_outbox::admin::{self, Note};
///
/// fn cancel(conn: &mut PgConnection, outbox: &OutboxName) -> Result<bool, DatabaseError> {
///     let note = Note::new("alice", "the order was cancelled");
///     let reminder = MessageRef::key("order-42-reminder");
///     Ok(admin::cancel(conn, outbox, &reminder, &note)?.answer() == Answer::Done)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn cancel(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    note: &Note,
) -> Result<Changed, DatabaseError> {
    let (end, reach) = (End::Cancelled, Reach::Waiting);
    Ok(pinned(conn, name, |conn, name| {
        let changed = waiting::end(conn, name, which, end, Some(&note.text), reach)?;
        note.audit_changed(conn, name, Act::CancelMessage, changed)
    })?)
}

/// Makes a waiting message due at once, and records in the history who retried it and why. [`retry_all`](crate::admin::retry_all)
/// retries many.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{Changed, DatabaseError, OutboxName, Sequence};
/// use diesel_outbox::admin::{self, Note};
///
/// fn retry(conn: &mut PgConnection, outbox: &OutboxName) -> Result<Changed, DatabaseError> {
///     let note = Note::new("alice", "the receiver is fixed");
///     admin::retry(conn, outbox, &Sequence(42).into(), &note)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn retry(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    note: &Note,
) -> Result<Changed, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        let changed = retry_one(conn, name, which, &note.text)?;
        note.audit_changed(conn, name, Act::RetryMessage, changed)
    })?)
}

/// Changes when a waiting message is due, as [`Outbox::reschedule`](crate::Outbox::reschedule) does, and records who has done
/// so and why.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{Changed, DatabaseError, Due, MessageRef, OutboxName, Sequence};
/// use diesel_outbox::admin::{self, Note};
///
/// fn at_once(conn: &mut PgConnection, outbox: &OutboxName) -> Result<Changed, DatabaseError> {
///     let note = Note::new("alice", "the customer asked for it");
///     admin::reschedule(conn, outbox, &MessageRef::from(Sequence(42)), Due::Now, &note)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn reschedule(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    due: Due,
    note: &Note,
) -> Result<Changed, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        let changed = waiting::reschedule(conn, name, which, due)?;
        note.audit_changed(conn, name, Act::RescheduleMessage, changed)
    })?)
}

/// How an operator settles a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The message was delivered by other means. It ends `delivered`, with the reason `BY_HAND`.
    Delivered,
    /// The message must not be sent. It ends `dead`, with the reason `CANCELLED`, and is no dead letter.
    NotToBeSent,
}

/// Settles a message by hand: a waiting message, a message of a relay whose lease has expired, or a dead
/// letter, which is removed from the dead letters. The ledger keeps who settled the message and why, and no payload.
///
/// A message that a live relay holds is left unchanged ([`Answer::InFlight`](crate::Answer::InFlight)), because its
/// outcome is not known yet. A delivered message stays delivered.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{Changed, DatabaseError, MessageRef, OutboxName, Sequence};
/// use diesel_outbox::admin::{self, Note, Verdict};
///
/// fn was_faxed(conn: &mut PgConnection, outbox: &OutboxName) -> Result<Changed, DatabaseError> {
///     let note = Note::new("alice", "sent by fax");
///     let letter = MessageRef::from(Sequence(42)).at("billing");
///     admin::settle(conn, outbox, &letter, Verdict::Delivered, &note)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn settle(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    verdict: Verdict,
    note: &Note,
) -> Result<Changed, DatabaseError> {
    let end = match verdict {
        Verdict::Delivered => End::Delivered,
        Verdict::NotToBeSent => End::Cancelled,
    };
    let reach = Reach::Everything;
    Ok(pinned(conn, name, |conn, name| {
        let changed = waiting::end(conn, name, which, end, Some(&note.text), reach)?;
        note.audit_changed(conn, name, Act::SettleMessage, changed)
    })?)
}
