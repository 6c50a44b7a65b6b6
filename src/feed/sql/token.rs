//! Tokens of readers, stored as digests.

use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Binary, Bool, Text};
use diesel::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, PgConnection, QueryDsl,
    RunQueryDsl, delete, insert_into,
};
use sha2::{Digest, Sha256};

use crate::name::OutboxName;
use crate::sql::functions::clock_timestamp;
use crate::sql::millis;
use crate::sql::statement::statement;
use crate::sql::table::feed_reader;

/// How far a reader that is not at the end is noted at most so often.
const NOTED_EVERY: Duration = Duration::from_secs(60);

fn digest(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

/// Adds a token, and ends the older ones after this time.
///
/// Text: Diesel has no interval arithmetic with `least`.
pub(crate) fn add(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &str,
    token: &str,
    keep: Duration,
) -> QueryResult<()> {
    delete(feed_reader::table(name.feed_reader()))
        .filter(feed_reader::feed.eq(feed))
        .filter(
            feed_reader::valid_until
                .assume_not_null()
                .le(clock_timestamp()),
        )
        .execute(conn)?;
    statement(format!(
        "UPDATE {reader} SET valid_until = least(valid_until, clock_timestamp() + $2 * interval '1 millisecond') WHERE feed = $1",
        reader = name.feed_reader(),
    ))
    .bind::<Text, _>(feed)
    .bind::<BigInt, _>(millis(keep))
    .execute(conn)?;
    insert_into(feed_reader::table(name.feed_reader()))
        .values((
            feed_reader::feed.eq(feed),
            feed_reader::token_digest.eq(digest(token)),
        ))
        .execute(conn)?;
    Ok(())
}

/// Whether the token may read the feed now.
pub(crate) fn is_valid(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &str,
    token: &str,
) -> QueryResult<bool> {
    let is_open = feed_reader::valid_until
        .is_null()
        .or(feed_reader::valid_until
            .assume_not_null()
            .gt(clock_timestamp()));
    let found = feed_reader::table(name.feed_reader())
        .filter(feed_reader::feed.eq(feed))
        .filter(feed_reader::token_digest.eq(digest(token)))
        .filter(is_open)
        .count()
        .get_result::<i64>(conn)?;
    Ok(found > 0)
}

/// Notes how far the reader of this feed with this token is. It is there: it has asked for what follows this position. Within
/// a minute it is noted once, and once more if the reader has all events (`has_all`).
///
/// Text: a condition on the age of a value that may be absent.
pub(crate) fn note(
    conn: &mut PgConnection,
    name: &OutboxName,
    (feed, token): (&str, &str),
    position: i64,
    has_all: bool,
) -> QueryResult<()> {
    statement(format!(
        "UPDATE {reader} SET last_position = $3, last_read_at = clock_timestamp()
          WHERE feed = $1 AND token_digest = $2
            AND (last_read_at IS NULL OR last_read_at <= clock_timestamp() - $4 * interval '1 millisecond'
                 OR last_read_at > clock_timestamp() OR ($5 AND last_position IS DISTINCT FROM $3))",
        reader = name.feed_reader(),
    ))
    .bind::<Text, _>(feed)
    .bind::<Binary, _>(digest(token))
    .bind::<BigInt, _>(position)
    .bind::<BigInt, _>(millis(NOTED_EVERY))
    .bind::<Bool, _>(has_all)
    .execute(conn)
    .map(drop)
}
