//! The server, and how relays learn of new messages.

use std::time::Duration;

use diesel::PgConnection;
use secrecy::SecretString;

use crate::config::Config;
use crate::error::DatabaseError;
use crate::store::pinned::pinned;
use crate::store::relay::connection;
use crate::store::relay::notifications::Listener;
use crate::store::setup::inspect;

/// Opens a connection that limits the time of each statement, and quickly detects a lost server. Behind a
/// pooler in transaction mode, statements have no limit, because it would also apply to other clients.
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
    let limits = connection::Limits::of_caller(statement_timeout);
    Ok(connection::connect(database_url, purpose, limits)?.conn)
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
