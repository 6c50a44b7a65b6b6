//! What the ledger remembers, the latest first.
//!
//! Its index by time is a BRIN: it finds the rows of a span of time, in no order. So the list is read in
//! windows of time, each longer than the one before while they hold little, and shorter where one holds
//! too much.
//!
//! What was written in the last minute is not in the index yet. While very much is written, reading even the
//! latest second means reading all that: then the end of the table is read instead, where most of the latest
//! rows are.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use uuid::Uuid;

use super::looking::looking_briefly;
use super::place::{Place, from_micros, micros, rfc3339};
use super::searched::{Deadline, Searched};
use crate::name::OutboxName;
use crate::status::{ReasonCode, Status};

/// How long reading one window may take before a shorter one is read instead.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long reading the latest second may take before the end of the table is read instead.
const FIRST_PATIENCE: Duration = Duration::from_millis(100);
/// Pages at the end of the table.
const TAIL_PAGES: i64 = 100;

/// Windows, in microseconds.
const FIRST_WINDOW: i64 = 1_000_000;
const SHORTEST_WINDOW: i64 = 1_000;
/// 60 days: behind it, all that is left is read.
const LONGEST_WINDOW: i64 = 60 * 86_400 * 1_000_000;

/// Which rows of the ledger. Everything given has to hold.
#[derive(Debug, Clone, Default)]
pub struct LedgerFilter {
    /// This topic only.
    pub topic: Option<String>,
    /// This destination only; empty: those that named none.
    pub destination: Option<String>,
    /// [`Delivered`](Status::Delivered) or [`Dead`](Status::Dead) only.
    pub status: Option<Status>,
    /// Only what died of this.
    pub reason: Option<ReasonCode>,
    /// Only this ordering key.
    pub ordering_key: Option<String>,
    /// Settled then or later.
    pub since: Option<SystemTime>,
    /// Settled before then.
    pub until: Option<SystemTime>,
    /// Only what stands behind this place in the list: the next page.
    pub before: Option<Place>,
}

/// What became of a message at a destination.
#[derive(Debug, Clone, diesel::QueryableByName)]
#[non_exhaustive]
pub struct LedgerRow {
    /// Its place in the outbox.
    #[diesel(sql_type = BigInt)]
    pub sequence: i64,
    /// Its id, as receivers see it.
    #[diesel(sql_type = SqlUuid)]
    pub message_id: Uuid,
    /// Its topic.
    #[diesel(sql_type = Text)]
    pub topic: String,
    /// Its destination; empty where it named none.
    #[diesel(sql_type = Text)]
    pub destination: String,
    /// `delivered` or `dead`.
    #[diesel(sql_type = Text)]
    pub status: String,
    /// Its idempotency key.
    #[diesel(sql_type = Text)]
    pub idempotency_key: String,
    /// Its ordering key.
    #[diesel(sql_type = Nullable<Text>)]
    pub ordering_key: Option<String>,
    /// Why it died: the name of a [`ReasonCode`].
    #[diesel(sql_type = Nullable<Text>)]
    pub reason: Option<String>,
    /// The last error.
    #[diesel(sql_type = Nullable<Text>)]
    pub error: Option<String>,
    /// The last answer's status.
    #[diesel(sql_type = Nullable<Integer>)]
    pub http_status: Option<i32>,
    /// The beginning of the last answer.
    #[diesel(sql_type = Nullable<Text>)]
    pub response: Option<String>,
    /// Attempts made.
    #[diesel(sql_type = Integer)]
    pub attempts: i32,
    /// When it was enqueued, RFC 3339.
    #[diesel(sql_type = Text)]
    pub created_at: String,
    /// When it was settled, RFC 3339.
    #[diesel(sql_type = Text)]
    pub settled_at: String,
    /// Its payload is kept, so it can be replayed.
    #[diesel(sql_type = Bool)]
    pub has_payload: bool,
    #[diesel(sql_type = BigInt)]
    settled_at_micros: i64,
}

impl LedgerRow {
    /// Where it stands in the list: the next page is what is before it ([`LedgerFilter::before`]).
    ///
    /// ```
    /// use diesel_outbox::admin::{LedgerFilter, LedgerRow};
    ///
    /// fn next_page(filter: LedgerFilter, page: &[LedgerRow]) -> LedgerFilter {
    ///     LedgerFilter { before: page.last().map(LedgerRow::place), ..filter }
    /// }
    /// ```
    pub fn place(&self) -> Place {
        Place {
            micros: self.settled_at_micros,
            sequence: self.sequence,
        }
    }
}

#[derive(diesel::QueryableByName)]
struct MicrosRow {
    #[diesel(sql_type = BigInt)]
    micros: i64,
}

/// The latest rows first, `limit` at most.
pub(crate) fn ledger(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &LedgerFilter,
    limit: i64,
) -> QueryResult<Searched<LedgerRow>> {
    let deadline = Deadline::new();
    let since = filter.since.map(as_micros).unwrap_or(i64::MIN);
    let ends = [filter.until.map(as_micros), behind(filter.before)];
    let mut to = match ends.into_iter().flatten().min() {
        Some(to) => to,
        None => after_now(conn)?,
    };
    let (mut window, mut rows) = (FIRST_WINDOW, Vec::new());
    let is_of_now = filter.before.is_none() && filter.until.is_none();
    if is_of_now {
        let from = to.saturating_sub(window).max(since);
        let latest = looking_briefly(conn, FIRST_PATIENCE, |conn| {
            between(conn, name, filter, (from, to), limit, Pages::All)
        })?;
        let Some(found) = latest else {
            return at_the_end(conn, name, filter, (since, to), limit, TAIL_PAGES);
        };
        rows = found;
        (to, window) = (from, window * 4);
    }
    loop {
        if i64::try_from(rows.len()).unwrap_or(limit) >= limit || to <= since {
            let is_complete = true;
            return Ok(Searched { rows, is_complete });
        }
        let from = match to.saturating_sub(window) {
            from if window < LONGEST_WINDOW => from.max(since),
            _ => since,
        };
        let missing = limit - i64::try_from(rows.len()).unwrap_or(limit);
        let read = match deadline.left(PATIENCE) {
            Some(left) => looking_briefly(conn, left, |conn| {
                between(conn, name, filter, (from, to), missing, Pages::All)
            })?,
            None => None,
        };
        match read {
            Some(found) => {
                rows.extend(found);
                to = from;
                window = window.saturating_mul(4);
            }
            None if window > SHORTEST_WINDOW && deadline.left(PATIENCE).is_some() => {
                window = window.min(LONGEST_WINDOW) / 16;
                continue;
            }
            None => {
                let is_complete = false;
                return Ok(Searched { rows, is_complete });
            }
        }
    }
}

/// Most of the latest rows, while too many are written to read them all.
fn at_the_end(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &LedgerFilter,
    times: (i64, i64),
    limit: i64,
    pages: i64,
) -> QueryResult<Searched<LedgerRow>> {
    let all: CountRow = sql_query(
        "SELECT pg_relation_size($1::regclass) / current_setting('block_size')::bigint AS count",
    )
    .bind::<Text, _>(name.ledger())
    .get_result(conn)?;
    let from = all.count.saturating_sub(pages).max(0);
    let found = looking_briefly(conn, PATIENCE, |conn| {
        between(conn, name, filter, times, limit, Pages::From(from))
    })?;
    Ok(Searched {
        is_complete: found.is_some() && from == 0,
        rows: found.unwrap_or_default(),
    })
}

/// Which pages of the table.
#[derive(Debug, Clone, Copy)]
enum Pages {
    All,
    From(i64),
}

#[derive(diesel::QueryableByName)]
struct CountRow {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

/// Rows that were settled from the first time on and before the second.
fn between(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &LedgerFilter,
    (from, to): (i64, i64),
    limit: i64,
    pages: Pages,
) -> QueryResult<Vec<LedgerRow>> {
    let of_pages = match pages {
        Pages::All => String::new(),
        Pages::From(page) => format!("AND ctid >= '({page},0)'::tid"),
    };
    sql_query(format!(
        "SELECT sequence, message_id, topic, destination, status, idempotency_key, ordering_key,
                reason, error, http_status, response, attempts, {created_at} AS created_at,
                {settled_at} AS settled_at, payload IS NOT NULL AS has_payload,
                {micros} AS settled_at_micros
           FROM (SELECT * FROM {ledger}
                  WHERE settled_at >= $1 AND settled_at < $2 {of_pages}
                    AND ($3::text IS NULL OR topic = $3)
                    AND ($4::text IS NULL OR destination = $4)
                    AND ($5::text IS NULL OR status = $5)
                    AND ($6::text IS NULL OR reason = $6)
                    AND ($7::text IS NULL OR ordering_key = $7)
                    AND ($8::bigint IS NULL OR ({micros}, sequence) < ($8, $9))
                  ORDER BY settled_at DESC, sequence DESC LIMIT $10) l
          ORDER BY l.settled_at DESC, l.sequence DESC",
        created_at = rfc3339("created_at"),
        settled_at = rfc3339("settled_at"),
        micros = micros("settled_at"),
        ledger = name.ledger(),
    ))
    .bind::<Timestamptz, _>(from_micros(from))
    .bind::<Timestamptz, _>(from_micros(to))
    .bind::<Nullable<Text>, _>(&filter.topic)
    .bind::<Nullable<Text>, _>(&filter.destination)
    .bind::<Nullable<Text>, _>(filter.status.map(Status::as_str))
    .bind::<Nullable<Text>, _>(filter.reason.map(ReasonCode::as_str))
    .bind::<Nullable<Text>, _>(&filter.ordering_key)
    .bind::<Nullable<BigInt>, _>(filter.before.map(|place| place.micros))
    .bind::<Nullable<BigInt>, _>(filter.before.map(|place| place.sequence))
    .bind::<BigInt, _>(limit)
    .load(conn)
}

/// Just behind a place: rows of the same time may be before it.
fn behind(place: Option<Place>) -> Option<i64> {
    place.map(|place| place.micros.saturating_add(1))
}

/// A little later than now: rows that are settled while this is read may be there or not.
fn after_now(conn: &mut PgConnection) -> QueryResult<i64> {
    sql_query(format!(
        "SELECT {} + 1 AS micros",
        micros("clock_timestamp()")
    ))
    .get_result::<MicrosRow>(conn)
    .map(|row| row.micros)
}

/// Microseconds since 1970.
pub(super) fn as_micros(time: SystemTime) -> i64 {
    let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => micros(after),
        Err(before) => -micros(before.duration()),
    }
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::store::model::database::Outbox;

    #[test]
    fn the_end_of_the_table_has_the_latest_rows_and_says_that_it_is_not_all() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        conn.batch_execute(&format!(
            "INSERT INTO {} (idempotency_key, destination, sequence, message_id, topic, digest, status,
                    attempts, created_at, settled_at)
             SELECT n::text, '', n, gen_random_uuid(), 'order.paid', '', 'delivered', 1, now(),
                    now() - (1000 - n) * interval '1 second'
               FROM generate_series(1, 1000) n",
            name.ledger()
        ))
        .expect("rows");
        let filter = LedgerFilter::default();
        let mut end = |pages| {
            let times = (i64::MIN, i64::MAX);
            at_the_end(&mut conn, name, &filter, times, 3, pages).expect("found")
        };
        let latest = |found: &Searched<LedgerRow>| -> Vec<i64> {
            found.rows.iter().map(|row| row.sequence).collect()
        };
        let (some, all) = (end(1), end(1000));
        assert_eq!(
            (latest(&some), some.is_complete),
            (vec![1000, 999, 998], false)
        );
        assert_eq!(
            (latest(&all), all.is_complete),
            (vec![1000, 999, 998], true)
        );
    }
}
