//! Whether something is due that a claim would take: asked where a relay finds nothing.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};

use super::looking::looking_briefly;
use super::millis;
use crate::name::OutboxName;

/// How long the look may take.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(diesel::QueryableByName)]
struct FoundRow {
    #[diesel(sql_type = Bool)]
    is_there: bool,
}

/// Whether a lane has a message without an ordering key that has been due for as long, is claimed by
/// nobody, and could be locked. `false` also where the look takes too long.
pub(crate) fn is_claimable(
    conn: &mut PgConnection,
    name: &OutboxName,
    topic: &str,
    destination: &str,
    due_for: Duration,
) -> QueryResult<bool> {
    let found = looking_briefly(conn, PATIENCE, |conn| {
        sql_query(format!(
            "WITH first AS (
                SELECT sequence FROM {outbox}
                 WHERE ordering_key IS NULL AND topic = $1 AND destination = $2
                   AND available_at <= now() - $3 * interval '1 ms' AND locked_by IS NULL
                 ORDER BY available_at, sequence LIMIT 1
                   FOR NO KEY UPDATE SKIP LOCKED
             )
             SELECT EXISTS (SELECT FROM first) AS is_there",
            outbox = name.outbox()
        ))
        .bind::<Text, _>(topic)
        .bind::<Text, _>(destination)
        .bind::<BigInt, _>(millis(due_for))
        .get_result::<FoundRow>(conn)
    })?;
    Ok(found.is_some_and(|row| row.is_there))
}
