//! Fan-out: splitting a message for several destinations into one message for each destination.
//!
//! Text: `unnest`, and WITH, by which a DELETE feeds an INSERT.

use diesel::pg::data_types::PgTimestamp;
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Array, BigInt, Text, Timestamptz};
use diesel::{Connection, PgConnection, RunQueryDsl};

use super::lease::LeaseId;
use super::settle::{Claim, of_row};
use crate::name::OutboxName;
use crate::store::digest_of;
use crate::store::statement::statement_anew;

/// A claimed message, and the destinations that it goes to.
pub(crate) type Split<'a> = (Claim, &'a [String]);

/// The result of a split. Messages in neither list were no longer held under the lease.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// Messages replaced by their parts.
    pub(crate) split: Vec<i64>,
    /// Unchanged messages: the outbox has another message with the same key for one of the destinations.
    pub(crate) in_conflict: Vec<i64>,
}

/// The most tries of a split when other transactions enqueue or settle the same keys at that moment.
const TRIES: usize = 10;

/// Replaces each message by one message for each of its destinations, with the same id, key and content, in one
/// transaction. An existing message with the same key and content counts as the part.
pub(crate) fn split(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Split<'_>],
) -> QueryResult<Done> {
    let mut messages = messages.to_vec();
    messages.sort_unstable();
    let mut parts = Parts::default();
    for (claim, destinations) in messages {
        for destination in destinations {
            parts.sequences.push(claim.sequence);
            parts.claimed_at.push(PgTimestamp(claim.at));
            parts.destinations.push(destination);
        }
    }
    for _ in 0..TRIES {
        let result = conn.transaction(|conn| try_to_split(conn, name, lease, &parts));
        if !matches!(result, Err(Error::RollbackTransaction)) {
            return result;
        }
    }
    Err(Error::QueryBuilderError(
        format!("other transactions enqueued the keys of a message {TRIES} times in a row").into(),
    ))
}

#[derive(Default)]
struct Parts<'a> {
    sequences: Vec<i64>,
    claimed_at: Vec<PgTimestamp>,
    destinations: Vec<&'a str>,
}

fn try_to_split(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    parts: &Parts<'_>,
) -> QueryResult<Done> {
    let in_conflict: Vec<i64> = statement_anew(format!(
        "SELECT DISTINCT g.sequence
           FROM unnest($1::bigint[], $2::text[], $4::timestamptz[])
                AS t(sequence, destination, claimed_at)
           JOIN {outbox} g ON g.sequence = t.sequence
                          AND g.locked_by = $3 AND g.locked_at = t.claimed_at
           JOIN {outbox} o ON o.idempotency_key = g.idempotency_key
                          AND o.destination = t.destination
          WHERE {other} <> {own}",
        outbox = name.outbox(),
        other = digest_of("o"),
        own = digest_of("g"),
    ))
    .bind::<Array<BigInt>, _>(&parts.sequences)
    .bind::<Array<Text>, _>(&parts.destinations)
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<Timestamptz>, _>(&parts.claimed_at)
    .giving::<BigInt>()
    .load(conn)?;
    // The message, the number of its parts, and the number of parts that exist.
    let rows: Vec<(i64, i64, i64)> = statement_anew(format!(
        "WITH gone AS (
            DELETE FROM {outbox} o
             WHERE o.sequence = ANY($1) AND o.locked_by = $3 AND o.locked_at = {claimed_at}
               AND o.sequence <> ALL($4)
            RETURNING o.*
        ), part AS MATERIALIZED (
            SELECT g.*, t.place, t.part_destination
              FROM gone g
              JOIN unnest($1::bigint[], $2::text[]) WITH ORDINALITY
                   AS t(part_sequence, part_destination, place) ON t.part_sequence = g.sequence
        ), inserted AS (
            INSERT INTO {outbox} (message_id, topic, destination, payload, headers, ordering_key,
                idempotency_key, digest, tenant_id, available_at, expires_at, created_at, occurred_at,
                attempts, last_attempt_at, last_error_code, last_error, split_from)
            SELECT message_id, topic, part_destination, payload, headers, ordering_key,
                   idempotency_key, digest, tenant_id, available_at, expires_at, created_at, occurred_at,
                   CASE WHEN {was_sent} THEN attempts ELSE 0 END, CASE WHEN {was_sent} THEN last_attempt_at END,
                   CASE WHEN {was_sent} THEN last_error_code END, CASE WHEN {was_sent} THEN last_error END,
                   coalesce(split_from, sequence)
              FROM part ORDER BY sequence, place
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING message_id, idempotency_key, destination
        )
        SELECT p.sequence, count(*) AS parts,
               count(*) FILTER (WHERE i.destination IS NOT NULL OR o.destination IS NOT NULL) AS placed
          FROM part p
          LEFT JOIN inserted i ON i.message_id = p.message_id
                              AND i.idempotency_key IS NOT DISTINCT FROM p.idempotency_key
                              AND i.destination = p.part_destination
          LEFT JOIN {outbox} o ON o.idempotency_key = p.idempotency_key
                              AND o.destination = p.part_destination AND {other} = {own}
         GROUP BY p.sequence",
        outbox = name.outbox(),
        // The attempt that a takeover counts is no send.
        was_sent = "last_error_code IS DISTINCT FROM 'ABANDONED'",
        claimed_at = of_row("$5::timestamptz[]", "$1"),
        other = digest_of("o"),
        own = digest_of("p"),
    ))
    .bind::<Array<BigInt>, _>(&parts.sequences)
    .bind::<Array<Text>, _>(&parts.destinations)
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<BigInt>, _>(&in_conflict)
    .bind::<Array<Timestamptz>, _>(&parts.claimed_at)
    .giving::<(BigInt, BigInt, BigInt)>()
    .load(conn)?;
    if rows.iter().any(|(_, parts, placed)| parts != placed) {
        // A row that this transaction could not see was in the way: try again.
        return Err(Error::RollbackTransaction);
    }
    Ok(Done {
        split: rows.into_iter().map(|(sequence, ..)| sequence).collect(),
        in_conflict,
    })
}
