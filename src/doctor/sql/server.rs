//! The server, and its settings for this role.
//!
//! Text: PostgreSQL's catalogue.

use std::time::{Instant, SystemTime};

use diesel::connection::SimpleConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Double, Nullable, Text};
use diesel::{ExpressionMethods, PgConnection, QueryDsl, RunQueryDsl, select};

use crate::name::OutboxName;
use crate::schema::values::{as_micros, to_micros};
use crate::setup::sql::catalogue::{current_schemas, pg_is_in_recovery, pg_settings};
use crate::sql::functions::{clock_timestamp, text_or};
use crate::sql::pinned;
use crate::sql::statement::unprepared_statement;

/// How far the server's clock is ahead of this machine's, and the error of this measurement, in seconds. The
/// shortest of several round trips is the most exact.
pub(crate) fn clock_offset(conn: &mut PgConnection) -> QueryResult<(f64, f64)> {
    let mut best = (0.0, f64::MAX);
    for _ in 0..5 {
        let before = as_micros(SystemTime::now());
        let begin = Instant::now();
        let now: PgTimestamp = select(clock_timestamp()).get_result(conn)?;
        let half = begin.elapsed().as_secs_f64() / 2.0;
        if half < best.1 {
            #[allow(
                clippy::cast_precision_loss,
                reason = "a clock that is wrong by 285 years is wrong"
            )]
            let ahead = to_micros(now).saturating_sub(before) as f64 / 1e6;
            best = (ahead - half, half);
        }
    }
    Ok(best)
}

/// The used share of the ids after which the server refuses writes: 0 to 1.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct WraparoundRow {
    pub(crate) transactions: f64,
    pub(crate) multixacts: f64,
}

pub(crate) fn wraparound(conn: &mut PgConnection) -> QueryResult<WraparoundRow> {
    unprepared_statement(
        "SELECT max(age(datfrozenxid)) / 2147483647.0::float8 AS transactions,
                max(mxid_age(datminmxid)) / 2147483647.0::float8 AS multixacts
           FROM pg_database WHERE datallowconn",
    )
    .giving::<(Double, Double)>()
    .get_result(conn)
}

/// The free connections for this role.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct ConnectionsRow {
    /// Without the connections reserved for superusers.
    pub(crate) of_server: i64,
    pub(crate) of_role: Option<i64>,
    pub(crate) of_database: Option<i64>,
    pub(crate) role: String,
    pub(crate) database: String,
}

pub(crate) fn connections(conn: &mut PgConnection) -> QueryResult<ConnectionsRow> {
    unprepared_statement(
        "WITH open AS (
            SELECT usesysid, datid FROM pg_stat_activity
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
        )
        SELECT current_setting('max_connections')::bigint
               - current_setting('superuser_reserved_connections')::bigint
               - coalesce(current_setting('reserved_connections', true)::bigint, 0)
               - (SELECT count(*) FROM open) AS of_server,
               CASE WHEN r.rolconnlimit >= 0 AND NOT r.rolsuper THEN r.rolconnlimit
                    - (SELECT count(*) FROM open WHERE usesysid = r.oid) END AS of_role,
               CASE WHEN d.datconnlimit >= 0 AND NOT r.rolsuper THEN d.datconnlimit
                    - (SELECT count(*) FROM open WHERE datid = d.oid) END AS of_database,
               quote_ident(r.rolname) AS role, quote_ident(d.datname) AS database
          FROM pg_roles r, pg_database d
         WHERE r.rolname = session_user AND d.datname = current_database()",
    )
    .giving::<(BigInt, Nullable<BigInt>, Nullable<BigInt>, Text, Text)>()
    .get_result(conn)
}

/// A schema of the search path in which a role can create objects that others may call.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct CreatorRow {
    pub(crate) schema: String,
    /// The quoted name; `PUBLIC` is every role.
    pub(crate) role: String,
}

/// The roles that can create objects in the schemas of a new session's search path. Left out: the owners of the
/// schemas and of the outbox, this role, and superusers.
pub(crate) fn creators(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<CreatorRow>> {
    conn.batch_execute("SET LOCAL search_path TO DEFAULT")?;
    let schemas: Vec<String> = select(current_schemas(false)).get_result(conn)?;
    conn.batch_execute(&format!("SET LOCAL search_path = {}", pinned::PATH))?;
    unprepared_statement(
        "SELECT quote_ident(n.nspname) AS schema, coalesce(quote_ident(r.rolname), 'PUBLIC') AS role
           FROM pg_namespace n
          CROSS JOIN aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
           LEFT JOIN pg_roles r ON r.oid = a.grantee
          WHERE n.nspname = ANY($1::text[]::name[]) AND a.privilege_type = 'CREATE'
            AND a.grantee <> n.nspowner
            AND a.grantee <> (SELECT relowner FROM pg_class WHERE oid = to_regclass($2)) AND NOT coalesce(r.rolsuper OR r.rolname = current_user, false)
          ORDER BY 1, 2",
    )
    .bind::<Array<Text>, _>(schemas)
    .bind::<Text, _>(name.outbox())
    .giving::<(Text, Text)>()
    .load(conn)
}

/// A setting of the server, the role or the database.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct SettingRow {
    pub(crate) name: String,
    pub(crate) setting: String,
}

/// The values of these settings for sessions of this role. Settings that this server does not know are left out.
pub(crate) fn settings(conn: &mut PgConnection, names: &[&str]) -> QueryResult<Vec<SettingRow>> {
    let setting = text_or(pg_settings::setting, "");
    pg_settings::table
        .filter(pg_settings::name.eq_any(names))
        .order(pg_settings::name)
        .select((pg_settings::name, text_or(pg_settings::reset_val, setting)))
        .load(conn)
}

/// Whether the server is a standby, which refuses writes.
pub(crate) fn is_standby(conn: &mut PgConnection) -> QueryResult<bool> {
    select(pg_is_in_recovery()).get_result(conn)
}
