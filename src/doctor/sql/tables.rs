//! The tables of an outbox: vacuum, sequence, age and size.
//!
//! Text: PostgreSQL's catalogue.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Double, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use super::suffixes;
use crate::name::OutboxName;
use crate::sql::functions::LONGEST;
use crate::sql::millis;
use crate::sql::statement::unprepared_statement;

/// A table as autovacuum sees it.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct VacuumRow {
    pub(crate) table_name: String,
    /// Autovacuum is off for this table.
    pub(crate) is_off: bool,
    pub(crate) dead_rows: i64,
    /// Dead rows at which autovacuum starts.
    pub(crate) threshold: f64,
    /// Seconds since the last vacuum.
    pub(crate) vacuumed_ago: Option<f64>,
}

pub(crate) fn vacuum(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<VacuumRow>> {
    let tables: Vec<String> = suffixes().map(|suffix| name.suffixed(&suffix)).collect();
    unprepared_statement(
        "SELECT t AS table_name,
                coalesce((SELECT NOT option_value::boolean FROM pg_options_to_table(c.reloptions)
                           WHERE option_name = 'autovacuum_enabled'), false) AS is_off,
                coalesce(pg_stat_get_dead_tuples(c.oid), 0) AS dead_rows,
                coalesce((SELECT option_value::float8 FROM pg_options_to_table(c.reloptions)
                           WHERE option_name = 'autovacuum_vacuum_threshold'),
                         current_setting('autovacuum_vacuum_threshold')::float8)
                + greatest(c.reltuples, 0)
                * coalesce((SELECT option_value::float8 FROM pg_options_to_table(c.reloptions)
                             WHERE option_name = 'autovacuum_vacuum_scale_factor'),
                           current_setting('autovacuum_vacuum_scale_factor')::float8) AS threshold,
                extract(epoch FROM clock_timestamp() - greatest(
                    pg_stat_get_last_vacuum_time(c.oid),
                    pg_stat_get_last_autovacuum_time(c.oid)))::float8 AS vacuumed_ago
           FROM unnest($1::text[]) WITH ORDINALITY AS t(t, n)
           JOIN pg_class c ON c.oid = to_regclass(t.t) ORDER BY n",
    )
    .bind::<Array<Text>, _>(&tables)
    .giving::<(Text, Bool, BigInt, Double, Nullable<Double>)>()
    .load(conn)
}

/// The sequence of an outbox.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct SequenceRow {
    pub(crate) sequence_name: Option<String>,
    /// The sequence restarts at its end, and would assign numbers twice.
    pub(crate) cycles: bool,
    /// The highest possible number.
    pub(crate) most: Option<i64>,
    /// The highest number of a message in the outbox or of a dead letter.
    pub(crate) highest: Option<i64>,
    /// This role may read the sequence.
    pub(crate) is_readable: bool,
}

pub(crate) fn sequence(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<SequenceRow> {
    unprepared_statement(format!(
        "SELECT s.name AS sequence_name, coalesce(q.seqcycle, false) AS cycles, q.seqmax AS most,
                greatest((SELECT max(sequence) FROM {}), (SELECT max(sequence) FROM {})) AS highest,
                coalesce(has_sequence_privilege(s.name::regclass, 'SELECT'), false) AS is_readable
           FROM (SELECT pg_get_serial_sequence($1, 'sequence') AS name) s
           LEFT JOIN pg_sequence q ON q.seqrelid = s.name::regclass",
        name.outbox(),
        name.dead(),
    ))
    .bind::<Text, _>(name.outbox())
    .giving::<(
        Nullable<Text>,
        Bool,
        Nullable<BigInt>,
        Nullable<BigInt>,
        Bool,
    )>()
    .get_result(conn)
}

/// The last number that this sequence has assigned; 0 if none.
pub(crate) fn last_number(conn: &mut PgConnection, sequence: &str) -> QueryResult<i64> {
    // pg_sequence_last_value does not tell a restarted sequence from a new one.
    unprepared_statement(format!(
        "SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {sequence}"
    ))
    .giving::<BigInt>()
    .get_result(conn)
}

/// A role that may insert messages, but not call the function that gives them an id.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct WithoutIdRow {
    pub(crate) role: String,
    pub(crate) function: String,
}

/// The roles whose plain inserts fail because EXECUTE on `outbox_message_id` was revoked from PUBLIC.
pub(crate) fn without_id(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<WithoutIdRow>> {
    unprepared_statement(
        "SELECT quote_ident(r.rolname) AS role, d.refobjid::regprocedure::text AS function
           FROM pg_attribute a
           JOIN pg_attrdef v ON v.adrelid = a.attrelid AND v.adnum = a.attnum
           JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = v.oid AND d.refclassid = 'pg_proc'::regclass
          CROSS JOIN pg_roles r
          WHERE a.attrelid = to_regclass($1) AND a.attname = 'message_id' AND r.rolname !~ '^pg_'
            AND has_column_privilege(r.oid, a.attrelid, 'payload', 'INSERT')
            AND NOT has_function_privilege(r.oid, d.refobjid, 'EXECUTE')
          ORDER BY 1",
    )
    .bind::<Text, _>(name.outbox())
    .giving::<(Text, Text)>()
    .load(conn)
}

/// The age and the size of a table whose rows are kept for a time.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct KeptRow {
    pub(crate) has_older: bool,
    pub(crate) size: String,
    pub(crate) bytes: i64,
}

/// Whether a table has rows older than `age`, by a column with an index, and the size of the table.
/// `None`: there is no such table.
pub(crate) fn kept(
    conn: &mut PgConnection,
    table: &str,
    column: &str,
    age: Duration,
) -> QueryResult<Option<KeptRow>> {
    let is_there = crate::setup::sql::inspect::has_column(conn, table, column)?;
    if !is_there {
        return Ok(None);
    }
    unprepared_statement(format!(
        "SELECT EXISTS (SELECT FROM {table}
                         WHERE {column} < now() - $2 * interval '1 millisecond') AS has_older,
                pg_size_pretty(s.bytes) AS size, s.bytes
           FROM (SELECT coalesce(
                    (SELECT sum(pg_total_relation_size(relid))::bigint
                       FROM pg_partition_tree(to_regclass($1))),
                    pg_total_relation_size(to_regclass($1))) AS bytes) s"
    ))
    .bind::<Text, _>(table)
    .bind::<BigInt, _>(millis(age.min(LONGEST)))
    .giving::<(Bool, Text, BigInt)>()
    .get_result(conn)
    .map(Some)
}
