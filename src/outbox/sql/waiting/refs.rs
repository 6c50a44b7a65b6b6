//! References to messages, the state of their parts, and the results of changing them.

use diesel::PgConnection;
use diesel::prelude::{
    ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Nullable, Text};
use uuid::Uuid;

use super::Reach;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::outbox::sql::seek::{Hit, MessageKey, live_ones, seek};
use crate::sql::statement::unprepared;
use crate::sql::table::{dead, ledger, outbox};
use crate::status::ReasonCode;

/// A reference to a message to change, at all of its destinations or at one.
///
/// ```
/// use diesel_outbox::MessageRef;
///
/// let everywhere = MessageRef::key("order-42-reminder");
/// let at_one_destination = MessageRef::key("order-42-paid").at("billing");
/// # let _ = (everywhere, at_one_destination);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageRef {
    pub(crate) key: MessageKey,
    message_id: Option<Uuid>,
    pub(crate) destination: Option<String>,
}

impl MessageRef {
    /// Refers to a message by its idempotency key. An index finds the message at once, wherever it is.
    ///
    /// ```
    /// let reminder = diesel_outbox::MessageRef::key("order-42-reminder");
    /// # let _ = reminder;
    /// ```
    pub fn key(key: impl Into<String>) -> Self {
        MessageKey::Key(key.into()).into()
    }

    /// Limits the reference to the message with this id, where several messages have a sequence.
    #[must_use]
    pub(crate) fn with_id(mut self, message_id: Uuid) -> Self {
        self.message_id = Some(message_id);
        self
    }

    /// Limits the reference to one destination: to the message, or the part of a fan-out, that names this destination
    /// or was sent there.
    ///
    /// ```
    /// let at_billing = diesel_outbox::MessageRef::key("order-42-paid").at("billing");
    /// # let _ = at_billing;
    /// ```
    #[must_use]
    pub fn at(mut self, destination: impl Into<String>) -> Self {
        self.destination = Some(destination.into());
        self
    }
}

impl From<MessageKey> for MessageRef {
    fn from(key: MessageKey) -> Self {
        Self {
            key,
            message_id: None,
            destination: None,
        }
    }
}

/// Refers to a message by the sequence that [`Outbox::enqueue`](crate::Outbox::enqueue) returned. After a fan-out, the
/// reference covers all parts, and the sequence of a part refers to this part alone.
impl From<Sequence> for MessageRef {
    fn from(sequence: Sequence) -> Self {
        MessageKey::Sequence(sequence.0).into()
    }
}

/// Refers to a message by its message id, which the outbox does not index. An id from this library shows roughly where
/// the message is; the search for any other id stops after 2 s.
impl From<Uuid> for MessageRef {
    fn from(id: Uuid) -> Self {
        MessageKey::Id(id).into()
    }
}

/// The result of changing a message, for each of its destinations.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changed {
    /// One part for a message; after a fan-out, one for each destination. Empty: the message is unknown.
    pub parts: Vec<Part>,
    /// The reference is a sequence that several messages have, because it was used again. Nothing was changed: refer to
    /// one of them by its message id or key.
    pub(crate) is_ambiguous: bool,
    /// Whether the search covered everything. `false`: a search without an index took too long and was stopped.
    pub is_complete: bool,
}

/// A message at one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// The sequence of the part in the outbox.
    pub sequence: Sequence,
    /// The destination that was used. For a waiting part: the destination that it names, or empty if its topic decides.
    pub destination: String,
    /// The result for this part.
    pub state: PartState,
}

/// The result of changing one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PartState {
    /// The part was changed.
    Done,
    /// Unchanged: a relay or another transaction holds the part.
    InFlight,
    /// Unchanged: the part was delivered before.
    Delivered,
    /// Unchanged: the part was cancelled before.
    Cancelled,
    /// Unchanged: the part is or was a dead letter.
    Dead,
}

/// The result of changing a message, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The message was changed at each destination.
    Done,
    /// The message was changed at some of its destinations, but not at others: see [`Changed::parts`].
    Partly,
    /// Nothing was changed: the message is in flight to at least one destination. A moment later it may be delivered,
    /// or wait for a retry.
    InFlight,
    /// Nothing was changed: the message was delivered to at least one destination.
    Delivered,
    /// Nothing was changed: the message was cancelled before.
    Cancelled,
    /// Nothing was changed: the message is or was a dead letter.
    Dead,
    /// Nothing was changed: several messages have this sequence. Refer to one of them by its message id or key.
    Ambiguous,
    /// The outbox, the ledger and the dead letters do not have the message.
    Unknown,
}

impl Answer {
    /// The answer as a word: `done`, `in_flight`.
    ///
    /// ```
    /// assert_eq!(diesel_outbox::Answer::InFlight.as_str(), "in_flight");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Partly => "partly",
            Self::InFlight => "in_flight",
            Self::Delivered => "delivered",
            Self::Cancelled => "cancelled",
            Self::Dead => "dead",
            Self::Ambiguous => "ambiguous",
            Self::Unknown => "unknown",
        }
    }
}

impl Changed {
    /// The result for all parts, in one word.
    ///
    /// ```
    /// # use diesel::PgConnection;
    /// use diesel_outbox::{Answer, MessageRef, Outbox};
    ///
    /// # fn cancel(conn: &mut PgConnection, outbox: &Outbox) -> diesel::QueryResult<()> {
    /// let changed = outbox.cancel(conn, MessageRef::key("order-42-reminder"))?;
    /// match changed.answer() {
    ///     Answer::Done | Answer::Cancelled => println!("no reminder is sent"),
    ///     other => println!("too late: {other:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn answer(&self) -> Answer {
        if self.is_ambiguous {
            return Answer::Ambiguous;
        }
        let all_done = self.parts.iter().all(|part| part.state == PartState::Done);
        if all_done && !self.parts.is_empty() {
            return Answer::Done;
        }
        let has =
            |(state, _): &(PartState, Answer)| self.parts.iter().any(|one| one.state == *state);
        let answers = [
            (PartState::Done, Answer::Partly),
            (PartState::InFlight, Answer::InFlight),
            (PartState::Delivered, Answer::Delivered),
            (PartState::Dead, Answer::Dead),
            (PartState::Cancelled, Answer::Cancelled),
        ];
        let first = answers.into_iter().find(has);
        first.map_or(Answer::Unknown, |(_, answer)| answer)
    }
}

/// What tells a message from all others: its sequence and its id.
pub(super) type Identity = (i64, Uuid);

/// A row of a part, from the outbox, the ledger or the dead letters.
#[derive(Debug, Clone, Queryable)]
pub(super) struct MatchedRow {
    /// `live`, or the status from the ledger or the dead letters.
    status: String,
    reason: Option<String>,
    sequence: i64,
    split_from: Option<i64>,
    message_id: Uuid,
    idempotency_key: Option<String>,
    /// The destination that the message names.
    destination: String,
    /// The destination that was used; for a live message, the destination that it names.
    used: String,
}

impl MatchedRow {
    fn identity(&self) -> Identity {
        (self.sequence, self.message_id)
    }

    fn key(&self) -> String {
        let key = self.idempotency_key.clone();
        key.unwrap_or_else(|| self.message_id.to_string())
    }

    fn is_live(&self) -> bool {
        self.status == "live"
    }

    fn state(&self) -> PartState {
        match self.status.as_str() {
            "live" => PartState::InFlight,
            "delivered" | "no_subscriber" => PartState::Delivered,
            _ if self.reason.as_deref() == Some(ReasonCode::Cancelled.as_str()) => {
                PartState::Cancelled
            }
            _ => PartState::Dead,
        }
    }

    fn is_of(&self, sequence: i64) -> bool {
        self.sequence == sequence || self.split_from == Some(sequence)
    }

    /// Whether the row is a live message of its own, not part of the message `sequence`. Both may have the same id:
    /// without a key, a message may be enqueued twice.
    fn is_another_than(&self, sequence: i64) -> bool {
        let is_whole = self.idempotency_key.is_none() && self.split_from.is_none();
        self.is_live() && is_whole && self.sequence != sequence
    }
}

/// A message's parts, one for each destination.
#[derive(Debug)]
pub(super) struct Matches {
    rows: Vec<MatchedRow>,
    is_complete: bool,
    is_ambiguous: bool,
}

impl Matches {
    /// Whether the reference names several messages, of which the caller can mean only one.
    pub(super) fn is_ambiguous(&self) -> bool {
        self.is_ambiguous
    }

    pub(super) fn live(&self) -> Vec<i64> {
        let live = self.identities(MatchedRow::is_live);
        live.into_iter().map(|(sequence, _)| sequence).collect()
    }

    /// The parts that are dead letters, according to the ledger or the dead letters.
    pub(super) fn dead(&self) -> Vec<Identity> {
        self.identities(|row| row.state() == PartState::Dead)
    }

    fn identities(&self, which: impl Fn(&MatchedRow) -> bool) -> Vec<Identity> {
        let rows = self.rows.iter().filter(|row| which(row));
        let mut identities: Vec<Identity> = rows.map(MatchedRow::identity).collect();
        identities.sort_unstable();
        identities
    }

    /// Replaces rows by what a second search found for the same messages.
    pub(super) fn and_now(mut self, again: Self) -> Self {
        for row in &mut self.rows {
            let same = |now: &&MatchedRow| now.identity() == row.identity();
            let now = again.rows.iter().find(same);
            if let Some(now) = now {
                *row = now.clone();
            }
        }
        self
    }

    pub(super) fn told(self, done: &[Identity]) -> Changed {
        let part = |row: MatchedRow| Part {
            sequence: Sequence(row.sequence),
            state: match done.contains(&row.identity()) {
                true => PartState::Done,
                false => row.state(),
            },
            destination: row.used,
        };
        Changed {
            parts: self.rows.into_iter().map(part).collect(),
            is_complete: self.is_complete,
            is_ambiguous: self.is_ambiguous,
        }
    }
}

/// The parts of a message. Dead letters are read only if the outbox and the ledger do not have the message, or with
/// [`Reach::Everything`].
pub(super) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    reach: Reach,
) -> QueryResult<Matches> {
    let found = seek(conn, name, &which.key)?;
    let (hits, is_complete) = (found.rows, found.is_complete);
    let mut rows = of_hits(conn, name, &hits)?;
    if rows.is_empty() || reach == Reach::Everything {
        let dead = dead_of_hits(conn, name, &hits)?.into_iter();
        let known: Vec<Identity> = rows.iter().map(MatchedRow::identity).collect();
        rows.extend(dead.filter(|row| !known.contains(&row.identity())));
    }
    if let Some(id) = which.message_id {
        rows.retain(|row| row.message_id == id);
    }
    let is_ambiguous = retain_meant(&mut rows, &which.key, reach);
    if let Some(destination) = &which.destination {
        rows.retain(|row| [&row.destination, &row.used].contains(&destination));
    }
    // A live message hides earlier messages of the same key.
    let live: Vec<(String, String)> = rows
        .iter()
        .filter(|row| row.is_live())
        .map(|row| (row.key(), row.destination.clone()))
        .collect();
    let is_earlier = |row: &MatchedRow| {
        let is_same = |(key, destination): &(String, String)| {
            *key == row.key() && *destination == row.destination
        };
        !row.is_live() && live.iter().any(is_same)
    };
    rows.retain(|row| !is_earlier(row));
    rows.sort_by(|a, b| (&a.destination, a.sequence).cmp(&(&b.destination, b.sequence)));
    Ok(Matches {
        rows,
        is_complete,
        is_ambiguous,
    })
}

/// Keeps only the rows that `key` means. Every search leads to ids, and a replay has the id of the message that was
/// delivered, under another key. A search by sequence or id also leads to keys, and another message may have the same
/// key.
///
/// A sequence may be used again: then a live message is meant, unless settled messages can be changed, too. Returns
/// whether several messages are left.
fn retain_meant(rows: &mut Vec<MatchedRow>, key: &MessageKey, reach: Reach) -> bool {
    let (sequence, id) = match key {
        MessageKey::Key(key) => {
            rows.retain(|row| row.key() == *key);
            return false;
        }
        MessageKey::Sequence(sequence) => (Some(*sequence), None),
        MessageKey::Id(id) => (None, Some(*id)),
        MessageKey::Text(text) => {
            let text = text.trim();
            if rows.iter().any(|row| row.key() == text) {
                rows.retain(|row| row.key() == text);
                return false;
            }
            (text.parse().ok(), text.parse().ok())
        }
    };
    // The sequence of a part means this part, and the sequence of a message means all of its parts.
    let mut own = (rows.iter())
        .filter(|row| Some(row.sequence) == sequence)
        .peekable();
    let is_part = own.peek().is_some() && own.all(|row| row.split_from.is_some());
    let of_sequence = |row: &&MatchedRow| sequence.is_some_and(|sequence| row.is_of(sequence));
    let is_any_live = rows.iter().filter(of_sequence).any(MatchedRow::is_live);
    let is_of_live =
        |row: &&MatchedRow| reach == Reach::Everything || !is_any_live || row.is_live();
    let meant: Vec<(Uuid, String)> = rows
        .iter()
        .filter(of_sequence)
        .filter(is_of_live)
        .map(|row| (row.message_id, row.key()))
        .collect();
    rows.retain(|row| {
        let is_another = sequence.is_some_and(|sequence| row.is_another_than(sequence));
        let is_other_part = is_part && Some(row.sequence) != sequence;
        let is_meant = meant.contains(&(row.message_id, row.key())) && !is_another;
        let is_meant = is_meant && !is_other_part;
        id == Some(row.message_id) || is_meant
    });
    let (first, rest) = match meant.split_first() {
        Some(((first, _), rest)) => (*first, rest),
        None => return false,
    };
    rest.iter().any(|(id, _)| *id != first)
}

/// The live rows of these messages, and the last ledger entry for each of their parts.
fn of_hits(
    conn: &mut PgConnection,
    name: &OutboxName,
    hits: &[Hit],
) -> QueryResult<Vec<MatchedRow>> {
    let is_one = live_ones(name, hits);
    let live = outbox::table(name.outbox()).filter(is_one).select((
        "live".into_sql::<Text>(),
        None::<&str>.into_sql::<Nullable<Text>>(),
        outbox::sequence,
        outbox::split_from,
        outbox::message_id,
        outbox::idempotency_key,
        outbox::destination,
        outbox::destination,
    ));
    let mut rows: Vec<MatchedRow> = unprepared(live).load(conn)?;
    let settled = ledger::table(name.ledger())
        .filter(ledger::message_id.eq_any(ids(hits)))
        .order(ledger::settled_at.desc())
        .select((
            ledger::status,
            ledger::reason,
            ledger::sequence,
            ledger::split_from,
            ledger::message_id,
            ledger::idempotency_key,
            ledger::named_destination,
            ledger::destination,
        ));
    for row in unprepared(settled).load::<MatchedRow>(conn)? {
        if rows.iter().all(|other| other.identity() != row.identity()) {
            rows.push(row);
        }
    }
    Ok(rows)
}

fn dead_of_hits(
    conn: &mut PgConnection,
    name: &OutboxName,
    hits: &[Hit],
) -> QueryResult<Vec<MatchedRow>> {
    let dead = dead::table(name.dead())
        .filter(dead::message_id.eq_any(ids(hits)))
        .select((
            "dead".into_sql::<Text>(),
            dead::reason.nullable(),
            dead::sequence,
            dead::split_from,
            dead::message_id,
            dead::idempotency_key,
            dead::named_destination,
            dead::destination,
        ));
    unprepared(dead).load(conn)
}

fn ids(hits: &[Hit]) -> Vec<Uuid> {
    hits.iter().map(|hit| hit.message_id).collect()
}
