//! Since when nobody has read a feed, according to the row of its endpoint: the feed is `failing`, since `failing_since`.
//! Nothing is sent to feeds, so nobody else writes these columns of them.
//!
//! A feed is unread if it has events that no reader with a token has, and no such reader was here for a while: since the
//! last one was here, or since the first event was stored. Relays write the row: of all relays, one makes each change, and
//! writes the event in the same transaction.

use std::time::Duration;

use diesel::data_types::PgTimestamp;
use diesel::prelude::{ExpressionMethods, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Interval, Nullable, Text, Timestamptz};
use diesel::{PgConnection, PgExpressionMethods, update};

use crate::name::OutboxName;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::absent::all_endpoints;
use crate::sql::functions::interval;
use crate::sql::statement::statement;
use crate::sql::table::endpoint;

/// The most feeds of one look.
const MOST: i64 = 500;

/// A feed whose row says something else than its events and readers.
#[derive(Debug)]
pub(crate) struct TurnedFeed {
    pub(crate) name: String,
    /// What the row says. `None`: it is read.
    before: Option<PgTimestamp>,
    /// What is so now.
    now: Option<PgTimestamp>,
    /// A reader was here since.
    is_read: bool,
}

/// What a change of the row tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnreadTurn {
    Unread(PgTimestamp),
    /// It was not read since this time, and is now.
    Read(PgTimestamp),
}

impl TurnedFeed {
    /// `None`: the feed was disabled, or its events were emptied.
    pub(crate) fn turn(&self) -> Option<UnreadTurn> {
        match (self.now, self.before) {
            (Some(since), _) => Some(UnreadTurn::Unread(since)),
            (None, Some(since)) if self.is_read => Some(UnreadTurn::Read(since)),
            (None, _) => None,
        }
    }
}

type TurnedRow = (
    String,
    Option<PgTimestamp>,
    Option<PgTimestamp>,
    Option<PgTimestamp>,
    bool,
);

/// Of the feeds behind this name, those that have become unread or read, and the last feed that was looked at, if there may be
/// more. `after`: how long nobody must have read.
///
/// Text: lateral subqueries. A feed that was read lately costs no look at its events.
pub(crate) fn turned(
    conn: &mut PgConnection,
    name: &OutboxName,
    behind: &str,
    after: Duration,
) -> QueryResult<(Vec<TurnedFeed>, Option<String>)> {
    if !has_feeds(conn, name)? {
        return Ok((Vec::new(), None));
    }
    let rows: Vec<TurnedRow> = statement(format!(
        "SELECT d.name, d.failing_since, u.since, r.last_read_at, d.enabled
           FROM (SELECT name, id, created_at, failing_since, enabled FROM {endpoint}
                  WHERE kind = 'feed' AND name > $1 ORDER BY name LIMIT $3) d
           LEFT JOIN {feed} f ON f.name = d.name AND f.registration = d.id,
                LATERAL (SELECT max(last_read_at) AS last_read_at, max(last_position) AS position
                           FROM {reader} WHERE feed = d.name) r,
                LATERAL (SELECT CASE
                    WHEN NOT d.enabled OR r.last_read_at > clock_timestamp() - $2 THEN NULL
                    WHEN coalesce((SELECT e.position FROM {event} e WHERE e.feed = d.name ORDER BY e.position DESC LIMIT 1), 0)
                         <= greatest(f.base, r.position) THEN NULL
                    ELSE greatest(r.last_read_at, CASE
                        WHEN f.base > 0 THEN d.created_at
                        ELSE (SELECT e.stored_at FROM {event} e WHERE e.feed = d.name ORDER BY e.position LIMIT 1) END)
                    END AS since) s,
                LATERAL (SELECT CASE WHEN s.since <= clock_timestamp() - $2 THEN s.since END AS since) u
          ORDER BY d.name",
        endpoint = name.endpoint(),
        feed = name.feed(),
        reader = name.feed_reader(),
        event = name.feed_event(),
    ))
    .bind::<Text, _>(behind)
    .bind::<Interval, _>(interval(after))
    .bind::<BigInt, _>(MOST)
    .giving::<(Text, Nullable<Timestamptz>, Nullable<Timestamptz>, Nullable<Timestamptz>, Bool)>()
    .load(conn)?;
    let is_full = i64::try_from(rows.len()).is_ok_and(|found| found >= MOST);
    let last = rows.last().map(|row| row.0.clone()).filter(|_| is_full);
    let turned = rows
        .into_iter()
        .map(|(name, before, now, last_read_at, is_enabled)| TurnedFeed {
            name,
            is_read: is_enabled && last_read_at > before,
            before,
            now,
        });
    Ok((
        turned
            .filter(|one| one.before.is_some() != one.now.is_some())
            .collect(),
        last,
    ))
}

/// Writes the row, unless it has changed since. `false`: it has.
pub(crate) fn record(
    conn: &mut PgConnection,
    name: &OutboxName,
    feed: &TurnedFeed,
) -> QueryResult<bool> {
    let written = update(all_endpoints(name))
        .filter(endpoint::name.eq(&feed.name))
        .filter(endpoint::failing_since.is_not_distinct_from(feed.before))
        .set((
            endpoint::failing_since.eq(feed.now),
            endpoint::failing.eq(feed.now.is_some()),
        ))
        .execute(conn)?;
    Ok(written > 0)
}
