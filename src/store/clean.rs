//! Retention of the ledger.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::BigInt;
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::{LONGEST_AGE, millis};
use crate::name::OutboxName;

/// Removes ledger rows that were settled longer than `retention` ago, `limit` at most. Returns
/// how many. Live and dead messages are in other tables.
pub(crate) fn remove_old_ledger_rows(
    conn: &mut PgConnection,
    name: &OutboxName,
    retention: Duration,
    limit: i64,
) -> QueryResult<usize> {
    sql_query(format!(
        "DELETE FROM {ledger} WHERE ctid = ANY(ARRAY(
            SELECT ctid FROM {ledger}
             WHERE settled_at < now() - $1 * interval '1 millisecond'
             LIMIT $2 FOR UPDATE SKIP LOCKED))",
        ledger = name.ledger()
    ))
    .bind::<BigInt, _>(millis(retention.min(LONGEST_AGE)))
    .bind::<BigInt, _>(limit)
    .execute(conn)
}
