//! Runs: the messages behind another in its key, which are claimed with it.
//!
//! A run has no gap: it ends before the first message that is not free, not due, was attempted before, goes elsewhere,
//! or waits for a message beside its order. A row that another session has locked is not free.

use std::collections::HashMap;
use std::time::Instant;

use diesel::PgConnection;
use diesel::dsl::array;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Text};

use super::{is_not_kept_back, none_beside};
use crate::engine::claim::sql::claim::{
    Batch, Candidates, Claimant, Claimed, Known, LockedRow, Longest, can_be_taken, facts, lock,
    take,
};
use crate::message::Message;
use crate::name::OutboxName;
use crate::sql::functions::clock_timestamp;
use crate::sql::statement::statement;
use crate::sql::table::candidate;

/// Claims the rest of the runs that begin with the claimed messages, in the transaction of their claim: until it ends,
/// no other claim finds these keys.
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
    let is_new = |one: &Claimed| one.message.attempts == 0 && one.known == Known::No;
    let first = batch.claimed.iter().zip(longest);
    let first = first.filter(|(one, longest)| longest.messages > 0 && is_new(one));
    let first: HashMap<i64, (&Message, Longest)> = first
        .map(|(one, longest)| (one.message.sequence.0, (&*one.message, longest)))
        .collect();
    let mut behind = seen_behind(conn, name, &first)?;
    for (of, run) in &mut behind {
        let (message, _) = first[of];
        let goes_along = |(_, topic): &&(i64, String)| runs.goes_along(message, topic);
        let count = run.iter().take_while(goes_along).count();
        run.truncate(count);
    }
    behind.retain(|(_, run)| !run.is_empty());
    if behind.is_empty() {
        return Ok(());
    }
    let before = Instant::now();
    let sequences = behind
        .iter()
        .flat_map(|(_, run)| run.iter().map(|one| one.0));
    let found = lock(
        conn,
        name,
        claimant,
        vec![free(name, claimant, sequences.collect())],
    )?;
    let mut found: HashMap<i64, LockedRow> =
        found.into_iter().map(|one| (one.sequence, one)).collect();
    let mut left = claimant.bytes.saturating_sub(batch.bytes());
    let mut taken: Vec<LockedRow> = Vec::new();
    for (of, run) in &behind {
        let (message, longest) = first[of];
        let mut left_of_run = longest.bytes.saturating_sub(message.bytes());
        for (sequence, _) in run {
            let Some(row) = found.remove(sequence).filter(|_| left.min(left_of_run) > 0) else {
                break;
            };
            left = left.saturating_sub(row.bytes);
            left_of_run = left_of_run.saturating_sub(row.bytes);
            taken.push(row);
        }
    }
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

/// The messages behind a first one: the sequence of the first, and sequence and topic of each in their order.
type Behind = (i64, Vec<(i64, String)>);

/// The messages behind these in their keys, claimable or not.
///
/// Text: Diesel has neither `unnest` nor LATERAL.
fn seen_behind(
    conn: &mut PgConnection,
    name: &OutboxName,
    first: &HashMap<i64, (&Message, Longest)>,
) -> QueryResult<Vec<Behind>> {
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
    let runs = seen.chunk_by(|one, other| one.0 == other.0);
    let run = |run: &[(i64, i64, String)]| {
        let each = run.iter().map(|(_, one, topic)| (*one, topic.clone()));
        (run[0].0, each.collect())
    };
    Ok(runs.map(run).collect())
}

/// Those of these messages that can be claimed behind another. Due means due now, as for the next message of a key.
fn free<'a>(name: &OutboxName, claimant: Claimant<'a>, sequences: Vec<i64>) -> Candidates<'a> {
    let free = candidate::table(name.outbox())
        .filter(candidate::sequence.eq_any(sequences))
        .filter(candidate::available_at.le(clock_timestamp()))
        .filter(can_be_taken(claimant))
        .filter(
            candidate::locked_by
                .is_null()
                .and(candidate::attempts.eq(0)),
        )
        .filter(is_not_kept_back(name, None))
        .filter(none_beside(name, None))
        .order(candidate::sequence)
        .select(facts())
        .for_no_key_update()
        .skip_locked();
    Box::new(array(free))
}
