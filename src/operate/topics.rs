//! The topics of live messages, and what is recorded of topics: served by relays, declared by the application.

use std::collections::BTreeSet;

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::sql::depths::{self, Care};
use crate::endpoints::sql::served::{Unserved, served, server_of};
use crate::endpoints::sql::subscribers::{self, Freed};
use crate::engine::serves::routes::matches_any;
use crate::engine::serves::sql::topics::{self, KnownTopic, Patterns};
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;

/// What is recorded of topics, by pattern: what a route or a handler of any relay has ever served, what the application
/// has declared, and the topics that ended without a subscriber and never had one. A message that names no destination
/// and whose topic a relay has ever served waits for such a relay. Where topics are declared, a message of another topic
/// that nobody wants waits, too. Other messages that nobody wants are settled without a send
/// ([`Status::NoSubscriber`](crate::Status::NoSubscriber)).
///
/// # Errors
/// A [`DatabaseError`].
pub fn known_topics(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> Result<Vec<KnownTopic>, DatabaseError> {
    Ok(pinned(conn, name, topics::list)?)
}

/// Declares topics of the application, as patterns like those of routes. Where any are declared, a message of another
/// topic that nobody wants waits as `UNKNOWN_TOPIC`. Relays declare topics when they start
/// ([`RelayBuilder::topics`](crate::RelayBuilder::topics)). Returns the number of new patterns.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName, admin};
/// fn declare(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     admin::declare_topics(conn, outbox, ["order.*", "invoice.sent"])?;
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn declare_topics<T: Into<String>>(
    conn: &mut PgConnection,
    name: &OutboxName,
    patterns: impl IntoIterator<Item = T>,
) -> Result<usize, DatabaseError> {
    let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
    Ok(pinned(conn, name, |conn, name| {
        topics::declare(conn, name, &patterns)
    })?)
}

/// A change of what is recorded of topics.
#[derive(Debug, Clone, Copy)]
pub enum TopicChange<'a> {
    /// Declares a pattern.
    Declare(&'a str),
    /// Forgets a pattern, of this kind or of any.
    Forget(&'a str, Option<&'a str>),
}

impl TopicChange<'_> {
    /// What is recorded after the change.
    fn applied(self, mut known: Vec<KnownTopic>) -> Patterns {
        match self {
            Self::Declare(pattern) => {
                let mut patterns = Patterns::of(&known);
                patterns.declared.push(pattern.to_owned());
                patterns
            }
            Self::Forget(pattern, kind) => {
                let is_meant = |one: &KnownTopic| {
                    one.pattern == pattern && kind.is_none_or(|kind| kind == one.kind)
                };
                known.retain(|one| !is_meant(one));
                Patterns::of(&known)
            }
        }
    }
}

/// The waiting messages that nothing keeps any more after a change, and what becomes of them.
///
/// # Errors
/// A [`DatabaseError`].
pub fn freed_by(
    conn: &mut PgConnection,
    name: &OutboxName,
    change: TopicChange<'_>,
) -> Result<Freed, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| freed(conn, name, change))?)
}

fn freed(
    conn: &mut PgConnection,
    name: &OutboxName,
    change: TopicChange<'_>,
) -> QueryResult<Freed> {
    let served = served(conn, name, &BTreeSet::new())?;
    let after = change.applied(topics::list(conn, name)?);
    let lanes = depths::lanes(conn, name)?;
    let lanes = lanes
        .iter()
        .filter(|(_, destination)| destination.is_empty());
    let topics = lanes.map(|(topic, _)| topic.as_str());
    let freed = served.freed(topics, served.patterns(), &after);
    // Also without any endpoint: the first one would end them.
    let patterns = subscribers::subscribed(conn, name, true)?;
    let mut wanted = Vec::new();
    for topic in &freed {
        for pattern in &patterns {
            if matches_any(std::slice::from_ref(pattern), topic) {
                wanted.push((topic.clone(), pattern.clone()));
            }
        }
    }
    subscribers::count_freed(conn, name, freed, &wanted)
}

/// Carries out a change, unless messages wait that nothing would keep any more: then only if `with_waiting`. A relay that
/// serves or declares a topic records it again when it starts, so the topics of a running relay cannot be forgotten.
/// Returns the number of changed rows.
///
/// # Errors
/// A [`TopicError`].
pub fn change_topics(
    conn: &mut PgConnection,
    name: &OutboxName,
    change: TopicChange<'_>,
    with_waiting: bool,
) -> Result<usize, TopicError> {
    let done: QueryResult<_> = pinned(conn, name, |conn, name| {
        if let TopicChange::Forget(pattern, kind) = change
            && let Some(relay) = server_of(conn, name, pattern, kind)?
        {
            return Ok(Err(TopicError::Served(relay)));
        }
        if !with_waiting {
            let freed = freed(conn, name, change)?;
            if freed.messages > 0 {
                return Ok(Err(TopicError::Waiting(freed)));
            }
        }
        Ok(Ok(match change {
            TopicChange::Declare(pattern) => topics::declare(conn, name, &[pattern.to_owned()])?,
            TopicChange::Forget(pattern, kind) => topics::forget(conn, name, pattern, kind)?,
        }))
    });
    done.map_err(DatabaseError::from)?
}

/// Why the recorded topics were not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopicError {
    /// The relay of this name is running, and serves or declares the topics.
    #[error(
        "relay {0:?} is running and serves or declares these topics: stop it, or start it without them"
    )]
    Served(String),
    /// Messages wait that nothing would keep any more.
    #[error("{} would go on", .0.messages)]
    Waiting(Freed),
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
    /// The messages that no relay has claimed. An estimate if there are many.
    pub waiting: i64,
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
    let (served, depths) = pinned(conn, name, |conn, name| {
        let depths = depths::depths(conn, name, Care::Cheap)?;
        let lanes = depths.lanes.iter();
        let names = lanes.map(|lane| lane.destination.as_str()).collect();
        QueryResult::Ok((served(conn, name, &names)?, depths))
    })?;
    let topics = depths.lanes.into_iter().map(|lane| {
        let by = served.by(&lane.topic, &lane.destination).map(str::to_owned);
        LiveTopic {
            served_by: by.collect(),
            unserved: lane.unserved,
            waiting: lane.pending + lane.retrying,
            topic: lane.topic,
            destination: lane.destination,
        }
    });
    Ok(topics.collect())
}
