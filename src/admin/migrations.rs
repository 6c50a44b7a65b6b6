//! Making an outbox, and asking whether it is as it has to be.

use diesel::PgConnection;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::pinned::pinned;
use crate::store::setup::migrate::{self as migrations, Direction};
use crate::store::setup::{inspect, rights};

/// Undoes all migrations, and with them the first outbox and the inbox and what is in them. Outboxes of
/// other names stay: undo each before, by `SELECT outbox_drop('hrm.outbox')`.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::{OutboxName, admin};
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// // Not while there is something to deliver.
/// if admin::count_due(&mut conn, &OutboxName::default())? == 0 {
///     admin::revert_migrations(&mut conn)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`]; then nothing was changed.
pub fn revert_migrations(conn: &mut PgConnection) -> Result<(), DatabaseError> {
    migrations::revert(conn)
}

/// The migrations as SQL, for the outbox `name`, to be put into a migration of the application's
/// own.
///
/// ```
/// use diesel_outbox::OutboxName;
/// use diesel_outbox::admin::{self, Direction};
///
/// let outbox: OutboxName = "hrm.outbox".parse()?;
/// let up = admin::migration_sql(Direction::Up, &outbox);
/// assert!(up.contains("SELECT outbox_create('hrm.outbox');"));
/// let down = admin::migration_sql(Direction::Down, &outbox);
/// assert!(down.contains("SELECT outbox_drop('hrm.outbox');"));
/// # Ok::<(), diesel_outbox::BadName>(())
/// ```
pub fn migration_sql(direction: Direction, name: &OutboxName) -> String {
    migrations::printed(direction, name)
}

/// Roles with the least that they need, as SQL: one that enqueues into the outbox `name`, one for its
/// relays, one that looks, and one that handles messages by the [`inbox`](crate::inbox).
///
/// ```
/// use diesel_outbox::{OutboxName, admin};
///
/// let sql = admin::roles_sql(&OutboxName::default());
/// assert!(sql.contains("CREATE ROLE outbox_relay;"));
/// ```
pub fn roles_sql(name: &OutboxName) -> String {
    rights::printed(name)
}

/// What a relay needs in the outbox `name` and the connection's role may not do, as the `GRANT`
/// statements that are missing.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::{OutboxName, admin};
///
/// # let mut conn = PgConnection::establish("postgres://relay@localhost/shop")?;
/// // Connected as the relay's role:
/// for grant in admin::missing_rights(&mut conn, &OutboxName::default())? {
///     println!("{grant}");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn missing_rights(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<String>, DatabaseError> {
    pinned(conn, name, rights::missing)
}

/// Whether the outbox is there and as this version needs it.
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
///             println!("{reason}"); // what is missing, and what to do
///             Ok(false)
///         }
///         Err(error) => Err(error),
///     }
/// }
/// ```
///
/// # Errors
/// [`DatabaseError::Schema`] says what is missing and what to do.
pub fn check_schema(conn: &mut PgConnection, name: &OutboxName) -> Result<(), DatabaseError> {
    pinned(conn, name, inspect::check)
}
