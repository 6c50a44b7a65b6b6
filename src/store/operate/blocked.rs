//! Keys that wait for a message that is not on its way: found from that message, so that what waits
//! behind it is only counted, and not looked for.
//!
//! Text: WITH, and a subquery for each row (LATERAL).

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Double, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use crate::message::Sequence;
use crate::name::OutboxName;
use crate::status::Status;
use crate::store::looking::{looking, looking_briefly};
use crate::store::relay::streams::streams;
use crate::store::statement::statement_anew;

/// Messages that are looked at because they are not due yet, and as many because they are dead and hold
/// their key.
const CANDIDATES: i64 = 2_000;

/// What is read to find the keys with the most messages; and to count those that are shown.
const ROUGHLY: i64 = 50;
const COUNTED: i64 = 200_000;
const MOST_COUNTED: i64 = 10_000;

/// How long looking for lanes may take: usual is a millisecond.
const PATIENCE: Duration = Duration::from_millis(200);

/// An ordering key whose messages wait for one that is not on its way.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct BlockedKey {
    /// The key.
    #[diesel(sql_type = Text)]
    pub ordering_key: String,
    /// The destination that the messages name; empty where they name none.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// The message that they wait for.
    #[diesel(sql_type = BigInt)]
    pub sequence: Sequence,
    /// Retrying, pending (it is delayed) or dead (until it is requeued or discarded).
    #[diesel(sql_type = Text)]
    pub status: Status,
    /// Why: the name of a [`ReasonCode`](crate::ReasonCode).
    #[diesel(sql_type = Nullable<Text>)]
    pub reason: Option<String>,
    /// Seconds until it is due; `None`: it is dead.
    #[diesel(sql_type = Nullable<Double>)]
    pub seconds_left: Option<f64>,
    /// How many messages wait behind it.
    #[diesel(sql_type = BigInt)]
    pub waiting: i64,
    /// There are more: counting ended there.
    #[diesel(sql_type = Bool)]
    pub waiting_is_capped: bool,
}

/// The keys that wait, those with the most messages first, `limit` at most. Where more than two thousand
/// messages could hold a key, it is those that are due soonest, and the dead ones whose keys come first.
pub(crate) fn blocked_keys(
    conn: &mut PgConnection,
    name: &OutboxName,
    limit: i64,
) -> QueryResult<Vec<BlockedKey>> {
    let lanes: Vec<(String, String)> = looking_briefly(conn, PATIENCE, |conn| streams(conn, name))?
        .into_iter()
        .flatten()
        .map(|found| found.stream)
        .filter(|stream| stream.is_keyed)
        .map(|stream| (stream.topic.topic, stream.topic.destination))
        .collect();
    let number = i64::try_from(lanes.len()).unwrap_or(i64::MAX).max(1);
    let (topics, destinations): (Vec<String>, Vec<String>) = lanes.into_iter().unzip();
    looking(conn, None, |conn| {
        statement_anew(statement(name))
            .bind::<BigInt, _>(limit)
            .bind::<Array<Text>, _>(&topics)
            .bind::<Array<Text>, _>(&destinations)
            .bind::<BigInt, _>((CANDIDATES / number).max(20))
            .bind::<BigInt, _>((COUNTED / limit.max(1)).clamp(100, MOST_COUNTED))
            .load(conn)
    })
}

/// `$1` limit, `$2` and `$3` lanes of keyed messages, `$4` candidates of each, `$5` the count's end.
fn statement(name: &OutboxName) -> String {
    // OFFSET 0: read as written, whatever the planner thinks of these few rows.
    let behind = |candidate: &str, limit: &str| {
        format!(
            "(SELECT count(*) FROM (
                SELECT FROM {outbox} o
                 WHERE o.ordering_key = {candidate}.ordering_key
                   AND (o.destination = {candidate}.destination
                        OR ({candidate}.is_dead AND '' IN (o.destination, {candidate}.destination)))
                 OFFSET CASE WHEN {candidate}.is_dead THEN 0 ELSE 1 END
                 LIMIT {limit}) behind)",
            outbox = name.outbox(),
        )
    };
    format!(
        "WITH later AS MATERIALIZED (
            SELECT l.* FROM unnest($2::text[], $3::text[]) AS lane(topic, destination)
             CROSS JOIN LATERAL (
                SELECT o.ordering_key, o.destination, o.sequence, o.attempts, o.available_at,
                       o.last_error_code, o.locked_by
                  FROM {outbox} o
                 WHERE o.ordering_key IS NOT NULL AND o.topic = lane.topic
                   AND o.destination = lane.destination AND o.available_at > now()
                 ORDER BY o.available_at, o.sequence LIMIT $4) l
        ), first AS MATERIALIZED (
            SELECT l.ordering_key, l.destination, l.sequence,
                   CASE WHEN l.attempts > 0 THEN 'retrying' ELSE 'pending' END AS status,
                   l.last_error_code AS reason,
                   extract(epoch FROM CASE WHEN isfinite(l.available_at)
                           THEN l.available_at - clock_timestamp() END)::float8 AS seconds_left,
                   false AS is_dead
              FROM later l CROSS JOIN LATERAL (
                    SELECT o.sequence FROM {outbox} o
                     WHERE o.ordering_key = l.ordering_key AND o.destination = l.destination
                     ORDER BY coalesce(o.split_from, o.sequence) LIMIT 1) head
             WHERE l.locked_by IS NULL AND head.sequence = l.sequence
        ), dead AS MATERIALIZED (
            SELECT DISTINCT ON (ordering_key, destination)
                   ordering_key, destination, sequence, reason
              FROM (SELECT ordering_key, named_destination AS destination, sequence, split_from,
                           reason
                      FROM {dead} WHERE blocks_key ORDER BY ordering_key LIMIT {CANDIDATES}) d
             ORDER BY ordering_key, destination, coalesce(split_from, sequence)
        ), candidate AS (
            SELECT * FROM first
            UNION ALL
            SELECT ordering_key, destination, sequence, 'dead', reason, NULL, true FROM dead
        ), most AS MATERIALIZED (
            SELECT * FROM (SELECT c.*, {roughly} AS roughly FROM candidate c OFFSET 0) c
             WHERE roughly > 0 ORDER BY roughly DESC, ordering_key, destination LIMIT $1
        )
        SELECT ordering_key, destination, sequence, status, reason, seconds_left,
               least(waiting, $5) AS waiting, waiting > $5 AS waiting_is_capped
          FROM (SELECT m.*, {exactly} AS waiting FROM most m OFFSET 0) m
         ORDER BY waiting DESC, ordering_key, destination",
        outbox = name.outbox(),
        dead = name.dead(),
        roughly = behind("c", &ROUGHLY.to_string()),
        exactly = behind("m", "$5 + 1"),
    )
}
