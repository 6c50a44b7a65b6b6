//! SQL: where the consumers of feeds in this database continue.
//!
//! Text: Diesel cannot qualify operators with their schema, as an application's search path requires.

use diesel::result::{OptionalExtension, QueryResult};
use diesel::sql_types::Text;
use diesel::upsert::excluded;
use diesel::{ExpressionMethods, PgConnection, RunQueryDsl, insert_into};

use crate::sql::functions::clock_timestamp;
use crate::sql::statement::statement;
use crate::sql::table::feed_position;

/// The table, found by the connection's search path.
const TABLE: &str = "outbox_feed_position";

/// A consumer and its feed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PositionKey<'a> {
    pub(crate) consumer: &'a str,
    pub(crate) feed: &'a str,
}

/// Where the consumer is; where it begins, if it was nowhere.
pub(crate) fn found_or(
    conn: &mut PgConnection,
    of: PositionKey<'_>,
    begin: &str,
) -> QueryResult<String> {
    let found: Option<String> = select(conn, of, "")?;
    if let Some(cursor) = found {
        return Ok(cursor);
    }
    insert_into(feed_position::table(TABLE))
        .values((
            feed_position::consumer.eq(of.consumer),
            feed_position::feed.eq(of.feed),
            feed_position::cursor.eq(begin),
        ))
        .on_conflict_do_nothing()
        .execute(conn)?;
    Ok(select(conn, of, "")?.unwrap_or_else(|| begin.to_owned()))
}

/// Locks the position until the end of the transaction. `None`: another process has locked it, or it was removed. It
/// waits for neither.
pub(crate) fn locked(conn: &mut PgConnection, of: PositionKey<'_>) -> QueryResult<Option<String>> {
    select(conn, of, "FOR UPDATE SKIP LOCKED")
}

fn select(conn: &mut PgConnection, of: PositionKey<'_>, lock: &str) -> QueryResult<Option<String>> {
    statement(format!(
        "SELECT cursor FROM {TABLE}
          WHERE consumer OPERATOR(pg_catalog.=) $1 AND feed OPERATOR(pg_catalog.=) $2 {lock}"
    ))
    .bind::<Text, _>(of.consumer)
    .bind::<Text, _>(of.feed)
    .giving::<Text>()
    .get_result(conn)
    .optional()
}

/// Writes where the consumer is.
pub(crate) fn write(conn: &mut PgConnection, of: PositionKey<'_>, cursor: &str) -> QueryResult<()> {
    insert_into(feed_position::table(TABLE))
        .values((
            feed_position::consumer.eq(of.consumer),
            feed_position::feed.eq(of.feed),
            feed_position::cursor.eq(cursor),
        ))
        .on_conflict((feed_position::consumer, feed_position::feed))
        .do_update()
        .set((
            feed_position::cursor.eq(excluded(feed_position::cursor)),
            feed_position::updated_at.eq(clock_timestamp()),
        ))
        .execute(conn)
        .map(drop)
}
