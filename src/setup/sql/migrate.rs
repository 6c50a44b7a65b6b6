//! Runs our migrations, and records them in a table of their own.
//!
//! Text: the migrations are DDL, and each step finds out in SQL whether it was applied.

use diesel::connection::SimpleConnection;
use diesel::prelude::{Connection, ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::Bool;
use diesel::{PgConnection, insert_into};

use super::inspect;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::{located, pinned};
use crate::sql::statement::unprepared_statement;

diesel::table! {
    /// The applied steps. A step has several rows if it was applied again, or if a dump of the data was restored.
    outbox_migrations (version, applied_at) {
        version -> diesel::sql_types::Text,
        applied_at -> diesel::sql_types::Timestamptz,
    }
}

/// One migration. The version is the name of its folder.
pub(crate) struct MigrationStep {
    pub(crate) version: &'static str,
    /// SQL: whether the step is applied, perhaps by a migration of the application.
    is_there: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

macro_rules! step {
    ($folder:literal, $is_there:literal) => {
        MigrationStep {
            version: $folder,
            is_there: concat!($is_there, " IS NOT NULL"),
            up: include_str!(concat!("../../../migrations/", $folder, "/up.sql")),
            down: include_str!(concat!("../../../migrations/", $folder, "/down.sql")),
        }
    };
}

/// All steps, oldest first.
// Why: docs/decisions.md#own-migrations
pub(crate) const STEPS: &[MigrationStep] = &[
    step!(
        "2026-11-20-000001_outbox_functions",
        "pg_catalog.to_regprocedure('outbox_create(pg_catalog.text)')"
    ),
    // Recognised by a column that only our table has: an application may have another table of this name, which must
    // not be dropped.
    step!(
        "2026-11-20-000002_first_outbox",
        "(SELECT attrelid FROM pg_catalog.pg_attribute
           WHERE attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass('outbox')::pg_catalog.oid
             AND attname OPERATOR(pg_catalog.=) 'split_from' AND NOT attisdropped)"
    ),
    INBOX,
];

/// The step that a database without an outbox can apply alone. Another table of this name (such as an outbox) is not
/// mistaken for the inbox, and makes the step fail.
pub(crate) const INBOX: MigrationStep = step!(
    "2026-11-21-000003_inbox",
    "(SELECT attrelid FROM pg_catalog.pg_attribute
       WHERE attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass('outbox_inbox')::pg_catalog.oid
         AND attname OPERATOR(pg_catalog.=) 'handled_at' AND NOT attisdropped)"
);

/// The step that creates the outbox of the default name. An application that uses another name does not need it.
const FIRST_OUTBOX: &str = "2026-11-20-000002_first_outbox";

impl MigrationStep {
    /// SQL that applies the step unless it is applied.
    pub(crate) fn up_unless_there(&self) -> String {
        only_if(&format!("NOT ({})", self.is_there), self.up)
    }

    /// SQL that reverts the step if it is applied.
    pub(crate) fn down_if_there(&self) -> String {
        only_if(self.is_there, self.down)
    }
}

fn only_if(condition: &str, sql: &str) -> String {
    format!(
        "DO $outbox_step$ BEGIN
            IF {condition} THEN EXECUTE $outbox_sql$ {sql} $outbox_sql$; END IF;
         END $outbox_step$"
    )
}

/// When a migration creates the tables of endpoints and of feeds, which an outbox may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointTables {
    /// Together with the outbox. An outbox that is there stays with or without them.
    WithOutbox,
    /// Not now. Those of an outbox that is there stay.
    Never,
    /// Together with the outbox, without those of feeds.
    WithoutFeeds,
    /// Those of endpoints, also for an outbox that is there.
    Always,
    /// Those of feeds, also for an outbox that is there.
    Feeds,
}

impl EndpointTables {
    /// SQL that creates an outbox.
    fn creation(self, name: &OutboxName) -> String {
        let outbox = format!("SELECT outbox_create('{name}');");
        let endpoints = endpoints_creation(name);
        match self {
            Self::WithOutbox | Self::Always | Self::Feeds => {
                format!("{outbox}\n{endpoints}\n{}", feeds_creation(name))
            }
            Self::WithoutFeeds => format!("{outbox}\n{endpoints}"),
            Self::Never => outbox,
        }
    }
}

/// SQL that adds the tables of endpoints to an outbox.
fn endpoints_creation(name: &OutboxName) -> String {
    format!("SELECT outbox_create_endpoints('{name}');")
}

/// SQL that adds the tables of feeds to an outbox.
fn feeds_creation(name: &OutboxName) -> String {
    format!("SELECT outbox_create_feeds('{name}');")
}

/// SQL that creates an outbox like this one: with the tables of endpoints and of feeds, or without.
pub(crate) fn creation_like(
    conn: &mut PgConnection,
    name: &OutboxName,
    found: &OutboxName,
) -> QueryResult<String> {
    let mut sql = format!("SELECT outbox_create('{name}');");
    if found.has_endpoints() {
        sql += &endpoints_creation(name);
    }
    if inspect::has_feeds(conn, found)? {
        sql += &feeds_creation(name);
    }
    Ok(sql)
}

/// Applies the missing steps, and creates the outbox `name` if it is missing. A step that a migration of the
/// application has applied is only recorded. Returns a description of each change. Two processes may migrate at once:
/// each step is applied once.
///
/// # Errors
/// A [`DatabaseError`]; then nothing is changed.
pub fn migrate(
    conn: &mut PgConnection,
    name: &OutboxName,
    endpoints: EndpointTables,
) -> Result<Vec<String>, DatabaseError> {
    conn.transaction(|conn| {
        lock(conn)?;
        let mut done = Vec::new();
        let is_new = !inspect::table_exists(conn, name)?;
        let applied: Vec<String> = outbox_migrations::table
            .select(outbox_migrations::version)
            .load(conn)?;
        for step in STEPS {
            if step.version == FIRST_OUTBOX && *name != OutboxName::default() {
                continue;
            }
            let is_recorded = applied.iter().any(|version| version == step.version);
            let is_created = match step.version {
                FIRST_OUTBOX => create(conn, step.is_there, &endpoints.creation(name))?,
                _ => create(conn, step.is_there, step.up)?,
            };
            // A step may be recorded and missing: a migration of the application has reverted it.
            if is_recorded && !is_created {
                continue;
            }
            insert_into(outbox_migrations::table)
                .values(outbox_migrations::version.eq(step.version))
                .on_conflict_do_nothing()
                .execute(conn)?;
            done.push(if is_created {
                format!("applied {}", step.version)
            } else {
                format!("found {} applied by a migration of yours", step.version)
            });
        }
        if !inspect::table_exists(conn, name)? {
            conn.batch_execute(&endpoints.creation(name))?;
            done.push(format!("created outbox {name}"));
        }
        let found = located(conn, name)?;
        let (has_endpoints, has_feeds) = (found.has_endpoints(), inspect::has_feeds(conn, &found)?);
        match endpoints {
            EndpointTables::Always if !has_endpoints => {
                conn.batch_execute(&endpoints_creation(name))?;
                done.push(format!("created the tables of endpoints of {name}"));
            }
            EndpointTables::Feeds if !has_feeds => {
                conn.batch_execute(&feeds_creation(name))?;
                done.push(format!("created the tables of feeds of {name}"));
            }
            EndpointTables::WithoutFeeds if is_new => {
                done.push(format!("left out the tables of feeds of {name}"));
            }
            EndpointTables::Never if is_new => {
                done.push(format!("left out the tables of endpoints of {name}"));
            }
            EndpointTables::Never if has_endpoints => done.push(format!(
                "the outbox {name} has the tables of endpoints already: they stay"
            )),
            _ => {}
        }
        // An existing outbox may be damaged.
        pinned(conn, name, inspect::check_migrated)?;
        Ok(done)
    })
}

/// Reverts all steps, newest first. This drops the first outbox and the inbox, with their contents. Outboxes of other
/// names stay: drop each of them first, with `SELECT outbox_drop('hrm.outbox')`.
///
/// # Errors
/// A [`DatabaseError`]; then nothing is changed.
pub fn revert(conn: &mut PgConnection) -> Result<(), DatabaseError> {
    conn.transaction(|conn| {
        lock(conn)?;
        for step in STEPS.iter().rev() {
            if is_true(conn, step.is_there)? {
                conn.batch_execute(step.down)?;
            }
        }
        conn.batch_execute("DROP TABLE outbox_migrations")?;
        Ok(())
    })
}

/// Applies the step that creates the inbox, if the inbox is missing.
pub(crate) fn create_inbox(conn: &mut PgConnection) -> QueryResult<()> {
    create(conn, INBOX.is_there, INBOX.up).map(drop)
}

/// Lets one process at a time continue, until the end of its transaction. Not an advisory lock: any role that may
/// connect could hold that and stop all migrations. The lock has its own statement, so that later statements see the
/// changes of the last holder.
fn lock(conn: &mut PgConnection) -> QueryResult<()> {
    create(
        conn,
        "pg_catalog.to_regclass('outbox_migrations') IS NOT NULL",
        "CREATE TABLE outbox_migrations (
            version    pg_catalog.text NOT NULL,
            applied_at pg_catalog.timestamptz NOT NULL DEFAULT pg_catalog.now(),
            PRIMARY KEY (version, applied_at)
        )",
    )?;
    // This mode needs the right to change the table, and lets dumps read it.
    conn.batch_execute("LOCK TABLE outbox_migrations IN SHARE ROW EXCLUSIVE MODE")
}

/// Executes `up` unless the condition is true already. Returns whether `up` was executed. If two processes do this at
/// once, the second waits for the first, fails, and then finds the condition true.
fn create(conn: &mut PgConnection, is_there: &str, up: &str) -> QueryResult<bool> {
    if is_true(conn, is_there)? {
        return Ok(false);
    }
    match conn.transaction(|conn| conn.batch_execute(up)) {
        Ok(()) => Ok(true),
        Err(error) => match is_true(conn, is_there)? {
            true => Ok(false),
            false => Err(error),
        },
    }
}

fn is_true(conn: &mut PgConnection, condition: &str) -> QueryResult<bool> {
    unprepared_statement(format!("SELECT {condition}"))
        .giving::<Bool>()
        .get_result(conn)
}

/// The SQL of all steps for the outbox `name`, to copy into a migration of the application. With
/// [`EndpointTables::Always`] or [`EndpointTables::Feeds`]: only what adds these tables.
pub fn printed(direction: Direction, name: &OutboxName, endpoints: EndpointTables) -> String {
    match endpoints {
        EndpointTables::Always => return endpoints_creation(name),
        EndpointTables::Feeds => return feeds_creation(name),
        _ => {}
    }
    let printed = |step: &MigrationStep| {
        let text = match (direction, step.version) {
            (Direction::Up, FIRST_OUTBOX) => endpoints.creation(name),
            (Direction::Down, FIRST_OUTBOX) => format!("SELECT outbox_drop('{name}');"),
            (Direction::Up, _) => step.up.to_owned(),
            (Direction::Down, _) => step.down.to_owned(),
        };
        format!("-- {}\n{}\n\n", step.version, text.trim_end())
    };
    match direction {
        Direction::Up => STEPS.iter().map(printed).collect(),
        Direction::Down => STEPS.iter().rev().map(printed).collect(),
    }
}

/// The direction of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Create the outbox.
    Up,
    /// Drop the outbox.
    Down,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_of_migrations_is_in_the_list() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations");
        let mut found: Vec<String> = std::fs::read_dir(folder)
            .expect("migrations/ is there")
            .map(|entry| {
                entry
                    .expect("readable")
                    .file_name()
                    .into_string()
                    .expect("UTF-8")
            })
            .collect();
        found.sort();
        let listed: Vec<&str> = STEPS.iter().map(|step| step.version).collect();
        assert_eq!(found, listed);
    }
}
