//! The message that follows another in its key.

use diesel::PgConnection;
use diesel::dsl::array;
use diesel::expression::ValidGrouping;
use diesel::pg::Pg;
use diesel::prelude::{
    AppearsOnTable, BoolExpressionMethods, Expression, ExpressionMethods, QueryDsl,
};
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Text};

use super::run::claim_behind;
use super::{
    Key, is_before, is_held, is_not_kept_back, names, names_none, names_one, none_before,
    none_of_its_key,
};
use crate::name::OutboxName;
use crate::store::relay::claim::{
    Batch, Candidates, Claimant, claim_from, facts, is_free, take_at_once,
};
use crate::store::sql::clock_timestamp;
use crate::store::table::{candidate, other};

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
    let is_before_or_held = is_before().or(is_held(claimant.expired));
    let parts_elsewhere = names(None).and(is_before_or_held);
    let next = candidate::table(name.outbox())
        .filter(candidate::sequence.eq(AnyFirstOf::new(name, keys)))
        .filter(candidate::available_at.le(clock_timestamp()))
        .filter(candidate::topic.ne_all(closed))
        .filter(is_free(claimant.expired))
        .filter(is_not_kept_back(name, None))
        .filter(names_none().or(none_before(name, Box::new(other::destination.eq("")))))
        .filter(names_one().or(none_of_its_key(name, Box::new(parts_elsewhere))))
        .order(candidate::sequence);
    let mut batch = if claimant.has_space_for_any(keys.len()) {
        let next = next.select(candidate::sequence);
        let next = array(next.for_no_key_update().skip_locked());
        take_at_once(conn, name, claimant.lease, Box::new(next))?
    } else {
        let next = next.select(facts());
        let next: Candidates<'_> = Box::new(array(next.for_no_key_update().skip_locked()));
        claim_from(conn, name, claimant, [vec![next]], usize::MAX)?
    };
    claim_behind(conn, name, claimant, &mut batch)?;
    Ok(batch)
}

/// The sequences of the first message of each of these keys, for `column.eq(…)`.
///
/// Text: Diesel has neither `unnest` nor LATERAL.
#[derive(ValidGrouping)]
struct AnyFirstOf<'a> {
    outbox: String,
    ordering_keys: Vec<&'a str>,
    destinations: Vec<&'a str>,
}

impl<'a> AnyFirstOf<'a> {
    fn new(name: &OutboxName, keys: &'a [Key]) -> Self {
        let key = |key: &'a Key| (key.ordering_key.as_str(), key.destination.as_str());
        let (ordering_keys, destinations) = keys.iter().map(key).unzip();
        Self {
            outbox: name.outbox(),
            ordering_keys,
            destinations,
        }
    }
}

impl Expression for AnyFirstOf<'_> {
    type SqlType = BigInt;
}

impl QueryId for AnyFirstOf<'_> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<QS> AppearsOnTable<QS> for AnyFirstOf<'_> {}

impl QueryFragment<Pg> for AnyFirstOf<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("ANY(ARRAY(SELECT first.sequence FROM unnest(");
        out.push_bind_param::<Array<Text>, _>(&self.ordering_keys)?;
        out.push_sql("::text[], ");
        out.push_bind_param::<Array<Text>, _>(&self.destinations)?;
        out.push_sql(
            "::text[]) AS k(ordering_key, destination) CROSS JOIN LATERAL (SELECT o.sequence FROM ",
        );
        out.push_sql(&self.outbox);
        out.push_sql(
            " o WHERE o.ordering_key = k.ordering_key AND o.destination = k.destination
              ORDER BY coalesce(o.split_from, o.sequence) LIMIT 1) first))",
        );
        Ok(())
    }
}
