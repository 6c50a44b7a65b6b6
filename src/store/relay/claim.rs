//! Claiming: the due messages of each topic.
//!
//! A claim of a few messages is one statement ([`take_at_once`]). One that could be too large, or takes what a
//! dead relay held, is a transaction of three steps. It locks candidates and learns of each how large it is and who
//! held it ([`lock`]); decides which of them fit ([`how_many_fit`]); and takes these ([`take`]). The others
//! stay free.

#[cfg(test)]
mod tests;

use std::time::Instant;

use diesel::dsl::{AsSelect, AssumeNotNull, Eq, array, case_when, exists};
use diesel::internal::table_macro::{NoFromClause, NullableExpression};
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, IntoSql, NullableExpressionMethods,
    OptionalExtension, PgArrayExpressionMethods, QueryDsl, RunQueryDsl, SelectableHelper,
    TextExpressionMethods,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Binary, Integer, Nullable, Record, Text, Timestamptz};
use diesel::{PgConnection, select, update};

use super::lease::{LeaseId, at_work};
use crate::message::{MAX_ROW_BYTES, Message};
use crate::name::OutboxName;
use crate::status::ReasonCode;
use crate::store::live;
use crate::store::sql::{AnyOf, On, clock_timestamp, maybe_octet_length, now, octet_length};
use crate::store::statement::kept;
use crate::store::table::{candidate, ledger, outbox};

/// A topic, and the destination that its messages name: empty where they name none.
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

/// The messages of a topic, those with an ordering key apart from those without.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Stream {
    pub(crate) topic: Topic,
    pub(crate) is_keyed: bool,
}

/// A place in the order in which a stream is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// Microseconds, as the database counts.
    pub(crate) available_at: i64,
    pub(crate) sequence: i64,
}

impl Position {
    /// Before everything.
    pub(crate) const START: Self = Self {
        // PostgreSQL's -infinity.
        available_at: i64::MIN,
        sequence: i64::MIN,
    };

    /// Before everything that is available then.
    pub(crate) fn of_time(available_at: i64) -> Self {
        Self {
            available_at,
            sequence: i64::MIN,
        }
    }
}

/// How many messages of a stream may be claimed at once, and behind which place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) stream: Stream,
    pub(crate) room: usize,
    pub(crate) after: Position,
}

/// What the ledger knows of a claimed message's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// Nothing: it has to be sent.
    No,
    /// The same message was delivered.
    Delivered,
    /// Another message was delivered under its key.
    OtherContent,
}

/// Whether a claimed message was taken from a relay that is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TakenOver {
    /// It was free.
    No,
    /// It was, for the first time: its attempt is counted, and it is sent at once.
    Once,
    /// It was, again or at its last attempt: it has to be settled as a failed attempt.
    Again,
}

/// A claimed message and what the claim found out about it.
pub(crate) struct Claimed {
    pub(crate) message: Message,
    pub(crate) position: Position,
    pub(crate) known: Known,
    pub(crate) taken_over: TakenOver,
}

/// Who claims.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claimant<'a> {
    pub(crate) lease: LeaseId,
    /// Leases that are over: what they hold may be taken.
    pub(crate) expired: &'a [i64],
    pub(crate) max_attempts: u32,
    /// Payloads and headers that a claim brings, beside those of its last message. One message it brings
    /// in any case.
    pub(crate) bytes: usize,
}

impl Claimant<'_> {
    /// Whether so many messages may be claimed without knowing more of them: they can be of any size, and nobody
    /// holds them.
    pub(super) fn has_space_for_any(&self, count: usize) -> bool {
        let bytes = count.saturating_mul(MAX_ROW_BYTES);
        self.expired.is_empty() && (count <= 1 || bytes <= self.bytes)
    }
}

/// What a claim has brought.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) claimed: Vec<Claimed>,
    /// Others were left where they are, for these are as large as they may be.
    pub(crate) is_cut: bool,
}

/// Lanes that one statement looks at, each by an array of its own. More would save round trips; but each number
/// of arrays is another text, whose plan the server keeps for the connection.
pub(in crate::store) const ARRAYS_AT_ONCE: usize = 8;

impl Batch {
    pub(super) fn bytes(&self) -> usize {
        self.claimed.iter().map(|one| one.message.bytes()).sum()
    }
}

/// Claims due messages without an ordering key, `room` of them at most.
///
/// Each lane is read from its place on by the index of the claim, and no further than it has room; what others
/// hold is skipped, not waited for.
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
            .filter(is_free(claimant.expired))
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
            take_at_once(conn, name, claimant.lease, all)
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

/// Claims those of these messages that have no ordering key and are free.
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
        .filter(is_free(claimant.expired))
        .order(candidate::sequence)
        .select(facts())
        .for_no_key_update()
        .skip_locked();
    let look: Look = vec![Box::new(array(chosen))];
    conn.transaction(|conn| claim_from(conn, name, claimant, [look], usize::MAX))
}

/// Due when the transaction began: the scan of an index can end at `now()`, and not at `clock_timestamp()`.
pub(super) fn is_due() -> On<'static, candidate::table> {
    Box::new(candidate::available_at.le(now()))
}

/// Nobody holds it, or a lease that is over. These come as values: a subquery would keep the old snapshot
/// when a row has changed meanwhile.
pub(super) fn is_free(expired: &[i64]) -> On<'_, candidate::table> {
    let is_unheld = candidate::locked_by.is_null();
    Box::new(is_unheld.or(candidate::locked_by.assume_not_null().eq_any(expired)))
}

/// Of the lane's topic and destination, and behind its place.
pub(super) fn is_in(lane: &Lane) -> On<'_, candidate::table> {
    let Topic { topic, destination } = &lane.stream.topic;
    let here = (candidate::available_at, candidate::sequence);
    let place = (PgTimestamp(lane.after.available_at), lane.after.sequence);
    let is_behind = here.into_sql::<Record<(Timestamptz, BigInt)>>().gt(place);
    let is_there = candidate::destination.eq(destination).and(is_behind);
    Box::new(candidate::topic.eq(topic).and(is_there))
}

/// What a claim has to know of a candidate.
#[derive(Debug)]
struct Found {
    sequence: i64,
    taken_over: TakenOver,
    /// Of payload and headers. How large a row is once it is read its stored size does not tell, for that is
    /// compressed.
    bytes: usize,
}

/// Sequence, bytes of the payload and of the headers, who holds it, attempts, code of the last error.
type Facts = (i64, i32, Option<i32>, Option<i64>, i32, Option<String>);

/// The same, as SQL has them.
type FactsSql = (
    BigInt,
    Integer,
    Nullable<Integer>,
    Nullable<BigInt>,
    Integer,
    Nullable<Text>,
);

pub(super) fn facts() -> On<'static, candidate::table, Record<FactsSql>> {
    let facts = (
        candidate::sequence,
        octet_length(candidate::payload.cast::<Text>()),
        maybe_octet_length(candidate::headers.cast::<Nullable<Text>>()),
        candidate::locked_by,
        candidate::attempts,
        candidate::last_error_code,
    );
    Box::new(facts.into_sql::<Record<FactsSql>>())
}

impl Found {
    fn new(facts: Facts, max_attempts: u32) -> Self {
        let (sequence, payload, headers, holder, attempts, error) = facts;
        let is_last = i64::from(attempts) + 1 >= i64::from(max_attempts);
        let was_abandoned = error.as_deref() == Some(ReasonCode::Abandoned.as_str());
        let bytes = i64::from(payload) + i64::from(headers.unwrap_or(0));
        Self {
            sequence,
            taken_over: match holder {
                None => TakenOver::No,
                Some(_) if is_last || was_abandoned => TakenOver::Again,
                Some(_) => TakenOver::Once,
            },
            bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
        }
    }
}

/// Locks messages that may be claimed.
pub(in crate::store) type Sequences<'a> = On<'a, NoFromClause, Array<BigInt>>;

/// The same, and what a claim has to know of each.
pub(super) type Candidates<'a> = On<'a, NoFromClause, Array<Record<FactsSql>>>;

/// What one statement looks at.
pub(super) type Look<'a> = Vec<Candidates<'a>>;

/// Claims candidates, in their order, as many as fit: in the caller's transaction. What stands behind those
/// is not looked at.
pub(super) fn claim_from<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    looks: impl IntoIterator<Item = Look<'a>>,
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
    Ok(Batch {
        claimed: take(conn, name, claimant.lease, &found, before)?,
        is_cut,
    })
}

/// These arrays as one.
pub(in crate::store) fn concatenated<'a, T: 'static>(
    arrays: impl Iterator<Item = On<'a, NoFromClause, Array<T>>>,
) -> Option<On<'a, NoFromClause, Array<T>>> {
    arrays.reduce(|one, other| Box::new(one.concat(other)))
}

/// Locks the candidates, until the transaction ends. Under a lease that is over, or beside an older relay
/// that is to be the only one, there are none.
fn lock(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    look: Look<'_>,
) -> QueryResult<Vec<Found>> {
    let Some(all) = concatenated(look.into_iter()) else {
        return Ok(Vec::new());
    };
    let found = select(all)
        .filter(exists(at_work(name, claimant.lease)))
        .get_result::<Vec<Facts>>(conn)
        .optional()?;
    let found = found.into_iter().flatten();
    Ok(found
        .map(|facts| Found::new(facts, claimant.max_attempts))
        .collect())
}

/// How many of them are claimed, from the first one on: up to the one that makes `bytes` full.
fn how_many_fit(found: &[Found], bytes: usize) -> usize {
    let mut before: usize = 0;
    let fits = |one: &&Found| {
        let fits = before < bytes;
        before = before.saturating_add(one.bytes);
        fits
    };
    found.iter().take_while(fits).count()
}

/// Takes messages that this transaction has locked. Those that are taken from a dead relay for the first time
/// have had an attempt: they may be what it died of.
fn take(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    found: &[Found],
    before: Instant,
) -> QueryResult<Vec<Claimed>> {
    let mut claimed = Vec::with_capacity(found.len());
    for kind in [TakenOver::No, TakenOver::Once, TakenOver::Again] {
        let of_kind = found.iter().filter(|one| one.taken_over == kind);
        let sequences: Vec<i64> = of_kind.map(|one| one.sequence).collect();
        if sequences.is_empty() {
            continue;
        }
        let these = update(outbox::table(name.outbox())).filter(outbox::sequence.eq_any(sequences));
        let from = "taken over from lease ".into_sql::<Text>().nullable();
        let was_tried = (
            outbox::attempts.eq(1.into_sql::<Integer>() + outbox::attempts),
            outbox::last_error_code.eq(ReasonCode::Abandoned.as_str()),
            outbox::last_error.eq(from.concat(outbox::locked_by.cast::<Nullable<Text>>())),
        );
        let rows: Vec<TakenRow> = match kind {
            TakenOver::No | TakenOver::Again => {
                let these = these.set(is_held_by(lease));
                kept(these.returning(taken(name))).load(conn)?
            }
            TakenOver::Once => {
                let these = these.set((is_held_by(lease), was_tried));
                kept(these.returning(taken(name))).load(conn)?
            }
        };
        claimed.extend(rows.into_iter().map(|row| Claimed::new(row, kind, before)));
    }
    Ok(claimed)
}

/// Locks messages that nobody holds, and takes them: one statement is a claim, where none can be too large.
pub(super) fn take_at_once(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    these: Sequences<'_>,
) -> QueryResult<Batch> {
    let before = Instant::now();
    let these = update(outbox::table(name.outbox()))
        .filter(outbox::sequence.eq(AnyOf(these)))
        .filter(exists(at_work(name, lease)))
        .set(is_held_by(lease))
        .returning(taken(name));
    let rows: Vec<TakenRow> = kept(these).load(conn)?;
    let claimed = rows
        .into_iter()
        .map(|row| Claimed::new(row, TakenOver::No, before));
    Ok(Batch {
        claimed: claimed.collect(),
        is_cut: false,
    })
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

/// The row, when it was claimed, and the digest of what was delivered under its key.
type TakenRow = (live::Row, PgTimestamp, Option<Vec<u8>>);

type Taken = (
    AsSelect<live::Row, Pg>,
    AssumeNotNull<outbox::locked_at>,
    On<'static, outbox::table, Nullable<Binary>>,
);

fn taken(name: &OutboxName) -> Taken {
    (
        live::Row::as_returning(),
        outbox::locked_at.assume_not_null(),
        delivered(name),
    )
}

/// The digest of what was delivered last under a message's key. A message without a key cannot have been
/// delivered before, so the ledger is asked about keys only.
fn delivered(name: &OutboxName) -> On<'static, outbox::table, Nullable<Binary>> {
    let delivered = ledger::table(name.ledger())
        .filter(ledger::idempotency_key.eq(outbox::idempotency_key))
        .filter(ledger::named_destination.eq(outbox::destination))
        .filter(ledger::status.eq("delivered"))
        .order(ledger::settled_at.desc())
        .select(ledger::digest)
        .single_value();
    Box::new(case_when(outbox::idempotency_key.is_not_null(), delivered))
}

impl Claimed {
    fn new((row, at, delivered): TakenRow, taken_over: TakenOver, before: Instant) -> Self {
        Self {
            position: Position {
                available_at: row.available_at.0,
                sequence: row.sequence,
            },
            known: match delivered {
                None => Known::No,
                Some(digest) if row.has_content(&digest) => Known::Delivered,
                Some(_) => Known::OtherContent,
            },
            taken_over,
            message: row.into_message(at, before),
        }
    }
}

pub(super) fn as_bigint(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
