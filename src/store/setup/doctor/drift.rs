//! Whether an outbox is as this version makes one: by making one beside it, in a transaction that is rolled
//! back, and comparing what the server says of both.
//!
//! Text: PostgreSQL's catalogue.

use diesel::connection::SimpleConnection;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, Bool, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::suffixes;
use crate::name::OutboxName;
use crate::store::looking::looking;
use crate::store::setup::migrate::STEPS;

/// Indexes that a relay needs, by their suffixes, and those for looking things up.
const INDEXES: [&str; 14] = [
    "_idempotency",
    "_claim",
    "_claim_keyed",
    "_ordering",
    "_tenant",
    "_parts",
    "_part_open",
    "_ledger_settled",
    "_ledger_id",
    "_ledger_key",
    "_attempt_id",
    "_dead_id",
    "_dead_key",
    "_dead_blocks",
];

/// A part of an outbox as the server describes it, without the schema's name.
#[derive(Debug, Clone, PartialEq, Eq, diesel::QueryableByName)]
pub(crate) struct Part {
    /// `table`, `column`, `index`, `constraint`, `trigger`, `option` or `view`.
    #[diesel(sql_type = Text)]
    pub(crate) kind: String,
    /// The table that it belongs to.
    #[diesel(sql_type = Text)]
    pub(crate) table_name: String,
    #[diesel(sql_type = Text)]
    pub(crate) name: String,
    #[diesel(sql_type = Text)]
    pub(crate) definition: String,
}

/// Two outboxes.
pub(crate) struct Compared {
    /// The one that is there, and the schema that it is in, quoted.
    pub(crate) found: Vec<Part>,
    pub(crate) schema: String,
    /// One that this version makes.
    pub(crate) made: Vec<Part>,
}

#[derive(diesel::QueryableByName)]
struct TextRow {
    #[diesel(sql_type = Text)]
    text: String,
}

#[derive(diesel::QueryableByName)]
struct FunctionRow {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    source: String,
}

#[derive(diesel::QueryableByName)]
struct CanRow {
    #[diesel(sql_type = Bool)]
    can: bool,
}

/// Whether this role may make a schema here, as comparing takes.
pub(crate) fn can_compare(conn: &mut PgConnection) -> QueryResult<bool> {
    sql_query(
        "SELECT has_database_privilege(current_database(), 'CREATE') AND NOT pg_is_in_recovery()
                AND current_setting('transaction_read_only') = 'off' AS can",
    )
    .get_result::<CanRow>(conn)
    .map(|row| row.can)
}

/// Makes an outbox of the same name in a schema that is gone at the end, and describes both.
pub(crate) fn compare(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Compared> {
    let table = name.outbox();
    let table = table
        .rsplit('.')
        .next()
        .unwrap_or_default()
        .trim_matches('"');
    let schema = format!("outbox_compared_{:08x}", fastrand::u32(..));
    let made_name = format!("\"{schema}\".\"{table}");
    looking(conn, None, |conn| {
        let found_tables = names(|suffix| name.suffixed(suffix));
        let found: Vec<String> =
            sql_query("SELECT to_regclass(t)::oid::text AS text FROM unnest($1::text[]) t")
                .bind::<Array<Text>, _>(&found_tables)
                .load::<TextRow>(conn)?
                .into_iter()
                .map(|row| row.text)
                .collect();
        let schema_of = sql_query(
            "SELECT quote_ident(relnamespace::regnamespace::text) AS text FROM pg_class
              WHERE oid = $1::oid",
        )
        .bind::<Text, _>(found.first().cloned().unwrap_or_default())
        .get_result::<TextRow>(conn)?
        .text;
        conn.batch_execute(&format!(
            "CREATE SCHEMA \"{schema}\"; SET LOCAL search_path = \"{schema}\", pg_catalog; {}",
            STEPS[0].up
        ))?;
        sql_query("SELECT outbox_create($1)")
            .bind::<Text, _>(format!("{schema}.{table}"))
            .execute(conn)?;
        // So that every name is shown with its schema.
        conn.batch_execute("SET LOCAL search_path = pg_catalog")?;
        let made_tables = names(|suffix| format!("{made_name}{suffix}\""));
        let made: Vec<String> =
            sql_query("SELECT to_regclass(t)::oid::text AS text FROM unnest($1::text[]) t")
                .bind::<Array<Text>, _>(&made_tables)
                .load::<TextRow>(conn)?
                .into_iter()
                .map(|row| row.text)
                .collect();
        Ok(Compared {
            found: describe(conn, &found)?,
            schema: schema_of,
            made: describe(conn, &made)?,
        })
    })
}

fn names(of: impl Fn(&str) -> String) -> Vec<String> {
    suffixes()
        .chain(["_messages".to_owned()])
        .map(|suffix| of(&suffix))
        .collect()
}

/// What the server says of these tables, by their numbers.
fn describe(conn: &mut PgConnection, tables: &[String]) -> QueryResult<Vec<Part>> {
    sql_query(
        "WITH t AS (
            SELECT c.*, quote_ident(c.relnamespace::regnamespace::text) || '.' AS q
              FROM pg_class c WHERE c.oid = ANY($1::text[]::oid[])
        ), part AS (
            SELECT 'table' AS kind, t.relname, t.relname::text AS name,
                   t.relpersistence::text || ' ' || t.relrowsecurity::text AS definition, t.q FROM t
            UNION ALL
            SELECT 'column', t.relname, a.attname::text,
                   concat_ws(' ', format_type(a.atttypid, a.atttypmod),
                       CASE WHEN co.collname <> 'default' THEN 'COLLATE ' || co.collname END,
                       CASE WHEN a.attnotnull THEN 'NOT NULL' END,
                       'DEFAULT ' || regexp_replace(pg_get_expr(d.adbin, d.adrelid),
                                                    '^.*[.]outbox_message_id', 'outbox_message_id'),
                       CASE a.attidentity WHEN 'a' THEN 'GENERATED ALWAYS AS IDENTITY'
                                          WHEN 'd' THEN 'GENERATED BY DEFAULT AS IDENTITY' END), t.q
              FROM t JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
              LEFT JOIN pg_attrdef d ON d.adrelid = t.oid AND d.adnum = a.attnum
              LEFT JOIN pg_collation co ON co.oid = a.attcollation
             WHERE t.relkind <> 'v'
            UNION ALL
            SELECT 'index', t.relname, i.relname::text, pg_get_indexdef(i.oid), t.q
              FROM t JOIN pg_index x ON x.indrelid = t.oid JOIN pg_class i ON i.oid = x.indexrelid
             WHERE NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.oid)
            UNION ALL
            SELECT 'constraint', t.relname, k.conname::text, pg_get_constraintdef(k.oid), t.q
              FROM t JOIN pg_constraint k ON k.conrelid = t.oid AND k.contype IN ('p', 'u', 'c')
            UNION ALL
            SELECT 'trigger', t.relname, g.tgname::text,
                   regexp_replace(pg_get_triggerdef(g.oid), 'EXECUTE FUNCTION .*[.]', 'EXECUTE FUNCTION ')
                   || CASE WHEN g.tgenabled IN ('O', 'A') THEN '' ELSE ' (disabled)' END, t.q
              FROM t JOIN pg_trigger g ON g.tgrelid = t.oid AND NOT g.tgisinternal
            UNION ALL
            SELECT 'option', t.relname, split_part(o, '=', 1), split_part(o, '=', 2), t.q
              FROM t CROSS JOIN unnest(t.reloptions) o
            UNION ALL
            SELECT 'view', t.relname, t.relname::text, pg_get_viewdef(t.oid), t.q
              FROM t WHERE t.relkind = 'v'
        )
        SELECT kind, relname::text AS table_name, name, replace(definition, q, '') AS definition
          FROM part ORDER BY kind, relname, name",
    )
    .bind::<Array<Text>, _>(tables)
    .load(conn)
}

/// The functions of the outboxes that are not as this version has them: of another version, or changed.
pub(crate) fn other_functions(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<String>> {
    let functions: Vec<FunctionRow> = looking(conn, None, |conn| {
        sql_query(
            "SELECT proname::text AS name, prosrc AS source FROM pg_proc
              WHERE proname IN ('outbox_create', 'outbox_drop', 'outbox_message_id', 'outbox_name_parts',
                              'outbox_wake')
                AND pronamespace = (SELECT f.pronamespace FROM pg_trigger t JOIN pg_proc f ON f.oid = t.tgfoid
                                     WHERE t.tgrelid = to_regclass($1) AND t.tgname = 'outbox_wake')
              ORDER BY 1",
        )
        .bind::<Text, _>(name.outbox())
        .load(conn)
    })?;
    let is_ours = |source: &str| {
        let written = format!("$function${source}$function$");
        STEPS.iter().any(|step| step.up.contains(&written))
    };
    Ok(functions
        .into_iter()
        .filter(|function| !is_ours(&function.source))
        .map(|function| function.name)
        .collect())
}

/// Indexes that are missing: by their names, which every role can see.
pub(crate) fn missing_indexes(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<String>> {
    let names: Vec<String> = INDEXES.iter().map(|suffix| name.suffixed(suffix)).collect();
    sql_query("SELECT t AS text FROM unnest($1::text[]) t WHERE to_regclass(t) IS NULL")
        .bind::<Array<Text>, _>(&names)
        .load::<TextRow>(conn)
        .map(|rows| rows.into_iter().map(|row| row.text).collect())
}

/// Indexes that are not valid: building them was broken off. Nothing uses them.
pub(crate) fn invalid_indexes(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<Vec<String>> {
    let tables: Vec<String> = suffixes().map(|suffix| name.suffixed(&suffix)).collect();
    sql_query(
        "SELECT i.indexrelid::regclass::text AS text FROM unnest($1::text[]) t
           JOIN pg_index i ON i.indrelid = to_regclass(t) AND NOT (i.indisvalid AND i.indisready)
          ORDER BY 1",
    )
    .bind::<Array<Text>, _>(&tables)
    .load::<TextRow>(conn)
    .map(|rows| rows.into_iter().map(|row| row.text).collect())
}
