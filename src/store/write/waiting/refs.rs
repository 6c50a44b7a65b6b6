//! Which message is meant, where it stands, and what became of the wish to change it.

use diesel::PgConnection;
use diesel::prelude::{
    ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable, Text};
use uuid::Uuid;

use super::Reach;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::status::ReasonCode;
use crate::store::operate::messages::{Hit, MessageKey, live_ones, seek};
use crate::store::statement::planned_anew;
use crate::store::table::{dead, ledger, outbox};

/// A message that somebody wants to change, and where: at each of its destinations, or at one.
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
    pub(crate) destination: Option<String>,
}

impl MessageRef {
    /// By its idempotency key: found at once, wherever it is.
    ///
    /// ```
    /// let reminder = diesel_outbox::MessageRef::key("order-42-reminder");
    /// # let _ = reminder;
    /// ```
    pub fn key(key: impl Into<String>) -> Self {
        MessageKey::Key(key.into()).into()
    }

    /// Only the part of a fan-out, or the message, that names this destination, or was sent there.
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
            destination: None,
        }
    }
}

/// By what [`Outbox::enqueue`](crate::Outbox::enqueue) has returned; after a fan-out, all of its parts.
impl From<Sequence> for MessageRef {
    fn from(sequence: Sequence) -> Self {
        MessageKey::Sequence(sequence.0).into()
    }
}

/// By its message id. There is no index of these in the outbox: an id of the library's leads to about
/// where the message is, another one is looked for during two seconds.
impl From<Uuid> for MessageRef {
    fn from(id: Uuid) -> Self {
        MessageKey::Id(id).into()
    }
}

/// What became of the wish to change a message, for each of its destinations.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changed {
    /// One for a message, one for each destination after a fan-out. None: the message is unknown.
    pub parts: Vec<Part>,
    /// Everything was looked at. `false`: a search without an index took too long and was ended.
    pub is_complete: bool,
}

/// A message at one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// Its place in the outbox.
    pub sequence: Sequence,
    /// The destination that was used; of one that waits the one that it names, empty where its topic decides.
    pub destination: String,
    /// What became of it.
    pub state: PartState,
}

/// What became of the wish to change one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PartState {
    /// It was changed.
    Done,
    /// A relay, or another transaction, has it just now. It was left alone.
    UnderWay,
    /// It was delivered before.
    Delivered,
    /// It was cancelled before.
    Cancelled,
    /// It is a dead letter, or was one.
    Dead,
}

/// What became of the wish to change a message, in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// It was changed, at each destination.
    Done,
    /// It was changed for some of its destinations, and not for others: see [`Changed::parts`].
    Partly,
    /// Nothing was changed: it is under way, for one destination at least. It may be delivered, or wait
    /// for a retry, a moment later.
    UnderWay,
    /// Nothing was changed: it was delivered, to one destination at least.
    Delivered,
    /// Nothing was changed: it was cancelled before.
    Cancelled,
    /// Nothing was changed: it is a dead letter, or was one.
    Dead,
    /// Neither outbox nor ledger knows it.
    Unknown,
}

impl Changed {
    /// The parts in a word.
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
        let all_done = self.parts.iter().all(|part| part.state == PartState::Done);
        if all_done && !self.parts.is_empty() {
            return Answer::Done;
        }
        let has =
            |(state, _): &(PartState, Answer)| self.parts.iter().any(|one| one.state == *state);
        let answers = [
            (PartState::Done, Answer::Partly),
            (PartState::UnderWay, Answer::UnderWay),
            (PartState::Delivered, Answer::Delivered),
            (PartState::Dead, Answer::Dead),
            (PartState::Cancelled, Answer::Cancelled),
        ];
        let first = answers.into_iter().find(has);
        first.map_or(Answer::Unknown, |(_, answer)| answer)
    }
}

/// What a table has of a part.
#[derive(Debug, Clone, Queryable)]
pub(super) struct Row {
    /// `live`, or the status that the ledger or the dead letters give it.
    status: String,
    reason: Option<String>,
    sequence: i64,
    split_from: Option<i64>,
    message_id: Uuid,
    idempotency_key: Option<String>,
    /// The one that it names.
    destination: String,
    /// The one that was used; of what lives, the one that it names.
    used: String,
}

impl Row {
    fn key(&self) -> String {
        let key = self.idempotency_key.clone();
        key.unwrap_or_else(|| self.message_id.to_string())
    }

    fn is_live(&self) -> bool {
        self.status == "live"
    }

    fn state(&self) -> PartState {
        match self.status.as_str() {
            "live" => PartState::UnderWay,
            "delivered" => PartState::Delivered,
            _ if self.reason.as_deref() == Some(ReasonCode::Cancelled.as_str()) => {
                PartState::Cancelled
            }
            _ => PartState::Dead,
        }
    }

    fn is_of(&self, sequence: i64) -> bool {
        self.sequence == sequence || self.split_from == Some(sequence)
    }

    /// It lives, and is no part of that message, though both may have one id: without a key a message may be
    /// enqueued twice.
    fn is_another_than(&self, sequence: i64) -> bool {
        let is_whole = self.idempotency_key.is_none() && self.split_from.is_none();
        self.is_live() && is_whole && self.sequence != sequence
    }
}

/// A message's parts, one for each destination.
#[derive(Debug)]
pub(super) struct Found {
    rows: Vec<Row>,
    is_complete: bool,
}

impl Found {
    pub(super) fn live(&self) -> Vec<i64> {
        self.sequences(Row::is_live)
    }

    /// Dead letters, as far as the ledger or the dead letters say so.
    pub(super) fn dead(&self) -> Vec<i64> {
        self.sequences(|row| row.state() == PartState::Dead)
    }

    fn sequences(&self, which: impl Fn(&Row) -> bool) -> Vec<i64> {
        let rows = self.rows.iter().filter(|row| which(row));
        let mut sequences: Vec<i64> = rows.map(|row| row.sequence).collect();
        sequences.sort_unstable();
        sequences
    }

    /// With what a second look has found of the same messages.
    pub(super) fn and_now(mut self, again: Self) -> Self {
        for row in &mut self.rows {
            let now = again.rows.iter().find(|now| now.sequence == row.sequence);
            if let Some(now) = now {
                *row = now.clone();
            }
        }
        self
    }

    pub(super) fn told(self, done: &[i64]) -> Changed {
        let part = |row: Row| Part {
            sequence: Sequence(row.sequence),
            state: match done.contains(&row.sequence) {
                true => PartState::Done,
                false => row.state(),
            },
            destination: row.used,
        };
        Changed {
            parts: self.rows.into_iter().map(part).collect(),
            is_complete: self.is_complete,
        }
    }
}

/// The parts of a message. Dead letters are only read where neither outbox nor ledger has the message.
pub(super) fn find(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &MessageRef,
    reach: Reach,
) -> QueryResult<Found> {
    let found = seek(conn, name, &which.key)?;
    let (hits, is_complete) = (found.rows, found.is_complete);
    let mut rows = of_hits(conn, name, &hits)?;
    if rows.is_empty() || reach == Reach::Everything {
        let dead = dead_of_hits(conn, name, &hits)?.into_iter();
        let sequences: Vec<i64> = rows.iter().map(|row| row.sequence).collect();
        rows.extend(dead.filter(|row| !sequences.contains(&row.sequence)));
    }
    retain_meant(&mut rows, &which.key);
    if let Some(destination) = &which.destination {
        rows.retain(|row| [&row.destination, &row.used].contains(&destination));
    }
    // What is live counts, and not what became of an earlier message of the key.
    let live: Vec<(String, String)> = rows
        .iter()
        .filter(|row| row.is_live())
        .map(|row| (row.key(), row.destination.clone()))
        .collect();
    let is_earlier = |row: &Row| {
        let is_same = |(key, destination): &(String, String)| {
            *key == row.key() && *destination == row.destination
        };
        !row.is_live() && live.iter().any(is_same)
    };
    rows.retain(|row| !is_earlier(row));
    rows.sort_by(|a, b| (&a.destination, a.sequence).cmp(&(&b.destination, b.sequence)));
    Ok(Found { rows, is_complete })
}

/// Whatever is asked for leads to ids, and a replay has the id of what was delivered under another key. A
/// sequence, or an id, leads to keys; another message may have the same key.
fn retain_meant(rows: &mut Vec<Row>, key: &MessageKey) {
    let (sequence, id) = match key {
        MessageKey::Key(key) => return rows.retain(|row| row.key() == *key),
        MessageKey::Sequence(sequence) => (Some(*sequence), None),
        MessageKey::Id(id) => (None, Some(*id)),
        MessageKey::Text(text) => {
            let text = text.trim();
            if rows.iter().any(|row| row.key() == text) {
                rows.retain(|row| row.key() == text);
                return;
            }
            (text.parse().ok(), text.parse().ok())
        }
    };
    let of_sequence = |row: &&Row| sequence.is_some_and(|sequence| row.is_of(sequence));
    let meant: Vec<(Uuid, String)> = rows
        .iter()
        .filter(of_sequence)
        .map(|row| (row.message_id, row.key()))
        .collect();
    rows.retain(|row| {
        let is_another = sequence.is_some_and(|sequence| row.is_another_than(sequence));
        let is_meant = meant.contains(&(row.message_id, row.key())) && !is_another;
        id == Some(row.message_id) || is_meant
    });
}

/// What lives of these messages, and the last entry of the ledger for each of their parts.
fn of_hits(conn: &mut PgConnection, name: &OutboxName, hits: &[Hit]) -> QueryResult<Vec<Row>> {
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
    let mut rows: Vec<Row> = planned_anew(live).load(conn)?;
    let settled = ledger::table(name.ledger())
        .filter(ledger::message_id.eq_any(ids(hits)))
        .order(ledger::settled_at.desc())
        .select((
            ledger::status,
            ledger::reason,
            ledger::sequence,
            None::<i64>.into_sql::<Nullable<BigInt>>(),
            ledger::message_id,
            ledger::idempotency_key,
            ledger::named_destination,
            ledger::destination,
        ));
    for row in planned_anew(settled).load::<Row>(conn)? {
        if rows.iter().all(|other| other.sequence != row.sequence) {
            rows.push(row);
        }
    }
    Ok(rows)
}

fn dead_of_hits(conn: &mut PgConnection, name: &OutboxName, hits: &[Hit]) -> QueryResult<Vec<Row>> {
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
    planned_anew(dead).load(conn)
}

fn ids(hits: &[Hit]) -> Vec<Uuid> {
    hits.iter().map(|hit| hit.message_id).collect()
}
