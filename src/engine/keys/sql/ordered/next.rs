//! The message that follows another in its key.

use std::collections::HashMap;
use std::time::Instant;

use diesel::PgConnection;
use diesel::dsl::{SqlTypeOf, array, sql};
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl, Selectable,
};
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Timestamptz};

use super::run::claim_behind;
use super::{
    Key, is_before, is_held, is_not_kept_back, names, names_none, names_one, none_before,
    none_of_its_key,
};
use crate::engine::claim::sql::claim::{
    Batch, Candidates, Claimant, Sequences, TakenOver, can_be_taken, claim_from, facts,
    take_at_once, take_these,
};
use crate::engine::settle::sql::settle::{Delivered, delivering};
use crate::name::OutboxName;
use crate::sql::functions::{On, clock_timestamp};
use crate::sql::live::LiveRow;
use crate::sql::statement::Statement;
use crate::sql::table::{candidate, other};
use crate::status::Status;

/// Claims the next message of each of these keys.
///
/// For a transaction that has just removed a message of each key, held by the same lease. Until the transaction
/// commits, no other claim can find these keys free, so this claim needs no lock.
///
/// However, the removed message may have gone to one destination while an earlier part for another is in flight. The
/// next message that names no destination may go there, so it waits for that part. No message of the topics `closed`
/// is taken. Due means due now: the next message may have been enqueued since the transaction began.
pub(crate) fn claim_next(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    keys: &[Key],
    closed: &[String],
) -> QueryResult<Batch> {
    let next = candidate::table(name.outbox())
        .filter(is_first_of(name, keys.iter(), None))
        .filter(may_follow(name, claimant, closed))
        .order(candidate::sequence);
    let mut batch = if claimant.has_space_for_any(keys.len()) {
        let next = next.select(candidate::sequence);
        let next = array(next.for_no_key_update().skip_locked());
        take_at_once(conn, name, claimant, Box::new(next))?
    } else {
        let next = next.select(facts());
        let next: Candidates<'_> = Box::new(array(next.for_no_key_update().skip_locked()));
        claim_from(conn, name, claimant, [vec![next]], usize::MAX)?
    };
    claim_behind(conn, name, claimant, &mut batch)?;
    Ok(batch)
}

/// Whether the first message of a key can be claimed.
fn may_follow<'a>(
    name: &OutboxName,
    claimant: Claimant<'a>,
    closed: &'a [String],
) -> On<'a, candidate::table> {
    let is_open = candidate::available_at
        .le(clock_timestamp())
        .and(candidate::topic.ne_all(closed));
    let parts_elsewhere = names(None).and(is_before().or(is_held(claimant.expired)));
    let none_for_all = none_before(name, Box::new(other::destination.eq("")));
    let none_elsewhere = none_of_its_key(name, Box::new(parts_elsewhere));
    Box::new(
        is_open
            .and(can_be_taken(claimant))
            .and(is_not_kept_back(name, None))
            .and(names_none().or(none_for_all))
            .and(names_one().or(none_elsewhere)),
    )
}

/// Records delivered messages, and claims the next message of each of these keys, by the sequences of the delivered
/// messages: with one statement, so that a key costs one round trip and one commit for each message. No two of the keys
/// have the same ordering key. Returns the sequences of the recorded messages.
///
/// The statement still sees the delivered messages. Only the search of the first message would find them: the other
/// conditions are about messages with the same ordering key and another destination.
pub(crate) fn deliver_and_claim_next(
    conn: &mut PgConnection,
    name: &OutboxName,
    claimant: Claimant<'_>,
    (delivered, keep_payload): (&[Delivered], bool),
    keys: &HashMap<i64, Key>,
    closed: &[String],
) -> QueryResult<(Vec<i64>, Batch)> {
    let before = Instant::now();
    let (sequences, keys): (Vec<i64>, Vec<&Key>) = keys.iter().unzip();
    let next = candidate::table(name.outbox())
        .filter(is_first_of(name, keys.into_iter(), Some(sequences)))
        .filter(may_follow(name, claimant, closed))
        .order(candidate::sequence)
        .select(candidate::sequence)
        .for_no_key_update()
        .skip_locked();
    let next: Sequences<'_> = Box::new(array(next));
    let both = Both {
        settle: delivering(
            name,
            claimant.lease,
            delivered,
            Status::Delivered,
            keep_payload,
        ),
        claim: take_these(name, claimant, next),
    };
    let rows: Vec<BothRow> = both.load(conn)?;
    let mut done = Vec::with_capacity(rows.len());
    let mut taken = Vec::with_capacity(rows.len());
    for (sequence, row, at, registrations) in rows {
        done.extend(sequence);
        let row = row.zip(at);
        taken.extend(row.map(|(row, at)| ((row, at, registrations), TakenOver::No)));
    }
    Ok((done, Batch::of(conn, name, taken, before)?))
}

/// A settle that ends within WITH, and the claim that continues.
///
/// Text: Diesel has no WITH.
struct Both<'a, Claim> {
    settle: Statement<'a>,
    claim: Claim,
}

impl<Claim> QueryId for Both<'_, Claim> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

/// The sequence of a settled message, or a claimed message.
type BothRow = (
    Option<i64>,
    Option<LiveRow>,
    Option<PgTimestamp>,
    Option<i64>,
);

impl<Claim: QueryFragment<Pg>> QueryFragment<Pg> for Both<'_, Claim> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.settle.walk_ast(out.reborrow())?;
        out.push_sql("\n, taken AS (");
        self.claim.walk_ast(out.reborrow())?;
        out.push_sql(
            ") SELECT g.sequence, t.* FROM gone g LEFT JOIN taken t ON false UNION ALL SELECT NULL, t.* FROM taken t",
        );
        Ok(())
    }

    fn is_safe_to_cache_prepared(&self, _: &Pg) -> QueryResult<bool> {
        Ok(true)
    }
}

impl<Claim> Query for Both<'_, Claim> {
    type SqlType = (
        Nullable<BigInt>,
        Nullable<SqlTypeOf<<LiveRow as Selectable<Pg>>::SelectExpression>>,
        Nullable<Timestamptz>,
        Nullable<BigInt>,
    );
}

impl<Claim> RunQueryDsl<PgConnection> for Both<'_, Claim> {}

/// The first message of each of these keys. `after`: for each key, a message that the statement itself removes, in `gone`;
/// keys whose message is not removed have no first one.
///
/// Text: Diesel has neither `unnest` nor LATERAL.
fn is_first_of<'a>(
    name: &OutboxName,
    keys: impl Iterator<Item = &'a Key>,
    after: Option<Vec<i64>>,
) -> On<'a, candidate::table> {
    let key = |key: &'a Key| (key.ordering_key.as_str(), key.destination.as_str());
    let (ordering_keys, destinations): (Vec<&str>, Vec<&str>) = keys.map(key).unzip();
    let (gone, is_other) = match after {
        None => ("", ""),
        Some(_) => ("JOIN gone USING (sequence)", "AND o.sequence <> k.sequence"),
    };
    let first = sql::<BigInt>("ANY(ARRAY(SELECT first.sequence FROM unnest(")
        .bind::<Array<Text>, _>(ordering_keys)
        .sql("::text[], ")
        .bind::<Array<Text>, _>(destinations)
        .sql("::text[], ")
        .bind::<Nullable<Array<BigInt>>, _>(after)
        .sql(&format!(
            "::bigint[]) AS k(ordering_key, destination, sequence) {gone}
              CROSS JOIN LATERAL (
                SELECT o.sequence FROM {outbox} o
                 WHERE o.ordering_key = k.ordering_key AND o.destination = k.destination {is_other}
                 ORDER BY coalesce(o.split_from, o.sequence) LIMIT 1) first))",
            outbox = name.outbox(),
        ));
    Box::new(candidate::sequence.eq(first))
}
