//! The free messages in a range of sequences. They are found by the primary key, so dead entries of other indexes do
//! not slow the query.

use diesel::PgConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, Queryable, RunQueryDsl};
use diesel::result::QueryResult;

use super::claim::{Position, Stream, Topic, as_bigint};
use super::ordered::Key;
use super::search::{PAGE, Page};
use super::streams::Found;
use crate::name::OutboxName;
use crate::store::range::Range;
use crate::store::sql::now;
use crate::store::table::outbox;

/// A message that is due and not held by a relay.
#[derive(Debug, Clone, PartialEq, Eq, Queryable)]
pub(crate) struct Free {
    pub(crate) sequence: i64,
    pub(crate) topic: String,
    pub(crate) destination: String,
    pub(crate) ordering_key: Option<String>,
    pub(crate) available_at: PgTimestamp,
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
pub(super) type Columns = (i64, String, String, Option<String>, PgTimestamp);

impl From<Columns> for Free {
    fn from((sequence, topic, destination, ordering_key, available_at): Columns) -> Self {
        Self {
            sequence,
            topic,
            destination,
            ordering_key,
            available_at,
        }
    }
}

/// The first messages of the range that are due, and not held or held by an expired lease.
pub(crate) fn free(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    range: Range,
) -> QueryResult<Page> {
    let is_free = outbox::locked_by
        .is_null()
        .or(outbox::locked_by.eq_any(expired));
    let found = outbox::table(name.outbox())
        .filter(outbox::sequence.gt(range.after))
        .filter(outbox::sequence.le(range.upto))
        .filter(outbox::available_at.le(now()))
        .filter(is_free)
        .order(outbox::sequence)
        .limit(as_bigint(PAGE))
        .select((
            outbox::sequence,
            outbox::topic,
            outbox::destination,
            outbox::ordering_key,
            outbox::available_at,
        ))
        .load(conn)?;
    Ok(Page::of_sequences(found))
}
