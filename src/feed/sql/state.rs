//! What people see of feeds.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Double, Nullable, Text, Uuid as SqlUuid};
use diesel::{ExpressionMethods, PgConnection, QueryDsl, RunQueryDsl};
use uuid::Uuid;

use super::all::all_feeds;
use crate::name::OutboxName;
use crate::schema::values::system_time;
use crate::sql::statement::statement;
use crate::sql::table::feed_reader;

/// A feed, and how far it is read.
#[derive(Debug, Clone)]
pub struct FeedState {
    /// The name.
    pub name: String,
    /// The tenant of the endpoint.
    pub tenant_id: Option<Uuid>,
    /// `false`: a destination of the settings.
    pub is_of_endpoint: bool,
    /// The position of the first event that is kept; above the last position: none is.
    pub first_position: i64,
    /// The position of the last event that there ever was.
    pub last_position: i64,
    /// Up to where readers with tokens have read.
    pub read_to: i64,
    /// The time since the first event that nobody has read was stored. `None`: all are read.
    pub lag: Option<Duration>,
    /// Those with tokens, newest token first; also with tokens that have ended since the last one was made.
    pub readers: Vec<ReaderState>,
}

impl FeedState {
    /// The events that no reader with a token has read.
    pub fn unread(&self) -> u64 {
        u64::try_from(self.last_position - self.read_to).unwrap_or(0)
    }

    /// When a reader with a token was last here.
    pub fn last_read_at(&self) -> Option<SystemTime> {
        self.readers.iter().filter_map(|one| one.last_read_at).max()
    }
}

/// A reader with a token.
#[derive(Debug, Clone)]
pub struct ReaderState {
    /// When the token was made.
    pub created_at: SystemTime,
    /// When the token ends. `None`: it stays.
    pub valid_until: Option<SystemTime>,
    /// The position up to which the reader has said to have events; at most a minute old.
    pub last_position: Option<i64>,
    /// When the reader has said so.
    pub last_read_at: Option<SystemTime>,
}

type Row = (String, Option<Uuid>, bool, i64, i64, i64, Option<f64>);
type ReaderRow = (
    String,
    PgTimestamp,
    Option<PgTimestamp>,
    Option<i64>,
    Option<PgTimestamp>,
);

/// Which feeds are meant. By default, all.
#[derive(Debug, Clone, Copy, Default)]
pub struct WhichFeeds<'a> {
    /// Those with these names.
    pub names: Option<&'a [&'a str]>,
    /// Only those whose names come after this one.
    pub after: Option<&'a str>,
    /// At most so many.
    pub most: Option<u32>,
}

impl<'a> WhichFeeds<'a> {
    /// Those with these names.
    pub fn named(names: &'a [&'a str]) -> Self {
        Self {
            names: Some(names),
            ..Self::default()
        }
    }
}

/// These of the feeds that can be read, by name.
///
/// Text: the last row of each group, by an index.
pub(crate) fn states(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: WhichFeeds<'_>,
) -> QueryResult<Vec<FeedState>> {
    let rows: Vec<Row> = statement(format!(
        "SELECT name, tenant_id, of_endpoint, base + 1, last, read_to,
                extract(epoch FROM clock_timestamp() - (SELECT e.stored_at FROM {event} e
                    WHERE e.feed = f.name AND e.position = read_to + 1))::float8
           FROM (SELECT f.name, f.tenant_id, f.registration IS NOT NULL AS of_endpoint, f.base, p.last,
                        least(p.last, greatest(f.base, (SELECT max(r.last_position) FROM {reader} r WHERE r.feed = f.name))) AS read_to
                   FROM (SELECT * FROM {feed} f WHERE ($1 IS NULL OR name = ANY($1)) AND ($2 IS NULL OR name > $2)
                          ORDER BY name LIMIT $3) f,
                        LATERAL (SELECT greatest(f.base, (SELECT e.position FROM {event} e WHERE e.feed = f.name
                            ORDER BY e.position DESC LIMIT 1)) AS last) p) f
          ORDER BY name",
        event = name.feed_event(),
        reader = name.feed_reader(),
        feed = all_feeds(name),
    ))
    .bind::<Nullable<Array<Text>>, _>(which.names)
    .bind::<Nullable<Text>, _>(which.after)
    .bind::<Nullable<BigInt>, _>(which.most.map(i64::from))
    .giving::<(Text, Nullable<SqlUuid>, diesel::sql_types::Bool, BigInt, BigInt, BigInt, Nullable<Double>)>()
    .load(conn)?;
    let found: Vec<&str> = rows.iter().map(|row| row.0.as_str()).collect();
    let readers: Vec<ReaderRow> = feed_reader::table(name.feed_reader())
        .filter(feed_reader::feed.eq_any(&found))
        .order(feed_reader::created_at.desc())
        .select((
            feed_reader::feed,
            feed_reader::created_at,
            feed_reader::valid_until,
            feed_reader::last_position,
            feed_reader::last_read_at,
        ))
        .load(conn)?;
    let mut of_feed: HashMap<String, Vec<ReaderState>> = HashMap::new();
    for (feed, created_at, valid_until, last_position, last_read_at) in readers {
        of_feed.entry(feed).or_default().push(ReaderState {
            created_at: system_time(created_at),
            valid_until: valid_until.map(system_time),
            last_position,
            last_read_at: last_read_at.map(system_time),
        });
    }
    let state = |(name, tenant_id, is_of_endpoint, first, last, read_to, lag): Row| FeedState {
        readers: of_feed.remove(&name).unwrap_or_default(),
        name,
        tenant_id,
        is_of_endpoint,
        first_position: first,
        last_position: last,
        read_to,
        lag: lag.and_then(|lag| Duration::try_from_secs_f64(lag.max(0.0)).ok()),
    };
    Ok(rows.into_iter().map(state).collect())
}
