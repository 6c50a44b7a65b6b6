//! The server, and how relays learn of new messages.

use std::time::Duration;

use diesel::sql_types::Bool;
use diesel::{IntoSql, PgConnection, RunQueryDsl, select};
use secrecy::SecretString;

use crate::config::Config;
use crate::engine::host::sql::connection;
use crate::engine::wake::sql::notifications::Listener;
use crate::error::DatabaseError;
use crate::setup::sql::inspect;
use crate::sql::pinned::pinned;

/// Opens a connection that limits the time of each statement, and quickly detects a lost server. If there is no answer
/// 5 s after that time, the connection is closed, and the statement fails. Behind a pooler in transaction mode the server
/// limits no statement, because the limit would also apply to other clients, and an answer may take 120 s longer.
///
/// `purpose` is a word or two without quotes, and becomes part of the connection's `application_name`.
///
/// # Errors
/// [`DatabaseError::Connect`]; the text omits the password of the URL.
pub fn connect(
    database_url: &SecretString,
    purpose: &str,
    statement_timeout: Duration,
) -> Result<PgConnection, DatabaseError> {
    Ok(open(database_url, purpose, statement_timeout)?.conn)
}

fn open(
    database_url: &SecretString,
    purpose: &str,
    statement_timeout: Duration,
) -> Result<connection::Connected, DatabaseError> {
    let limits = connection::StatementLimits::of_caller(statement_timeout);
    connection::connect(database_url, purpose, limits)
}

/// A connection that [`connect`] has opened, for those who keep it: it says if the server did not answer in time.
pub struct Connection(connection::Connected);

impl Connection {
    /// Opens a connection.
    ///
    /// # Errors
    /// Those of [`connect`].
    pub fn open(
        database_url: &SecretString,
        purpose: &str,
        statement_timeout: Duration,
    ) -> Result<Self, DatabaseError> {
        open(database_url, purpose, statement_timeout).map(Self)
    }

    /// Runs statements.
    ///
    /// # Errors
    /// Those of the statements, and that there was no answer in time. Then the connection is closed.
    pub fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        statements(&mut self.0.conn).map_err(|error| match error {
            DatabaseError::Statement(error) => self.0.explained(error).into(),
            other => other,
        })
    }

    /// Whether the server answers a trivial question within this time. If not, the connection is closed.
    pub fn answers(&mut self, within: Duration) -> bool {
        self.0
            .within(within, |conn| select(true.into_sql::<Bool>()).execute(conn))
            .is_ok()
    }
}

/// How a relay with these settings learns of new messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WakeUp {
    /// By notification.
    Listening,
    /// By polling: the settings turn the listener off.
    Off,
    /// By polling: a pooler in front of the database delivers no notifications.
    Pooled,
    /// By polling: the trigger `outbox_wake` is missing or disabled.
    NoTrigger,
}

/// Determines how a relay with these settings learns of new messages, by connecting as the relay would.
///
/// # Errors
/// A [`DatabaseError`], for example if the listener cannot connect.
pub fn wake_up(conn: &mut PgConnection, config: &Config) -> Result<WakeUp, DatabaseError> {
    if !config.listener {
        return Ok(WakeUp::Off);
    }
    if !pinned(conn, &config.table, inspect::has_trigger)? {
        return Ok(WakeUp::NoTrigger);
    }
    let Some(url) = config
        .listener_url
        .as_ref()
        .or(config.database_url.as_ref())
    else {
        return Ok(WakeUp::Off);
    };
    let is_direct = config.listener_url.is_some();
    let timeout = Duration::from_secs(10);
    let listener = Listener::connect(url, &config.table, timeout, is_direct, "")?;
    Ok(listener.map_or(WakeUp::Pooled, |_| WakeUp::Listening))
}

/// The version of the server as PostgreSQL reports it, such as `18.1 (Debian 18.1-1)`.
///
/// # Errors
/// A [`DatabaseError`].
pub fn server_version(conn: &mut PgConnection) -> Result<String, DatabaseError> {
    Ok(inspect::setting(conn, "server_version")?)
}
