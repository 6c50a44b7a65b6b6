//! Ends expired leases, for relays that take over their messages and for operators who settle them.

use diesel::dsl::{array, not};
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::BigInt;
use diesel::{PgConnection, update};

use super::functions::clock_timestamp;
use super::table::{lease, other_lease};
use crate::name::OutboxName;

/// Ends the leases that have expired, and returns all ended leases: their messages may be taken.
///
/// A lease that has ended never becomes valid again. An UPDATE records the end, so a later renewal sees the new row and
/// changes nothing. A renewal in progress locks its row, so that lease is skipped. Any other lock on a row delays only
/// the takeover of that lease's messages, and no claim.
pub(crate) fn ended(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<i64>> {
    let (is_ended, is_expired) = (lease::ended, lease::expires_at.le(clock_timestamp()));
    let over = lease::table(name.lease())
        .filter(is_ended.or(is_expired))
        .order(lease::id)
        .select((lease::id, lease::ended));
    let over: Vec<(i64, bool)> = over.load(conn)?;
    if over.iter().all(|(_, ended)| *ended) {
        return Ok(over.into_iter().map(|(id, _)| id).collect());
    }
    let expired = other_lease::table(name.lease())
        .filter(not(other_lease::ended))
        .filter(other_lease::expires_at.le(clock_timestamp()))
        .select(other_lease::id)
        .for_no_key_update()
        .skip_locked();
    let end = update(lease::table(name.lease()))
        .filter(lease::id.eq_any(array::<BigInt, _>(expired)))
        .set(lease::ended.eq(true));
    end.execute(conn)?;
    lease::table(name.lease())
        .filter(lease::ended)
        .order(lease::id)
        .select(lease::id)
        .load(conn)
}
