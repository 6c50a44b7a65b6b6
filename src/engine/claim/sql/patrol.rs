//! The free messages in a range of sequences. They are found by the primary key, so dead entries of other indexes do
//! not slow the query.

use diesel::PgConnection;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;

use super::claim::as_bigint;
use super::page::{PAGE, Page};
use crate::name::OutboxName;
use crate::sql::functions::now;
use crate::sql::range::Range;
use crate::sql::table::outbox;

/// The first messages of the range that are due, and not held or held by an expired lease.
pub(crate) fn free(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    range: Range,
) -> QueryResult<Page> {
    let is_free = outbox::locked_by
        .is_null()
        .or(outbox::locked_by.eq_any(expired));
    let found = outbox::table(name.outbox())
        .filter(outbox::sequence.gt(range.after))
        .filter(outbox::sequence.le(range.upto))
        .filter(outbox::available_at.le(now()))
        .filter(is_free)
        .order(outbox::sequence)
        .limit(as_bigint(PAGE))
        .select((
            outbox::sequence,
            outbox::topic,
            outbox::destination,
            outbox::ordering_key,
            outbox::available_at,
            outbox::registration,
        ))
        .load(conn)?;
    Ok(Page::of_sequences(found))
}
