//! What the ledger remembers, the latest first.
//!
//! Its index by time is a BRIN: it finds the rows of a span of time, in no order. So the list is read in
//! windows of time, each longer than the one before while they hold little, and shorter where one holds
//! too much.
//!
//! What was written in the last minute is not in the index yet. While very much is written, reading even the
//! latest second means reading all that: then the end of the table is read instead, where most of the latest
//! rows are.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use diesel::dsl::count_star;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, Queryable, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, select};
use uuid::Uuid;

use crate::message::Sequence;
use crate::name::OutboxName;
use crate::status::{ReasonCode, Status};
use crate::store::catalogue;
use crate::store::looking::looking_briefly;
use crate::store::place::{Place, Rfc3339, as_micros, from_micros, to_micros};
use crate::store::searched::{Deadline, Searched};
use crate::store::sql::{On, TimeAndSequence, all_of, clock_timestamp, given, shown_key};
use crate::store::statement::planned_anew;
use crate::store::table::{PageBegin, ledger, part};

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
    /// This destination only; empty: what was sent nowhere.
    pub destination: Option<String>,
    /// [`Delivered`](Status::Delivered) or [`Dead`](Status::Dead) only.
    pub status: Option<Status>,
    /// Only what died of this.
    pub reason: Option<ReasonCode>,
    /// Only this ordering key.
    pub ordering_key: Option<String>,
    /// Only this tenant.
    pub tenant_id: Option<Uuid>,
    /// Settled then or later.
    pub since: Option<SystemTime>,
    /// Settled before then.
    pub until: Option<SystemTime>,
    /// Only what stands behind this place in the list: the next page.
    pub before: Option<Place>,
}

/// What became of a message at a destination.
#[derive(Debug, Clone, Queryable)]
#[non_exhaustive]
pub struct LedgerRow {
    /// Its place in the outbox.
    pub sequence: Sequence,
    /// Its id, as receivers see it.
    pub message_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// The destination that was used; empty where none was.
    pub destination: String,
    /// [`Delivered`](Status::Delivered) or [`Dead`](Status::Dead).
    pub status: Status,
    /// Its idempotency key; the message id where the caller gave none.
    pub idempotency_key: String,
    /// Its ordering key.
    pub ordering_key: Option<String>,
    /// Its tenant.
    pub tenant_id: Option<Uuid>,
    /// Why it died: the name of a [`ReasonCode`].
    pub reason: Option<String>,
    /// The last error.
    pub error: Option<String>,
    /// The last answer's status.
    pub http_status: Option<i32>,
    /// The beginning of the last answer.
    pub response: Option<String>,
    /// Attempts made.
    pub attempts: i32,
    /// When it was enqueued, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub created_at: String,
    /// When it was settled, RFC 3339.
    #[diesel(deserialize_as = Rfc3339)]
    pub settled_at: String,
    /// Its payload is kept, so it can be replayed.
    pub has_payload: bool,
    settled: PgTimestamp,
}

/// How many messages of a destination were settled in a span of time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeliveryCount {
    /// It got so many.
    pub delivered: u64,
    /// So many were given up: they died, expired, or were discarded or cancelled.
    pub dead: u64,
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
            micros: to_micros(self.settled),
            sequence: self.sequence.0,
        }
    }
}

/// The latest rows first, `limit` at most.
pub(crate) fn ledger(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &LedgerFilter,
    limit: i64,
) -> QueryResult<Searched<LedgerRow>> {
    let (rows, looked) = search(conn, name, filter, limit, Deadline::new())?;
    let is_complete = looked == Looked::AtAll;
    Ok(Searched { rows, is_complete })
}

/// What a search has looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Looked {
    /// At everything, or as far as it had to.
    AtAll,
    /// At everything from this time on, in microseconds since 1970.
    From(i64),
    /// At the end of the table: most of the latest.
    AtTheEnd,
}

/// The same, and what was looked at.
pub(super) fn search(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &LedgerFilter,
    limit: i64,
    deadline: Deadline,
) -> QueryResult<(Vec<LedgerRow>, Looked)> {
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
            let found = at_the_end(conn, name, filter, (since, to), limit, TAIL_PAGES)?;
            let looked = match found.is_complete {
                true => Looked::AtAll,
                false => Looked::AtTheEnd,
            };
            return Ok((found.rows, looked));
        };
        rows = found;
        (to, window) = (from, window * 4);
    }
    loop {
        if i64::try_from(rows.len()).unwrap_or(limit) >= limit || to <= since {
            return Ok((rows, Looked::AtAll));
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
            None => return Ok((rows, Looked::From(to))),
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
    let in_use: Vec<(i16, Option<PgTimestamp>)> = part::table(name.part())
        .filter(part::opened_at.is_not_null())
        .select((part::part, part::closed_at))
        .load(conn)?;
    let open = in_use.iter().find(|(_, closed_at)| closed_at.is_none());
    let open = open.map_or(0, |(part, _)| *part);
    let all = catalogue::pages(conn, &name.suffixed(&format!("_ledger_{open}")))?;
    let from = all.saturating_sub(pages).max(0);
    let page = u32::try_from(from).unwrap_or(u32::MAX);
    let found = looking_briefly(conn, PATIENCE, |conn| {
        between(conn, name, filter, times, limit, Pages::From(open, page))
    })?;
    Ok(Searched {
        is_complete: found.is_some() && from == 0 && in_use.len() == 1,
        rows: found.unwrap_or_default(),
    })
}

/// Which pages of the table.
#[derive(Debug, Clone, Copy)]
enum Pages {
    All,
    /// Of this part of the ring, from this page on.
    From(i16, u32),
}

/// The filter asks for this row, whenever it was settled.
fn is_meant(filter: &LedgerFilter) -> On<'_, ledger::table> {
    let when = (ledger::settled_at, ledger::sequence).into_sql::<TimeAndSequence>();
    let of_key = |key| ledger::ordering_key.assume_not_null().eq(key);
    let died_of = |reason: ReasonCode| ledger::reason.assume_not_null().eq(reason.as_str());
    all_of([
        given(filter.topic.as_ref(), |topic| ledger::topic.eq(topic)),
        given(filter.destination.as_ref(), |name| {
            ledger::destination.eq(name)
        }),
        given(filter.status, |status| ledger::status.eq(status.as_str())),
        given(filter.reason, died_of),
        given(filter.ordering_key.as_ref(), of_key),
        given(filter.tenant_id, |id| {
            ledger::tenant_id.assume_not_null().eq(id)
        }),
        given(filter.before, |place| when.lt(place.of_row())),
    ])
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
    let rows = ledger::table(name.ledger())
        .filter(ledger::settled_at.ge(from_micros(from)))
        .filter(ledger::settled_at.lt(from_micros(to)))
        .filter(is_meant(filter))
        .order((ledger::settled_at.desc(), ledger::sequence.desc()))
        .limit(limit)
        .select((
            ledger::sequence,
            ledger::message_id,
            ledger::topic,
            ledger::destination,
            ledger::status,
            shown_key!(ledger),
            ledger::ordering_key,
            ledger::tenant_id,
            ledger::reason,
            ledger::error,
            ledger::http_status,
            ledger::response,
            ledger::attempts,
            ledger::created_at,
            ledger::settled_at,
            ledger::payload.is_not_null(),
            ledger::settled_at,
        ));
    match pages {
        Pages::All => planned_anew(rows).load(conn),
        Pages::From(part, page) => {
            let rows = rows.filter(ledger::part.eq(part));
            planned_anew(rows.filter(ledger::ctid.ge(PageBegin(page)))).load(conn)
        }
    }
}

/// What a destination has got, and what of it died, from the first time on and before the second.
pub(super) fn count(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    (from, to): (i64, i64),
) -> QueryResult<DeliveryCount> {
    let counts = ledger::table(name.ledger())
        .filter(ledger::settled_at.ge(from_micros(from)))
        .filter(ledger::settled_at.lt(from_micros(to)))
        .filter(ledger::destination.eq(destination))
        .group_by(ledger::status)
        .select((ledger::status, count_star()));
    let counts: Vec<(Status, i64)> = planned_anew(counts).load(conn)?;
    let counts: HashMap<Status, i64> = counts.into_iter().collect();
    let of = |status| counts.get(&status).copied().unwrap_or(0);
    let of = |status| u64::try_from(of(status)).unwrap_or(0);
    Ok(DeliveryCount {
        delivered: of(Status::Delivered),
        dead: of(Status::Dead),
    })
}

/// Just behind a place: rows of the same time may be before it.
fn behind(place: Option<Place>) -> Option<i64> {
    place.map(|place| place.micros.saturating_add(1))
}

/// A little later than now: rows that are settled while this is read may be there or not.
fn after_now(conn: &mut PgConnection) -> QueryResult<i64> {
    select(clock_timestamp())
        .get_result(conn)
        .map(|now| to_micros(now).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::store::tests::Outbox;

    #[test]
    fn the_end_of_the_table_has_the_latest_rows_and_says_that_it_is_not_all() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        conn.batch_execute(&format!(
            "INSERT INTO {} (part, sequence, message_id, topic, destination, named_destination, status,
                    attempts, created_at, settled_at)
             SELECT 0, n, gen_random_uuid(), 'order.paid', '', '', 'delivered', 1, now(),
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
            found.rows.iter().map(|row| row.sequence.0).collect()
        };
        let (some, all) = (end(1), end(1000));
        let other = format!(
            "UPDATE {} SET opened_at = now(), closed_at = now() WHERE part = 1",
            name.part()
        );
        conn.batch_execute(&other).expect("another part is in use");
        let times = (i64::MIN, i64::MAX);
        let beside_others = at_the_end(&mut conn, name, &filter, times, 3, 1000).expect("found");
        assert!(!beside_others.is_complete);
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
