//! Our statements use PostgreSQL's own functions, operators and types, even if others can create objects in a
//! schema of the search path. PostgreSQL prefers a function whose types match a call exactly, wherever in the path
//! the function is. A path that others can write to would therefore run their code.
//!
//! - A relay's connections keep the path [`PATH`], and qualify tables with the schema found at the start.
//! - `admin` and `destinations` set the path for one transaction, on any connection ([`pinned`]).
//! - Other statements on an application's connection (enqueueing, the inbox, migrations) leave the path alone, and
//!   qualify every function, operator and type with its schema.

use diesel::connection::{SimpleConnection, TransactionManager};
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Bool, Nullable, Text};
use diesel::{Connection, PgConnection, RunQueryDsl, select};

use super::functions::set_config;
use super::statement::unprepared_statement;
use crate::name::OutboxName;

/// The search path for names without a schema. Without `pg_temp` in the path, PostgreSQL would search temporary
/// tables first.
pub(crate) const PATH: &str = "pg_catalog, pg_temp";

/// Where a connection finds a table.
struct PinnedPlace {
    /// The path of the connection.
    path: String,
    /// The schema of the table. `None`: there is no such table.
    schema: Option<String>,
    /// The table is an outbox that has at least one of the tables of endpoints. Without the other, it is damaged.
    has_endpoints: bool,
}

/// Finds the table with this quoted name.
///
/// Text: it queries PostgreSQL's catalogue, on an application's search path.
fn place(conn: &mut PgConnection, table: &str) -> QueryResult<PinnedPlace> {
    let (path, schema, has_endpoints) = unprepared_statement(
        "SELECT pg_catalog.current_setting('search_path'), n.nspname::pg_catalog.text,
                EXISTS (SELECT FROM pg_catalog.pg_class e
                          JOIN pg_catalog.pg_attribute a ON a.attrelid OPERATOR(pg_catalog.=) e.oid
                         WHERE e.relnamespace OPERATOR(pg_catalog.=) n.oid
                           AND (e.relname OPERATOR(pg_catalog.=) pg_catalog.concat(c.relname, '_endpoint')
                                AND a.attname OPERATOR(pg_catalog.=) 'old_secrets_until'
                             OR e.relname OPERATOR(pg_catalog.=) pg_catalog.concat(c.relname, '_registration')
                                AND a.attname OPERATOR(pg_catalog.=) 'is_new'))
           FROM (SELECT pg_catalog.to_regclass($1)::pg_catalog.oid AS oid) found
           LEFT JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) found.oid
           LEFT JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace",
    )
    .bind::<Text, _>(table)
    .giving::<(Text, Nullable<Text>, Bool)>()
    .get_result(conn)?;
    Ok(PinnedPlace {
        path,
        schema,
        has_endpoints,
    })
}

fn in_place(name: &OutboxName, place: &PinnedPlace) -> OutboxName {
    match &place.schema {
        Some(schema) => name.found_in(schema, place.has_endpoints),
        // The statement that needs the missing table reports it.
        None => name.clone(),
    }
}

/// The outbox, qualified with the schema in which this connection finds it.
pub(crate) fn located(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<OutboxName> {
    Ok(in_place(name, &place(conn, &name.outbox())?))
}

/// Looks again for the tables of endpoints, if the outbox had none. `true`: they have been created since, and all clones of the
/// name know.
#[cfg(feature = "relay")]
pub(crate) fn look_for_endpoints(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<bool> {
    let is_new = !name.has_endpoints() && place(conn, &name.outbox())?.has_endpoints;
    if is_new {
        name.found_endpoints();
    }
    Ok(is_new)
}

/// A table, qualified with the schema in which a new connection of this role finds it, both quoted. `None`: there is
/// no such table.
pub(crate) fn located_by_default(
    conn: &mut PgConnection,
    table: &str,
) -> QueryResult<Option<String>> {
    let found = super::looking::looking(conn, None, |conn| {
        conn.batch_execute("SET LOCAL search_path TO DEFAULT")?;
        place(conn, table)
    })?;
    Ok((found.schema).map(|schema| format!("\"{}\".{table}", schema.replace('"', "\"\""))))
}

/// Sets [`PATH`] until the connection closes.
pub(crate) fn pin(conn: &mut PgConnection) -> QueryResult<()> {
    conn.batch_execute(&format!("SET search_path = {PATH}"))
}

/// Runs `work` in a transaction, or a savepoint of the caller's, with the path [`PATH`]. `work` gets the outbox that
/// the connection finds by its own path. Afterwards the connection has its own path again.
pub(crate) fn pinned<T, E: From<Error>>(
    conn: &mut PgConnection,
    name: &OutboxName,
    work: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, E>,
) -> Result<T, E> {
    let is_nested = is_in_transaction(conn);
    conn.transaction(|conn| {
        let place = place(conn, &name.outbox())?;
        conn.batch_execute(&format!("SET LOCAL search_path = {PATH}"))?;
        let worked = work(conn, &in_place(name, &place))?;
        // A transaction of the caller's would keep the path. The end of our own transaction resets it.
        if is_nested {
            select(set_config("search_path", place.path, true)).execute(conn)?;
        }
        Ok(worked)
    })
}

/// Whether Diesel has begun a transaction that is still open. Sends no query.
pub(crate) fn is_in_transaction<C: Connection>(conn: &mut C) -> bool {
    let status = C::TransactionManager::transaction_manager_status_mut(conn);
    // A broken transaction counts as open: the next statement reports it.
    status
        .transaction_depth()
        .map_or(true, |depth| depth.is_some())
}
