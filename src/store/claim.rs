//! Claiming: which topics there are, and the due messages of each.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{
    Array, BigInt, Double, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

use super::digest_of;
use super::lease::LeaseId;
use crate::message::{Message, Sequence};
use crate::name::OutboxName;

/// A topic, and the destination that its messages name: empty where they name none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, diesel::QueryableByName)]
pub(crate) struct Topic {
    #[diesel(sql_type = Text)]
    pub(crate) topic: String,
    #[diesel(sql_type = Text)]
    pub(crate) destination: String,
}

/// How many messages of a topic may be claimed at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) topic: Topic,
    pub(crate) room: usize,
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
    pub(crate) known: Known,
    pub(crate) taken_over: TakenOver,
}

/// The topics of live messages, by a loose index scan: one probe for each.
pub(crate) fn topics(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Topic>> {
    sql_query(format!(
        "WITH RECURSIVE found AS (
            (SELECT topic, destination FROM {outbox} ORDER BY topic, destination LIMIT 1)
            UNION ALL
            (SELECT next.topic, next.destination
               FROM found CROSS JOIN LATERAL (
                    SELECT o.topic, o.destination FROM {outbox} o
                     WHERE (o.topic, o.destination) > (found.topic, found.destination)
                     ORDER BY o.topic, o.destination LIMIT 1
               ) next)
        )
        SELECT topic, destination FROM found",
        outbox = name.outbox()
    ))
    .load(conn)
}

#[derive(diesel::QueryableByName)]
struct ClaimedRow {
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
}

/// Who claims, and what it may take.
pub(crate) struct Claim<'a> {
    pub(crate) lease: LeaseId,
    pub(crate) lanes: &'a [Lane],
    /// The most that all lanes may give together.
    pub(crate) room: usize,
    /// Leases that are over: what they hold may be taken.
    pub(crate) expired: &'a [i64],
    pub(crate) max_attempts: u32,
}

/// Claims due messages for a lease that is not over, by one statement.
///
/// Each lane reads `(topic, destination, available_at, sequence)` from its first due message and stops at its
/// room; rows that others hold are skipped, not waited for. `= ANY(ARRAY(…))` locks no more rows
/// than were chosen. A key made from the message's own id cannot have been delivered before, so the
/// ledger is asked about other keys only. The leases that are over come as parameters: a subquery would keep the old
/// snapshot when a row has changed meanwhile.
pub(crate) fn claim(
    conn: &mut PgConnection,
    name: &OutboxName,
    claim: &Claim<'_>,
) -> QueryResult<Vec<Claimed>> {
    let topics: Vec<&str> = claim
        .lanes
        .iter()
        .map(|lane| lane.topic.topic.as_str())
        .collect();
    let destinations: Vec<&str> = claim
        .lanes
        .iter()
        .map(|lane| lane.topic.destination.as_str())
        .collect();
    let rooms: Vec<i64> = claim
        .lanes
        .iter()
        .map(|lane| as_bigint(lane.room))
        .collect();
    let before = Instant::now();
    let rows: Vec<ClaimedRow> = sql_query(format!(
        "WITH lane AS MATERIALIZED (
            SELECT * FROM unnest($1::text[], $7::text[], $2::bigint[])
                     WITH ORDINALITY AS t(topic, destination, room, n)
             WHERE EXISTS (SELECT FROM {lease} WHERE id = $3 AND expires_at > clock_timestamp())
             ORDER BY n
        ), candidate AS MATERIALIZED (
            SELECT chosen.* FROM lane CROSS JOIN LATERAL (
                SELECT o.sequence,
                       CASE WHEN o.locked_by IS NULL THEN 0
                            WHEN {first_time} THEN 1
                            ELSE 2 END AS taken_over
                  FROM {outbox} o
                 WHERE o.topic = lane.topic AND o.destination = lane.destination
                   AND o.available_at <= now()
                   AND (o.locked_by IS NULL OR o.locked_by = ANY($5))
                 ORDER BY o.available_at, o.sequence
                 LIMIT lane.room
                   FOR NO KEY UPDATE SKIP LOCKED
            ) chosen
            LIMIT $4
        ), claimed AS (
            UPDATE {outbox} o
               SET locked_by = $3,
                   locked_at = clock_timestamp(),
                   attempts = CASE WHEN {first_time} THEN o.attempts + 1 ELSE o.attempts END,
                   last_error_code = CASE WHEN {first_time} THEN 'ABANDONED' ELSE o.last_error_code END,
                   last_error = CASE WHEN {first_time} THEN 'taken over from lease ' || o.locked_by
                                     ELSE o.last_error END
             WHERE o.sequence = ANY(ARRAY(SELECT sequence FROM candidate))
            RETURNING o.*
        )
        SELECT o.sequence, o.message_id, o.topic, o.destination, o.payload::text AS payload,
               o.headers::text AS headers, o.ordering_key, o.idempotency_key, o.tenant_id,
               o.created_at, o.locked_at, o.attempts, c.taken_over,
               CASE WHEN isfinite(o.expires_at)
                    THEN extract(epoch FROM o.expires_at - clock_timestamp())::float8
                    WHEN o.expires_at = '-infinity' THEN -1::float8 END AS expires_in,
               CASE WHEN o.idempotency_key <> o.message_id::text THEN (
                SELECT CASE WHEN l.digest = {digest} THEN 1 ELSE 2 END
                  FROM {ledger} l
                 WHERE l.idempotency_key = o.idempotency_key AND l.destination = o.destination
                   AND l.status = 'delivered') END AS known
          FROM claimed o JOIN candidate c USING (sequence)",
        outbox = name.outbox(),
        lease = name.lease(),
        ledger = name.ledger(),
        digest = digest_of("o"),
        first_time = "(o.locked_by IS NOT NULL AND o.attempts + 1 < $6
                       AND o.last_error_code IS DISTINCT FROM 'ABANDONED')",
    ))
    .bind::<Array<Text>, _>(topics)
    .bind::<Array<BigInt>, _>(rooms)
    .bind::<BigInt, _>(claim.lease.0)
    .bind::<BigInt, _>(as_bigint(claim.room))
    .bind::<Array<BigInt>, _>(claim.expired)
    .bind::<Integer, _>(i32::try_from(claim.max_attempts).unwrap_or(i32::MAX))
    .bind::<Array<Text>, _>(destinations)
    .load(conn)?;
    Ok(rows
        .into_iter()
        .map(|row| row.into_claimed(before))
        .collect())
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
                attempts: u32::try_from(self.attempts).unwrap_or(0),
                expires,
                claimed_at: self.locked_at.0,
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

fn as_bigint(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
