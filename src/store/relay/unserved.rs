//! Expired messages that no relay serves.

use std::collections::HashMap;

use diesel::PgConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::Text;

use super::claim::{Position, Stream, as_bigint, is_due};
use super::streams::is_of;
use crate::name::OutboxName;
use crate::store::sql::{TimeAndSequence, clock_timestamp, octet_length};
use crate::store::statement::planned_anew;
use crate::store::table::{candidate, outbox};

/// The most messages that one call reads.
const READ: usize = 5_000;
/// The most messages that one call returns, and the most bytes of their payloads. The first message is returned
/// whatever its size.
const MOST: usize = 500;
const MOST_BYTES: usize = 4 * 1024 * 1024;

/// The result of one call.
pub(crate) struct Part {
    pub(crate) sequences: Vec<i64>,
    /// Where the next call continues; `None`: there are no more messages.
    pub(crate) reached: Option<Position>,
}

/// The sequence, the due time, and whether the message has expired (`None` if it never does).
type Read = (i64, PgTimestamp, Option<bool>);

/// The due messages of a stream, after a position, that have expired. Only due messages can be claimed.
pub(crate) fn expired(
    conn: &mut PgConnection,
    name: &OutboxName,
    stream: &Stream,
    after: Position,
) -> QueryResult<Part> {
    let here = (candidate::available_at, candidate::sequence);
    let place = (PgTimestamp(after.available_at), after.sequence);
    let first = candidate::table(name.outbox())
        .filter(is_of(stream))
        .filter(is_due())
        .filter(here.into_sql::<TimeAndSequence>().gt(place))
        .order(here)
        .limit(as_bigint(READ))
        .select((
            candidate::sequence,
            candidate::available_at,
            candidate::expires_at.le(clock_timestamp().nullable()),
        ));
    let read: Vec<Read> = planned_anew(first).load(conn)?;
    let mut is_cut = read.len() >= READ;
    let expired = read.iter().filter(|(_, _, is_over)| *is_over == Some(true));
    let expired: Vec<i64> = expired.map(|(sequence, ..)| *sequence).take(MOST).collect();
    let sizes = sizes(conn, name, &expired)?;
    let (mut sequences, mut last, mut bytes) = (Vec::new(), None, 0);
    for (sequence, available_at, is_over) in read {
        if is_over == Some(true) {
            bytes += sizes.get(&sequence).copied().unwrap_or(0);
            let is_full = sequences.len() >= MOST || bytes > MOST_BYTES;
            if is_full && !sequences.is_empty() {
                is_cut = true;
                break;
            }
            sequences.push(sequence);
        }
        last = Some(Position {
            available_at: available_at.0,
            sequence,
        });
    }
    Ok(Part {
        sequences,
        reached: last.filter(|_| is_cut),
    })
}

/// The bytes of the payloads of these messages, if they still exist.
fn sizes(
    conn: &mut PgConnection,
    name: &OutboxName,
    sequences: &[i64],
) -> QueryResult<HashMap<i64, usize>> {
    let sizes: Vec<(i64, i32)> = outbox::table(name.outbox())
        .filter(outbox::sequence.eq_any(sequences))
        .select((
            outbox::sequence,
            octet_length(outbox::payload.cast::<Text>()),
        ))
        .load(conn)?;
    let size = |(sequence, bytes)| (sequence, usize::try_from(bytes).unwrap_or(0));
    Ok(sizes.into_iter().map(size).collect())
}
