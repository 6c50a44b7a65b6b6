//! The entries of the ledger, latest first.
//!
//! The index by time is a BRIN, which finds the rows of a time span, in no order. So the list is read in windows of
//! time. After a window with few rows, the next window is longer. A window with too many rows is replaced by a
//! shorter one.
//!
//! Rows of the last minute are not in the index yet. Under heavy writes, reading even the latest second means reading
//! all of these rows. Then the end of the table is read instead, which has most of the latest rows.

use std::collections::HashMap;
use std::time::Duration;

use diesel::dsl::count_star;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    ExpressionMethods, IntoSql, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::{PgConnection, select};

use super::messages::{self, Content, MessageRecord};
use crate::endpoints::sql::recipient::Recipient;
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::operate::sql::selection::Selection;
use crate::operate::sql::selection::selected;
use crate::outbox::sql::searched::{SearchDeadline, Searched};
use crate::schema::values::{as_micros, from_micros, to_micros};
use crate::setup::sql::catalogue;
use crate::sql::functions::{On, TimeAndSequence, all_of, clock_timestamp, given};
use crate::sql::looking::looking_briefly;
use crate::sql::statement::unprepared;
use crate::sql::table::{PageBegin, ledger, part};
use crate::status::Status;

/// How long reading one window may take before a shorter one is read instead.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long reading the latest second may take before the end of the table is read instead.
const FIRST_PATIENCE: Duration = Duration::from_millis(100);
/// The pages to read at the end of the table.
const TAIL_PAGES: i64 = 100;

/// The first window, in microseconds.
const FIRST_WINDOW: i64 = 1_000_000;
/// The shortest window, in microseconds.
const SHORTEST_WINDOW: i64 = 1_000;
/// The longest window (60 days, in microseconds). After it, all older rows are read at once.
const LONGEST_WINDOW: i64 = 60 * 86_400 * 1_000_000;

/// The number of messages of a destination that were settled in a time span.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeliveryCount {
    /// Messages delivered.
    pub delivered: u64,
    /// Messages given up: dead-lettered, expired or cancelled.
    pub dead: u64,
}

/// The selected entries, latest first, at most `limit`.
pub(crate) fn ledger(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
) -> QueryResult<Searched<MessageRecord>> {
    let (rows, looked) = search(conn, name, selection, limit, SearchDeadline::new())?;
    let is_complete = looked == Looked::AtAll;
    Ok(Searched { rows, is_complete })
}

/// How far a search has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Looked {
    /// Everything, or as far as necessary.
    AtAll,
    /// Everything since this time, in microseconds since 1970.
    From(i64),
    /// The end of the table, which has most of the latest rows.
    AtTheEnd,
}

/// The selected entries, and how far the search has read.
pub(super) fn search(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    limit: i64,
    deadline: SearchDeadline,
) -> QueryResult<(Vec<MessageRecord>, Looked)> {
    let since = selection.since.map(as_micros).unwrap_or(i64::MIN);
    let ends = [selection.until.map(as_micros), behind(selection.behind)];
    let mut to = match ends.into_iter().flatten().min() {
        Some(to) => to,
        None => after_now(conn)?,
    };
    let (mut window, mut rows) = (FIRST_WINDOW, Vec::new());
    let is_of_now = selection.behind.is_none() && selection.until.is_none();
    if is_of_now {
        let from = to.saturating_sub(window).max(since);
        let latest = looking_briefly(conn, FIRST_PATIENCE, |conn| {
            between(conn, name, selection, (from, to), limit, Pages::All)
        })?;
        let Some(found) = latest else {
            let found = at_the_end(conn, name, selection, (since, to), limit, TAIL_PAGES)?;
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
                between(conn, name, selection, (from, to), missing, Pages::All)
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

/// Most of the latest rows, for when too many rows are being written to read all.
fn at_the_end(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    times: (i64, i64),
    limit: i64,
    pages: i64,
) -> QueryResult<Searched<MessageRecord>> {
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
        between(conn, name, selection, times, limit, Pages::From(open, page))
    })?;
    Ok(Searched {
        is_complete: found.is_some() && from == 0 && in_use.len() <= 1,
        rows: found.unwrap_or_default(),
    })
}

/// Which pages of the table to read.
#[derive(Debug, Clone, Copy)]
enum Pages {
    All,
    /// The pages of this part of the ring (the table is divided by time), from this page on.
    From(i16, u32),
}

/// Whether a row is selected.
fn is_meant(selection: &Selection) -> On<'_, ledger::table> {
    let when = (ledger::settled_at, ledger::sequence).into_sql::<TimeAndSequence>();
    let others = [
        given(selection.destination.as_deref(), |to| {
            ledger::destination.eq(to)
        }),
        given(selection.status, |status| {
            ledger::status.eq(status.as_str())
        }),
        given(selection.behind, |place| when.lt(place.of_row())),
    ];
    let own = selected!(ledger, selection, settled_at, reason);
    all_of(own.into_iter().chain(others))
}

/// Rows settled at or after the first time, and before the second.
fn between(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    (from, to): (i64, i64),
    limit: i64,
    pages: Pages,
) -> QueryResult<Vec<MessageRecord>> {
    let rows = messages::settled(name, is_meant(selection), Content::Without)
        .filter(ledger::settled_at.ge(from_micros(from)))
        .filter(ledger::settled_at.lt(from_micros(to)))
        .order((ledger::settled_at.desc(), ledger::sequence.desc()))
        .limit(limit);
    match pages {
        Pages::All => unprepared(rows).load(conn),
        Pages::From(part, page) => {
            let rows = rows.filter(ledger::part.eq(part));
            unprepared(rows.filter(ledger::ctid.ge(PageBegin(page)))).load(conn)
        }
    }
}

/// Counts the messages of a destination that were settled at or after the first time, and before the second.
pub(super) fn count(
    conn: &mut PgConnection,
    name: &OutboxName,
    recipient: Recipient<'_>,
    (from, to): (i64, i64),
) -> QueryResult<DeliveryCount> {
    let counts = ledger::table(name.ledger())
        .filter(recipient.entries())
        .filter(ledger::settled_at.ge(from_micros(from)))
        .filter(ledger::settled_at.lt(from_micros(to)))
        .group_by(ledger::status)
        .select((ledger::status, count_star()));
    let counts: Vec<(Status, i64)> = unprepared(counts).load(conn)?;
    let counts: HashMap<Status, i64> = counts.into_iter().collect();
    let of = |status| counts.get(&status).copied().unwrap_or(0);
    let of = |status| u64::try_from(of(status)).unwrap_or(0);
    Ok(DeliveryCount {
        delivered: of(Status::Delivered),
        dead: of(Status::Dead),
    })
}

/// The end of a search from a place: just after its time, because rows of the same time may come before the place.
fn behind(place: Option<Place>) -> Option<i64> {
    place.map(|place| place.micros.saturating_add(1))
}

/// Just after now. Rows settled during the search may or may not be found.
fn after_now(conn: &mut PgConnection) -> QueryResult<i64> {
    select(clock_timestamp())
        .get_result(conn)
        .map(|now| to_micros(now).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::sql::tests::Outbox;

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
        let anything = Selection::default();
        let mut end = |pages| {
            let times = (i64::MIN, i64::MAX);
            at_the_end(&mut conn, name, &anything, times, 3, pages).expect("found")
        };
        let latest = |found: &Searched<MessageRecord>| -> Vec<i64> {
            found.rows.iter().map(|row| row.sequence.0).collect()
        };
        let (some, all) = (end(1), end(1000));
        let other = format!(
            "INSERT INTO {} VALUES (0, now(), NULL), (1, now(), now())",
            name.part()
        );
        conn.batch_execute(&other).expect("another part is in use");
        let times = (i64::MIN, i64::MAX);
        let beside_others = at_the_end(&mut conn, name, &anything, times, 3, 1000).expect("found");
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
