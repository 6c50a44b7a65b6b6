//! How far readers of feeds lag behind.

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Double, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use super::MOST_ROWS;
use crate::name::OutboxName;
use crate::sql::absent::all_endpoints_text;
use crate::sql::statement::statement;

/// What no reader with a token has read of a feed.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct FeedLag {
    /// The feed.
    pub name: String,
    /// The number of its events.
    pub events: i64,
    /// Seconds since the first of them was stored; 0: there are none.
    pub seconds: f64,
}

/// The feeds that have events or had some, those with most events first.
///
/// Text: the last row of each group, by an index.
pub(super) fn lags(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<FeedLag>> {
    let rows: Vec<(String, i64, Option<f64>)> = statement(format!(
        "SELECT name, last - read_to,
                extract(epoch FROM clock_timestamp() - (SELECT e.stored_at FROM {event} e
                    WHERE e.feed = f.name AND e.position = read_to + 1))::float8
           FROM (SELECT f.name, p.last, least(p.last, r.position) AS read_to
                   FROM {feed} f,
                        LATERAL (SELECT greatest(f.base, (SELECT e.position FROM {event} e WHERE e.feed = f.name
                            ORDER BY e.position DESC LIMIT 1)) AS last) p,
                        LATERAL (SELECT greatest(f.base, max(last_position)) AS position FROM {reader} WHERE feed = f.name) r
                  WHERE f.registration IS NULL
                     OR EXISTS (SELECT FROM {endpoints} d WHERE d.name = f.name AND d.id = f.registration)
                  ORDER BY p.last - least(p.last, r.position) DESC, f.name LIMIT $1) f
          ORDER BY 2 DESC, 1",
        event = name.feed_event(),
        reader = name.feed_reader(),
        feed = name.feed(),
        endpoints = all_endpoints_text(name),
    ))
    .bind::<BigInt, _>(MOST_ROWS)
    .giving::<(Text, BigInt, Nullable<Double>)>()
    .load(conn)?;
    let lag = |(name, events, seconds): (_, _, Option<f64>)| FeedLag {
        name,
        events,
        seconds: seconds.unwrap_or(0.0).max(0.0),
    };
    Ok(rows.into_iter().map(lag).collect())
}
