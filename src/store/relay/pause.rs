//! Which destinations and topics are paused: shared by all relays of an outbox.

use std::time::Duration;

use diesel::dsl::not;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods, QueryDsl, RunQueryDsl,
};
use diesel::query_dsl::methods::FilterDsl;
use diesel::result::QueryResult;
use diesel::upsert::excluded;
use diesel::{PgConnection, delete, insert_into, update};

use crate::name::OutboxName;
use crate::store::sql::{On, clock_timestamp, interval};
use crate::store::table::{outbox, pause};

/// The reason of a row that a circuit breaker wrote.
pub(crate) const BREAKER_OPEN: &str = "BREAKER_OPEN";

/// The reason of a row which says that a registered destination is gone: a trigger writes it.
pub(crate) const REMOVED: &str = "DESTINATION_REMOVED";

/// What can be paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pausable {
    /// A destination, by its name; `default` is the one of `OUTBOX_URL`.
    Destination,
    /// A topic, as it is written in messages.
    Topic,
}

impl Pausable {
    /// The name in the table and in output.
    ///
    /// ```
    /// use diesel_outbox::admin::Pausable;
    ///
    /// assert_eq!(Pausable::Topic.as_str(), "topic");
    /// ```
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Destination => "destination",
            Self::Topic => "topic",
        }
    }
}

/// A row of `outbox_pause`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Paused {
    /// `destination` or `topic`.
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) reason: String,
    /// How often in a row a breaker has opened.
    pub(crate) openings: u32,
    /// Zero: its time is over. `None`: until it is resumed.
    pub(crate) left: Option<Duration>,
}

fn is(kind: Pausable, which: &str) -> On<'_, pause::table> {
    Box::new(pause::kind.eq(kind.as_str()).and(pause::name.eq(which)))
}

/// The breaker of this destination is open.
fn is_breaker(destination: &str) -> On<'_, pause::table> {
    Box::new(is(Pausable::Destination, destination).and(pause::reason.eq(BREAKER_OPEN)))
}

fn pauses(name: &OutboxName) -> pause::table {
    pause::table(name.pause())
}

/// All rows, also those whose time is over.
pub(crate) fn all(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Paused>> {
    let rows = pauses(name)
        .order((pause::kind, pause::name))
        .select((
            pause::kind,
            pause::name,
            pause::reason,
            pause::openings,
            pause::paused_until,
            clock_timestamp(),
        ))
        .load(conn)?;
    let is_endless = |time: &PgTimestamp| matches!(time.0, i64::MIN | i64::MAX);
    let row =
        |(kind, name, reason, openings, until, now): (_, _, _, i32, Option<_>, PgTimestamp)| {
            let left = |until: PgTimestamp| {
                let micros = until.0.saturating_sub(now.0);
                Duration::from_micros(u64::try_from(micros).unwrap_or(0))
            };
            Paused {
                kind,
                name,
                reason,
                openings: u32::try_from(openings).unwrap_or(0),
                left: until.filter(|until| !is_endless(until)).map(left),
            }
        };
    Ok(rows.into_iter().map(row).collect())
}

/// Pauses a destination or a topic for a time, or until it is resumed. A pause that is there
/// already and longer stays.
pub(crate) fn pause(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
    reason: &str,
    duration: Option<Duration>,
    openings: u32,
) -> QueryResult<()> {
    let until = clock_timestamp().nullable() + duration.map(interval);
    let upsert = insert_into(pauses(name))
        .values((
            pause::kind.eq(kind.as_str()),
            pause::name.eq(which),
            pause::reason.eq(reason),
            pause::openings.eq(i32::try_from(openings).unwrap_or(i32::MAX)),
            pause::paused_until.eq(until),
        ))
        .on_conflict((pause::kind, pause::name))
        .do_update()
        .set((
            pause::reason.eq(excluded(pause::reason)),
            pause::openings.eq(excluded(pause::openings)),
            pause::paused_at.eq(excluded(pause::paused_at)),
            pause::paused_until.eq(excluded(pause::paused_until)),
        ));
    let ends_later = excluded(pause::paused_until)
        .is_null()
        .or(excluded(pause::paused_until).gt(pause::paused_until));
    let gives_way = pause::paused_until
        .is_not_null()
        .and(pause::reason.eq(BREAKER_OPEN).or(ends_later));
    FilterDsl::filter(upsert, gives_way).execute(conn).map(drop)
}

/// Takes the right to probe a destination whose breaker has been open for long enough. Others get
/// it again after `hold`, should this relay die. `false`: another one has it, or there is no need.
pub(crate) fn take_probe(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    hold: Duration,
) -> QueryResult<bool> {
    update(pauses(name))
        .filter(is_breaker(destination))
        .filter(pause::paused_until.le(clock_timestamp().nullable()))
        .set(pause::paused_until.eq((clock_timestamp() + interval(hold)).nullable()))
        .execute(conn)
        .map(|count| count > 0)
}

/// Gives the right to probe back: whoever comes next may.
pub(crate) fn give_back_probe(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<()> {
    update(pauses(name))
        .filter(is_breaker(destination))
        .set(pause::paused_until.eq(clock_timestamp().nullable()))
        .execute(conn)
        .map(drop)
}

/// A probe went well: the breaker is closed for all relays. Other pauses stay.
pub(crate) fn close_breaker(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<()> {
    delete(pauses(name))
        .filter(is_breaker(destination))
        .execute(conn)
        .map(drop)
}

/// Ends a pause, whatever its reason. `false`: there was none.
pub(crate) fn resume(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
) -> QueryResult<bool> {
    delete(pauses(name))
        .filter(is(kind, which))
        .execute(conn)
        .map(|count| count > 0)
}

/// Removes rows whose time was over long ago.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    age: Duration,
) -> QueryResult<usize> {
    let long_ago = clock_timestamp() - interval(age);
    delete(pauses(name))
        .filter(pause::paused_until.lt(long_ago.nullable()))
        .execute(conn)
}

/// Forgets registered destinations that have been gone for so long and have no messages any more.
pub(crate) fn forget_removed(
    conn: &mut PgConnection,
    name: &OutboxName,
    age: Duration,
) -> QueryResult<usize> {
    let waited_for = outbox::table(name.outbox()).select(outbox::destination);
    delete(pauses(name))
        .filter(pause::reason.eq(REMOVED))
        .filter(pause::paused_at.lt(clock_timestamp() - interval(age)))
        .filter(not(pause::name.eq_any(waited_for)))
        .execute(conn)
}
