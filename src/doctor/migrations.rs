//! Creates outboxes and roles, and checks schema and rights.

use diesel::PgConnection;

use super::sql::rights;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::setup::sql::inspect;
use crate::setup::sql::migrate::{self as migrations, Direction, EndpointTables};
use crate::sql::pinned::pinned;

/// Reverts all migrations. This drops the first outbox and the inbox, with their contents. Outboxes of other
/// names stay: drop each of them first, with `SELECT outbox_drop('hrm.outbox')`.
///
/// # Errors
/// A [`DatabaseError`]; then nothing is changed.
pub fn revert_migrations(conn: &mut PgConnection) -> Result<(), DatabaseError> {
    migrations::revert(conn)
}

/// [`migrate`](crate::migrate()), with or without the tables of endpoints.
///
/// # Errors
/// A [`DatabaseError`]; then nothing is changed.
pub fn migrate(
    conn: &mut PgConnection,
    name: &OutboxName,
    endpoints: EndpointTables,
) -> Result<Vec<String>, DatabaseError> {
    migrations::migrate(conn, name, endpoints)
}

/// [`admin::migration_sql`](crate::admin::migration_sql), with or without the tables of endpoints. With
/// [`EndpointTables::Always`]: only what creates them in an outbox that is there.
pub fn printed(direction: Direction, name: &OutboxName, endpoints: EndpointTables) -> String {
    migrations::printed(direction, name, endpoints)
}

/// The migrations as SQL for the outbox `name`, to copy into a migration of the application.
///
/// ```
/// use diesel_outbox::OutboxName;
/// use diesel_outbox::Direction;
/// use diesel_outbox::admin;
///
/// let outbox: OutboxName = "hrm.outbox".parse()?;
/// let up = admin::migration_sql(Direction::Up, &outbox);
/// assert!(up.contains("SELECT outbox_create('hrm.outbox');"));
/// let down = admin::migration_sql(Direction::Down, &outbox);
/// assert!(down.contains("SELECT outbox_drop('hrm.outbox');"));
/// # Ok::<(), diesel_outbox::BadName>(())
/// ```
pub fn migration_sql(direction: Direction, name: &OutboxName) -> String {
    printed(direction, name, EndpointTables::WithOutbox)
}

/// SQL that creates six roles with minimal rights on the outbox `name`: to enqueue, to cancel, to register
/// destinations, to relay, to read, and to handle messages once with the [`inbox`](crate::inbox). With
/// [`EndpointTables::Always`]: only what an outbox needs that gets the tables of endpoints later.
pub fn roles_sql(name: &OutboxName, endpoints: EndpointTables) -> String {
    rights::printed(name, endpoints)
}

/// The rights that a relay needs in the outbox `name` and that the connection's role lacks, as `GRANT`
/// statements.
///
/// # Errors
/// A [`DatabaseError`].
pub fn missing_rights(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<String>, DatabaseError> {
    pinned(conn, name, rights::missing)
}

/// Checks that the outbox exists and has the schema that this version needs.
///
/// ```
/// # use diesel::PgConnection;
/// use diesel_outbox::{DatabaseError, OutboxName, admin};
///
/// /// At the start of a program that only enqueues.
/// fn is_ready(conn: &mut PgConnection, outbox: &OutboxName) -> Result<bool, DatabaseError> {
///     match admin::check_schema(conn, outbox) {
///         Ok(()) => Ok(true),
///         Err(DatabaseError::Schema(reason)) => {
///             println!("{reason}"); // the missing part, and what to do
///             Ok(false)
///         }
///         Err(error) => Err(error),
///     }
/// }
/// ```
///
/// # Errors
/// [`DatabaseError::Schema`] names the missing part and says what to do. Another [`DatabaseError`] if a query fails.
pub fn check_schema(conn: &mut PgConnection, name: &OutboxName) -> Result<(), DatabaseError> {
    pinned(conn, name, inspect::check)
}
