//! Prints migrations, and checks schema and rights.

use diesel::PgConnection;

use super::sql::rights;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::setup::sql::inspect;
use crate::setup::sql::migrate::{Direction, EndpointTables, printed};
use crate::sql::pinned::pinned;

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
