//! A database connection that pages take turns to use.

use std::time::Duration;

use anyhow::{Result, anyhow};
use crossbeam_channel::{Receiver, Sender, bounded};
use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use diesel_outbox::config::Config;
use diesel_outbox::{ConfigError, DatabaseError, OutboxName, admin};
use secrecy::SecretString;

/// How long a page waits for its turn.
const TURN: Duration = Duration::from_secs(2);
/// How long a statement may take.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// One connection, opened on first use and dropped after an error. A page that waits for it too long fails, so
/// that a hanging database blocks one page and not all of them.
pub(crate) struct Database {
    url: SecretString,
    purpose: &'static str,
    pub(crate) outbox: OutboxName,
    turn: (Sender<Option<PgConnection>>, Receiver<Option<PgConnection>>),
}

impl Database {
    pub(crate) fn new(config: &Config, purpose: &'static str) -> Result<Self, ConfigError> {
        Self::several(config, purpose, 1)
    }

    /// With so many connections, each opened when all others are in use.
    pub(crate) fn several(
        config: &Config,
        purpose: &'static str,
        connections: usize,
    ) -> Result<Self, ConfigError> {
        let turn = bounded(connections);
        for _ in 0..connections {
            // The channel has room, so this always succeeds.
            let _ = turn.0.try_send(None);
        }
        Ok(Self {
            url: config.database_url()?.clone(),
            purpose,
            outbox: config.table.clone(),
            turn,
        })
    }

    /// Runs statements on the outbox, in one transaction.
    pub(crate) fn run<T>(
        &self,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        let (back, turn) = &self.turn;
        let held = turn.recv_timeout(TURN).map_err(|_| {
            anyhow!("the database is slow or hangs: another page is still waiting for it")
        })?;
        let turn = Turn(back, None);
        let result = connected(held, self).and_then(|mut conn| {
            let value = limited(&mut conn, STATEMENT_TIMEOUT, |conn| {
                statements(conn, &self.outbox)
            })?;
            Ok((value, conn))
        });
        let (value, conn) = result?;
        turn.keep(conn);
        Ok(value)
    }
}

/// Runs statements in a transaction and limits the time of each. Settings of the session would not hold behind a
/// pooler in transaction mode.
pub(super) fn limited<T>(
    conn: &mut PgConnection,
    timeout: Duration,
    statements: impl FnOnce(&mut PgConnection) -> Result<T, DatabaseError>,
) -> Result<T, DatabaseError> {
    let millis = timeout.as_millis();
    conn.transaction(|conn| {
        conn.batch_execute(&format!(
            "SET LOCAL statement_timeout = {millis}; SET LOCAL lock_timeout = {millis}"
        ))?;
        statements(conn)
    })
}

fn connected(
    held: Option<PgConnection>,
    database: &Database,
) -> Result<PgConnection, DatabaseError> {
    match held {
        Some(conn) => Ok(conn),
        None => admin::connect(&database.url, database.purpose, STATEMENT_TIMEOUT),
    }
}

/// Passes the turn on when dropped, along with the connection if it still works.
struct Turn<'a>(&'a Sender<Option<PgConnection>>, Option<PgConnection>);

impl Turn<'_> {
    fn keep(mut self, conn: PgConnection) {
        self.1 = Some(conn);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // The holder of the turn emptied the channel, so this always succeeds.
        let _ = self.0.try_send(self.1.take());
    }
}
