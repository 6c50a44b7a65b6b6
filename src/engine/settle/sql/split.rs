//! Fan-out: replacing a message for several destinations by one message (a part) for each destination.
//!
//! A message may have thousands of destinations and a megabyte of payload, so a call does a bounded [`Piece`] of the
//! work. The parts are placed in the byte order of their destinations. The message keeps its row and its claim until
//! all parts are placed, and `split_to` records the last placed destination in the transaction that places the parts.
//! So whoever continues, in this relay or in another, neither loses nor doubles a part.
//!
//! Text: `unnest`, array slices, and WITH, by which a DELETE or an UPDATE feeds an INSERT. No statement joins a set
//! with a set: the planner expects one row in each, and would compare each row with each.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use diesel::result::{Error, QueryResult};
use diesel::sql_types::{
    Array, BigInt, Binary, Bool, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid,
};
use diesel::{Connection, PgConnection, RunQueryDsl};
use uuid::Uuid;

use super::settle::{Claim, Written, attempts_of, in_order, of_row};
use crate::engine::lease::sql::lease::LeaseId;
use crate::name::OutboxName;
use crate::sql::digest_of;
use crate::sql::statement::statement;

/// The parts of a fan-out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Parts {
    /// The destinations, in byte order.
    pub(crate) to: Vec<String>,
    /// The registrations of the destinations, in the same order. `None`: that which has the name when the part is placed,
    /// if any.
    pub(crate) registrations: Vec<Option<Uuid>>,
}

/// A claimed message, and its parts.
pub(crate) type Split<'a> = (Claim, &'a Parts);

/// The most that one call does, except that it always places at least one part.
// Why: docs/decisions.md#fan-out
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) parts: usize,
    /// Stored bytes, as the transaction writes them.
    pub(crate) bytes: usize,
}

impl Piece {
    /// Everything at once.
    pub(crate) const WHOLE: Self = Self {
        parts: usize::MAX,
        bytes: usize::MAX,
    };
}

/// The most tries of a split when other transactions enqueue or settle the same keys at that moment.
const TRIES: usize = 10;

/// Places the next parts of these messages, in their order, each with the id, key and content of its message, in one
/// transaction. An existing message with the same key and content counts as the part. The messages in conflict are left as
/// they are.
pub(crate) fn split(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Split<'_>],
    piece: Piece,
) -> QueryResult<Written> {
    for _ in 0..TRIES {
        let result = conn.transaction(|conn| try_to_split(conn, name, lease, messages, piece));
        if !matches!(result, Err(Error::RollbackTransaction)) {
            return result;
        }
    }
    Err(Error::QueryBuilderError(
        format!("other transactions enqueued the keys of a message {TRIES} times in a row").into(),
    ))
}

/// A locked message: its sequence, its stored bytes, the last destination that has its part, and its idempotency key.
type HeldMessage = (i64, i64, Option<String>, Option<String>);

/// The parts of a message that are placed now.
struct PlacedParts<'a> {
    held: &'a HeldMessage,
    destinations: &'a [String],
    registrations: &'a [Option<Uuid>],
    is_last: bool,
}

fn try_to_split(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Split<'_>],
    piece: Piece,
) -> QueryResult<Written> {
    let mut done = Written::default();
    let held = lock(conn, name, lease, messages)?;
    let mut taken = take(&held, messages, piece, &mut done.unfinished);
    let digests = digests(conn, name, &taken)?;
    done.in_conflict = (existing(conn, name, &taken, &digests)?.into_iter())
        .filter_map(|(sequence, is_same)| (is_same == Some(false)).then_some(sequence))
        .collect();
    done.in_conflict.dedup();
    taken.retain(|one| !done.in_conflict.contains(&one.held.0));
    let (last, others): (Vec<_>, Vec<_>) = taken.iter().partition(|one| one.is_last);
    let placed = place(conn, name, &last, true)? + place(conn, name, &others, false)?;
    let expected: usize = taken.iter().map(|one| one.destinations.len()).sum();
    // Another message has the place of a part. It must have the same content.
    let is_there = |(_, is_same): &(i64, Option<bool>)| *is_same == Some(true);
    if placed != expected && !existing(conn, name, &taken, &digests)?.iter().all(is_there) {
        // A row that this transaction could not see was in the way: try again.
        return Err(Error::RollbackTransaction);
    }
    done.changed = last.iter().map(|one| one.held.0).collect();
    let last_placed = |one: &PlacedParts<'_>| (one.held.0, one.destinations.last().cloned());
    done.unfinished.extend(others.into_iter().map(last_placed));
    Ok(done)
}

/// The parts that fit into a piece, by the order of these messages: the caller knows whose turn it is. In the order of the
/// sequences, because all relays write rows in one order. Adds the messages that get no part to `unfinished`.
fn take<'a>(
    held: &'a HashMap<i64, HeldMessage>,
    messages: &[Split<'a>],
    piece: Piece,
    unfinished: &mut Vec<(i64, Option<String>)>,
) -> Vec<PlacedParts<'a>> {
    let (mut taken, mut left) = (Vec::new(), piece);
    for (claim, parts) in messages {
        let Some(held) = held.get(&claim.sequence) else {
            continue;
        };
        let (sequence, bytes, split_to, _) = held;
        let is_placed = |one: &String| split_to.as_ref().is_some_and(|last| one <= last);
        let first = parts.to.partition_point(is_placed);
        let rest = parts.to.len() - first;
        let bytes = usize::try_from(*bytes).unwrap_or(usize::MAX).max(1);
        // A part may exceed the bytes if it is the first of the piece.
        let least = usize::from(left == piece);
        let count = rest.min(left.parts.min((left.bytes / bytes).max(least)));
        left.parts -= count;
        left.bytes = left.bytes.saturating_sub(bytes.saturating_mul(count));
        if count == 0 && rest > 0 {
            unfinished.push((*sequence, split_to.clone()));
            // No other message may go before: the pieces of one message follow one another.
            (left.parts, left.bytes) = (0, 0);
            continue;
        }
        taken.push(PlacedParts {
            held,
            destinations: &parts.to[first..first + count],
            registrations: &parts.registrations[first..first + count],
            is_last: count == rest,
        });
    }
    taken.sort_by_key(|one| one.held.0);
    taken
}

/// Locks the messages that are still held by their claims, in the order of their sequences. Returns them by sequence.
fn lock(
    conn: &mut PgConnection,
    name: &OutboxName,
    lease: LeaseId,
    messages: &[Split<'_>],
) -> QueryResult<HashMap<i64, HeldMessage>> {
    let (_, sequences, claimed_at) = in_order(messages, |(claim, _)| *claim);
    let held: Vec<HeldMessage> = statement(format!(
        "SELECT o.sequence, (pg_column_size(o.payload) + coalesce(pg_column_size(o.headers), 0))::bigint,
                o.split_to, o.idempotency_key
           FROM {outbox} o
          WHERE o.sequence = ANY($1) AND o.locked_by = $2 AND o.locked_at = {claimed_at}
          ORDER BY o.sequence FOR NO KEY UPDATE",
        outbox = name.outbox(),
        claimed_at = of_row("$3::timestamptz[]", "$1"),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<BigInt, _>(lease.0)
    .bind::<Array<Timestamptz>, _>(claimed_at)
    .giving::<(BigInt, BigInt, Nullable<Text>, Nullable<Text>)>()
    .load(conn)?;
    Ok(held.into_iter().map(|one| (one.0, one)).collect())
}

/// The digests of the messages that have an idempotency key.
fn digests(
    conn: &mut PgConnection,
    name: &OutboxName,
    taken: &[PlacedParts<'_>],
) -> QueryResult<HashMap<i64, Vec<u8>>> {
    let with_key = taken.iter().filter(|one| one.held.3.is_some());
    let keyed: Vec<i64> = with_key.map(|one| one.held.0).collect();
    if keyed.is_empty() {
        return Ok(HashMap::new());
    }
    let digests: Vec<(i64, Vec<u8>)> = statement(format!(
        "SELECT o.sequence, {digest} FROM {outbox} o WHERE o.sequence = ANY($1)",
        digest = digest_of("o"),
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(keyed)
    .giving::<(BigInt, Binary)>()
    .load(conn)?;
    Ok(digests.into_iter().collect())
}

/// For each part of a message with an idempotency key: the sequence of the message, and whether the message in the
/// part's place has the same content (`None`: no message is there). Each place is one probe of the unique index.
fn existing(
    conn: &mut PgConnection,
    name: &OutboxName,
    taken: &[PlacedParts<'_>],
    digests: &HashMap<i64, Vec<u8>>,
) -> QueryResult<Vec<(i64, Option<bool>)>> {
    let (mut sequences, mut keys, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
    let mut destinations = Vec::new();
    for one in taken {
        let (Some(key), Some(digest)) = (&one.held.3, digests.get(&one.held.0)) else {
            continue;
        };
        for destination in one.destinations {
            sequences.push(one.held.0);
            keys.push(key.as_str());
            destinations.push(destination.as_str());
            wanted.push(digest.as_slice());
        }
    }
    if sequences.is_empty() {
        return Ok(Vec::new());
    }
    statement(format!(
        "SELECT t.sequence, (SELECT {digest} = t.digest FROM {outbox} o
                              WHERE o.idempotency_key = t.key AND o.destination = t.destination)
           FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bytea[]) AS t(sequence, key, destination, digest)",
        digest = digest_of("o"),
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<Text>, _>(keys)
    .bind::<Array<Text>, _>(destinations)
    .bind::<Array<Binary>, _>(wanted)
    .giving::<(BigInt, Nullable<Bool>)>()
    .load(conn)
}

/// Places parts of locked messages. The messages are removed if these are their last parts; otherwise they record how
/// far the fan-out is. Returns the number of new rows.
fn place(
    conn: &mut PgConnection,
    name: &OutboxName,
    taken: &[&PlacedParts<'_>],
    is_last: bool,
) -> QueryResult<usize> {
    if taken.is_empty() {
        return Ok(0);
    }
    let (mut sequences, mut destinations, mut split_to) = (Vec::new(), Vec::new(), Vec::new());
    let mut registrations = Vec::new();
    // The first and the last part of each message, counted from 1.
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for one in taken {
        let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        first.push(number(destinations.len() + 1));
        destinations.extend(one.destinations.iter().map(String::as_str));
        registrations.extend_from_slice(one.registrations);
        last.push(number(destinations.len()));
        sequences.push(one.held.0);
        split_to.push(one.destinations.last().map(String::as_str));
    }
    let insert = statement(place_sql(name, is_last))
        .bind::<Array<BigInt>, _>(sequences)
        .bind::<Array<Text>, _>(destinations)
        .bind::<Array<Integer>, _>(first)
        .bind::<Array<Integer>, _>(last)
        .bind::<Array<Nullable<SqlUuid>>, _>(registrations);
    let insert = match is_last {
        true => insert,
        false => insert.bind::<Array<Nullable<Text>>, _>(split_to),
    };
    let count: i64 = insert.giving::<BigInt>().get_result(conn)?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn place_sql(name: &OutboxName, is_last: bool) -> String {
    let these = "WHERE o.sequence = ANY($1) RETURNING o.*";
    let outbox = name.outbox();
    let taken = match is_last {
        true => format!("DELETE FROM {outbox} o {these}"),
        false => format!(
            "UPDATE {outbox} o SET split_to = {split_to} {these}",
            split_to = of_row("$6::text[]", "$1")
        ),
    };
    format!(
        "WITH taken AS ({taken}), inserted AS (
            INSERT INTO {outbox} (message_id, topic, destination, payload, headers, ordering_key,
                idempotency_key, digest, tenant_id, available_at, expires_at, created_at, occurred_at,
                attempts, last_attempt_at, last_error_code, last_error, split_from, registration)
            SELECT o.message_id, o.topic, part.destination, o.payload, o.headers, o.ordering_key,
                   o.idempotency_key, o.digest, o.tenant_id, o.available_at, o.expires_at, o.created_at,
                   o.occurred_at, CASE WHEN {was_sent} THEN {attempts} ELSE 0 END,
                   CASE WHEN {was_sent} THEN o.last_attempt_at END,
                   CASE WHEN {was_sent} THEN o.last_error_code END, CASE WHEN {was_sent} THEN o.last_error END,
                   coalesce(o.split_from, o.sequence), part.registration
              FROM taken o
             CROSS JOIN LATERAL unnest(($2::text[])[{first}:{last}], ($5::uuid[])[{first}:{last}])
                   WITH ORDINALITY AS part(destination, registration, place)
             ORDER BY o.sequence, part.place
            ON CONFLICT (idempotency_key, destination) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING 1
        ) SELECT count(*) FROM inserted",
        attempts = attempts_of("o"),
        // The attempt that a takeover counts is no send, and a message that waits to be fanned out was not sent.
        was_sent = "coalesce(o.last_error_code NOT IN ('ABANDONED', 'NOT_FANNED_OUT'), true)",
        first = of_row("$3::int[]", "$1"),
        last = of_row("$4::int[]", "$1"),
    )
}
