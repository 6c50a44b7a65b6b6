//! The topics of live messages, and the topics that relays have served.

use diesel::PgConnection;
use diesel::result::QueryResult;

use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::pinned::pinned;
use crate::store::relay::claim::Topic;
use crate::store::relay::served::{Unserved, served, server_of};
use crate::store::relay::streams::streams;
use crate::store::relay::topics::{self, ServedTopic};

/// The topics that a route or a handler of any relay has ever served, by pattern. A message that names no destination
/// and whose topic meets one of them waits for such a relay. Only a message that meets none, and that no registered
/// destination wants, is settled without a send ([`Status::NoSubscriber`](crate::Status::NoSubscriber)).
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

/// A topic with live messages, for one destination.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct LiveTopic {
    /// The topic.
    pub topic: String,
    /// The destination that the messages name; empty if they name none.
    pub destination: String,
    /// The names of the active relays that have a route, a handler or a destination for these messages.
    pub served_by: Vec<String>,
    /// Why relays are active, but none serves these messages.
    pub unserved: Option<Unserved>,
}

/// The topics of live messages, sorted: one entry for each topic and destination.
///
/// # Errors
/// A [`DatabaseError`].
pub fn topics(conn: &mut PgConnection, name: &OutboxName) -> Result<Vec<LiveTopic>, DatabaseError> {
    let (served, streams) = pinned(conn, name, |conn, name| {
        QueryResult::Ok((served(conn, name)?, streams(conn, name)?))
    })?;
    let mut topics: Vec<LiveTopic> = streams
        .into_iter()
        .map(|found| {
            let Topic { topic, destination } = found.stream.topic;
            let by = served.by(&topic, &destination).map(str::to_owned);
            LiveTopic {
                served_by: by.collect(),
                unserved: served.unserved(&topic, &destination),
                topic,
                destination,
            }
        })
        .collect();
    topics.sort();
    topics.dedup();
    Ok(topics)
}
