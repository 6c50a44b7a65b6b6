//! What dead letters died of.

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use super::super::looking::looking;
use super::super::place::rfc3339;
use super::{DeadFilter, condition, filtered};
use crate::name::OutboxName;

/// Dead letters of one reason, topic and destination.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct DeadGroup {
    /// Why they died: the name of a [`ReasonCode`](crate::ReasonCode).
    #[diesel(sql_type = Text)]
    pub reason: String,
    /// Their topic.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// Their named destination, or empty.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// How many.
    #[diesel(sql_type = BigInt)]
    pub count: i64,
    /// When the first one died, RFC 3339.
    #[diesel(sql_type = Text)]
    pub oldest_died_at: String,
    /// When the last one died, RFC 3339.
    #[diesel(sql_type = Text)]
    pub latest_died_at: String,
    /// One of them: the one with the highest sequence.
    #[diesel(sql_type = BigInt)]
    pub example_sequence: i64,
    /// Its last error.
    #[diesel(sql_type = Nullable<Text>)]
    pub example_error: Option<String>,
}

/// The most frequent first, `limit` at most.
pub(crate) fn groups(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &DeadFilter,
    limit: i64,
) -> QueryResult<Vec<DeadGroup>> {
    let sql = format!(
        "SELECT g.reason, g.topic, g.destination, g.count,
                {} AS oldest_died_at, {} AS latest_died_at,
                g.example_sequence, e.last_error AS example_error
           FROM (SELECT reason, topic, destination, count(*) AS count, min(died_at) AS oldest,
                        max(died_at) AS latest, max(sequence) AS example_sequence
                   FROM {dead} d WHERE {}
                  GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT $7) g
           JOIN {dead} e ON e.sequence = g.example_sequence
          ORDER BY g.count DESC, 1, 2, 3",
        rfc3339("g.oldest"),
        rfc3339("g.latest"),
        condition(),
        dead = name.dead(),
    );
    looking(conn, None, |conn| {
        filtered(sql, filter).bind::<BigInt, _>(limit).load(conn)
    })
}
