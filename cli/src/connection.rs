//! The connection of a command.

use std::time::Duration;

use anyhow::Result;
use diesel::PgConnection;
use diesel_outbox::config::Config;
use diesel_outbox::{admin, program};

/// Connects, and checks that the outbox exists and has this version. `longest`: the time limit of a statement.
pub(crate) fn connect(config: &Config, purpose: &str, longest: Duration) -> Result<PgConnection> {
    let mut conn = program::connect(config.database_url()?, purpose, longest)?;
    admin::check_schema(&mut conn, &config.table)?;
    Ok(conn)
}
