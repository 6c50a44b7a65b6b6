//! A connection as the relay needs it: named, with limits on every statement, and noticing soon
//! when the server is gone.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use secrecy::{ExposeSecret, SecretString};

use crate::error::DatabaseError;

/// libpq's parameters, used where the URL does not set them itself. A dead server is noticed
/// after 20 s of silence at most, and sooner while data is on its way.
const PARAMETERS: &[(&str, &str)] = &[
    ("connect_timeout", "5"),
    ("keepalives_idle", "10"),
    ("keepalives_interval", "5"),
    ("keepalives_count", "2"),
    ("tcp_user_timeout", "20000"),
];

/// Connects. `purpose` shows in `pg_stat_activity`; no statement runs longer than
/// `statement_timeout`, or waits for a lock longer than a half of it.
pub(crate) fn connect(
    database_url: &SecretString,
    purpose: &str,
    statement_timeout: Duration,
) -> Result<PgConnection, DatabaseError> {
    let url = with_parameters(database_url.expose_secret());
    let mut conn = PgConnection::establish(&url)
        .map_err(|error| DatabaseError::Connect(error.to_string().trim().replace('\n', "; ")))?;
    let timeout = super::millis(statement_timeout).max(1);
    // Without merge joins: they would read the primary key from the first to the last of a few
    // scattered sequences.
    conn.batch_execute(&format!(
        "SET application_name = 'diesel-outbox {purpose}';
         SET statement_timeout = {timeout};
         SET lock_timeout = {};
         SET enable_mergejoin = off;
         SET client_min_messages = warning",
        (timeout / 2).max(1),
    ))?;
    Ok(conn)
}

/// Puts our parameters before the given ones: of two, libpq takes the later.
fn with_parameters(database_url: &str) -> String {
    let is_url = ["postgres://", "postgresql://"]
        .iter()
        .any(|scheme| database_url.starts_with(scheme));
    let separator = if is_url { "&" } else { " " };
    let ours = PARAMETERS
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect::<Vec<_>>()
        .join(separator);
    if !is_url {
        return format!("{ours} {database_url}");
    }
    match database_url.split_once('?') {
        None => format!("{database_url}?{ours}"),
        Some((before, "")) => format!("{before}?{ours}"),
        Some((before, theirs)) => format!("{before}?{ours}&{theirs}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_parameters_come_last_and_win() {
        let url = with_parameters("postgres://db/shop?connect_timeout=9");
        assert!(
            url.starts_with("postgres://db/shop?connect_timeout=5&"),
            "{url}"
        );
        assert!(url.ends_with("&connect_timeout=9"), "{url}");
        assert!(with_parameters("host=db").ends_with(" host=db"));
        assert!(with_parameters("postgres://db/shop").contains("shop?connect_timeout=5"));
    }
}
