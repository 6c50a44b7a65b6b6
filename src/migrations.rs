//! Creating an outbox: by a call, or by migrations for Diesel's own harness.

use std::fmt;

use diesel::PgConnection;
use diesel::connection::BoxableConnection;
use diesel::migration::{
    Migration, MigrationMetadata, MigrationName, MigrationSource, MigrationVersion, Result,
};
use diesel::pg::Pg;

use crate::error::DatabaseError;
use crate::name::OutboxName;
pub use crate::setup::sql::migrate::Direction;
use crate::setup::sql::migrate::{self as steps, EndpointTables, MigrationStep};

/// Applies the missing migrations, and creates the outbox if it is missing. Safe to run again, and by
/// two processes at once. The table `outbox_migrations` records the applied migrations. Returns a
/// description of each change.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::OutboxName;
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// for done in diesel_outbox::migrate(&mut conn, &OutboxName::default())? {
///     println!("{done}"); // no line if the database is up to date
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`]. Nothing was changed.
pub fn migrate(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> std::result::Result<Vec<String>, DatabaseError> {
    steps::migrate(conn, name, EndpointTables::WithOutbox)
}

/// The migrations that create the outbox `outbox` and the inbox, for the `MigrationHarness` of
/// [`diesel_migrations`](https://docs.rs/diesel_migrations). An application that runs its own migrations
/// at start can also run these.
///
/// ```no_run
/// use diesel::PgConnection;
/// use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};
///
/// const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");
///
/// fn migrate(conn: &mut PgConnection) -> diesel::migration::Result<()> {
///     conn.run_pending_migrations(diesel_outbox::MIGRATIONS)?;
///     conn.run_pending_migrations(MIGRATIONS)?;
///     Ok(())
/// }
/// ```
///
/// Diesel records these migrations in its table `__diesel_schema_migrations`;
/// [`migrate`](migrate()) records them in `outbox_migrations`. Both check which objects exist in the database,
/// and only record a migration whose objects exist. So you can use both, in any order.
///
/// Diesel reverts only migrations of the source that it is given. `diesel migration revert` knows only the
/// application's folder: it reverts the application's migrations, and stops at these. The versions of these
/// migrations sort before all dates.
///
/// Diesel's harness takes no lock: if several processes run migrations at once, some fail. Run it in one process, or use
/// [`migrate`](migrate()), which waits for the others.
///
/// To create an outbox of another name, add a line of SQL to a later migration of the application:
/// `SELECT outbox_create('hrm.outbox')`. For endpoints, also `SELECT outbox_create_endpoints('hrm.outbox')`.
pub const MIGRATIONS: Migrations = Migrations(());

/// The type of [`MIGRATIONS`].
#[derive(Debug, Clone, Copy)]
pub struct Migrations(());

impl MigrationSource<Pg> for Migrations {
    fn migrations(&self) -> Result<Vec<Box<dyn Migration<Pg>>>> {
        let boxed = |step| Box::new(OfHarness(step)) as Box<dyn Migration<Pg>>;
        Ok(steps::STEPS.iter().map(boxed).collect())
    }
}

/// A step as a Diesel migration. Diesel runs and records the step in one transaction.
struct OfHarness(&'static MigrationStep);

impl Migration<Pg> for OfHarness {
    fn run(&self, conn: &mut dyn BoxableConnection<Pg>) -> Result<()> {
        Ok(conn.batch_execute(&self.0.up_unless_there())?)
    }

    fn revert(&self, conn: &mut dyn BoxableConnection<Pg>) -> Result<()> {
        Ok(conn.batch_execute(&self.0.down_if_there())?)
    }

    fn metadata(&self) -> &dyn MigrationMetadata {
        &InTransaction
    }

    fn name(&self) -> &dyn MigrationName {
        self
    }
}

impl MigrationName for OfHarness {
    /// Sorts before the application's migrations, so that `diesel migration revert` and `redo` act on the
    /// application's last migration.
    fn version(&self) -> MigrationVersion<'_> {
        let date = "2026-11-20-".len();
        let number = self.0.version.get(date..).unwrap_or(self.0.version);
        format!("0_outbox_{number}").into()
    }
}

impl fmt::Display for OfHarness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.version().fmt(f)
    }
}

struct InTransaction;

impl MigrationMetadata for InTransaction {}
