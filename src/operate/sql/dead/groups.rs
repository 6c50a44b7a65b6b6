//! Dead letters, grouped by reason, topic and destination.

use diesel::pg::Pg;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Nullable, Text, Timestamptz, Untyped};
use diesel::{PgConnection, RunQueryDsl};

use super::{DeadCondition, is_meant};
use crate::message::Sequence;
use crate::name::OutboxName;
use crate::operate::sql::selection::Selection;
use crate::schema::rfc3339::Rfc3339;
use crate::sql::looking::looking;
use crate::sql::statement::unprepared;
use crate::sql::table::dead;

/// Dead letters of one reason, topic and destination.
#[derive(Debug, Clone, diesel::QueryableByName, serde::Serialize)]
#[non_exhaustive]
pub struct DeadGroup {
    /// Why the messages were dead-lettered: the name of a [`ReasonCode`](crate::ReasonCode).
    #[diesel(sql_type = Text)]
    pub reason: String,
    /// The topic of the messages.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// The destination of the messages; empty if no destination serves their topic.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// The number of dead letters.
    #[diesel(sql_type = BigInt)]
    pub count: i64,
    /// When the oldest of them was dead-lettered, RFC 3339.
    #[diesel(sql_type = Timestamptz, deserialize_as = Rfc3339)]
    pub oldest_dead_lettered_at: String,
    /// When the latest of them was dead-lettered, RFC 3339.
    #[diesel(sql_type = Timestamptz, deserialize_as = Rfc3339)]
    pub latest_dead_lettered_at: String,
    /// An example: the dead letter with the highest sequence.
    #[diesel(sql_type = BigInt)]
    pub example_sequence: Sequence,
    /// The last error of the example.
    #[diesel(sql_type = Nullable<Text>)]
    pub example_error: Option<String>,
}

/// The groups with the most letters first, at most `limit`.
pub(crate) fn groups(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> QueryResult<Vec<DeadGroup>> {
    let groups = Groups {
        dead: dead::table(name.dead()),
        is_meant: is_meant(selection),
        limit,
    };
    looking(conn, None, |conn| unprepared(groups).load(conn))
}

/// Groups dead letters. Diesel renders the table and the filter.
///
/// Text: Diesel joins no subquery.
struct Groups<'a> {
    dead: dead::table,
    is_meant: DeadCondition<'a>,
    limit: i64,
}

impl QueryFragment<Pg> for Groups<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT g.reason, g.topic, g.destination, g.count, g.oldest AS oldest_dead_lettered_at,
                    g.latest AS latest_dead_lettered_at, g.example_sequence, e.last_error AS example_error
               FROM (SELECT reason, topic, destination, count(*) AS count, min(dead_lettered_at) AS oldest,
                            max(dead_lettered_at) AS latest, max(sequence) AS example_sequence
                       FROM ",
        );
        self.dead.walk_ast(out.reborrow())?;
        out.push_sql(" WHERE ");
        self.is_meant.walk_ast(out.reborrow())?;
        out.push_sql(" GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT ");
        out.push_bind_param::<BigInt, _>(&self.limit)?;
        out.push_sql(") g CROSS JOIN LATERAL (SELECT dead.last_error FROM ");
        self.dead.walk_ast(out.reborrow())?;
        out.push_sql(
            " WHERE dead.sequence = g.example_sequence AND dead.reason = g.reason
                AND dead.topic = g.topic AND dead.destination = g.destination LIMIT 1) e
              ORDER BY g.count DESC, 1, 2, 3",
        );
        Ok(())
    }
}

impl QueryId for Groups<'_> {
    type QueryId = ();

    const HAS_STATIC_QUERY_ID: bool = false;
}

impl Query for Groups<'_> {
    type SqlType = Untyped;
}
