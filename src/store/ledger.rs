//! What the ledger remembers, the latest first.
//!
//! Its index by time is a BRIN: it finds the rows of a span of time, in no order. So the list is read in
//! windows of time, each longer than the one before while they hold little, and shorter where one holds
//! too much.

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
    loop {
        let from = match to.saturating_sub(window) {
            from if window < LONGEST_WINDOW => from.max(since),
            _ => since,
        };
        let missing = limit - i64::try_from(rows.len()).unwrap_or(limit);
        let read = match deadline.left(PATIENCE) {
            Some(left) => looking_briefly(conn, left, |conn| {
                between(conn, name, filter, (from, to), missing)
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
        if i64::try_from(rows.len()).unwrap_or(limit) >= limit || from <= since {
            let is_complete = true;
            return Ok(Searched { rows, is_complete });
        }
    }
}

/// Rows that were settled from the first time on and before the second.
fn between(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &LedgerFilter,
    (from, to): (i64, i64),
    limit: i64,
) -> QueryResult<Vec<LedgerRow>> {
    sql_query(format!(
        "SELECT sequence, message_id, topic, destination, status, idempotency_key, ordering_key,
                reason, error, http_status, response, attempts, {created_at} AS created_at,
                {settled_at} AS settled_at, payload IS NOT NULL AS has_payload,
                {micros} AS settled_at_micros
           FROM (SELECT * FROM {ledger}
                  WHERE settled_at >= $1 AND settled_at < $2
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
