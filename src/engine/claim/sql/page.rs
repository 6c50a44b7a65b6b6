//! What the searches find: pages of free messages.

use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{Queryable, Selectable};
use diesel::sql_types::{self, BigInt, Nullable, Text, Timestamptz};
use uuid::Uuid;

use super::claim::{Position, Stream, Topic};
use super::streams::FoundStream;
use crate::engine::keys::sql::ordered::Key;
use crate::sql::table::candidate;

/// The most messages of a page.
pub(crate) const PAGE: usize = 500;

/// A part of what a search finds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) found: Vec<Free>,
    /// Where the next page begins; `None`: there are no more messages.
    pub(crate) next: Option<SearchPlace>,
    /// Only of a search for late messages.
    pub(crate) moment: Option<Moment>,
}

/// The place of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SearchPlace {
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
            next: last.map(SearchPlace::After),
            moment: None,
        }
    }
}

/// A message that is due and not held by a relay.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[diesel(table_name = candidate)]
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
    pub(crate) fn found(&self) -> FoundStream {
        FoundStream {
            stream: Stream {
                topic: self.topic(),
                is_keyed: self.ordering_key.is_some(),
            },
            first: self.position(),
        }
    }

    pub(crate) fn position(&self) -> Position {
        Position::new(self.available_at, self.sequence)
    }
}

/// The columns of a [`Free`], and their SQL types.
pub(super) type FreeColumns = <Free as Queryable<ColumnsSql, Pg>>::Row;
pub(super) type ColumnsSql = (
    BigInt,
    Text,
    Text,
    Nullable<Text>,
    Timestamptz,
    Nullable<sql_types::Uuid>,
);
