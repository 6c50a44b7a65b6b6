//! Retention of the ledger.

use std::time::Duration;

use diesel::dsl::array;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::{PgConnection, delete};

use super::LONGEST_AGE;
use super::sql::{interval, now};
use super::statement::planned_anew;
use super::table::{Tid, ledger, old_ledger};
use crate::name::OutboxName;

/// Removes ledger rows that were settled longer than `retention` ago, `limit` at most. Returns
/// how many. Live and dead messages are in other tables.
pub(crate) fn remove_old_ledger_rows(
    conn: &mut PgConnection,
    name: &OutboxName,
    retention: Duration,
    limit: i64,
) -> QueryResult<usize> {
    let settled_before = now() - interval(retention.min(LONGEST_AGE));
    let old = old_ledger::table(name.ledger())
        .filter(old_ledger::settled_at.lt(settled_before))
        .limit(limit)
        .select(old_ledger::ctid)
        .for_update()
        .skip_locked();
    let removal =
        delete(ledger::table(name.ledger())).filter(ledger::ctid.eq_any(array::<Tid, _>(old)));
    planned_anew(removal).execute(conn)
}
