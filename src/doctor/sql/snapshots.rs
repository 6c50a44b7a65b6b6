//! Holders of old snapshots: vacuum cannot remove rows that were deleted after these snapshots.
//!
//! Text: PostgreSQL's catalogue.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Double, Text};
use diesel::{ExpressionMethods, PgConnection, QueryDsl, RunQueryDsl};

use crate::engine::lease::sql::backend::pg_stat_activity;
use crate::sql::functions::pg_backend_pid;
use crate::sql::millis;
use crate::sql::statement::unprepared_statement;

/// A session, prepared transaction, slot or standby that holds a snapshot or a transaction.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct SnapshotRow {
    /// `session`, `prepared`, `slot` or `standby`.
    pub(crate) kind: String,
    /// The process id, or the name of the transaction, slot or standby.
    pub(crate) name: String,
    /// User, application and state, if known.
    pub(crate) who: String,
    /// The age. 0 for slots and standbys, because the server does not report it.
    pub(crate) seconds: f64,
    /// Transactions started since.
    pub(crate) transactions: i64,
}

/// Snapshots of any database that are older than `age`, and slots and standbys that hold back more than
/// `transactions`. Oldest first.
pub(crate) fn held(
    conn: &mut PgConnection,
    age: Duration,
    transactions: i64,
) -> QueryResult<Vec<SnapshotRow>> {
    unprepared_statement(
        "SELECT * FROM (
            SELECT 'session' AS kind, pid::text AS name,
                   concat_ws(', ', 'user ' || usename, 'database ' || datname,
                       'application ' || nullif(application_name, ''),
                       'from ' || client_addr::text, state) AS who,
                   extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds,
                   greatest(age(backend_xmin), age(backend_xid), 0)::bigint AS transactions
              FROM pg_stat_activity
             WHERE pid <> pg_backend_pid() AND coalesce(backend_xmin, backend_xid) IS NOT NULL
               AND backend_type <> 'walsender'
               AND xact_start < clock_timestamp() - $1 * interval '1 millisecond'
            UNION ALL
            SELECT 'prepared', gid, concat_ws(', ', 'user ' || owner, 'database ' || database),
                   extract(epoch FROM clock_timestamp() - prepared)::float8, age(transaction)::bigint
              FROM pg_prepared_xacts
             WHERE prepared < clock_timestamp() - $1 * interval '1 millisecond'
            UNION ALL
            SELECT 'slot', slot_name,
                   concat_ws(', ', slot_type, CASE WHEN active THEN 'in use' ELSE 'not in use' END),
                   0, age(xmin)::bigint
              FROM pg_replication_slots WHERE age(xmin) > $2
            UNION ALL
            SELECT 'standby', coalesce(nullif(application_name, ''), pid::text),
                   concat_ws(', ', 'user ' || usename, 'from ' || client_addr::text), 0,
                   age(backend_xmin)::bigint
              FROM pg_stat_replication WHERE age(backend_xmin) > $2
         ) h ORDER BY seconds DESC, transactions DESC LIMIT 20",
    )
    .bind::<BigInt, _>(millis(age))
    .bind::<BigInt, _>(transactions)
    .giving::<(Text, Text, Text, Double, BigInt)>()
    .load(conn)
}

/// The number of sessions that are not visible to this role.
pub(crate) fn hidden_sessions(conn: &mut PgConnection) -> QueryResult<i64> {
    pg_stat_activity::table
        .filter(pg_stat_activity::query.eq("<insufficient privilege>"))
        .filter(pg_stat_activity::pid.ne(pg_backend_pid()))
        .count()
        .get_result(conn)
}
