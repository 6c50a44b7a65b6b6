//! Messages that no relay serves, and whose time is over.
//!
//! Text: WITH, and window functions over a subquery.

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Nullable, Text, Timestamptz};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::claim::{Position, Stream, Topic};
use crate::name::OutboxName;

/// Messages that one look reads.
const READ: i64 = 5_000;
/// Messages that one look returns, at most, and bytes of their payloads, but for the first one.
const MOST: usize = 500;
const MOST_BYTES: i64 = 4 * 1024 * 1024;

/// What a look has found.
pub(crate) struct Part {
    pub(crate) sequences: Vec<i64>,
    /// Where the next look goes on; `None`: there is no more.
    pub(crate) reached: Option<Position>,
}

#[derive(diesel::QueryableByName)]
struct Row {
    #[diesel(sql_type = BigInt)]
    sequence: i64,
    #[diesel(sql_type = Timestamptz)]
    available_at: PgTimestamp,
    /// Of its payload; null: its time is not over.
    #[diesel(sql_type = Nullable<BigInt>)]
    bytes: Option<i64>,
    /// It is the last one that was read, and there may be more.
    #[diesel(sql_type = Bool)]
    is_cut: bool,
}

/// The due messages of a stream, behind a place, whose time is over. Due ones: what is claimed has to be.
pub(crate) fn expired(
    conn: &mut PgConnection,
    name: &OutboxName,
    stream: &Stream,
    after: Position,
) -> QueryResult<Part> {
    let Topic { topic, destination } = &stream.topic;
    let rows: Vec<Row> = sql_query(format!(
        "WITH part AS MATERIALIZED (
            SELECT sequence, available_at, expires_at,
                   row_number() OVER (ORDER BY available_at, sequence) AS n
              FROM (SELECT sequence, available_at, expires_at FROM {outbox}
                     WHERE ordering_key IS {null} AND topic = $1 AND destination = $2
                       AND available_at <= now() AND (available_at, sequence) > ($3, $4)
                     ORDER BY available_at, sequence LIMIT $5) first
         )
         SELECT p.sequence, p.available_at, p.n = $5 AS is_cut,
                CASE WHEN p.expires_at <= clock_timestamp() THEN
                    (SELECT octet_length(o.payload::text)::bigint FROM {outbox} o
                      WHERE o.sequence = p.sequence) END AS bytes
           FROM part p
          WHERE p.expires_at <= clock_timestamp() OR p.n = $5
          ORDER BY p.n LIMIT $6",
        outbox = name.outbox(),
        null = if stream.is_keyed { "NOT NULL" } else { "NULL" },
    ))
    .bind::<Text, _>(topic)
    .bind::<Text, _>(destination)
    .bind::<Timestamptz, _>(PgTimestamp(after.available_at))
    .bind::<BigInt, _>(after.sequence)
    .bind::<BigInt, _>(READ)
    .bind::<BigInt, _>(i64::try_from(MOST).unwrap_or(i64::MAX))
    .load(conn)?;
    let mut is_cut = rows.len() >= MOST;
    let (mut sequences, mut last, mut bytes) = (Vec::new(), None, 0);
    for row in rows {
        bytes += row.bytes.unwrap_or(0);
        if bytes > MOST_BYTES && !sequences.is_empty() {
            is_cut = true;
            break;
        }
        is_cut |= row.is_cut;
        sequences.extend(row.bytes.map(|_| row.sequence));
        last = Some(Position {
            available_at: row.available_at.0,
            sequence: row.sequence,
        });
    }
    Ok(Part {
        sequences,
        reached: last.filter(|_| is_cut),
    })
}
