//! What is free in a range of sequences: found by the primary key, which no other index's dead entries slow.

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Timestamptz};
use diesel::{PgConnection, RunQueryDsl};

use super::claim::{Position, Stream, Topic, as_bigint};
use super::range::Range;
use super::statement::statement;
use super::streams::Found;
use crate::name::OutboxName;

/// A message that is due and held by nobody.
#[derive(Debug, Clone, PartialEq, Eq, diesel::QueryableByName)]
pub(crate) struct Free {
    #[diesel(sql_type = BigInt)]
    pub(crate) sequence: i64,
    #[diesel(sql_type = Text)]
    topic: String,
    #[diesel(sql_type = Text)]
    destination: String,
    #[diesel(sql_type = Nullable<Text>)]
    ordering_key: Option<String>,
    #[diesel(sql_type = Timestamptz)]
    available_at: PgTimestamp,
}

impl Free {
    /// Where it stands in its stream.
    pub(crate) fn found(&self) -> Found {
        Found {
            stream: Stream {
                topic: Topic {
                    topic: self.topic.clone(),
                    destination: self.destination.clone(),
                },
                is_keyed: self.ordering_key.is_some(),
            },
            first: Position {
                available_at: self.available_at.0,
                sequence: self.sequence,
            },
        }
    }
}

/// The first `count` messages of the range that are due and held by nobody, or by one of these leases.
pub(crate) fn free(
    conn: &mut PgConnection,
    name: &OutboxName,
    expired: &[i64],
    range: Range,
    count: usize,
) -> QueryResult<Vec<Free>> {
    statement(format!(
        "SELECT o.sequence, o.topic, o.destination, o.ordering_key, o.available_at
           FROM {outbox} o
          WHERE o.sequence > $2 AND o.sequence <= $3 AND o.available_at <= now()
            AND (o.locked_by IS NULL OR o.locked_by = ANY($1))
          ORDER BY o.sequence LIMIT $4",
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(expired)
    .bind::<BigInt, _>(range.after)
    .bind::<BigInt, _>(range.upto)
    .bind::<BigInt, _>(as_bigint(count))
    .load(conn)
}
