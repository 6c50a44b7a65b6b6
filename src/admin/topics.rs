//! The topics that relays have served.

use diesel::PgConnection;
use diesel::result::QueryResult;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::pinned::pinned;
use crate::store::relay::served::server_of;
use crate::store::relay::topics::{self, ServedTopic};

/// The topics that a route or a handler of any relay has ever served, by pattern. A message that names no destination
/// and whose topic meets one of them waits for such a relay. Only a message that meets none, and that no registered
/// destination wants, is settled without a send ([`Status::NoSubscriber`](crate::Status::NoSubscriber)).
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     for one in admin::served_topics(conn, outbox)? {
///         println!("{} ({}), last served {}", one.pattern, one.kind, one.last_served);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn served_topics(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<ServedTopic>, DatabaseError> {
    Ok(pinned(conn, name, topics::list)?)
}

/// Forgets topics that no relay will serve again: a pattern exactly as [`served_topics`] shows it, of this kind (`route` or
/// `handler`) or of any. A relay that serves them records them again when it starts, so topics that a running relay
/// serves cannot be forgotten. Returns the number of forgotten rows.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{OutboxName, admin};
/// fn retire(conn: &mut PgConnection, outbox: &OutboxName) -> Result<bool, admin::ForgetTopicError> {
///     Ok(admin::forget_topic(conn, outbox, "legacy.*", None)? > 0)
/// }
/// ```
///
/// # Errors
/// A [`ForgetTopicError`].
pub fn forget_topic(
    conn: &mut PgConnection,
    name: &OutboxName,
    pattern: &str,
    kind: Option<&str>,
) -> Result<usize, ForgetTopicError> {
    let done: QueryResult<_> = pinned(conn, name, |conn, name| {
        Ok(match server_of(conn, name, pattern, kind)? {
            Some(relay) => Err(ForgetTopicError::Served(relay)),
            None => Ok(topics::forget(conn, name, pattern, kind)?),
        })
    });
    done.map_err(DatabaseError::from)?
}

/// Why topics were not forgotten.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForgetTopicError {
    /// The relay of this name is running and serves the topics.
    #[error("relay {0:?} is running and serves these topics: stop it, or start it without them")]
    Served(String),
    /// The database failed.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}
