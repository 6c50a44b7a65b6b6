//! Statements of ours mean PostgreSQL's own functions, operators and types, whoever can create others in a
//! schema of the search path. A function of the exact types of a call is preferred to PostgreSQL's, wherever
//! in the path it is, so a path that others can write to runs their code.
//!
//! - Relays' connections have the path [`PATH`] for as long as they live, and tables are named with the
//!   schema that was found at the start.
//! - `admin` sets it for a transaction, on whatever connection it is given ([`pinned`]).
//! - What runs on an application's connection beside that (enqueueing, the inbox, migrations) leaves the
//!   path alone, and names the schema of every function, operator and type.

use diesel::connection::{SimpleConnection, TransactionManager};
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Nullable, Text};
use diesel::{Connection, PgConnection, RunQueryDsl, select};

use super::sql::set_config;
use super::statement::statement_anew;
use crate::name::OutboxName;

/// Where names without a schema are looked for. Without `pg_temp` temporary tables would come first.
pub(crate) const PATH: &str = "pg_catalog, pg_temp";

/// The path of a connection, and the schema in which it finds a table of this (quoted) name.
///
/// Text: it asks PostgreSQL's catalogue, on an application's search path.
fn place(conn: &mut PgConnection, table: &str) -> QueryResult<(String, Option<String>)> {
    statement_anew(
        "SELECT pg_catalog.current_setting('search_path'),
                (SELECT n.nspname::pg_catalog.text
                   FROM pg_catalog.pg_class c
                   JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
                  WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)::pg_catalog.oid)",
    )
    .bind::<Text, _>(table)
    .giving::<(Text, Nullable<Text>)>()
    .get_result(conn)
}

fn in_place(name: &OutboxName, schema: Option<&str>) -> OutboxName {
    match schema {
        Some(schema) => name.found_in(schema),
        // What is missing is said by whoever needs it.
        None => name.clone(),
    }
}

/// The outbox with the schema in which this connection finds it.
pub(crate) fn located(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<OutboxName> {
    place(conn, &name.outbox()).map(|(_, schema)| in_place(name, schema.as_deref()))
}

/// A table with the schema in which a new connection of this role finds it, both quoted. `None`: there is none.
pub(crate) fn located_by_default(
    conn: &mut PgConnection,
    table: &str,
) -> QueryResult<Option<String>> {
    let (_, schema) = super::looking::looking(conn, None, |conn| {
        conn.batch_execute("SET LOCAL search_path TO DEFAULT")?;
        place(conn, table)
    })?;
    Ok(schema.map(|schema| format!("\"{}\".{table}", schema.replace('"', "\"\""))))
}

/// Sets the path for as long as the connection lives.
pub(crate) fn pin(conn: &mut PgConnection) -> QueryResult<()> {
    conn.batch_execute(&format!("SET search_path = {PATH}"))
}

/// Does `work` in a transaction, or a savepoint of the caller's, that has the path [`PATH`], with the outbox
/// that the connection finds by its own. Afterwards the connection has its own path again.
pub(crate) fn pinned<T, E: From<Error>>(
    conn: &mut PgConnection,
    name: &OutboxName,
    work: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, E>,
) -> Result<T, E> {
    let is_nested = is_in_transaction(conn);
    conn.transaction(|conn| {
        let (path, schema) = place(conn, &name.outbox())?;
        conn.batch_execute(&format!("SET LOCAL search_path = {PATH}"))?;
        let worked = work(conn, &in_place(name, schema.as_deref()))?;
        // Where the transaction goes on, so would the path. Where it does not, its end resets it.
        if is_nested {
            select(set_config("search_path", path, true)).execute(conn)?;
        }
        Ok(worked)
    })
}

/// Whether a transaction is open that was begun by Diesel. Asks nobody.
pub(crate) fn is_in_transaction<C: Connection>(conn: &mut C) -> bool {
    let status = C::TransactionManager::transaction_manager_status_mut(conn);
    // One that is broken is told by the next statement.
    status
        .transaction_depth()
        .map_or(true, |depth| depth.is_some())
}
