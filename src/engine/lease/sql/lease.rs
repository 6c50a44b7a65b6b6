//! The lease of one relay incarnation: the right to the messages that it has claimed. The lease id fences (guards)
//! every change of a claimed message.
//!
//! A lease expires by time, which takes a minute. The lease of a killed relay ends sooner. The session of the relay's
//! heartbeat holds the advisory lock of the lease's id, and the server ends a session whose process is gone. A relay
//! that finds the lock free lets the lease expire after the row's `takeover_after` ([`shorten`]). A relay that has only
//! lost its connection sees the change in its row, and renews.
//!
//! So the lock only shows which lease to check. The row keeps two relays from sending one message: whenever a relay
//! sends, it has read its row less than `takeover_after` ago.

use std::fmt;
use std::time::Duration;

use diesel::dsl::{array, exists, max, not};
use diesel::internal::table_macro::{BoxedSelectStatement, FromClause};
use diesel::pg::Pg;
use diesel::pg::data_types::{PgInterval, PgTimestamp};
use diesel::prelude::{
    BoolExpressionMethods, Connection, ExpressionMethods, Insertable, IntoSql,
    NullableExpressionMethods, OptionalExtension, QueryDsl, RunQueryDsl,
};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Json as SqlJson, Nullable, Text};
use diesel::{PgConnection, delete, update};

use super::backend::Backend;
use crate::delivery::LONGEST_LEASE;
use crate::engine::keys::sql::lock::keep_lock;
use crate::engine::serves::routes::Serves;
use crate::engine::serves::sql::topics;
use crate::name::OutboxName;
use crate::sql::NOTIFY;
use crate::sql::functions::{
    Json, On, clock_timestamp, date_part, greatest, interval, length, now, pg_try_advisory_lock,
    pg_try_advisory_xact_lock,
};
use crate::sql::statement::{statement, unprepared_statement};
use crate::sql::table::{lease, other_lease};

/// The id of a lease: the time of its registration, in microseconds. No id is used twice in one outbox, not even by a
/// new primary that lacks the last leases of the old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LeaseId(pub(crate) i64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The row is this lease, and the lease is valid.
fn is_valid(id: LeaseId) -> On<'static, lease::table> {
    Box::new(lease::id.eq(id.0).and(is_not_over()))
}

pub(crate) fn is_not_over() -> On<'static, lease::table> {
    Box::new(not(lease::ended).and(lease::expires_at.gt(clock_timestamp())))
}

/// The relay must stand by: both are single-active, and an older relay is active, or may be. An older relay whose lease
/// has expired may be about to renew it.
// Why: docs/decisions.md#single-active
pub(crate) fn stands_by(name: &OutboxName) -> On<'static, lease::table> {
    let older = other_lease::table(name.lease())
        .filter(other_lease::single_active)
        .filter(other_lease::id.lt(lease::id))
        .filter(not(other_lease::ended))
        .select(other_lease::id);
    Box::new(lease::single_active.and(exists(older)))
}

/// This lease, if it is valid and its relay does not stand by.
pub(crate) fn at_work(name: &OutboxName, id: LeaseId) -> LeasesAtWork {
    leases(name)
        .filter(is_valid(id))
        .filter(not(stands_by(name)))
        .select(lease::id)
        .into_boxed()
}

type LeasesAtWork = BoxedSelectStatement<'static, BigInt, FromClause<lease::table>, Pg>;

pub(crate) fn leases(name: &OutboxName) -> lease::table {
    lease::table(name.lease())
}

/// A lease to register.
pub(crate) struct Registration {
    /// The relay's name, for people who read leases. It does not identify the relay.
    pub(crate) relay: String,
    /// How long the lease is valid.
    pub(crate) lease: Duration,
    /// Whether the relay may be active only while no older lease of this kind is alive.
    pub(crate) is_single_active: bool,
    /// The topics and destinations that the relay serves, as JSON.
    pub(crate) serves: Option<String>,
    /// Whether the registration also records the topics that the relay serves. If not, the relay records them once it
    /// serves messages. Declared topics are recorded in any case.
    pub(crate) records_topics: bool,
    /// The settings that all relays must agree on, as JSON.
    pub(crate) settings: Option<String>,
}

/// Registers a relay: a new lease, valid from now. Usually also records which topics the relay serves.
///
/// Text: Diesel has no LOCK TABLE.
pub(crate) fn register(
    conn: &mut PgConnection,
    name: &OutboxName,
    registration: &Registration,
) -> QueryResult<LeaseId> {
    let Registration {
        is_single_active, ..
    } = *registration;
    let serves = registration.serves.as_deref();
    keep_lock(conn, name)?;
    conn.transaction(|conn| {
        if is_single_active {
            // Ids must become visible in order: a lower id that appears later would make two relays active.
            // So would a clock that was set back: hence the new id is above all existing ids.
            unprepared_statement(format!(
                "LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE",
                name.lease()
            ))
            .execute(conn)?;
        }
        let micros = (date_part("epoch", clock_timestamp()) * 1e6).cast::<BigInt>();
        let id = other_lease::table(name.lease())
            .select((
                greatest(micros, max(other_lease::id) + 1),
                registration.relay.as_str().into_sql::<Text>(),
                clock_timestamp() + interval(registration.lease),
                is_single_active.into_sql::<Bool>(),
                serves.map(Json).into_sql::<Nullable<SqlJson>>(),
                registration
                    .settings
                    .as_deref()
                    .map(Json)
                    .into_sql::<Nullable<SqlJson>>(),
            ))
            .insert_into(leases(name))
            .into_columns((
                lease::id,
                lease::relay,
                lease::expires_at,
                lease::single_active,
                lease::serves,
                lease::settings,
            ))
            .returning(lease::id)
            .get_result(conn)
            .map(LeaseId)?;
        if let Some(serves) = serves.and_then(Serves::from_json) {
            topics::record(conn, name, &serves, !registration.records_topics)?;
        }
        Ok(id)
    })
}

/// Renews a valid lease. `false`: the lease has ended, or has expired and will be ended. `takeover_after` is set if the
/// relay's session holds the lease's lock; `listener` is the server process of the relay's listener.
// Why: docs/decisions.md#ended-leases
pub(crate) fn renew(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
    lease: Duration,
    takeover_after: Option<Duration>,
    listener: Option<Backend>,
) -> QueryResult<bool> {
    update(leases(name))
        .filter(is_valid(id))
        .set((
            lease::renewed_at.eq(clock_timestamp()),
            lease::expires_at.eq(clock_timestamp() + interval(lease)),
            lease::takeover_after.eq(takeover_after.map(interval)),
            lease::listener_pid.eq(listener.map(|one| one.pid)),
            lease::listener_started.eq(listener.and_then(Backend::started)),
        ))
        .execute(conn)
        .map(|rows| rows == 1)
}

/// A valid lease, as its relay sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SeenLease {
    /// The time until the lease expires.
    pub(crate) left: Duration,
    /// Whether this session holds the lease's lock.
    pub(crate) is_locked: bool,
    /// Whether the lease of another relay ends, or should: a survey by the claimer decides.
    pub(crate) others_end: bool,
    /// Whether an older relay is active instead.
    pub(crate) stands_by: bool,
}

/// Reads a lease. `None`: the lease has expired or ended. `locks`: the session lasts, so it takes the lease's lock; it
/// may take the lock again if it already holds it.
pub(crate) fn look(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
    locks: bool,
) -> QueryResult<Option<SeenLease>> {
    let found = leases(name).filter(is_valid(id));
    let soon = clock_timestamp() + other_lease::takeover_after.assume_not_null();
    // The session of a relay holds the lock of its lease, if the row says after how long others may take over.
    let has_no_session =
        (other_lease::takeover_after.is_not_null()).and(pg_try_advisory_xact_lock(other_lease::id));
    let ends = (other_lease::expires_at.le(clock_timestamp()))
        .or(other_lease::expires_at.le(soon))
        .or(has_no_session);
    let others = other_lease::table(name.lease())
        .filter(not(other_lease::ended))
        .filter(other_lease::id.ne(id.0))
        .filter(ends)
        .select(other_lease::id);
    let times = (lease::expires_at, clock_timestamp());
    let seen = (times, exists(others), stands_by(name));
    type LeaseTimes = (((PgTimestamp, PgTimestamp), bool, bool), bool);
    let found: Option<LeaseTimes> = match locks {
        true => found
            .select((seen, pg_try_advisory_lock(lease::id)))
            .get_result(conn),
        false => found
            .select((seen, false.into_sql::<Bool>()))
            .get_result(conn),
    }
    .optional()?;
    Ok(found.map(
        |(((until, now), others_end, stands_by), is_locked)| SeenLease {
            left: Duration::from_micros(u64::try_from(until.0.saturating_sub(now.0)).unwrap_or(0)),
            is_locked,
            others_end,
            stands_by,
        },
    ))
}

/// Removes a lease that holds no messages any more, and notifies the other relays: one that stands by may be the next,
/// and one that sleeps takes what was released.
pub(crate) fn end(conn: &mut PgConnection, name: &OutboxName, id: LeaseId) -> QueryResult<usize> {
    conn.transaction(|conn| {
        let ended = delete(leases(name))
            .filter(lease::id.eq(id.0))
            .execute(conn)?;
        // Text: Diesel has no NOTIFY.
        unprepared_statement(format!("SELECT {NOTIFY}"))
            .bind::<Text, _>(name.outbox())
            .execute(conn)?;
        Ok(ended)
    })
}

/// Shortens the leases of relays whose sessions are gone, and returns them. A relay that comes back renews in time.
///
/// This transaction holds the lock of each shortened lease, so no other session gets it meanwhile. Leases that are
/// being renewed are skipped, and so is the lease of the relay that asks, which is alive.
// Why: docs/decisions.md#session-gone
pub(crate) fn shorten(
    conn: &mut PgConnection,
    name: &OutboxName,
    asks: LeaseId,
) -> QueryResult<Vec<i64>> {
    let soon = clock_timestamp() + other_lease::takeover_after.assume_not_null();
    let gone = other_lease::table(name.lease())
        .filter(not(other_lease::ended))
        .filter(other_lease::id.ne(asks.0))
        .filter(other_lease::expires_at.gt(soon))
        .filter(pg_try_advisory_xact_lock(other_lease::id))
        .select(other_lease::id);
    let soon = clock_timestamp() + lease::takeover_after.assume_not_null();
    update(leases(name))
        .filter(lease::id.eq_any(array::<BigInt, _>(gone.for_no_key_update().skip_locked())))
        .set(lease::expires_at.eq(soon))
        .returning(lease::id)
        .get_results(conn)
}

/// The leases that hold messages in a part of the outbox.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct HoldersPart {
    /// The last sequence of the part; `None`: there are no messages here or after it.
    pub(crate) last: Option<i64>,
    /// The leases that hold messages.
    pub(crate) holders: Vec<i64>,
    /// The holders whose lease rows are gone. No relay removes the row of a holder, but an operator may. One snapshot
    /// sees both tables, and a lease is committed before its first claim, so no relay has these messages.
    pub(crate) vanished: Vec<i64>,
    /// The messages that wait for a retry since a time that has not come yet: the server's clock has gone back since.
    pub(crate) ahead: Vec<i64>,
}

/// The part of the outbox after a sequence, at most `count` messages.
///
/// Text: aggregates of a subquery in FROM.
pub(crate) fn holders(
    conn: &mut PgConnection,
    name: &OutboxName,
    after: i64,
    count: i64,
) -> QueryResult<HoldersPart> {
    unprepared_statement(format!(
        "SELECT max(o.sequence) AS last,
                coalesce(array_agg(DISTINCT o.locked_by) FILTER (WHERE o.locked_by IS NOT NULL),
                         '{{}}') AS holders,
                coalesce(array_agg(DISTINCT o.locked_by) FILTER (WHERE o.locked_by IS NOT NULL
                             AND NOT EXISTS (SELECT FROM {lease} l WHERE l.id = o.locked_by)),
                         '{{}}') AS vanished,
                coalesce(array_agg(o.sequence) FILTER (WHERE o.locked_by IS NULL
                             AND o.last_attempt_at > clock_timestamp() + interval '1 s'),
                         '{{}}') AS ahead
           FROM (SELECT sequence, locked_by, last_attempt_at FROM {outbox} WHERE sequence > $1
                  ORDER BY sequence LIMIT $2) o",
        outbox = name.outbox(),
        lease = name.lease(),
    ))
    .bind::<BigInt, _>(after)
    .bind::<BigInt, _>(count)
    .giving::<(
        Nullable<BigInt>,
        Array<BigInt>,
        Array<BigInt>,
        Array<BigInt>,
    )>()
    .get_result(conn)
}

/// Lets these messages wait as long as their retries were to wait, from now on. Others may have changed them meanwhile.
/// Returns how many.
///
/// Text: the difference of two columns.
// Why: docs/decisions.md#two-clocks
pub(crate) fn bring_back(
    conn: &mut PgConnection,
    name: &OutboxName,
    ahead: &[i64],
) -> QueryResult<usize> {
    statement(format!(
        "UPDATE {outbox} SET last_attempt_at = clock_timestamp(),
                available_at = clock_timestamp() + greatest(available_at - last_attempt_at, interval '0')
          WHERE sequence = ANY($1) AND locked_by IS NULL
            AND last_attempt_at > clock_timestamp() + interval '1 s'",
        outbox = name.outbox(),
    ))
    .bind::<Array<BigInt>, _>(ahead)
    .execute(conn)
}

/// A lease that may disappear.
pub(crate) struct Watched {
    pub(crate) id: i64,
    pub(crate) has_ended: bool,
    /// How long the relay may still send after the row has disappeared: as long as other relays wait after the end of
    /// its session, if the row says so, and else the time left.
    pub(crate) sends_for: Duration,
    /// What the server's clock showed, in microseconds.
    pub(crate) read_at: i64,
}

/// All leases.
pub(crate) fn all(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Watched>> {
    type LeaseTimes = (i64, bool, Option<PgInterval>, PgTimestamp, PgTimestamp);
    let rows: Vec<LeaseTimes> = leases(name)
        .select((
            lease::id,
            lease::ended,
            lease::takeover_after,
            lease::expires_at,
            clock_timestamp(),
        ))
        .load(conn)?;
    let of_row = |(id, has_ended, after, until, now): LeaseTimes| {
        let left = until.0.saturating_sub(now.0);
        let left = Duration::from_micros(u64::try_from(left).unwrap_or(0));
        Watched {
            id,
            has_ended,
            // The clock may have gone back since the row was written: no lease is longer.
            sends_for: after.map_or(left, length).min(LONGEST_LEASE),
            read_at: now.0,
        }
    };
    Ok(rows.into_iter().map(of_row).collect())
}

/// Forgets leases that expired longer ago than `age`, except `holders`: the leases that held messages when the whole
/// outbox was scanned. The scan must have taken no longer than `age`.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    age: Duration,
    holders: &[i64],
) -> QueryResult<usize> {
    delete(leases(name))
        .filter(lease::expires_at.lt(now() - interval(age)))
        .filter(lease::id.ne_all(holders))
        .execute(conn)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use diesel::sql_query;

    use super::*;
    use crate::sql::expired::ended;
    use crate::sql::tests::Outbox;

    const MINUTE: Duration = Duration::from_secs(60);

    fn stands_active(conn: &mut PgConnection, name: &OutboxName, id: LeaseId) -> bool {
        crate::engine::claim::sql::glance::at_leases(conn, name, id)
            .expect("an answer")
            .is_active
    }

    /// Opens a transaction on a lease's row: a renewal before its commit, or an operator's change.
    fn hold(conn: &mut PgConnection, name: &OutboxName, id: LeaseId, change: &str) {
        conn.batch_execute(&format!(
            "BEGIN; UPDATE {} SET {change} WHERE id = {id}",
            name.lease()
        ))
        .expect("the row is free");
    }

    fn let_expire(conn: &mut PgConnection, name: &OutboxName, id: LeaseId) {
        conn.batch_execute(&format!(
            "UPDATE {} SET expires_at = clock_timestamp() WHERE id = {id}",
            name.lease()
        ))
        .expect("the row is free");
    }

    /// G4
    #[test]
    fn a_lock_on_the_row_of_an_expired_lease_keeps_no_other_lease_from_ending() {
        let outbox = Outbox::new();
        let (mut conn, mut other, name) = (outbox.connect(), outbox.connect(), &outbox.name);
        let [held, over] =
            [Duration::ZERO; 2].map(|lease| outbox.lease_for(&mut conn, lease, false));
        hold(&mut other, name, held, "relay = 'an operator'");
        assert_eq!(ended(&mut conn, name).expect("no wait"), [over.0]);
        other.batch_execute("COMMIT").expect("an end");
        assert_eq!(ended(&mut conn, name).expect("an answer"), [held.0, over.0]);
        end(&mut conn, name, held).expect("removed");
        assert_eq!(ended(&mut conn, name).expect("an answer"), [over.0]);
    }

    /// G4: also if the clock is set back.
    #[test]
    fn a_lease_that_has_ended_is_never_renewed() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        let lease = outbox.lease_for(&mut conn, Duration::ZERO, false);
        assert_eq!(ended(&mut conn, name).expect("an answer"), [lease.0]);
        hold(&mut conn, name, lease, "expires_at = 'infinity'");
        conn.batch_execute("COMMIT")
            .expect("a clock that was set back");
        assert!(!renew(&mut conn, name, lease, MINUTE, None, None).expect("an answer"));
        assert!(!stands_active(&mut conn, name, lease));
        assert_eq!(ended(&mut conn, name).expect("an answer"), [lease.0]);
    }

    /// R10: the renewal's commit is slow, so other sessions still see the old time, which is past.
    #[test]
    fn another_single_active_relay_waits_for_the_end_of_a_renewal_that_is_in_flight() {
        let outbox = Outbox::new();
        let (mut conn, mut slow, name) = (outbox.connect(), outbox.connect(), &outbox.name);
        let [first, second] = [MINUTE; 2].map(|lease| outbox.lease_for(&mut conn, lease, true));
        let expired = "expires_at = clock_timestamp() + interval '1 h'";
        let_expire(&mut conn, name, first);
        hold(&mut slow, name, first, expired);
        assert!(ended(&mut conn, name).expect("no wait").is_empty());
        assert!(!stands_active(&mut conn, name, second));
        slow.batch_execute("COMMIT").expect("an answer at last");
        assert!(stands_active(&mut conn, name, first));
        assert!(!stands_active(&mut conn, name, second));

        let_expire(&mut conn, name, first);
        assert!(!stands_active(&mut conn, name, second), "not ended yet");
        assert_eq!(ended(&mut conn, name).expect("an answer"), [first.0]);
        assert!(stands_active(&mut conn, name, second));
        assert!(!renew(&mut conn, name, first, MINUTE, None, None).expect("an answer"));
    }

    /// A killed relay soon loses its lease; a relay that comes back keeps it.
    #[test]
    fn a_lease_whose_session_is_gone_ends_soon_unless_it_is_renewed() {
        let outbox = Outbox::new();
        let (mut conn, mut heartbeat, name) = (outbox.connect(), outbox.connect(), &outbox.name);
        let id = outbox.lease(&mut conn);
        let look = |conn: &mut PgConnection, locks| {
            look(conn, name, id, locks)
                .expect("an answer")
                .expect("a lease")
        };
        assert!(!look(&mut heartbeat, false).is_locked);
        assert!(look(&mut heartbeat, true).is_locked);
        assert!(!look(&mut conn, true).is_locked, "locked elsewhere");
        let soon = Some(Duration::from_secs(7));
        let renewed = |conn: &mut PgConnection, takeover_after| {
            assert!(renew(conn, name, id, MINUTE, takeover_after, None).expect("an answer"));
        };
        renewed(&mut heartbeat, soon);
        let (none, shortened) = ([0_i64; 0], |conn: &mut PgConnection| {
            shorten(conn, name, LeaseId(0)).expect("an answer")
        });
        assert_eq!(shortened(&mut conn), none, "the session lives");
        drop(heartbeat);
        let own = shorten(&mut conn, name, id).expect("an answer");
        assert_eq!(own, none, "the relay that asks is alive");
        let mut watched = Vec::new();
        while watched.is_empty() {
            // The server's process takes a moment to end.
            watched = shortened(&mut conn);
        }
        assert_eq!(watched, [id.0]);
        let left = look(&mut conn, false).left;
        assert!(
            (Duration::from_secs(4)..=Duration::from_secs(7)).contains(&left),
            "{left:?}"
        );
        assert_eq!(shortened(&mut conn), none, "already shortened");
        assert!(look(&mut conn, false).left <= left);

        let mut heartbeat = outbox.connect();
        assert!(look(&mut heartbeat, true).is_locked, "the lock is free");
        renewed(&mut heartbeat, None);
        assert!(look(&mut conn, false).left > Duration::from_secs(50));
        drop(heartbeat);
        assert_eq!(shortened(&mut conn), none, "it ends by time only");
    }

    /// Shortening does not wait for a renewal in progress.
    #[test]
    fn a_lease_that_is_being_renewed_is_not_shortened() {
        let outbox = Outbox::new();
        let (mut conn, mut slow, name) = (outbox.connect(), outbox.connect(), &outbox.name);
        let id = outbox.lease(&mut conn);
        let soon = Some(Duration::from_secs(7));
        assert!(renew(&mut conn, name, id, MINUTE, soon, None).expect("an answer"));
        hold(
            &mut slow,
            name,
            id,
            "expires_at = clock_timestamp() + interval '1 h'",
        );
        assert!(
            shorten(&mut conn, name, LeaseId(0))
                .expect("no wait")
                .is_empty()
        );
        slow.batch_execute("COMMIT").expect("an end");
        assert_eq!(
            shorten(&mut conn, name, LeaseId(0)).expect("an answer"),
            [id.0]
        );
    }

    /// G4, R10: after a failover, after TRUNCATE, and after the clock is set back.
    #[test]
    fn no_lease_id_is_assigned_twice_or_below_an_existing_one() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        let one = |conn: &mut PgConnection| outbox.lease_for(conn, MINUTE, true);
        let first = one(&mut conn);
        conn.batch_execute(&format!("TRUNCATE {} RESTART IDENTITY", name.lease()))
            .expect("emptied");
        let second = one(&mut conn);
        assert!(second > first);
        conn.batch_execute(&format!("UPDATE {} SET id = id + 3600000000", name.lease()))
            .expect("a clock that was set back");
        assert_eq!(one(&mut conn).0, second.0 + 3_600_000_001);
    }

    #[test]
    fn holders_are_found_part_by_part_and_forgotten_when_they_hold_nothing() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        let mut register = |lease| outbox.lease_for(&mut conn, lease, false);
        let [over, idle] = [Duration::ZERO, Duration::ZERO].map(&mut register);
        let live = register(Duration::from_secs(600));
        // A lease without a row holds every fifth message.
        let gone = live.0 + 100;
        sql_query(format!(
            "INSERT INTO {} (topic, payload, locked_by, locked_at)
             SELECT 'a', '1', CASE n % 5 WHEN 0 THEN {gone} WHEN 1 THEN {over} WHEN 2 THEN {live} END, now()
               FROM generate_series(1, 25) n",
            name.outbox()
        ))
        .execute(&mut conn)
        .expect("messages");
        let (mut after, mut all, mut vanished, mut parts) = (i64::MIN, Vec::new(), Vec::new(), 0);
        loop {
            let part = holders(&mut conn, name, after, 4).expect("a part");
            all.extend(part.holders);
            vanished.extend(part.vanished);
            match part.last {
                Some(last) => (after, parts) = (last, parts + 1),
                None => break,
            }
        }
        all.sort_unstable();
        all.dedup();
        vanished.dedup();
        assert_eq!(
            (all.as_slice(), parts),
            ([over.0, live.0, gone].as_slice(), 7)
        );
        assert_eq!(vanished, [gone]);
        let forgotten = forget(&mut conn, name, Duration::ZERO, &all).expect("forgotten");
        assert_eq!(forgotten, 1, "only {idle} has expired and holds no message");
    }
}
