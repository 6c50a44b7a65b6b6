//! Claiming: the due messages of each topic.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{
    Array, BigInt, Bool, Double, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};
use diesel::{PgConnection, RunQueryDsl};
use uuid::Uuid;

use super::digest_of;
use super::lease::LeaseId;
use super::statement::statement;
use crate::message::{Message, Sequence};
use crate::name::OutboxName;

/// A topic, and the destination that its messages name: empty where they name none.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Topic {
    pub(crate) topic: String,
    pub(crate) destination: String,
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

#[derive(diesel::QueryableByName)]
pub(super) struct ClaimedRow {
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = SqlUuid)]
    message_id: Uuid,
    #[diesel(sql_type = Text)]
    topic: String,
    #[diesel(sql_type = Text)]
    destination: String,
    #[diesel(sql_type = Text)]
    payload: String,
    #[diesel(sql_type = Nullable<Text>)]
    headers: Option<String>,
    #[diesel(sql_type = Nullable<Text>)]
    ordering_key: Option<String>,
    #[diesel(sql_type = Text)]
    idempotency_key: String,
    #[diesel(sql_type = Nullable<SqlUuid>)]
    tenant_id: Option<Uuid>,
    #[diesel(sql_type = Timestamptz)]
    created_at: PgTimestamp,
    #[diesel(sql_type = Nullable<Timestamptz>)]
    occurred_at: Option<PgTimestamp>,
    #[diesel(sql_type = Timestamptz)]
    available_at: PgTimestamp,
    #[diesel(sql_type = Timestamptz)]
    locked_at: PgTimestamp,
    #[diesel(sql_type = Integer)]
    attempts: i32,
    #[diesel(sql_type = Nullable<Double>)]
    expires_in: Option<f64>,
    #[diesel(sql_type = Integer)]
    taken_over: i32,
    #[diesel(sql_type = Nullable<Integer>)]
    known: Option<i32>,
    #[diesel(sql_type = Bool)]
    is_cut: bool,
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

/// What a claim has brought.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) claimed: Vec<Claimed>,
    /// Others were left where they are, for these are as large as they may be.
    pub(crate) is_cut: bool,
}

/// Claims due messages without an ordering key, `room` of them at most, by one statement.
///
/// Each lane reads the index of the claim from its place on and stops at its room; rows that others
/// hold are skipped, not waited for.
pub(crate) fn claim(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    lanes: &[Lane],
    room: usize,
) -> QueryResult<Batch> {
    let candidates = format!(
        "WITH lane AS MATERIALIZED (
            SELECT * FROM unnest($5::text[], $6::text[], $7::bigint[], $8::timestamptz[], $9::bigint[])
                     WITH ORDINALITY AS t(topic, destination, room, after_time, after_sequence, n)
             WHERE {is_live}
             ORDER BY n
        ), candidate AS MATERIALIZED (
            SELECT chosen.* FROM lane CROSS JOIN LATERAL (
                SELECT {candidate}
                  FROM {outbox} o
                 WHERE o.topic = lane.topic AND o.destination = lane.destination
                   AND o.ordering_key IS NULL
                   AND o.available_at <= now()
                   AND (o.available_at, o.sequence) > (lane.after_time, lane.after_sequence)
                   AND (o.locked_by IS NULL OR o.locked_by = ANY($2))
                 ORDER BY o.available_at, o.sequence
                 LIMIT lane.room
                   FOR NO KEY UPDATE SKIP LOCKED
            ) chosen
            LIMIT $10
        )",
        is_live = is_live(name),
        candidate = candidate(),
        outbox = name.outbox(),
    );
    let before = Instant::now();
    let lanes = Lanes::of(lanes);
    statement(claim_statement(name, &candidates))
        .bind::<BigInt, _>(claimant.lease.0)
        .bind::<Array<BigInt>, _>(claimant.expired)
        .bind::<Integer, _>(most(claimant))
        .bind::<BigInt, _>(as_bigint(claimant.bytes))
        .bind::<Array<Text>, _>(lanes.topics)
        .bind::<Array<Text>, _>(lanes.destinations)
        .bind::<Array<BigInt>, _>(lanes.rooms)
        .bind::<Array<Timestamptz>, _>(lanes.after_times)
        .bind::<Array<BigInt>, _>(lanes.after_sequences)
        .bind::<BigInt, _>(as_bigint(room))
        .load::<ClaimedRow>(conn)
        .map(|rows| claimed(rows, before))
}

/// Claims those of these messages that have no ordering key and are free.
pub(crate) fn claim_chosen(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    sequences: &[i64],
) -> QueryResult<Batch> {
    let candidates = format!(
        "WITH candidate AS MATERIALIZED (
            SELECT {candidate}
              FROM {outbox} o
             WHERE o.sequence = ANY($5) AND {is_live}
               AND o.ordering_key IS NULL AND o.available_at <= now()
               AND (o.locked_by IS NULL OR o.locked_by = ANY($2))
             ORDER BY o.sequence
               FOR NO KEY UPDATE SKIP LOCKED
        )",
        candidate = candidate(),
        outbox = name.outbox(),
        is_live = is_live(name),
    );
    let before = Instant::now();
    statement(claim_statement(name, &candidates))
        .bind::<BigInt, _>(claimant.lease.0)
        .bind::<Array<BigInt>, _>(claimant.expired)
        .bind::<Integer, _>(most(claimant))
        .bind::<BigInt, _>(as_bigint(claimant.bytes))
        .bind::<Array<BigInt>, _>(sequences)
        .load::<ClaimedRow>(conn)
        .map(|rows| claimed(rows, before))
}

/// Lanes as parameters.
pub(super) struct Lanes<'a> {
    pub(super) topics: Vec<&'a str>,
    pub(super) destinations: Vec<&'a str>,
    pub(super) rooms: Vec<i64>,
    pub(super) after_times: Vec<PgTimestamp>,
    pub(super) after_sequences: Vec<i64>,
}

impl<'a> Lanes<'a> {
    pub(super) fn of(lanes: &'a [Lane]) -> Self {
        let topic = |lane: &'a Lane| lane.stream.topic.topic.as_str();
        let destination = |lane: &'a Lane| lane.stream.topic.destination.as_str();
        let lanes_of = || lanes.iter();
        Self {
            topics: lanes_of().map(topic).collect(),
            destinations: lanes_of().map(destination).collect(),
            rooms: lanes_of().map(|lane| as_bigint(lane.room)).collect(),
            after_times: lanes_of()
                .map(|lane| PgTimestamp(lane.after.available_at))
                .collect(),
            after_sequences: lanes_of().map(|lane| lane.after.sequence).collect(),
        }
    }
}

/// Whether the lease $1 is not over. Of several that are to be the only one at work, it has to be
/// the oldest that has not ended: one that has expired may be about to be renewed.
pub(super) fn is_live(name: &OutboxName) -> String {
    format!(
        "EXISTS (SELECT FROM {lease} l
                  WHERE l.id = $1 AND NOT l.ended AND l.expires_at > clock_timestamp()
                    AND NOT (l.single_active AND EXISTS (
                            SELECT FROM {lease} e
                             WHERE e.single_active AND e.id < l.id AND NOT e.ended)))",
        lease = name.lease()
    )
}

/// What a claim has to know of a candidate: also how it is taken from the lease that holds it, if one
/// does.
pub(super) fn candidate() -> String {
    format!(
        "o.sequence,
         CASE WHEN o.locked_by IS NULL THEN 0 WHEN {FIRST_TIME} THEN 1 ELSE 2 END AS taken_over,
         octet_length(o.payload::text) + coalesce(octet_length(o.headers::text), 0) AS bytes"
    )
}

const FIRST_TIME: &str = "(o.locked_by IS NOT NULL AND o.attempts + 1 < $3
    AND o.last_error_code IS DISTINCT FROM 'ABANDONED')";

/// Locks what `candidates` has chosen for the lease $1, and returns it.
///
/// `candidates` is a WITH clause that ends with `candidate (sequence, taken_over, bytes)`. $2: leases
/// that are over; they come as a parameter, because a subquery would keep the old snapshot when a row has
/// changed meanwhile. $3: most attempts. $4: bytes; how large a row is once it is read its stored size
/// does not tell, for that is compressed. `= ANY(ARRAY(…))` locks no more rows than were chosen. A key
/// made from the message's own id cannot have been delivered before, so the ledger is asked about
/// other keys only.
pub(super) fn claim_statement(name: &OutboxName, candidates: &str) -> String {
    format!(
        "{candidates}, measured AS (
            SELECT sequence, taken_over, sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) - bytes AS before
              FROM candidate
        ), chosen AS MATERIALIZED (
            SELECT sequence, taken_over FROM measured WHERE before < $4
        ), claimed AS (
            UPDATE {outbox} o
               SET locked_by = $1,
                   locked_at = clock_timestamp(),
                   attempts = CASE WHEN {FIRST_TIME} THEN o.attempts + 1 ELSE o.attempts END,
                   last_error_code = CASE WHEN {FIRST_TIME} THEN 'ABANDONED' ELSE o.last_error_code END,
                   last_error = CASE WHEN {FIRST_TIME} THEN 'taken over from lease ' || o.locked_by
                                     ELSE o.last_error END
             WHERE o.sequence = ANY(ARRAY(SELECT sequence FROM chosen))
            RETURNING o.*
        )
        SELECT o.sequence, o.message_id, o.topic, o.destination, o.payload::text AS payload,
               o.headers::text AS headers, o.ordering_key, o.idempotency_key, o.tenant_id,
               o.created_at, o.occurred_at, o.available_at, o.locked_at, o.attempts, c.taken_over,
               CASE WHEN isfinite(o.expires_at)
                    THEN extract(epoch FROM o.expires_at - clock_timestamp())::float8
                    WHEN o.expires_at = '-infinity' THEN -1::float8 END AS expires_in,
               CASE WHEN o.idempotency_key <> o.message_id::text THEN (
                SELECT CASE WHEN l.digest = {digest} THEN 1 ELSE 2 END
                  FROM {ledger} l
                 WHERE l.idempotency_key = o.idempotency_key AND l.destination = o.destination
                   AND l.status = 'delivered') END AS known,
               (SELECT count(*) FROM chosen) < (SELECT count(*) FROM candidate) AS is_cut
          FROM claimed o JOIN chosen c USING (sequence)",
        outbox = name.outbox(),
        ledger = name.ledger(),
        digest = digest_of("o"),
    )
}

pub(super) fn most(claimant: Claimant<'_>) -> i32 {
    i32::try_from(claimant.max_attempts).unwrap_or(i32::MAX)
}

pub(super) fn claimed(rows: Vec<ClaimedRow>, before: Instant) -> Batch {
    let is_cut = rows.iter().any(|row| row.is_cut);
    let claimed = rows.into_iter().map(|row| row.into_claimed(before));
    Batch {
        claimed: claimed.collect(),
        is_cut,
    }
}

impl ClaimedRow {
    fn into_claimed(self, before: Instant) -> Claimed {
        let expires = self.expires_in.map(|seconds| {
            let left = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
            // Further away than the clock can say is never.
            before.checked_add(left).unwrap_or_else(|| before + FAR)
        });
        Claimed {
            known: match self.known {
                None => Known::No,
                Some(1) => Known::Delivered,
                Some(_) => Known::OtherContent,
            },
            taken_over: match self.taken_over {
                0 => TakenOver::No,
                1 => TakenOver::Once,
                _ => TakenOver::Again,
            },
            position: Position {
                available_at: self.available_at.0,
                sequence: self.sequence,
            },
            message: Message {
                sequence: Sequence(self.sequence),
                message_id: self.message_id,
                topic: self.topic,
                destination: self.destination,
                payload: self.payload,
                headers: self.headers,
                ordering_key: self.ordering_key,
                idempotency_key: self.idempotency_key,
                tenant_id: self.tenant_id,
                created_at: system_time(self.created_at),
                occurred_at: self.occurred_at.map(system_time),
                age: between(self.created_at, self.locked_at),
                claimed: before,
                attempts: u32::try_from(self.attempts).unwrap_or(0),
                expires,
                available_at: self.available_at.0,
                claimed_at: self.locked_at.0,
                in_a_row: 0,
            },
        }
    }
}

/// A year: no message waits in a relay's memory for that long.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// PostgreSQL counts from the first of January 2000.
const POSTGRES_EPOCH: Duration = Duration::from_secs(946_684_800);

/// The last second of the year 9999: later ones have no RFC 3339 form.
const LAST_SECOND: Duration = Duration::from_secs(253_402_300_799);

/// From one time to a later one.
fn between(from: PgTimestamp, to: PgTimestamp) -> Duration {
    Duration::from_micros(u64::try_from(to.0.saturating_sub(from.0)).unwrap_or(0))
}

/// The nearest time that can be written in a header: plain SQL can store any, and infinity.
fn system_time(timestamp: PgTimestamp) -> SystemTime {
    let micros = Duration::from_micros(timestamp.0.unsigned_abs());
    let since_1970 = if timestamp.0 < 0 {
        POSTGRES_EPOCH.saturating_sub(micros)
    } else {
        POSTGRES_EPOCH.saturating_add(micros)
    };
    UNIX_EPOCH + since_1970.min(LAST_SECOND)
}

pub(super) fn as_bigint(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
