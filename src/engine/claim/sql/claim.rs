//! Claiming: taking the due messages of each topic under the relay's lease.
//!
//! A claim of a few messages is one statement ([`take_at_once`]). A claim that could be too large, or that takes over
//! messages of a dead relay, is a transaction of three steps. It locks candidates and learns the size and the holder
//! of each ([`lock`]); decides which candidates fit ([`how_many_fit`]); and takes these ([`take`]). The others stay
//! free.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt::Debug;
use std::time::Instant;

use diesel::dsl::{AsSelect, AssumeNotNull, Eq, SqlTypeOf, array, exists};
use diesel::internal::table_macro::{NoFromClause, NullableExpression};
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, IntoSql, NullableExpressionMethods,
    OptionalExtension, PgArrayExpressionMethods, QueryDsl, RunQueryDsl, SelectableHelper,
    TextExpressionMethods,
};
use diesel::query_builder::{Query, QueryFragment, QueryId};
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Array, BigInt, Integer, Nullable, Record, Text};
use diesel::{PgConnection, select, update};

use super::namesakes::{Namesakes, is_not_left};
use crate::engine::lease::sql::lease::{LeaseId, at_work};
use crate::engine::settle::sql::settle::MOST_ATTEMPTS;
use crate::message::{MAX_ROW_BYTES, Message};
use crate::name::OutboxName;
use crate::sql::functions::{
    AnyOf, On, TimeAndSequence, at_least, at_most, clock_timestamp, maybe_octet_length, now,
    octet_length,
};
use crate::sql::live;
use crate::sql::statement::kept;
use crate::sql::table::{candidate, ledger, outbox};
use crate::status::ReasonCode;

/// A topic, and the destination that its messages name: empty if they name none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Topic {
    pub(crate) topic: String,
    pub(crate) destination: String,
}

impl Topic {
    pub(crate) fn new(topic: &str, destination: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            destination: destination.to_owned(),
        }
    }
}

/// The messages of a topic, either with or without an ordering key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Stream {
    pub(crate) topic: Topic,
    pub(crate) is_keyed: bool,
}

/// A position in the order in which a stream is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// PostgreSQL's microseconds (since 2000).
    pub(crate) available_at: i64,
    pub(crate) sequence: i64,
}

impl Position {
    /// Before all messages.
    pub(crate) const START: Self = Self {
        // PostgreSQL's -infinity.
        available_at: i64::MIN,
        sequence: i64::MIN,
    };

    pub(crate) fn new(available_at: PgTimestamp, sequence: i64) -> Self {
        Self {
            available_at: available_at.0,
            sequence,
        }
    }

    /// Before all messages that become available at this time.
    pub(crate) fn of_time(available_at: i64) -> Self {
        Self {
            available_at,
            sequence: i64::MIN,
        }
    }
}

/// A stream to claim from: how many messages at once, and after which position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) stream: Stream,
    pub(crate) room: usize,
    pub(crate) after: Position,
}

/// The last delivery that the ledger has for a claimed message's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KnownDelivery {
    /// No delivery: the message must be sent.
    No,
    /// The same message was delivered, with this sequence.
    Delivered(i64),
    /// Another message was delivered under the key, with this sequence.
    OtherContent(i64),
}

/// Whether a claimed message was taken over from a dead relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TakenOver {
    /// The message was free.
    No,
    /// Taken over for the first time: an attempt is counted, and the message is sent at once.
    Once,
    /// Taken over again, without an attempt in between: the message must be settled as a failed attempt.
    Again,
}

/// A claimed message, and the facts that the claim found.
#[derive(Debug)]
pub(crate) struct Claimed {
    /// Boxed, because a claimed message is moved about twenty times.
    pub(crate) message: Box<Message>,
    pub(crate) position: Position,
    pub(crate) known: KnownDelivery,
    pub(crate) taken_over: TakenOver,
}

/// How far the run of a message may go, without the message itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Longest {
    pub(crate) messages: usize,
    /// The bytes of payloads and headers, without the last message.
    pub(crate) bytes: usize,
}

/// Decides how far runs go.
pub(crate) trait Runs {
    /// How far the runs of these messages, the first of their keys, may go.
    fn longest(&self, first: &[Claimed]) -> Vec<Longest>;

    /// Whether a message of this topic, of the key of `first`, goes where `first` goes.
    fn goes_along(&self, first: &Message, topic: &str) -> bool;
}

/// Up to where a relay has read its members: what statements find out about later changes.
pub(crate) trait Reads: Debug + Send + Sync {
    /// For claims: a number for the members that are new; null: there are none.
    fn seen<'a>(&'a self, name: &OutboxName) -> On<'a, outbox::table, Nullable<BigInt>>;

    /// For surveys: a number for all changes; null: there are none.
    fn changed<'a>(&'a self, name: &OutboxName) -> On<'a, NoFromClause, Nullable<BigInt>>;
}

/// The relay that claims.
#[derive(Clone, Copy)]
pub(crate) struct Claimant<'a> {
    pub(crate) lease: LeaseId,
    /// Expired leases, whose messages may be taken.
    pub(crate) expired: &'a [i64],
    /// The most bytes of payloads and headers in a claim, without the last message. A claim takes at least one message.
    pub(crate) bytes: usize,
    /// How far runs go. `None`: a claim takes one message of a key.
    pub(crate) runs: Option<&'a dyn Runs>,
    /// Which messages are left to other relays, if some may be.
    pub(crate) namesakes: Option<&'a Namesakes>,
    /// Up to where the relay has read its members, if it has any.
    pub(crate) read_to: Option<&'a dyn Reads>,
}

impl Claimant<'_> {
    /// Without limits: it claims messages of any size, and one of each key.
    pub(crate) fn of(lease: LeaseId) -> Self {
        Self {
            lease,
            expired: &[],
            bytes: usize::MAX,
            runs: None,
            namesakes: None,
            read_to: None,
        }
    }

    /// Whether `count` messages may be claimed without further facts: any size fits, and no other relay holds them.
    pub(crate) fn has_space_for_any(&self, count: usize) -> bool {
        let bytes = count.saturating_mul(MAX_ROW_BYTES);
        self.expired.is_empty() && (count <= 1 || bytes <= self.bytes)
    }
}

/// The result of a claim.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) claimed: Vec<Claimed>,
    /// The rest of each run, in order: messages of the same keys as those in `claimed`.
    pub(crate) behind: Vec<Claimed>,
    /// Whether candidates were left because the claim was full.
    pub(crate) is_cut: bool,
    /// A number for the registrations that the claim has seen and the relay has not read, if it has claimed anything.
    pub(crate) registrations: Option<i64>,
}

/// The most lanes that one statement reads, each by its own array. More lanes would save round trips. But each number
/// of arrays is another text, and the server keeps a plan of each for the connection.
pub(crate) const ARRAYS_AT_ONCE: usize = 8;

impl Batch {
    /// `before`: a moment before the claim.
    pub(crate) fn of(
        conn: &mut PgConnection,
        name: &OutboxName,
        rows: Vec<(TakenRow, TakenOver)>,
        before: Instant,
    ) -> QueryResult<Self> {
        let delivered = delivered(conn, name, rows.iter().map(|((row, ..), _)| row))?;
        // Of several statements, the last one sees the most.
        let registrations = rows.last().and_then(|((.., seen), _)| *seen);
        let claimed = rows.into_iter().map(|((row, at, _), taken_over)| {
            let known = match row.key().and_then(|key| delivered.get(&key)) {
                None => KnownDelivery::No,
                Some((digest, first)) if row.has_content(digest) => {
                    KnownDelivery::Delivered(*first)
                }
                Some((_, first)) => KnownDelivery::OtherContent(*first),
            };
            Claimed {
                position: Position::new(row.available_at, row.sequence),
                known,
                taken_over,
                message: Box::new(row.into_message(at, before)),
            }
        });
        Ok(Self {
            claimed: claimed.collect(),
            behind: Vec::new(),
            is_cut: false,
            registrations,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.claimed.iter().map(|one| one.message.bytes()).sum()
    }
}

/// Claims due messages without an ordering key, at most `room`.
///
/// Each lane is read by the claim index, from its position, and no further than its room. Messages that others have
/// locked are skipped, not waited for.
pub(crate) fn claim<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'a>,
    lanes: &'a [Lane],
    room: usize,
) -> QueryResult<Batch> {
    let first_of = |lane: &'a Lane| {
        candidate::table(name.outbox())
            .filter(is_in(lane))
            .filter(candidate::ordering_key.is_null())
            .filter(is_due())
            .filter(can_be_taken(claimant))
            .order((candidate::available_at, candidate::sequence))
            .limit(as_bigint(lane.room))
    };
    let count = lanes.iter().map(|lane| lane.room).sum();
    if count <= room && lanes.len() <= ARRAYS_AT_ONCE && claimant.has_space_for_any(count) {
        let first_of = |lane| -> Sequences<'_> {
            let first = first_of(lane).select(candidate::sequence);
            Box::new(array(first.for_no_key_update().skip_locked()))
        };
        let all = concatenated(lanes.iter().map(first_of));
        return all.map_or(Ok(Batch::default()), |all| {
            take_at_once(conn, name, claimant, all)
        });
    }
    let first_of = |lane| -> Candidates<'_> {
        let first = first_of(lane).select(facts());
        Box::new(array(first.for_no_key_update().skip_locked()))
    };
    let looks = lanes.chunks(ARRAYS_AT_ONCE);
    let looks = looks.map(|lanes| lanes.iter().map(first_of).collect());
    conn.transaction(|conn| claim_from(conn, name, claimant, looks, room))
}

/// Claims the messages among `sequences` that have no ordering key, are due, and are free.
pub(crate) fn claim_chosen(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    sequences: &[i64],
) -> QueryResult<Batch> {
    let chosen = candidate::table(name.outbox())
        .filter(candidate::sequence.eq_any(sequences))
        .filter(candidate::ordering_key.is_null())
        .filter(is_due())
        .filter(can_be_taken(claimant))
        .order(candidate::sequence)
        .select(facts())
        .for_no_key_update()
        .skip_locked();
    let look: LaneLook = vec![Box::new(array(chosen))];
    conn.transaction(|conn| claim_from(conn, name, claimant, [look], usize::MAX))
}

/// Due when the transaction began: an index scan can end at `now()`, but not at `clock_timestamp()`.
pub(crate) fn is_due() -> On<'static, candidate::table> {
    Box::new(candidate::available_at.le(now()))
}

/// Free, and not left to other relays.
pub(crate) fn can_be_taken(claimant: Claimant<'_>) -> On<'_, candidate::table> {
    let is_free = is_free(claimant.expired);
    match claimant.namesakes {
        Some(namesakes) => Box::new(is_free.and(is_not_left(namesakes))),
        None => is_free,
    }
}

/// Held by no lease, or by an expired lease. The expired leases are values: a subquery would keep the old snapshot if
/// a row has changed meanwhile.
pub(super) fn is_free(expired: &[i64]) -> On<'_, candidate::table> {
    let is_unheld = candidate::locked_by.is_null();
    Box::new(is_unheld.or(candidate::locked_by.assume_not_null().eq_any(expired)))
}

/// In the lane's topic and destination, and after the lane's position.
pub(crate) fn is_in(lane: &Lane) -> On<'_, candidate::table> {
    let Topic { topic, destination } = &lane.stream.topic;
    let is_there = candidate::destination.eq(destination);
    Box::new((candidate::topic.eq(topic)).and(is_there.and(is_behind(lane.after))))
}

/// After this position.
pub(super) fn is_behind(after: Position) -> On<'static, candidate::table> {
    let here = (candidate::available_at, candidate::sequence);
    let place = (PgTimestamp(after.available_at), after.sequence);
    Box::new(here.into_sql::<TimeAndSequence>().gt(place))
}

/// What a claim must know about a candidate.
#[derive(Debug)]
pub(crate) struct LockedRow {
    pub(crate) sequence: i64,
    taken_over: TakenOver,
    /// The size of payload and headers when read. The stored size of the row is compressed.
    pub(crate) bytes: usize,
}

/// Sequence, bytes of the payload, bytes of the headers, holder, code of the last error.
type Facts = (i64, i32, Option<i32>, Option<i64>, Option<String>);

/// The SQL types of [`Facts`].
type FactsSql = (
    BigInt,
    Integer,
    Nullable<Integer>,
    Nullable<BigInt>,
    Nullable<Text>,
);

pub(crate) fn facts() -> On<'static, candidate::table, Record<FactsSql>> {
    let facts = (
        candidate::sequence,
        octet_length(candidate::payload.cast::<Text>()),
        maybe_octet_length(candidate::headers.cast::<Nullable<Text>>()),
        candidate::locked_by,
        candidate::last_error_code,
    );
    Box::new(facts.into_sql::<Record<FactsSql>>())
}

impl LockedRow {
    fn new(facts: Facts) -> Self {
        let (sequence, payload, headers, holder, error) = facts;
        let was_abandoned = error.as_deref() == Some(ReasonCode::Abandoned.as_str());
        let bytes = i64::from(payload) + i64::from(headers.unwrap_or(0));
        Self {
            sequence,
            taken_over: match holder {
                None => TakenOver::No,
                Some(_) if was_abandoned => TakenOver::Again,
                Some(_) => TakenOver::Once,
            },
            bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
        }
    }
}

/// An array of sequences, whose query locks messages that may be claimed.
pub(crate) type Sequences<'a> = On<'a, NoFromClause, Array<BigInt>>;

/// Like [`Sequences`], with the [`Facts`] of each message.
pub(crate) type Candidates<'a> = On<'a, NoFromClause, Array<Record<FactsSql>>>;

/// The arrays that one statement reads.
pub(super) type LaneLook<'a> = Vec<Candidates<'a>>;

/// Claims as many candidates as fit, in order, in the caller's transaction. Candidates after these are not read.
pub(crate) fn claim_from<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    looks: impl IntoIterator<Item = LaneLook<'a>>,
    room: usize,
) -> QueryResult<Batch> {
    let before = Instant::now();
    let (mut found, mut is_cut) = (Vec::new(), false);
    for look in looks {
        if is_cut {
            break;
        }
        found.extend(lock(conn, name, claimant, look)?);
        let count = how_many_fit(&found, claimant.bytes).min(room);
        is_cut = count < found.len();
        found.truncate(count);
    }
    let rows = take(conn, name, claimant, &found)?;
    Ok(Batch {
        is_cut,
        ..Batch::of(conn, name, rows, before)?
    })
}

/// Concatenates the arrays.
pub(crate) fn concatenated<'a, T: 'static>(
    arrays: impl Iterator<Item = On<'a, NoFromClause, Array<T>>>,
) -> Option<On<'a, NoFromClause, Array<T>>> {
    arrays.reduce(|one, other| Box::new(one.concat(other)))
}

/// Locks the candidates until the transaction ends. There are none if the lease has expired, or if the relay must
/// stand by for an older one.
// Why: docs/decisions.md#two-step-claims
pub(crate) fn lock(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    look: LaneLook<'_>,
) -> QueryResult<Vec<LockedRow>> {
    let Some(all) = concatenated(look.into_iter()) else {
        return Ok(Vec::new());
    };
    let found = kept(select(all).filter(exists(at_work(name, claimant.lease))))
        .get_result::<Vec<Facts>>(conn)
        .optional()?;
    let found = found.into_iter().flatten();
    Ok(found.map(LockedRow::new).collect())
}

/// The number of candidates to claim, from the first: up to the candidate that reaches `bytes`.
fn how_many_fit(found: &[LockedRow], bytes: usize) -> usize {
    let mut before: usize = 0;
    let fits = |one: &&LockedRow| {
        let fits = before < bytes;
        before = before.saturating_add(one.bytes);
        fits
    };
    found.iter().take_while(fits).count()
}

/// Takes messages that this transaction has locked. The first takeover of a message from a dead relay counts an
/// attempt, because the message may have caused the crash.
// Why: docs/decisions.md#narrow-claims
pub(crate) fn take(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    found: &[LockedRow],
) -> QueryResult<Vec<(TakenRow, TakenOver)>> {
    let mut taken_rows = Vec::with_capacity(found.len());
    for kind in [TakenOver::No, TakenOver::Once, TakenOver::Again] {
        let of_kind = found.iter().filter(|one| one.taken_over == kind);
        let sequences: Vec<i64> = of_kind.map(|one| one.sequence).collect();
        if sequences.is_empty() {
            continue;
        }
        let these = update(outbox::table(name.outbox())).filter(outbox::sequence.eq_any(sequences));
        let from = "taken over from lease ".into_sql::<Text>().nullable();
        let before = at_most(at_least(outbox::attempts, 0), MOST_ATTEMPTS);
        let was_tried = (
            outbox::attempts.eq(1.into_sql::<Integer>() + before),
            outbox::last_error_code.eq(ReasonCode::Abandoned.as_str()),
            outbox::last_error.eq(from.concat(outbox::locked_by.cast::<Nullable<Text>>())),
        );
        let (held, taken) = (is_held_by(claimant.lease), taken(name, claimant));
        let rows: Vec<TakenRow> = match kind {
            TakenOver::Once => kept(these.set((held, was_tried)).returning(taken)).load(conn)?,
            TakenOver::No | TakenOver::Again => {
                kept(these.set(held).returning(taken)).load(conn)?
            }
        };
        taken_rows.extend(rows.into_iter().map(|row| (row, kind)));
    }
    Ok(taken_rows)
}

/// Locks free messages and takes them with one statement, for a claim that cannot be too large.
pub(crate) fn take_at_once(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    these: Sequences<'_>,
) -> QueryResult<Batch> {
    let before = Instant::now();
    let rows: Vec<TakenRow> = kept(take_these(name, claimant, these)).load(conn)?;
    let rows = rows.into_iter().map(|row| (row, TakenOver::No));
    Batch::of(conn, name, rows.collect(), before)
}

/// Takes free messages. There are none if the lease has expired, or if the relay must stand by for an older one.
pub(crate) fn take_these<'a>(
    name: &OutboxName,
    claimant: Claimant<'a>,
    these: Sequences<'a>,
) -> impl Query<SqlType = SqlTypeOf<TakenColumns<'static>>> + QueryFragment<Pg> + QueryId + use<'a>
{
    update(outbox::table(name.outbox()))
        .filter(outbox::sequence.eq(AnyOf(these)))
        .filter(exists(at_work(name, claimant.lease)))
        .set(is_held_by(claimant.lease))
        .returning(taken(name, claimant))
}

type IsHeld = (
    Eq<outbox::locked_by, i64>,
    Eq<outbox::locked_at, NullableExpression<clock_timestamp>>,
);

fn is_held_by(lease: LeaseId) -> IsHeld {
    (
        outbox::locked_by.eq(lease.0),
        outbox::locked_at.eq(clock_timestamp().nullable()),
    )
}

/// The row, the time of the claim, and the number of the registrations that the relay has not read.
pub(super) type TakenRow = (live::LiveRow, PgTimestamp, Option<i64>);

type TakenColumns<'a> = (
    AsSelect<live::LiveRow, Pg>,
    AssumeNotNull<outbox::locked_at>,
    On<'a, outbox::table, Nullable<BigInt>>,
);

fn taken<'a>(name: &OutboxName, claimant: Claimant<'a>) -> TakenColumns<'a> {
    (
        live::LiveRow::as_returning(),
        outbox::locked_at.assume_not_null(),
        match claimant.read_to {
            Some(read_to) => read_to.seen(name),
            None => Box::new(None::<i64>.into_sql::<Nullable<BigInt>>()),
        },
    )
}

/// The digest and the sequence of a delivered message.
type DeliveryRow = (Vec<u8>, i64);

/// The digest and the sequence of the last delivery under the idempotency key of each of these messages.
///
/// A message without such a key cannot have been delivered before. A statement of its own, because a subquery of the claim
/// would open all partitions of the ledger for each claim: that takes as long as the rest of a small claim.
// Why: docs/decisions.md#delivered-before
fn delivered<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    rows: impl Iterator<Item = &'a live::LiveRow>,
) -> QueryResult<HashMap<(String, String), DeliveryRow>> {
    let (keys, destinations): (Vec<String>, Vec<String>) =
        rows.filter_map(live::LiveRow::key).unzip();
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let key = (
        ledger::idempotency_key.assume_not_null(),
        ledger::named_destination,
    );
    let found = ledger::table(name.ledger())
        .filter(ledger::idempotency_key.eq_any(keys))
        .filter(ledger::named_destination.eq_any(destinations))
        .filter(ledger::status.eq("delivered"))
        .distinct_on(key)
        .order((key, ledger::settled_at.desc()))
        .select((key, ledger::digest, ledger::sequence))
        .load::<((String, String), Option<Vec<u8>>, i64)>(conn)
        // The claim may have been committed already, so this error is not the claim's: its answer is lost.
        .map_err(|error| Error::DeserializationError(error.into()))?;
    let with_digest = found
        .into_iter()
        .filter_map(|(key, digest, sequence)| Some((key, (digest?, sequence))));
    Ok(with_digest.collect())
}

pub(super) fn as_bigint(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
