//! The number of waiting messages, at a cost that does not grow with the number.
//!
//! A small table is counted. In a large table, a loose index scan finds the lanes (a lane is the messages of one
//! topic and destination), and each lane is counted up to a limit. So small lanes are exact even next to huge
//! lanes. Lanes beyond the limit are estimated from some pages of the table: always the same pages, as long as
//! the table keeps its size. If an old snapshot keeps millions of dead entries in the indexes, reading by index
//! stops after a short time, and only the pages are read.
//!
//! Text: subqueries in FROM, `unnest` and TABLESAMPLE, and one list of counts for all of them.

mod dead;
mod lags;
pub(super) mod sample;

pub use self::lags::FeedLag;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Double, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl};

use crate::endpoints::sql::rows::{self, EndpointCounts};
use crate::endpoints::sql::served::{Unserved, served};
use crate::engine::claim::sql::streams::{FoundStream, streams};
use crate::name::OutboxName;
use crate::sql::looking::{looking, looking_briefly};
use crate::sql::statement::unprepared_statement;

/// Tables up to this size are counted (16 MiB in pages, about 10,000 messages).
pub(super) const COUNTED_PAGES: i64 = 2_000;

/// The rows to read by index, for all lanes together.
const ROWS: i64 = 6_000;
/// The fewest rows to read of one lane.
const LEAST_ROWS: i64 = 100;
/// The most rows to read of one lane.
const MOST_ROWS: i64 = 1_000;

/// How long reading by index may take; it usually takes a few milliseconds.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// The number of live messages, dead letters and endpoints of an outbox. Delivered messages are not
/// counted.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Depths {
    /// The live messages, by topic and destination, sorted.
    pub lanes: Vec<LaneDepth>,
    /// The dead letters, by topic and destination, sorted.
    pub dead: Vec<DeadDepth>,
    /// The endpoints.
    pub endpoints: EndpointCounts,
    /// The feeds, those with most events that nobody has read first.
    pub feeds: Vec<FeedLag>,
    /// At least one of the numbers is an estimate.
    pub is_estimate: bool,
}

/// The number of live messages of one topic and destination.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct LaneDepth {
    /// The topic.
    pub topic: String,
    /// The destination that the messages name; empty if they name none.
    pub destination: String,
    /// Messages not tried yet.
    pub pending: i64,
    /// Messages claimed by a relay. In a long lane, only the first messages are counted: relays claim those.
    pub sending: i64,
    /// Messages tried without success.
    pub retrying: i64,
    /// Seconds since the oldest due, unclaimed message became due. `None`: no message is due.
    pub oldest_due_seconds: Option<f64>,
    /// The numbers are estimates, because the lane is long.
    pub is_estimate: bool,
    /// `NO_ROUTE`: why relays are active, but no relay serves these messages. The messages wait and use no attempts.
    pub unserved: Option<Unserved>,
}

/// The number of dead letters of one topic and destination.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadDepth {
    /// The topic.
    pub topic: String,
    /// The destination that was used; empty if none was used.
    pub destination: String,
    /// The number of dead letters.
    pub count: i64,
    /// The number is an estimate.
    pub is_estimate: bool,
}

impl Depths {
    /// All messages not tried yet.
    ///
    /// ```
    /// use diesel_outbox::admin::Depths;
    ///
    /// assert_eq!(Depths::default().pending(), 0);
    /// ```
    pub fn pending(&self) -> i64 {
        self.lanes.iter().map(|lane| lane.pending).sum()
    }

    /// All messages that relays have claimed.
    ///
    /// ```
    /// use diesel_outbox::admin::Depths;
    ///
    /// assert_eq!(Depths::default().sending(), 0);
    /// ```
    pub fn sending(&self) -> i64 {
        self.lanes.iter().map(|lane| lane.sending).sum()
    }

    /// All messages tried without success, to be retried.
    ///
    /// ```
    /// use diesel_outbox::admin::Depths;
    ///
    /// assert_eq!(Depths::default().retrying(), 0);
    /// ```
    pub fn retrying(&self) -> i64 {
        self.lanes.iter().map(|lane| lane.retrying).sum()
    }

    /// All dead letters.
    ///
    /// ```
    /// use diesel_outbox::admin::Depths;
    ///
    /// assert_eq!(Depths::default().dead_letters(), 0);
    /// ```
    pub fn dead_letters(&self) -> i64 {
        self.dead.iter().map(|lane| lane.count).sum()
    }

    /// The lanes whose messages wait because no active relay serves them.
    ///
    /// ```
    /// use diesel_outbox::admin::Depths;
    ///
    /// fn say(depths: &Depths) {
    ///     for lane in depths.unrouted() {
    ///         println!("{} {}: {} wait", lane.topic, lane.destination, lane.pending + lane.retrying);
    ///     }
    /// }
    /// # say(&Depths::default());
    /// ```
    pub fn unrouted(&self) -> impl Iterator<Item = &LaneDepth> {
        let waits = |lane: &&LaneDepth| lane.unserved.is_some() && lane.pending + lane.retrying > 0;
        self.lanes.iter().filter(waits)
    }

    /// Seconds since the oldest due, unclaimed message of all lanes became due. `None`: no message is due.
    ///
    /// ```
    /// use diesel_outbox::admin::Depths;
    ///
    /// assert_eq!(Depths::default().oldest_due_seconds(), None);
    /// ```
    pub fn oldest_due_seconds(&self) -> Option<f64> {
        let ages = self.lanes.iter().filter_map(|lane| lane.oldest_due_seconds);
        ages.reduce(f64::max)
    }
}

/// A topic and a destination.
type DepthLane = (String, String);

#[derive(diesel::Queryable)]
struct LaneRow {
    topic: String,
    destination: String,
    pending: i64,
    sending: i64,
    retrying: i64,
    oldest_due_seconds: Option<f64>,
    /// The lane has more messages than were read.
    is_cut: bool,
    /// Retrying messages among the messages that are not due yet.
    later: i64,
}

/// The SQL types of the columns of a [`LaneRow`].
type LaneColumns = (
    Text,
    Text,
    BigInt,
    BigInt,
    BigInt,
    Nullable<Double>,
    Bool,
    BigInt,
);

impl LaneRow {
    fn lane(&self) -> DepthLane {
        (self.topic.clone(), self.destination.clone())
    }

    fn total(&self) -> i64 {
        self.pending + self.sending + self.retrying
    }
}

/// The columns of a [`LaneRow`] for rows of an outbox, except the lane, `is_cut` and `later`.
const COUNTS: &str = "count(*) FILTER (WHERE locked_by IS NULL AND attempts = 0) AS pending,
    count(locked_by) AS sending,
    count(*) FILTER (WHERE locked_by IS NULL AND attempts > 0) AS retrying,
    extract(epoch FROM clock_timestamp() - min(available_at) FILTER (
        WHERE locked_by IS NULL AND available_at <= now() AND isfinite(available_at)))::float8
        AS oldest_due_seconds";

/// How large tables are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// At a cost that does not grow with the table: numbers of large tables are estimates.
    Cheap,
    /// Row by row.
    Exact,
}

/// The number of messages in each state, by lane.
pub(crate) fn depths(
    conn: &mut PgConnection,
    name: &OutboxName,
    care: Care,
) -> QueryResult<Depths> {
    // One transaction, because each further transaction costs four round trips.
    let read = looking(conn, None, |conn| read(conn, name, care))?;
    of_read(conn, name, read)
}

/// The same, at a cost that does not grow with the table, on a connection of a relay, whose settings are those of
/// [`looking`].
pub(crate) fn depths_of_relay(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Depths> {
    let read = read(conn, name, Care::Cheap)?;
    of_read(conn, name, read)
}

/// What is read of the tables: `depths` without lanes yet.
struct DepthRead {
    rows: Vec<LaneRow>,
    factor: Option<f64>,
    depths: Depths,
}

/// Few statements, because a relay repeats them.
fn read(conn: &mut PgConnection, name: &OutboxName, care: Care) -> QueryResult<DepthRead> {
    let tables = [&name.outbox(), &name.dead(), &name.feed()];
    let (endpoints, pages) = rows::counts_and_pages(conn, name, tables.map(String::as_str))?;
    let [(from, factor), (dead, factor_of_dead)] =
        [(name.outbox(), pages[0]), (name.dead(), pages[1])]
            .map(|(table, pages)| sample::source(&table, pages, care));
    Ok(DepthRead {
        rows: counted(conn, &from, factor.is_some())?,
        factor,
        depths: Depths {
            dead: dead::depths(conn, name, &dead, factor_of_dead)?,
            endpoints,
            // Without a feed, without a statement.
            feeds: match pages[2] {
                0 => Vec::new(),
                _ => lags::lags(conn, name)?,
            },
            ..Depths::default()
        },
    })
}

fn of_read(conn: &mut PgConnection, name: &OutboxName, read: DepthRead) -> QueryResult<Depths> {
    let mut depths = read.depths;
    depths.lanes = match read.factor {
        None => read.rows.into_iter().map(exact).collect(),
        Some(factor) => of_large(conn, name, read.rows, factor)?,
    };
    find_unrouted(conn, name, &mut depths.lanes)?;
    depths.is_estimate = depths.lanes.iter().any(|lane| lane.is_estimate)
        || depths.dead.iter().any(|lane| lane.is_estimate);
    Ok(depths)
}

fn find_unrouted(
    conn: &mut PgConnection,
    name: &OutboxName,
    lanes: &mut [LaneDepth],
) -> QueryResult<()> {
    if lanes.is_empty() {
        return Ok(());
    }
    let names = lanes.iter().map(|lane| lane.destination.as_str()).collect();
    let served = served(conn, name, &names)?;
    for lane in lanes {
        lane.unserved = served.unserved(&lane.topic, &lane.destination);
    }
    Ok(())
}

/// The lanes of the rows in `from`. `is_sample`: the lanes may have more rows.
fn counted(conn: &mut PgConnection, from: &str, is_sample: bool) -> QueryResult<Vec<LaneRow>> {
    unprepared_statement(format!(
        "SELECT topic, destination, {COUNTS}, {is_sample} AS is_cut, 0::bigint AS later
           FROM {from} GROUP BY 1, 2 ORDER BY 1, 2"
    ))
    .giving::<LaneColumns>()
    .load(conn)
}

/// The topics and destinations of live messages.
pub(crate) fn lanes(
    conn: &mut PgConnection,
    name: &OutboxName,
) -> QueryResult<BTreeSet<DepthLane>> {
    // A set, because a lane has two streams if it has messages with and without ordering keys.
    let lane = |FoundStream { stream, .. }| (stream.topic.topic, stream.topic.destination);
    Ok(streams(conn, name)?.into_iter().map(lane).collect())
}

fn exact(row: LaneRow) -> LaneDepth {
    LaneDepth {
        topic: row.topic,
        destination: row.destination,
        pending: row.pending,
        sending: row.sending,
        retrying: row.retrying,
        oldest_due_seconds: row.oldest_due_seconds,
        is_estimate: false,
        unserved: None,
    }
}

/// What was read of a lane: by index, and in the sampled pages.
#[derive(Default)]
struct Sampled {
    first: Option<LaneRow>,
    sampled: Option<LaneRow>,
}

/// `sampled`: the lanes in the sampled pages; `factor`: how many messages each sampled message represents.
fn of_large(
    conn: &mut PgConnection,
    name: &OutboxName,
    sampled: Vec<LaneRow>,
    factor: f64,
) -> QueryResult<Vec<LaneDepth>> {
    let mut seen: BTreeMap<DepthLane, Sampled> = BTreeMap::new();
    for row in sampled {
        let lane = row.lane();
        seen.entry(lane).or_default().sampled = Some(row);
    }
    let mut found = BTreeSet::new();
    let mut first = looking_briefly(conn, PATIENCE, |conn| {
        found = lanes(conn, name)?;
        first_rows(conn, name, &found)
    })?;
    for lane in found {
        seen.entry(lane).or_default();
    }
    if first.is_none() {
        // Dead entries delay reading the long lanes. The lanes that the sample missed are short: read only these.
        let short = seen.iter().filter(|(_, seen)| seen.sampled.is_none());
        let short: BTreeSet<DepthLane> = short.map(|(lane, _)| lane.clone()).collect();
        first = looking_briefly(conn, PATIENCE, |conn| first_rows(conn, name, &short))?;
    }
    for row in first.into_iter().flatten() {
        let lane = row.lane();
        seen.entry(lane).or_default().first = Some(row);
    }
    let lanes = seen
        .into_iter()
        .map(|(lane, seen)| joined(lane, seen, factor));
    // Messages in the sample may be gone by now.
    Ok(lanes
        .filter(|lane| lane.is_estimate || lane.pending + lane.sending + lane.retrying > 0)
        .collect())
}

/// The first messages of each lane, with and without an ordering key, and the first messages that are not due
/// yet, because retries are among them.
fn first_rows(
    conn: &mut PgConnection,
    name: &OutboxName,
    lanes: &BTreeSet<DepthLane>,
) -> QueryResult<Vec<LaneRow>> {
    let limit = rows_of_each(lanes.len());
    let (topics, destinations): (Vec<&str>, Vec<&str>) =
        lanes.iter().map(|(t, d)| (t.as_str(), d.as_str())).unzip();
    unprepared_statement(format!(
        "SELECT lane.topic, lane.destination, first.*, later.*
           FROM unnest($1::text[], $2::text[]) AS lane(topic, destination)
           CROSS JOIN LATERAL (
                SELECT {COUNTS},
                       $3 IN (count(*) FILTER (WHERE is_keyed), count(*) FILTER (WHERE NOT is_keyed))
                       AS is_cut
                  FROM {first} f) first
           CROSS JOIN LATERAL (
                SELECT count(*) FILTER (WHERE locked_by IS NULL AND attempts > 0) AS later
                  FROM {later} l) later",
        first = of_lane(name, "locked_by, attempts, available_at", "true"),
        later = of_lane(name, "locked_by, attempts", "o.available_at > now()"),
    ))
    .bind::<Array<Text>, _>(topics)
    .bind::<Array<Text>, _>(destinations)
    .bind::<BigInt, _>(limit)
    .giving::<LaneColumns>()
    .load(conn)
}

/// The number of rows to read of each of `lanes` lanes.
pub(super) fn rows_of_each(lanes: usize) -> i64 {
    let lanes = i64::try_from(lanes).unwrap_or(i64::MAX).max(1);
    (ROWS / lanes).clamp(LEAST_ROWS, MOST_ROWS)
}

/// The first rows of `lane` that match `which`: `$3` rows with an ordering key, and `$3` rows without.
pub(super) fn of_lane(name: &OutboxName, columns: &str, which: &str) -> String {
    let part = |is_keyed: bool| {
        format!(
            "(SELECT {columns}, {is_keyed} AS is_keyed FROM {outbox} o
               WHERE o.ordering_key IS {null} AND o.topic = lane.topic
                 AND o.destination = lane.destination AND {which}
               ORDER BY o.available_at, o.sequence LIMIT $3)",
            outbox = name.outbox(),
            null = if is_keyed { "NOT NULL" } else { "NULL" },
        )
    };
    format!("({} UNION ALL {})", part(false), part(true))
}

/// Joins what was read by index and by sample. `factor`: how many messages each sampled message represents.
fn joined((topic, destination): DepthLane, seen: Sampled, factor: f64) -> LaneDepth {
    let first = match seen.first {
        Some(first) if !first.is_cut => return exact(first),
        first => first,
    };
    let times = |count| sample::times(count, factor);
    let read = first.as_ref();
    let sampled = seen.sampled.as_ref();
    let total = times(sampled.map_or(0, LaneRow::total)).max(read.map_or(0, LaneRow::total));
    let sending = match (read, sampled) {
        (Some(read), _) => read.sending,
        (None, sampled) => times(sampled.map_or(0, |row| row.sending)),
    };
    let retrying = times(sampled.map_or(0, |row| row.retrying))
        .max(read.map_or(0, |row| row.retrying.max(row.later)));
    let ages = [read, sampled].into_iter().flatten();
    LaneDepth {
        topic,
        destination,
        pending: (total - sending - retrying).max(0),
        sending,
        retrying,
        oldest_due_seconds: ages
            .filter_map(|row| row.oldest_due_seconds)
            .reduce(f64::max),
        is_estimate: true,
        unserved: None,
    }
}
