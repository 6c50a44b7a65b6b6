//! Runs: the messages behind another in its key, which are claimed with it.
//!
//! A run has no gap: it ends before the first message that is not free, not due, was attempted before, goes elsewhere,
//! or waits for a message beside its order. A row that another session has locked is not free.

use std::collections::HashMap;
use std::time::Instant;

use diesel::PgConnection;
use diesel::dsl::array;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Text};

use super::{is_not_kept_back, none_beside};
use crate::engine::claim::sql::claim::{
    Batch, Candidates, Claimant, Claimed, KnownDelivery, LockedRow, Longest, Runs, can_be_taken,
    facts, lock, take,
};
use crate::message::Message;
use crate::name::OutboxName;
use crate::sql::functions::clock_timestamp;
use crate::sql::statement::statement;
use crate::sql::table::candidate;

/// Claims the rest of the runs that begin with the claimed messages, in the transaction of their claim: until it ends,
/// no other claim finds these keys.
// Why: docs/decisions.md#runs
pub(super) fn claim_behind(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    batch: &mut Batch,
) -> QueryResult<()> {
    let Some(runs) = claimant.runs else {
        return Ok(());
    };
    let longest = runs.longest(&batch.claimed);
    // A message that has failed, or whose relay has died, is sent alone.
    let is_new = |one: &Claimed| one.message.attempts == 0 && one.known == KnownDelivery::No;
    let first = batch.claimed.iter().zip(longest);
    let first = first.filter(|(one, longest)| longest.messages > 0 && is_new(one));
    let first: HashMap<i64, First<'_>> = first
        .map(|(one, longest)| (one.message.sequence.0, (&*one.message, longest)))
        .collect();
    let behind = seen_behind(conn, name, runs, &first)?;
    if behind.is_empty() {
        return Ok(());
    }
    let before = Instant::now();
    let sequences = behind.iter().flat_map(|(_, run)| run).copied().collect();
    let free = free(name, claimant, sequences);
    let found = lock(conn, name, claimant, vec![free])?;
    let left = claimant.bytes.saturating_sub(batch.bytes());
    let taken = up_to_gaps(&behind, found, left);
    let rows = take(conn, name, claimant, &taken)?;
    let mut more = Batch::of(conn, name, rows, before)?;
    if !more.claimed.is_empty() {
        batch.registrations = more.registrations;
    }
    let order = taken.iter().zip(0..).map(|(one, at)| (one.sequence, at));
    let order: HashMap<i64, usize> = order.collect();
    more.claimed
        .sort_unstable_by_key(|one| order.get(&one.message.sequence.0).copied());
    batch.behind = more.claimed;
    Ok(())
}

/// The first message of a run, and how far the run may go.
type First<'a> = (&'a Message, Longest);

/// The first message of a run, and the sequences of those behind it in their order.
type Behind<'a> = (First<'a>, Vec<i64>);

/// The messages behind these in their keys that go where the first ones go, claimable or not.
///
/// Text: Diesel has neither `unnest` nor LATERAL.
fn seen_behind<'a>(
    conn: &mut PgConnection,
    name: &OutboxName,
    runs: &dyn Runs,
    first: &HashMap<i64, First<'a>>,
) -> QueryResult<Vec<Behind<'a>>> {
    if first.is_empty() {
        return Ok(Vec::new());
    }
    let most = |longest: &Longest| i64::try_from(longest.messages).unwrap_or(i64::MAX);
    let (sequences, most): (Vec<i64>, Vec<i64>) = first
        .iter()
        .map(|(sequence, (_, longest))| (*sequence, most(longest)))
        .unzip();
    let seen: Vec<(i64, i64, String)> = statement(format!(
        "SELECT first.sequence, behind.sequence, behind.topic
           FROM unnest($1::bigint[], $2::bigint[]) AS k(sequence, most)
           JOIN {outbox} first ON first.sequence = k.sequence
          CROSS JOIN LATERAL (
                SELECT o.sequence, o.topic, coalesce(o.split_from, o.sequence) AS place FROM {outbox} o
                 WHERE o.ordering_key = first.ordering_key AND o.destination = first.destination
                   AND coalesce(o.split_from, o.sequence) > coalesce(first.split_from, first.sequence)
                 ORDER BY coalesce(o.split_from, o.sequence) LIMIT k.most) behind
          ORDER BY first.sequence, behind.place",
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(sequences)
    .bind::<Array<BigInt>, _>(most)
    .giving::<(BigInt, BigInt, Text)>()
    .load(conn)?;
    let behind = seen.chunk_by(|one, other| one.0 == other.0).map(|run| {
        let first = first[&run[0].0];
        let along = run
            .iter()
            .take_while(|one| runs.goes_along(first.0, &one.2));
        (first, along.map(|one| one.1).collect())
    });
    Ok(behind
        .filter(|(_, run): &Behind<'_>| !run.is_empty())
        .collect())
}

/// The messages of each run before its first gap. `left`: the bytes that the claim may still take.
fn up_to_gaps(behind: &[Behind<'_>], found: Vec<LockedRow>, mut left: usize) -> Vec<LockedRow> {
    let found = found.into_iter().map(|one| (one.sequence, one));
    let mut found: HashMap<i64, LockedRow> = found.collect();
    let mut taken = Vec::new();
    for ((message, longest), run) in behind {
        let mut left_of_run = longest.bytes.saturating_sub(message.bytes());
        for sequence in run {
            let Some(row) = found.remove(sequence).filter(|_| left.min(left_of_run) > 0) else {
                break;
            };
            left = left.saturating_sub(row.bytes);
            left_of_run = left_of_run.saturating_sub(row.bytes);
            taken.push(row);
        }
    }
    taken
}

/// Those of these messages that can be claimed behind another. Due means due now, as for the next message of a key.
fn free<'a>(name: &OutboxName, claimant: Claimant<'a>, sequences: Vec<i64>) -> Candidates<'a> {
    let free = candidate::table(name.outbox())
        .filter(candidate::sequence.eq_any(sequences))
        .filter(candidate::available_at.le(clock_timestamp()))
        .filter(can_be_taken(claimant))
        .filter(candidate::locked_by.is_null())
        .filter(candidate::attempts.eq(0))
        .filter(is_not_kept_back(name, None))
        .filter(none_beside(name, None))
        .order(candidate::sequence)
        .select(facts())
        .for_no_key_update()
        .skip_locked();
    Box::new(array(free))
}
