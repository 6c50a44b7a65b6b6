//! Settling: what became of claimed messages, fenced by the lease that holds them and by the time of
//! their claim.
//!
//! Each function settles many messages by one statement and returns the sequences that it
//! changed. One that is missing there was not held by that claim any more. No sequence may stand in
//! a call twice.

#[cfg(test)]
mod tests;

use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{
    Array, BigInt, Bool, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};
use diesel::{PgConnection, RunQueryDsl};
use uuid::Uuid;

use super::lease::LeaseId;
use super::range::Range;
use super::statement::statement;
use super::{SequenceRow, digest_of, millis};
use crate::name::OutboxName;
use crate::status::ReasonCode;

/// A claim of a message, beside its lease: a sequence may be given twice, by a new primary that lacks the
/// last inserts or after `TRUNCATE … RESTART IDENTITY`. When it was claimed tells the messages apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Claim {
    pub(crate) sequence: i64,
    /// The row's `locked_at`, in microseconds as the database counts.
    pub(crate) at: i64,
}

/// A message that the receiver has.
#[derive(Debug, Clone)]
pub(crate) struct Delivered {
    pub(crate) claim: Claim,
    pub(crate) http_status: Option<i32>,
    pub(crate) response: Option<String>,
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    pub(crate) claim: Claim,
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
    let messages = in_order(messages, |m| m.claim);
    let (sequences, claimed_at) = claims(messages.iter().map(|m| m.claim));
    let statuses: Vec<Option<i32>> = messages.iter().map(|m| m.http_status).collect();
    let responses: Vec<Option<&str>> = messages.iter().map(|m| m.response.as_deref()).collect();
    statement(format!(
        "WITH outcome AS (
            SELECT * FROM unnest($1::bigint[], $2::int[], $3::text[])
                AS t(sequence, http_status, response)
        ), gone AS (
            DELETE FROM {outbox} o
             WHERE o.sequence = ANY($1) AND o.locked_by = $4 AND o.locked_at = {claimed_at}
            RETURNING o.*
        ), recorded AS (
            INSERT INTO {ledger} AS l (idempotency_key, destination, sequence, message_id, topic,
                ordering_key, tenant_id, digest, status, http_status, response, attempts, payload,
                created_at, occurred_at)
            SELECT g.idempotency_key, g.destination, g.sequence, g.message_id, g.topic,
                   g.ordering_key, g.tenant_id, {digest}, 'delivered', o.http_status, o.response,
                   g.attempts + 1, CASE WHEN $5 THEN g.payload END, g.created_at,
                   g.occurred_at
              FROM gone g JOIN outcome o USING (sequence)
            ON CONFLICT (idempotency_key, destination) DO UPDATE
               SET {overwrite}
             WHERE l.status = 'dead'
        )
        SELECT sequence FROM gone",
        outbox = name.outbox(),
        claimed_at = of_row("$6::timestamptz[]", "$1"),
        ledger = name.ledger(),
        digest = digest_of("g"),
        overwrite = OVERWRITE,
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Nullable<Integer>>, _>(statuses)
    .bind::<Array<Nullable<Text>>, _>(responses)
    .bind::<BigInt, _>(lease.0)
    .bind::<Bool, _>(keep_payload)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Removes messages that the ledger has as delivered already.
pub(crate) fn deduplicated(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Claim],
) -> QueryResult<Vec<i64>> {
    let (sequences, claimed_at) = claims(in_order(messages, |m| *m).into_iter().copied());
    statement(format!(
        "DELETE FROM {outbox} o
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
    let messages = in_order(messages, |m| m.claim);
    let (sequences, claimed_at) = claims(messages.iter().map(|m| m.claim));
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
    .bind::<Array<BigInt>, _>(sequences)
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
    .bind::<Array<Timestamptz>, _>(claimed_at)
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
    let messages = in_order(messages, |m| m.claim);
    let (sequences, claimed_at) = claims(messages.iter().map(|m| m.claim));
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
                created_at, occurred_at, attempts, reason, last_error, http_status, response,
                split_from, blocks_key)
            SELECT g.sequence, g.message_id, g.topic, g.destination, g.payload, g.headers,
                   g.ordering_key, g.idempotency_key, g.digest, g.tenant_id, g.available_at,
                   g.expires_at, g.created_at, g.occurred_at, g.attempts + o.counted, o.code, o.error,
                   o.http_status, o.response, g.split_from,
                   o.blocks_key AND g.ordering_key IS NOT NULL
              FROM gone g JOIN outcome o USING (sequence)
        ), recorded AS (
            INSERT INTO {ledger} AS l (idempotency_key, destination, sequence, message_id, topic,
                ordering_key, tenant_id, digest, status, reason, error, http_status, response,
                attempts, payload, created_at, occurred_at)
            SELECT g.idempotency_key, g.destination, g.sequence, g.message_id, g.topic,
                   g.ordering_key, g.tenant_id, {digest}, 'dead', o.code, o.error, o.http_status,
                   o.response, g.attempts + o.counted, CASE WHEN $8 THEN g.payload END, g.created_at,
                   g.occurred_at
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
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<Integer>, _>(messages.iter().map(|m| m.counted).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(messages.iter().map(|m| m.code.as_str()).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(messages.iter().map(|m| m.error.as_str()).collect::<Vec<_>>())
    .bind::<Array<Nullable<Integer>>, _>(statuses)
    .bind::<Array<Nullable<Text>>, _>(responses)
    .bind::<Bool, _>(keep_payload)
    .bind::<Array<Bool>, _>(messages.iter().map(|m| m.blocks_key).collect::<Vec<_>>())
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

/// Gives messages back unsent. Costs no attempt, and is a HOT update. When its answer was lost and the same lease
/// has claimed a message anew meanwhile, the repeat leaves it alone.
pub(crate) fn release(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Claim],
) -> QueryResult<Vec<i64>> {
    let (sequences, claimed_at) = claims(in_order(messages, |m| *m).into_iter().copied());
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

/// Gives back what a lease holds in this range, but for `known`: for a relay that knows of nothing else that
/// the lease holds there. Reads the whole range. Returns how many.
pub(crate) fn release_unknown(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    known: &[i64],
    range: Range,
) -> QueryResult<usize> {
    statement(format!(
        "UPDATE {} SET (locked_by, locked_at) = (NULL, NULL)
          WHERE sequence > $3 AND sequence <= $4 AND locked_by = $1 AND sequence <> ALL($2)",
        name.outbox()
    ))
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<BigInt>, _>(known)
    .bind::<BigInt, _>(range.after)
    .bind::<BigInt, _>(range.upto)
    .execute(conn)
}

/// What a settle has left in the ledger, if it had worked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trace<'a> {
    pub(crate) sequence: i64,
    pub(crate) message_id: Uuid,
    pub(crate) idempotency_key: &'a str,
    pub(crate) destination: &'a str,
}

/// Which of these messages the ledger has as settled, each by its sequence: asked when a settle was
/// repeated because its answer was lost, to tell "it had worked" from "another relay has them". A row of
/// another message that has the same key is none of ours.
pub(crate) fn settled(
    conn: &mut PgConnection,
    name: &OutboxName,
    traces: &[Trace<'_>],
) -> QueryResult<Vec<i64>> {
    statement(format!(
        "SELECT l.sequence
           FROM unnest($1::text[], $2::text[], $3::bigint[], $4::uuid[])
                AS t(idempotency_key, destination, sequence, message_id)
           JOIN {} l USING (idempotency_key, destination)
          WHERE l.sequence = t.sequence AND l.message_id = t.message_id",
        name.ledger()
    ))
    .bind::<Array<Text>, _>(traces.iter().map(|t| t.idempotency_key).collect::<Vec<_>>())
    .bind::<Array<Text>, _>(traces.iter().map(|t| t.destination).collect::<Vec<_>>())
    .bind::<Array<BigInt>, _>(traces.iter().map(|t| t.sequence).collect::<Vec<_>>())
    .bind::<Array<SqlUuid>, _>(traces.iter().map(|t| t.message_id).collect::<Vec<_>>())
    .load::<SequenceRow>(conn)
    .map(only_sequences)
}

pub(super) const OVERWRITE: &str = "sequence = excluded.sequence, message_id = excluded.message_id,
    topic = excluded.topic, ordering_key = excluded.ordering_key, tenant_id = excluded.tenant_id,
    digest = excluded.digest, status = excluded.status, reason = excluded.reason,
    error = excluded.error, http_status = excluded.http_status, response = excluded.response,
    attempts = excluded.attempts, payload = excluded.payload, created_at = excluded.created_at,
    occurred_at = excluded.occurred_at, settled_at = excluded.settled_at";

/// What an array has for the row `o`, whose sequence is in another one, in ascending order: a binary
/// search. A join with the arrays would be a nested loop in a plan for all values, and compare each row
/// with each.
pub(super) fn of_row(array: &str, sequences: &str) -> String {
    format!("({array})[width_bucket(o.sequence, {sequences}::bigint[])]")
}

/// As [`of_row`] needs them.
fn in_order<T>(messages: &[T], claim: impl Fn(&T) -> Claim) -> Vec<&T> {
    let mut messages: Vec<&T> = messages.iter().collect();
    messages.sort_unstable_by_key(|message| claim(message));
    messages
}

/// Claims as parameters: sequences, and when they were claimed.
pub(super) fn claims(claims: impl Iterator<Item = Claim>) -> (Vec<i64>, Vec<PgTimestamp>) {
    claims
        .map(|claim| (claim.sequence, PgTimestamp(claim.at)))
        .unzip()
}

fn only_sequences(rows: Vec<SequenceRow>) -> Vec<i64> {
    rows.into_iter().map(|row| row.sequence).collect()
}
