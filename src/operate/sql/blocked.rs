//! Blocked ordering keys: their first message waits for its time, is a dead letter, or is due and cannot be sent (paused,
//! or without a relay that serves it). The query starts from the blocking messages, so the messages behind them are only
//! counted.
//!
//! Text: WITH, and a subquery for each row (LATERAL).

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Double, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use super::why::{WaitReason, WhyFacts};
use crate::engine::claim::sql::streams::streams;
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::sql::looking::{looking, looking_briefly};
use crate::sql::statement::unprepared_statement;
use crate::status::Status;

/// The most messages read that are not due yet, and the most dead letters read that block their key.
const CANDIDATES: i64 = 2_000;

/// The most messages counted behind each candidate, to find the keys with the most messages.
const ROUGHLY: i64 = 50;
/// The most messages counted for all keys that are shown.
const COUNTED: i64 = 200_000;
/// The most messages counted for one key.
const MOST_COUNTED: i64 = 10_000;

/// How long finding the lanes (topics and destinations) may take; it usually takes 1 ms.
const PATIENCE: Duration = Duration::from_millis(200);

/// An ordering key whose messages wait for a blocking message: one that is delayed, retrying, dead, or due and held up.
#[derive(Debug, Clone, diesel::QueryableByName, serde::Serialize)]
#[non_exhaustive]
pub struct BlockedKey {
    /// The ordering key.
    #[diesel(sql_type = Text)]
    pub ordering_key: String,
    /// The destination that the messages name; empty if they name none.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// The blocking message.
    #[diesel(sql_type = BigInt)]
    pub sequence: Sequence,
    /// The state of the blocking message: retrying, pending (delayed or held up) or dead (until requeued or discarded).
    #[diesel(sql_type = Text)]
    pub status: Status,
    /// Why the blocking message failed: the name of a [`ReasonCode`](crate::ReasonCode).
    #[diesel(sql_type = Nullable<Text>)]
    pub reason: Option<String>,
    /// Why the blocking message is not sent although it is due: the text of a
    /// [`WaitReason`](crate::admin::WaitReason), such as `no relay serves it`.
    #[diesel(sql_type = Nullable<Text>)]
    pub waits: Option<String>,
    /// Seconds until the blocking message is due. `None`: it is dead, held up, or never due.
    #[diesel(sql_type = Nullable<Double>)]
    pub seconds_left: Option<f64>,
    /// The number of messages behind the blocking message.
    #[diesel(sql_type = BigInt)]
    pub waiting: i64,
    /// More messages wait: counting stopped at this number.
    #[diesel(sql_type = Bool)]
    pub waiting_is_capped: bool,
}

/// The blocked keys, those with the most messages first, at most `limit`. If more than [`CANDIDATES`] messages
/// could block a key, the messages that are due soonest are read, and the dead letters whose keys come first.
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
    let names = lanes
        .iter()
        .map(|(_, destination)| destination.as_str())
        .collect();
    let facts = WhyFacts::load(conn, name, &names, None)?;
    let waits = |(topic, destination): &(String, String)| {
        // Without a relay everything waits, not a key.
        let reason = facts.of_lane(topic, destination);
        let reason = reason.filter(|reason| !matches!(reason, WaitReason::NoRelay { .. }));
        reason.map(|reason| reason.to_string())
    };
    let waits: Vec<Option<String>> = lanes.iter().map(waits).collect();
    let (topics, destinations): (Vec<String>, Vec<String>) = lanes.into_iter().unzip();
    looking(conn, None, |conn| {
        unprepared_statement(statement(name))
            .bind::<BigInt, _>(limit)
            .bind::<Array<Text>, _>(&topics)
            .bind::<Array<Text>, _>(&destinations)
            .bind::<BigInt, _>((CANDIDATES / number).max(20))
            .bind::<BigInt, _>((COUNTED / limit.max(1)).clamp(100, MOST_COUNTED))
            .bind::<Array<Nullable<Text>>, _>(&waits)
            .load(conn)
    })
}

/// `$1`: limit; `$2`, `$3`: lanes of keyed messages; `$4`: candidates of each lane; `$5`: where counting stops; `$6`: what
/// holds up the due messages of each lane, if anything does.
fn statement(name: &OutboxName) -> String {
    // OFFSET 0 makes the planner run the subqueries as written: it misjudges these few rows.
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
            SELECT l.*, CASE WHEN l.available_at <= now() THEN lane.waits END AS waits
              FROM unnest($2::text[], $3::text[], $6::text[]) AS lane(topic, destination, waits)
             CROSS JOIN LATERAL (
                (SELECT {columns} FROM {outbox} o
                  WHERE o.ordering_key IS NOT NULL AND o.topic = lane.topic
                    AND o.destination = lane.destination AND o.available_at > now()
                  ORDER BY o.available_at, o.sequence LIMIT $4)
                UNION ALL
                (SELECT {columns} FROM {outbox} o
                  WHERE lane.waits IS NOT NULL AND o.ordering_key IS NOT NULL AND o.topic = lane.topic
                    AND o.destination = lane.destination AND o.available_at <= now()
                  ORDER BY o.available_at, o.sequence LIMIT $4)) l
        ), first AS MATERIALIZED (
            SELECT l.ordering_key, l.destination, l.sequence,
                   CASE WHEN l.attempts > 0 THEN 'retrying' ELSE 'pending' END AS status,
                   l.last_error_code AS reason, l.waits,
                   CASE WHEN l.waits IS NULL THEN extract(epoch FROM CASE WHEN isfinite(l.available_at)
                           THEN l.available_at - clock_timestamp() END)::float8 END AS seconds_left,
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
            SELECT ordering_key, destination, sequence, 'dead', reason, NULL, NULL, true FROM dead
        ), most AS MATERIALIZED (
            SELECT * FROM (SELECT c.*, {roughly} AS roughly FROM candidate c OFFSET 0) c
             WHERE roughly > 0 ORDER BY roughly DESC, ordering_key, destination LIMIT $1
        )
        SELECT ordering_key, destination, sequence, status, reason, waits, seconds_left,
               least(waiting, $5) AS waiting, waiting > $5 AS waiting_is_capped
          FROM (SELECT m.*, {exactly} AS waiting FROM most m OFFSET 0) m
         ORDER BY waiting DESC, ordering_key, destination",
        outbox = name.outbox(),
        dead = name.dead(),
        columns = "o.ordering_key, o.destination, o.sequence, o.attempts, o.available_at, o.last_error_code, o.locked_by",
        roughly = behind("c", &ROUGHLY.to_string()),
        exactly = behind("m", "$5 + 1"),
    )
}
