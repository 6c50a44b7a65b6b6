//! Empties old events.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Integer, Interval, Nullable};
use diesel::{OptionalExtension, PgConnection, RunQueryDsl};

use crate::name::OutboxName;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::functions::interval;
use crate::sql::statement::unprepared_statement;

/// Empties the parts that are older than the retention, and the oldest while all have more bytes than this. Returns how many,
/// and whether somebody reads one. `None`: the outbox has no feeds.
///
/// Text: the function's name is known only at run time.
pub(crate) fn rotate(
    conn: &mut PgConnection,
    name: &OutboxName,
    retention: Duration,
    most_bytes: Option<u64>,
) -> QueryResult<Option<(i32, bool)>> {
    if !has_feeds(conn, name)? {
        return Ok(None);
    }
    let most = most_bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    unprepared_statement(format!("SELECT * FROM {}($1, $2)", name.feed_rotate()))
        .bind::<Interval, _>(interval(retention))
        .bind::<Nullable<BigInt>, _>(most)
        .giving::<(Integer, Bool)>()
        .get_result(conn)
        .optional()
}
