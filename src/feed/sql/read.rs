//! Reads feeds.

use std::time::SystemTime;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{
    ExpressionMethods, OptionalExtension, PgConnection, QueryDsl, Queryable, RunQueryDsl,
};
use uuid::Uuid;

use super::all::all_feeds;
use crate::feed::cursor::{Cursor, Mark};
use crate::feed::event::FeedEvent;
use crate::name::OutboxName;
use crate::schema::values::{as_micros, from_micros, system_time};
use crate::sql::statement::statement;
use crate::sql::table::feed_event;

/// The most bytes of the payloads and headers of a page, unless a single event has more.
const PAGE_BYTES: i64 = 4 << 20;

/// A feed that can be read: one of the settings, or of an endpoint that is there.
#[derive(Debug, Clone)]
pub struct FeedRow {
    /// The name.
    pub name: String,
    /// The registration of the endpoint. `None`: a destination of the settings.
    pub registration: Option<Uuid>,
    /// The tenant of the endpoint.
    pub tenant_id: Option<Uuid>,
    /// The cursor of the last emptied event.
    pub(crate) base: Cursor,
}

/// The columns of an event that a cursor has.
type CursorSql = (BigInt, Nullable<SqlUuid>, Nullable<Timestamptz>);
type CursorValues = (i64, Option<Uuid>, Option<PgTimestamp>);

fn cursor((position, id, stored_at): CursorValues) -> Cursor {
    let stored_at = stored_at.map(|time| time.0);
    Cursor::new(position, id.map(|id| Mark { id, stored_at }))
}

type FeedSql = (Text, Nullable<SqlUuid>, Nullable<SqlUuid>, CursorSql);
type FeedValues = (String, Option<Uuid>, Option<Uuid>, CursorValues);

fn feed_row((name, registration, tenant_id, base): FeedValues) -> FeedRow {
    FeedRow {
        name,
        registration,
        tenant_id,
        base: cursor(base),
    }
}

/// The feed of this name, if it can be read.
///
/// Text: a table made of two, as [`all_feeds`] says.
pub(crate) fn feed(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &str,
) -> QueryResult<Option<FeedRow>> {
    let row: Option<FeedValues> = statement(format!(
        "SELECT name, registration, tenant_id, base, base_id, base_stored_at FROM {feed} f WHERE name = $1",
        feed = all_feeds(name),
    ))
    .bind::<Text, _>(feed)
    .giving::<FeedSql>()
    .get_result(conn)
    .optional()?;
    Ok(row.map(feed_row))
}

/// The cursor of the last event, or of the last emptied one: both as they are now, because events may have been emptied
/// since the feed was read.
///
/// Text: a lateral join.
pub(crate) fn last(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &FeedRow,
) -> QueryResult<Cursor> {
    let last: Option<CursorValues> = statement(format!(
        "SELECT coalesce(e.position, f.base), CASE WHEN e.position IS NULL THEN f.base_id ELSE e.message_id END,
                CASE WHEN e.position IS NULL THEN f.base_stored_at ELSE e.stored_at END
           FROM {feed} f LEFT JOIN LATERAL (SELECT e.position, e.message_id, e.stored_at FROM {event} e
                WHERE e.feed = f.name AND e.position > f.base ORDER BY e.position DESC LIMIT 1) e ON true
          WHERE f.name = $1 AND f.registration IS NOT DISTINCT FROM $2",
        event = name.feed_event(),
        feed = all_feeds(name),
    ))
    .bind::<Text, _>(&feed.name)
    .bind::<Nullable<SqlUuid>, _>(feed.registration)
    .giving::<CursorSql>()
    .get_result(conn)
    .optional()?;
    Ok(last.map_or(feed.base, cursor))
}

/// The cursor before the first event that was stored at this time or later. Times ascend with positions, so a binary search
/// finds it.
pub(crate) fn before(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &FeedRow,
    time: SystemTime,
) -> QueryResult<Cursor> {
    let time = from_micros(as_micros(time));
    let mut found = feed.base;
    let (mut low, mut high) = (feed.base.position(), last(conn, name, feed)?.position());
    while low < high {
        let middle = low + (high - low + 1) / 2;
        let at: Option<(PgTimestamp, Uuid)> = feed_event::table(name.feed_event())
            .filter(feed_event::feed.eq(&feed.name))
            .filter(feed_event::position.eq(middle))
            .select((feed_event::stored_at, feed_event::message_id))
            .first(conn)
            .optional()?;
        match at {
            Some((stored_at, id)) if stored_at.0 < time.0 => {
                (low, found) = (middle, cursor((middle, Some(id), Some(stored_at))));
            }
            Some(_) => high = middle - 1,
            // Emptied meanwhile: the page that begins here is read again.
            None => return Ok(found),
        }
    }
    Ok(found)
}

#[derive(Queryable)]
struct EventRow {
    position: i64,
    message_id: Uuid,
    sequence: i64,
    topic: String,
    payload: Option<String>,
    headers: Option<String>,
    ordering_key: Option<String>,
    tenant_id: Option<Uuid>,
    created_at: PgTimestamp,
    occurred_at: Option<PgTimestamp>,
    stored_at: PgTimestamp,
}

/// The events from this position on, at most so many, and so many as fill a page. None if the feed has another registration
/// by now: its events are not for the readers of this one.
///
/// Text: sums over the rows before: first of what the server stores, so that it reads no large payloads for nothing.
pub(crate) fn events(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &FeedRow,
    from: i64,
    most: i64,
) -> QueryResult<Vec<FeedEvent>> {
    let rows: Vec<EventRow> = statement(format!(
        "SELECT position, message_id, sequence, topic, payload::text, headers::text, ordering_key, tenant_id, created_at,
                occurred_at, stored_at
           FROM (SELECT *, sum(bytes) OVER (ORDER BY position) - bytes AS before
                   FROM (SELECT *, coalesce(octet_length(payload::text), 0) + coalesce(octet_length(headers::text), 0) AS bytes
                           FROM (SELECT *, sum(stored) OVER (ORDER BY position) - stored AS stored_before
                                   FROM (SELECT *, coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(headers), 0) AS stored
                                           FROM {event} WHERE feed = $1 AND position >= $2 ORDER BY position LIMIT $3) e) e
                          WHERE stored_before < $4) e) e
          WHERE before < $4
            AND EXISTS (SELECT FROM {feed} f WHERE f.name = $1 AND f.registration IS NOT DISTINCT FROM $5)
          ORDER BY position",
        event = name.feed_event(),
        feed = all_feeds(name),
    ))
    .bind::<Text, _>(&feed.name)
    .bind::<BigInt, _>(from)
    .bind::<BigInt, _>(most)
    .bind::<BigInt, _>(PAGE_BYTES)
    .bind::<Nullable<SqlUuid>, _>(feed.registration)
    .giving::<(
        BigInt,
        SqlUuid,
        BigInt,
        Text,
        Nullable<Text>,
        Nullable<Text>,
        Nullable<Text>,
        Nullable<SqlUuid>,
        Timestamptz,
        Nullable<Timestamptz>,
        Timestamptz,
    )>()
    .load(conn)?;
    let event = |row: EventRow| FeedEvent {
        position: row.position,
        message_id: row.message_id,
        sequence: row.sequence,
        topic: row.topic,
        payload: row.payload,
        headers: row.headers,
        ordering_key: row.ordering_key,
        tenant_id: row.tenant_id,
        created_at: system_time(row.created_at),
        occurred_at: row.occurred_at.map(system_time),
        stored_at: row.stored_at.0,
    };
    Ok(rows.into_iter().map(event).collect())
}

/// Those of these feeds that have an event behind the position, or that nobody can read any more: one query for all that wait.
/// Looks only into the parts that were opened last, which have what came in a minute.
///
/// Text: pairs of two arrays.
pub(crate) fn changed(
    conn: &mut PgConnection,
    name: &OutboxName,
    waiting: &[(&str, i64)],
) -> QueryResult<Vec<(String, i64)>> {
    let (feeds, positions): (Vec<&str>, Vec<i64>) = waiting.iter().copied().unzip();
    statement(format!(
        "SELECT w.feed, w.position
           FROM unnest($1::text[], $2::bigint[]) w(feed, position)
           LEFT JOIN (SELECT name FROM {feed} f WHERE name = ANY($1)) f ON f.name = w.feed
          WHERE f.name IS NULL
             OR EXISTS (SELECT FROM {event} e WHERE e.feed = w.feed AND e.position > w.position
                    AND e.part IN (0, ({opened} LIMIT 1), ({opened} OFFSET 1 LIMIT 1)))",
        event = name.feed_event(),
        feed = all_feeds(name),
        opened = format_args!(
            "SELECT part FROM {} WHERE opened_at IS NOT NULL ORDER BY opened_at DESC",
            name.feed_part()
        ),
    ))
    .bind::<Array<Text>, _>(feeds)
    .bind::<Array<BigInt>, _>(positions)
    .giving::<(Text, BigInt)>()
    .load(conn)
}
