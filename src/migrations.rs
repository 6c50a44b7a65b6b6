//! Making an outbox: by a call, or by its migrations for Diesel's own harness.

use std::fmt;

use diesel::PgConnection;
use diesel::connection::BoxableConnection;
use diesel::migration::{
    Migration, MigrationMetadata, MigrationName, MigrationSource, MigrationVersion, Result,
};
use diesel::pg::Pg;

use crate::error::DatabaseError;
use crate::name::OutboxName;
pub use crate::store::setup::migrate::Direction;
use crate::store::setup::migrate::{self as steps, Step};

/// Brings the database up to date and creates the outbox where it is missing. Safe to run again,
/// and by two processes at once. What was applied is recorded in the table `outbox_migrations`.
/// Returns what was done, in words.
///
/// ```no_run
/// # use diesel::prelude::*;
/// use diesel_outbox::OutboxName;
///
/// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
/// for done in diesel_outbox::migrate(&mut conn, &OutboxName::default())? {
///     println!("{done}"); // nothing, where there was nothing to do
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`DatabaseError`]; then nothing was changed.
pub fn migrate(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> std::result::Result<Vec<String>, DatabaseError> {
    steps::migrate(conn, name)
}

/// The migrations that make the outbox `outbox` and its inbox, for `MigrationHarness` of
/// [`diesel_migrations`](https://docs.rs/diesel_migrations): an application that runs its own migrations
/// at start runs these beside them.
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
/// Diesel records them in its table `__diesel_schema_migrations`, and
/// [`migrate`](migrate()) in `outbox_migrations`. Each of the two asks the database what is there, and not
/// the other's record, so they can follow one another in any order: what is there is only recorded.
///
/// Diesel reverts only what is in the source that it is given: `diesel migration revert`, which knows the
/// application's folder alone, undoes the application's and stops at these. Their versions sort before all dates.
///
/// An outbox of another name is made by a line of SQL in a migration of the application's, behind
/// these: `SELECT outbox_create('hrm.outbox')`.
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

/// A step, as Diesel runs it: in a transaction, with its record.
struct OfHarness(&'static Step);

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
    /// Sorted before the application's own, so that theirs is the last one, which `diesel migration revert`
    /// and `redo` are about.
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
