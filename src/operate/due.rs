//! The due messages.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::sql::status::{self, DueRow, Work};
use crate::endpoints::sql::served::{Unserved, served};
use crate::engine::serves::routes::matches_any;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// The number of due, unclaimed messages, including messages of paused destinations and topics.
///
/// # Errors
/// A [`DatabaseError`].
pub fn count_due(conn: &mut PgConnection, name: &OutboxName) -> Result<u64, DatabaseError> {
    Ok(u64::try_from(pinned(conn, name, status::count_due)?).unwrap_or(0))
}

/// What a relay would find to do now.
///
/// # Errors
/// A [`DatabaseError`].
pub fn work(conn: &mut PgConnection, name: &OutboxName) -> Result<Work, DatabaseError> {
    Ok(pinned(conn, name, status::work)?)
}

/// The due, unclaimed messages of one topic and destination.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DueTopic {
    /// The topic.
    pub topic: String,
    /// The destination that the messages name; empty if they name none.
    pub destination: String,
    /// The number of messages.
    pub count: u64,
    /// The number of these messages that wait for another message, or a dead letter, of their ordering key.
    pub behind: u64,
    /// Why no relay serves these messages, although relays are active.
    pub unserved: Option<Unserved>,
}

/// The due, unclaimed messages by topic and destination, including paused topics and destinations. `topics` are
/// patterns, as in routes; an empty slice selects all topics. Counts every message.
///
/// # Errors
/// A [`DatabaseError`].
pub fn due(
    conn: &mut PgConnection,
    name: &OutboxName,
    topics: &[String],
) -> Result<Vec<DueTopic>, DatabaseError> {
    let (served, mut rows) = pinned(conn, name, |conn, name| {
        let rows = status::due(conn, name)?;
        let names = rows.iter().map(|row| row.destination.as_str()).collect();
        QueryResult::Ok((served(conn, name, &names)?, rows))
    })?;
    rows.retain(|row| topics.is_empty() || matches_any(topics, &row.topic));
    let due = |row: DueRow| DueTopic {
        count: u64::try_from(row.count).unwrap_or(0),
        behind: u64::try_from(row.behind).unwrap_or(0),
        unserved: served.unserved(&row.topic, &row.destination),
        topic: row.topic,
        destination: row.destination,
    };
    Ok(rows.into_iter().map(due).collect())
}
