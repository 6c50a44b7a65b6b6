//! Settling: what became of claimed messages, fenced by the lease that holds them.
//!
//! Each function settles many messages by one statement and returns the sequences that it
//! changed. One that is missing there was not held by the lease any more.

#[cfg(test)]
mod tests;

use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, Text, Timestamptz};
use diesel::{PgConnection, RunQueryDsl};

use super::lease::LeaseId;
use super::statement::statement;
use super::{SequenceRow, digest_of, millis};
use crate::name::OutboxName;
use crate::status::ReasonCode;

/// A message that the receiver has.
#[derive(Debug, Clone)]
pub(crate) struct Delivered {
    pub(crate) sequence: i64,
    pub(crate) http_status: Option<i32>,
    pub(crate) response: Option<String>,
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    pub(crate) sequence: i64,
    pub(crate) code: ReasonCode,
    pub(crate) error: String,
    pub(crate) http_status: Option<i32>,
    pub(crate) response: Option<String>,
    /// Until the next attempt. Not used where the message dies.
    pub(crate) delay: Duration,
    /// Attempts before this one.
    pub(crate) before: i32,
    /// 1, or 0 where nothing was sent.
    pub(crate) counted: i32,
    pub(crate) claimed_at: i64,
    /// Where it dies: whether its ordering key is kept back.
    pub(crate) blocks_key: bool,
}

/// Removes the messages from the outbox and writes them into the ledger.
///
/// A ledger row that says `dead` gives way: the key was enqueued again, or requeued. One that
/// says `delivered` stays.
pub(crate) fn delivered(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Delivered],
    keep_payload: bool,
) -> QueryResult<Vec<i64>> {
    let sequences: Vec<i64> = messages.iter().map(|m| m.sequence).collect();
    let statuses: Vec<Option<i32>> = messages.iter().map(|m| m.http_status).collect();
    let responses: Vec<Option<&str>> = messages.iter().map(|m| m.response.as_deref()).collect();
    statement(format!(
        "WITH outcome AS (
            SELECT * FROM unnest($1::bigint[], $2::int[], $3::text[])
                AS t(sequence, http_status, response)
        ), gone AS (
            DELETE FROM {outbox} WHERE sequence = ANY($1) AND locked_by = $4
            RETURNING *
        ), recorded AS (
            INSERT INTO {ledger} AS l (idempotency_key, destination, sequence, message_id, topic,
                ordering_key, tenant_id, digest, status, http_status, response, attempts, payload,
                created_at)
            SELECT g.idempotency_key, g.destination, g.sequence, g.message_id, g.topic,
                   g.ordering_key, g.tenant_id, {digest}, 'delivered', o.http_status, o.response,
                   g.attempts + 1, CASE WHEN $5 THEN g.payload END, g.created_at
              FROM gone g JOIN outcome o USING (sequence)
            ON CONFLICT (idempotency_key, destination) DO UPDATE
               SET {overwrite}
             WHERE l.status = 'dead'
        )
        SELECT sequence FROM gone",
        outbox = name.outbox(),
        ledger = name.ledger(),
        digest = digest_of("g"),
        overwrite = OVERWRITE,
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Nullable<Integer>>, _>(statuses)
    .bind::<Array<Nullable<Text>>, _>(responses)
    .bind::<BigInt, _>(lease.0)
    .bind::<Bool, _>(keep_payload)
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Removes messages that the ledger has as delivered already.
pub(crate) fn deduplicated(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    sequences: &[i64],
) -> QueryResult<Vec<i64>> {
    statement(format!(
        "DELETE FROM {} WHERE sequence = ANY($1) AND locked_by = $2 RETURNING sequence",
        name.outbox()
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Counts the attempts and lets the messages wait for their next one.
///
/// An attempt that was counted by a settle whose answer was lost is not counted again, even where
/// the same lease has claimed the message anew meanwhile.
pub(crate) fn retry(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Failed],
) -> QueryResult<Vec<i64>> {
    let messages = in_order(messages);
    let delays: Vec<i64> = messages.iter().map(|m| millis(m.delay)).collect();
    statement(format!(
        "UPDATE {outbox} o
            SET available_at = clock_timestamp() + {delay} * interval '1 millisecond',
                attempts = o.attempts + {counted},
                last_error_code = {code}, last_error = {error},
                locked_by = NULL, locked_at = NULL
          WHERE o.sequence = ANY($1) AND o.locked_by = $2
            AND o.locked_at = {claimed_at} AND o.attempts <= {before}
        RETURNING o.sequence",
        outbox = name.outbox(),
        delay = of_row("$3::bigint[]", "$1"),
        counted = of_row("$4::int[]", "$1"),
        code = of_row("$5::text[]", "$1"),
        error = of_row("$6::text[]", "$1"),
        before = of_row("$7::int[]", "$1"),
        claimed_at = of_row("$8::timestamptz[]", "$1"),
    ))
    .bind::<Array<BigInt>, _>(sequences(&messages))
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<BigInt>, _>(delays)
    .bind::<Array<Integer>, _>(messages.iter().map(|m| m.counted).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(messages.iter().map(|m| m.code.as_str()).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(
        messages
            .iter()
            .map(|m| m.error.as_str())
            .collect::<Vec<_>>(),
    )
    .bind::<Array<Integer>, _>(messages.iter().map(|m| m.before).collect::<Vec<_>>())
    .bind::<Array<Timestamptz>, _>(
        messages
            .iter()
            .map(|m| PgTimestamp(m.claimed_at))
            .collect::<Vec<_>>(),
    )
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Moves the messages to the dead letters and writes them into the ledger.
///
/// When its answer was lost, and an operator has requeued a message and the same lease has claimed it
/// anew meanwhile, the repeat leaves it alone.
pub(crate) fn dead(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Failed],
    keep_payload: bool,
) -> QueryResult<Vec<i64>> {
    let messages = in_order(messages);
    let statuses: Vec<Option<i32>> = messages.iter().map(|m| m.http_status).collect();
    let responses: Vec<Option<&str>> = messages.iter().map(|m| m.response.as_deref()).collect();
    statement(format!(
        "WITH outcome AS (
            SELECT * FROM unnest($1::bigint[], $3::int[], $4::text[], $5::text[], $6::int[], $7::text[],
                                 $9::bool[])
                AS t(sequence, counted, code, error, http_status, response, blocks_key)
        ), gone AS (
            DELETE FROM {outbox} o
             WHERE o.sequence = ANY($1) AND o.locked_by = $2 AND o.locked_at = {claimed_at}
            RETURNING o.*
        ), buried AS (
            INSERT INTO {dead} (sequence, message_id, topic, destination, payload, headers,
                ordering_key, idempotency_key, digest, tenant_id, available_at, expires_at,
                created_at, attempts, reason, last_error, http_status, response, split_from,
                blocks_key)
            SELECT g.sequence, g.message_id, g.topic, g.destination, g.payload, g.headers,
                   g.ordering_key, g.idempotency_key, g.digest, g.tenant_id, g.available_at,
                   g.expires_at, g.created_at, g.attempts + o.counted, o.code, o.error,
                   o.http_status, o.response, g.split_from,
                   o.blocks_key AND g.ordering_key IS NOT NULL
              FROM gone g JOIN outcome o USING (sequence)
        ), recorded AS (
            INSERT INTO {ledger} AS l (idempotency_key, destination, sequence, message_id, topic,
                ordering_key, tenant_id, digest, status, reason, error, http_status, response,
                attempts, payload, created_at)
            SELECT g.idempotency_key, g.destination, g.sequence, g.message_id, g.topic,
                   g.ordering_key, g.tenant_id, {digest}, 'dead', o.code, o.error, o.http_status,
                   o.response, g.attempts + o.counted, CASE WHEN $8 THEN g.payload END, g.created_at
              FROM gone g JOIN outcome o USING (sequence)
            ON CONFLICT (idempotency_key, destination) DO UPDATE
               SET {overwrite}
             WHERE l.status = 'dead'
        )
        SELECT sequence FROM gone",
        outbox = name.outbox(),
        dead = name.dead(),
        ledger = name.ledger(),
        claimed_at = of_row("$10::timestamptz[]", "$1"),
        digest = digest_of("g"),
        overwrite = OVERWRITE,
    ))
    .bind::<Array<BigInt>, _>(sequences(&messages))
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<Integer>, _>(messages.iter().map(|m| m.counted).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(messages.iter().map(|m| m.code.as_str()).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(messages.iter().map(|m| m.error.as_str()).collect::<Vec<_>>())
    .bind::<Array<Nullable<Integer>>, _>(statuses)
    .bind::<Array<Nullable<Text>>, _>(responses)
    .bind::<Bool, _>(keep_payload)
    .bind::<Array<Bool>, _>(messages.iter().map(|m| m.blocks_key).collect::<Vec<_>>())
    .bind::<Array<Timestamptz>, _>(
        messages
            .iter()
            .map(|m| PgTimestamp(m.claimed_at))
            .collect::<Vec<_>>(),
    )
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Gives messages back unsent: sequences, and when they were claimed. Costs no attempt, and is a HOT
/// update. When its answer was lost and the same lease has claimed a message anew meanwhile, the
/// repeat leaves it alone.
pub(crate) fn release(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[(i64, i64)],
) -> QueryResult<Vec<i64>> {
    let mut messages = messages.to_vec();
    messages.sort_unstable();
    let sequences: Vec<i64> = messages.iter().map(|m| m.0).collect();
    let claimed_at: Vec<PgTimestamp> = messages.iter().map(|m| PgTimestamp(m.1)).collect();
    statement(format!(
        "UPDATE {outbox} o SET locked_by = NULL, locked_at = NULL
          WHERE o.sequence = ANY($1) AND o.locked_by = $2 AND o.locked_at = {claimed_at}
        RETURNING o.sequence",
        outbox = name.outbox(),
        claimed_at = of_row("$3::timestamptz[]", "$1"),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Gives everything back that a lease holds, but for `known`: for a relay that knows of nothing
/// else that it holds. Reads the whole outbox. Returns how many.
pub(crate) fn release_all(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    known: &[i64],
) -> QueryResult<usize> {
    statement(format!(
        "UPDATE {} SET (locked_by, locked_at) = (NULL, NULL)
          WHERE locked_by = $1 AND sequence <> ALL($2)",
        name.outbox()
    ))
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<BigInt>, _>(known)
    .execute(conn)
}

/// Which of these messages the ledger has as settled: asked when a settle was repeated because
/// its answer was lost, to tell "it had worked" from "another relay has them".
pub(crate) fn settled(
    conn: &mut PgConnection,
    name: &OutboxName,
    keys: &[(String, String)],
) -> QueryResult<Vec<i64>> {
    let (keys, destinations): (Vec<&str>, Vec<&str>) =
        keys.iter().map(|(k, d)| (k.as_str(), d.as_str())).unzip();
    statement(format!(
        "SELECT l.sequence FROM unnest($1::text[], $2::text[]) AS t(k, d)
           JOIN {} l ON l.idempotency_key = t.k AND l.destination = t.d",
        name.ledger()
    ))
    .bind::<Array<Text>, _>(keys)
    .bind::<Array<Text>, _>(destinations)
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

const OVERWRITE: &str = "sequence = excluded.sequence, message_id = excluded.message_id,
    topic = excluded.topic, ordering_key = excluded.ordering_key, tenant_id = excluded.tenant_id,
    digest = excluded.digest, status = excluded.status, reason = excluded.reason,
    error = excluded.error, http_status = excluded.http_status, response = excluded.response,
    attempts = excluded.attempts, payload = excluded.payload, created_at = excluded.created_at,
    settled_at = excluded.settled_at";

/// What an array has for the row `o`, whose sequence is in another one, in ascending order: a binary
/// search. A join with the arrays would be a nested loop in a plan for all values, and compare each row
/// with each.
pub(super) fn of_row(array: &str, sequences: &str) -> String {
    format!("({array})[width_bucket(o.sequence, {sequences}::bigint[])]")
}

fn in_order(messages: &[Failed]) -> Vec<&Failed> {
    let mut messages: Vec<&Failed> = messages.iter().collect();
    messages.sort_unstable_by_key(|message| message.sequence);
    messages
}

fn sequences(messages: &[&Failed]) -> Vec<i64> {
    messages.iter().map(|m| m.sequence).collect()
}

fn only_sequences(rows: Vec<SequenceRow>) -> Vec<i64> {
    rows.into_iter().map(|row| row.sequence).collect()
}
