//! What the searches find: pages of free messages.

use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::Queryable;
use uuid::Uuid;

use super::claim::{Position, Stream, Topic};
use super::streams::Found;
use crate::engine::keys::sql::ordered::Key;

/// The most messages of a page.
pub(crate) const PAGE: usize = 500;

/// A part of what a search finds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) found: Vec<Free>,
    /// Where the next page begins; `None`: there are no more messages.
    pub(crate) next: Option<Place>,
    /// Only of a search for late messages.
    pub(crate) moment: Option<Moment>,
}

/// The place of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// At this key, which must be read again.
    Key(Key),
    After(i64),
    Behind(Position),
}

/// The state of the outbox at the moment of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    /// The last existing sequence; `None`: no message is newer than the known ones.
    pub(crate) newest: Option<i64>,
    pub(crate) writers: Writers,
}

/// The server's writing transactions, by number, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Writers {
    /// All transactions before this number have ended.
    pub(crate) oldest: i64,
    /// The transactions from this number on have not begun.
    pub(crate) next: i64,
}

impl Page {
    /// A page of at most [`PAGE`] messages, in the order of their sequences.
    pub(crate) fn of_sequences(found: Vec<Free>) -> Self {
        let last = found.get(PAGE - 1).map(|last| last.sequence);
        Self {
            found,
            next: last.map(Place::After),
            moment: None,
        }
    }
}

/// A message that is due and not held by a relay.
#[derive(Debug, Clone, PartialEq, Eq, Queryable)]
pub(crate) struct Free {
    pub(crate) sequence: i64,
    pub(crate) topic: String,
    pub(crate) destination: String,
    pub(crate) ordering_key: Option<String>,
    pub(crate) available_at: PgTimestamp,
    /// The registration that the message is addressed to.
    pub(crate) registration: Option<Uuid>,
}

impl Free {
    pub(crate) fn stream(&self) -> Stream {
        Stream {
            topic: self.topic(),
            is_keyed: self.ordering_key.is_some(),
        }
    }

    pub(crate) fn topic(&self) -> Topic {
        Topic::new(&self.topic, &self.destination)
    }

    pub(crate) fn key(&self) -> Option<Key> {
        Some(Key {
            ordering_key: self.ordering_key.clone()?,
            destination: self.destination.clone(),
        })
    }

    /// The message's stream, and its position there.
    pub(crate) fn found(&self) -> Found {
        Found {
            stream: self.stream(),
            first: self.position(),
        }
    }

    pub(crate) fn position(&self) -> Position {
        Position {
            available_at: self.available_at.0,
            sequence: self.sequence,
        }
    }
}

/// The columns of a [`Free`], as one record.
pub(super) type Columns = (
    i64,
    String,
    String,
    Option<String>,
    PgTimestamp,
    Option<Uuid>,
);

impl From<Columns> for Free {
    fn from(columns: Columns) -> Self {
        let (sequence, topic, destination, ordering_key, available_at, registration) = columns;
        Self {
            sequence,
            topic,
            destination,
            ordering_key,
            available_at,
            registration,
        }
    }
}
