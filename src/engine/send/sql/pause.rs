//! The paused destinations and topics, shared by all relays of an outbox.

use std::time::Duration;

use diesel::dsl::{array, case_when, exists};
use diesel::internal::table_macro::NoFromClause;
use diesel::pg::data_types::{PgInterval, PgTimestamp};
use diesel::prelude::{
    BoolExpressionMethods, ExpressionMethods, IntoSql, NullableExpressionMethods,
    OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::query_dsl::methods::FilterDsl;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, Integer, Interval, Nullable, Record, Text, Timestamptz};
use diesel::upsert::excluded;
use diesel::{PgConnection, delete, insert_into, select, update};

use crate::engine::claim::sql::streams::{is_of, streams_to};
use crate::hand::Hand;
use crate::name::OutboxName;
use crate::sql::functions::{On, clock_timestamp, interval, length};
pub use crate::sql::paused::Pausable;
pub(crate) use crate::sql::paused::pauses;
use crate::sql::paused::{is_on, of_tenants};
use crate::sql::statement::unprepared;
use crate::sql::table::{candidate, pause};

/// The reason of a row that a circuit breaker wrote.
pub(crate) const BREAKER_OPEN: &str = "BREAKER_OPEN";

/// A row of `outbox_pause`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Paused {
    /// `destination` or `topic`.
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) reason: String,
    /// Whose pause it is. Each hand has a row of its own.
    pub(crate) by: Hand,
    /// How often in a row a breaker has opened.
    pub(crate) openings: u32,
    /// The time left. Zero: the pause has expired. `None`: paused until resumed.
    pub(crate) left: Option<Duration>,
}

impl Paused {
    /// Whether the pause holds now.
    pub(crate) fn is_on(&self) -> bool {
        self.left.is_none_or(|left| !left.is_zero())
    }

    /// For the pause that ends last: an endless pause is the longest.
    pub(crate) fn length(&self) -> (bool, Option<Duration>) {
        (self.left.is_none(), self.left)
    }
}

fn is(kind: Pausable, which: &str) -> On<'_, pause::table> {
    Box::new(pause::kind.eq(kind.as_str()).and(pause::name.eq(which)))
}

/// The row is the open breaker of this destination.
fn is_breaker(destination: &str) -> On<'_, pause::table> {
    Box::new(is(Pausable::Destination, destination).and(pause::reason.eq(BREAKER_OPEN)))
}

/// The row is a pause. Named by its kinds, so that the index finds the rows beside any number of removals.
fn is_pause() -> On<'static, pause::table> {
    let kinds = Pausable::ALL.iter().map(|kind| kind.as_str());
    Box::new(pause::kind.eq_any(kinds.collect::<Vec<_>>()))
}

/// A pause that ends later than it lasts by more than this was written by a clock that has gone back since.
const TOLERANCE: Duration = Duration::from_secs(1);

/// All pauses, including expired ones. None is longer than it was when it was written.
pub(crate) fn all(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Paused>> {
    Ok(with_limits(conn, name)?.0)
}

/// The same for relays, which write the ends of the pauses again if the server's clock has gone back since they were written:
/// they would not come closer otherwise.
// Why: docs/decisions.md#two-clocks
pub(crate) fn all_in_time(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Paused>> {
    let (rows, are_ahead) = with_limits(conn, name)?;
    if are_ahead {
        let end = clock_timestamp().nullable() + pause::lasts;
        update(pauses(name))
            .filter(pause::paused_until.gt(end + Some(interval(TOLERANCE))))
            .set(pause::paused_until.eq(end))
            .execute(conn)?;
    }
    Ok(rows)
}

fn with_limits(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<PausesRead> {
    let rows: Vec<PauseColumns> = select(at_once(name)).get_result(conn)?;
    Ok(with_ends(rows))
}

/// All pauses as one value.
pub(crate) fn at_once(name: &OutboxName) -> On<'static, NoFromClause, Array<Record<PauseSql>>> {
    let columns = (
        pause::kind,
        pause::name,
        pause::reason,
        pause::openings,
        (pause::paused_until, pause::lasts).into_sql::<Record<EndSql>>(),
        pause::paused_by,
        clock_timestamp(),
    );
    let rows = QueryDsl::filter(pauses(name), is_pause())
        .order((pause::kind, pause::name, pause::paused_by))
        .select(columns.into_sql::<Record<PauseSql>>());
    Box::new(array(rows))
}

/// All pauses of destinations and topics; a paused tenant counts as a pause of each of its destinations, with `only` of this
/// one.
pub(crate) fn of_each(
    conn: &mut PgConnection,
    name: &OutboxName,
    only: Option<&str>,
) -> QueryResult<Vec<Paused>> {
    let is_of_tenant = |row: &Paused| row.kind == Pausable::Tenant.as_str();
    let (tenants, mut pauses): (Vec<Paused>, Vec<Paused>) =
        all(conn, name)?.into_iter().partition(is_of_tenant);
    let ids = tenants.iter().map(|row| row.name.as_str());
    let only = only.as_ref().map(std::slice::from_ref);
    let own = of_tenants(conn, name, ids, only)?;
    for row in tenants {
        let names = own.iter().filter(|(tenant, _)| *tenant == row.name);
        pauses.extend(names.map(|(_, name)| Paused {
            kind: Pausable::Destination.as_str().to_owned(),
            name: name.clone(),
            ..row.clone()
        }));
    }
    Ok(pauses)
}

/// The columns of a pause, and the time at which they were read.
pub(crate) type PauseColumns = (
    String,
    String,
    String,
    i32,
    (Option<PgTimestamp>, Option<PgInterval>),
    String,
    PgTimestamp,
);

/// The SQL types of a [`PauseColumns`].
type PauseSql = (Text, Text, Text, Integer, Record<EndSql>, Text, Timestamptz);
type EndSql = (Nullable<Timestamptz>, Nullable<Interval>);

/// The pauses, and whether one ends later than it lasts.
pub(crate) type PausesRead = (Vec<Paused>, bool);

pub(crate) fn with_ends(rows: impl IntoIterator<Item = PauseColumns>) -> PausesRead {
    let is_endless = |time: &PgTimestamp| matches!(time.0, i64::MIN | i64::MAX);
    let mut are_ahead = false;
    let pause = |(kind, name, reason, openings, (until, lasts), by, now): PauseColumns| {
        let most = lasts.map_or(Duration::MAX, length);
        let left = until.filter(|until| !is_endless(until)).map(|until| {
            let micros = until.0.saturating_sub(now.0);
            Duration::from_micros(u64::try_from(micros).unwrap_or(0))
        });
        are_ahead |= left.is_some_and(|left| left > most.saturating_add(TOLERANCE));
        Paused {
            kind,
            name,
            reason,
            by: Hand::of_column(Some(&by)),
            openings: u32::try_from(openings).unwrap_or(0),
            left: left.map(|left| left.min(most)),
        }
    };
    let rows = rows.into_iter().map(pause).collect();
    (rows, are_ahead)
}

/// Pauses a destination or a topic for a time, or until it is resumed. `false`: a longer pause of this hand exists, and
/// stays. The pauses of others stay, too.
pub(crate) fn pause(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
    (by, reason): (Hand, &str),
    duration: Option<Duration>,
    openings: u32,
) -> QueryResult<bool> {
    let lasts = duration.map(interval);
    let until = clock_timestamp().nullable() + lasts;
    let upsert = insert_into(pauses(name))
        .values((
            pause::kind.eq(kind.as_str()),
            pause::name.eq(which),
            pause::reason.eq(reason),
            pause::openings.eq(i32::try_from(openings).unwrap_or(i32::MAX)),
            pause::paused_until.eq(until),
            pause::lasts.eq(lasts),
            pause::paused_by.eq(by.as_str()),
        ))
        .on_conflict((pause::kind, pause::name, pause::paused_by))
        .do_update()
        .set((
            pause::reason.eq(excluded(pause::reason)),
            pause::openings.eq(excluded(pause::openings)),
            // A breaker that opens repeatedly has been open since its first opening.
            pause::paused_at.eq(case_when(
                pause::reason.eq(excluded(pause::reason)),
                pause::paused_at,
            )
            .otherwise(excluded(pause::paused_at))),
            pause::paused_until.eq(excluded(pause::paused_until)),
            pause::lasts.eq(excluded(pause::lasts)),
        ));
    let ends_later = excluded(pause::paused_until)
        .is_null()
        .or(excluded(pause::paused_until).gt(pause::paused_until));
    let gives_way = pause::paused_until
        .is_not_null()
        .and(pause::reason.eq(BREAKER_OPEN).or(ends_later));
    let count = FilterDsl::filter(upsert, gives_way).execute(conn)?;
    Ok(count > 0)
}

/// Like [`pause()`], for a breaker that opens. `true`: the breaker was closed before, and is open now. If several
/// relays open the breaker at the same time, only one gets `true`.
pub(crate) fn open_breaker(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    left: Duration,
    openings: u32,
) -> QueryResult<bool> {
    let kind = Pausable::Destination;
    // A second relay waits here for the first relay's row.
    let is_first = insert_into(pauses(name))
        .values((
            pause::kind.eq(kind.as_str()),
            pause::name.eq(destination),
            pause::reason.eq(BREAKER_OPEN),
            pause::openings.eq(i32::try_from(openings).unwrap_or(i32::MAX)),
            pause::paused_until.eq(clock_timestamp().nullable() + Some(interval(left))),
            pause::lasts.eq(Some(interval(left))),
            pause::paused_by.eq(Hand::Relay.as_str()),
        ))
        .on_conflict_do_nothing()
        .execute(conn)?
        > 0;
    if !is_first {
        let by = (Hand::Relay, BREAKER_OPEN);
        pause(conn, name, kind, destination, by, Some(left), openings)?;
    }
    Ok(is_first)
}

/// Until when the breaker of a destination is open. `None`: it is closed.
pub(crate) fn open_until(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<Option<PgTimestamp>> {
    QueryDsl::filter(pauses(name), is_breaker(destination))
        .select(pause::paused_until)
        .get_result(conn)
        .optional()
        .map(Option::flatten)
}

/// Takes the right to probe a destination whose breaker has been open long enough. If this relay dies, other relays
/// get the right after `hold`. `false`: another relay has the right, or no probe is needed.
pub(crate) fn take_probe(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
    hold: Duration,
) -> QueryResult<bool> {
    update(pauses(name))
        .filter(is_breaker(destination))
        .filter(pause::paused_until.le(clock_timestamp().nullable()))
        .set((
            pause::paused_until.eq((clock_timestamp() + interval(hold)).nullable()),
            pause::lasts.eq(Some(interval(hold))),
        ))
        .execute(conn)
        .map(|count| count > 0)
}

/// Gives back the right to probe: any relay may take it.
pub(crate) fn release_probe(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<()> {
    update(pauses(name))
        .filter(is_breaker(destination))
        .set((
            pause::paused_until.eq(clock_timestamp().nullable()),
            pause::lasts.eq(Some(interval(Duration::ZERO))),
        ))
        .execute(conn)
        .map(drop)
}

/// Closes the breaker for all relays, after a successful probe or test. Other pauses stay. `false`: the breaker
/// was closed.
pub(crate) fn close_breaker(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<bool> {
    delete(pauses(name))
        .filter(is_breaker(destination))
        .execute(conn)
        .map(|count| count > 0)
}

/// Ends the pauses of operators, relays and the receiver; if there were none, that of the owner. `false`: there was none.
pub(crate) fn resume(
    conn: &mut PgConnection,
    name: &OutboxName,
    kind: Pausable,
    which: &str,
) -> QueryResult<bool> {
    let not_the_owner = pause::paused_by.ne(Hand::Owner.as_str());
    let rows = delete(pauses(name)).filter(is(kind, which));
    if rows.filter(not_the_owner).execute(conn)? > 0 {
        return Ok(true);
    }
    let rows = delete(pauses(name)).filter(is(kind, which));
    Ok(rows.execute(conn)? > 0)
}

/// Ends the pauses of a destination that its owner may end: all, unless an operator has paused the destination or its tenant.
/// `None`: an operator has. `Some(false)`: the destination was not paused.
pub(crate) fn resume_as_owner(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &str,
) -> QueryResult<Option<bool>> {
    let all = || is(Pausable::Destination, which);
    let is_meant = all().or(pause::kind.eq(Pausable::Tenant.as_str()));
    let is_operators = pause::paused_by.eq(Hand::Operator.as_str());
    let of_operator: Vec<(String, String)> =
        QueryDsl::filter(pauses(name), is_meant.and(is_operators).and(is_on!()))
            .select((pause::kind, pause::name))
            .load(conn)?;
    let tenants = of_operator
        .iter()
        .filter(|(kind, _)| kind == Pausable::Tenant.as_str());
    let count = tenants.clone().count();
    let tenants = tenants.map(|(_, tenant)| tenant.as_str());
    let of_tenant = of_tenants(conn, name, tenants, Some(&[which]))?;
    if of_operator.len() > count || !of_tenant.is_empty() {
        return Ok(None);
    }
    let not_of_operator = pause::paused_by.ne(Hand::Operator.as_str());
    let rows = delete(pauses(name)).filter(all());
    let count = rows.filter(not_of_operator).execute(conn)?;
    Ok(Some(count > 0))
}

/// Removes pauses that expired longer ago than `age`.
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

/// Whether any message names this destination. One probe for each topic: a scan of the table would read all waiting
/// messages.
pub(crate) fn is_named(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<bool> {
    for lane in streams_to(conn, name, destination)? {
        let messages = QueryDsl::filter(candidate::table(name.outbox()), is_of(&lane));
        // A plan for all names may read the table: most messages may have this topic and another destination.
        if unprepared(select(exists(messages))).get_result(conn)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::sql::tests::Outbox;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_breaker_opens_where_it_was_closed_whoever_else_has_paused() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let opens = |conn: &mut PgConnection, openings| {
            open_breaker(conn, name, "billing", MINUTE, openings).expect("an answer")
        };
        assert!(opens(conn, 1));
        assert!(!opens(conn, 2), "by another relay, or after a probe");
        assert_eq!(all(conn, name).expect("pauses")[0].openings, 2);
        close_breaker(conn, name, "billing").expect("closed");
        assert!(opens(conn, 1));
        close_breaker(conn, name, "billing").expect("closed");
        let by = (Hand::Receiver, "RATE_LIMITED");
        let kind = Pausable::Destination;
        pause(conn, name, kind, "billing", by, None, 0).expect("paused");
        assert!(opens(conn, 1), "each hand has a pause of its own");
        close_breaker(conn, name, "billing").expect("closed");
        let left = all(conn, name).expect("pauses");
        assert_eq!(
            left.iter().map(|one| one.by).collect::<Vec<_>>(),
            [Hand::Receiver]
        );
    }

    /// A time that is out of range would fail each statement that looks at pauses, for all destinations.
    #[test]
    fn no_pause_lasts_longer_than_times_have_room_for() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        for lasts in ["-1 s", "-10000 years", "300000 years"] {
            let refused = conn.batch_execute(&format!(
                "INSERT INTO {} (kind, name, reason, lasts) VALUES ('topic', 'a', 'x', '{lasts}')",
                name.pause()
            ));
            assert!(refused.is_err(), "{lasts}");
        }
        let by = (Hand::Operator, "WHY");
        for lasts in [Duration::ZERO, Duration::MAX] {
            pause(conn, name, Pausable::Topic, "a", by, Some(lasts), 0).expect("paused");
            all_in_time(conn, name).expect("pauses");
        }
    }

    /// R66: whoever resumes ends no pause that another hand needs.
    #[test]
    fn no_hand_ends_the_pause_of_another() {
        let outbox = Outbox::new();
        let (conn, name) = (&mut outbox.connect(), &outbox.name);
        let kind = Pausable::Destination;
        let hold = |conn: &mut PgConnection, by, lasts| {
            pause(conn, name, kind, "acme", (by, "WHY"), lasts, 0).expect("paused");
        };
        let hands = |conn: &mut PgConnection| -> Vec<Hand> {
            all(conn, name)
                .expect("pauses")
                .iter()
                .map(|one| one.by)
                .collect()
        };
        hold(conn, Hand::Owner, None);
        hold(conn, Hand::Operator, Some(MINUTE));
        hold(conn, Hand::Receiver, Some(2 * MINUTE));
        assert_eq!(resume_as_owner(conn, name, "acme"), Ok(None));
        assert_eq!(hands(conn).len(), 3, "the operator's pause holds");
        assert_eq!(resume(conn, name, kind, "acme"), Ok(true));
        assert_eq!(
            hands(conn),
            [Hand::Owner],
            "an operator leaves the owner's pause first"
        );
        assert_eq!(resume(conn, name, kind, "acme"), Ok(true));
        assert_eq!(resume(conn, name, kind, "acme"), Ok(false));
        hold(conn, Hand::Owner, None);
        hold(conn, Hand::Receiver, None);
        hold(conn, Hand::Operator, Some(Duration::ZERO));
        assert_eq!(resume_as_owner(conn, name, "acme"), Ok(Some(true)));
        assert_eq!(hands(conn), [Hand::Operator], "which has expired");
    }
}
