//! The lease of one relay incarnation. Its id fences every change of a claimed message.

use std::fmt;
use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text, Timestamptz};
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};

use super::claim::is_live;
use super::millis;
use super::statement::statement;
use crate::name::OutboxName;

/// The id of a lease, never used twice in one outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LeaseId(pub(crate) i64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(diesel::QueryableByName)]
struct IdRow {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

/// Registers a relay: a new lease, valid for `lease` from now. `single_active`: it is to work only
/// while no older lease of that kind is alive.
pub(crate) fn register(
    conn: &mut PgConnection,
    name: &OutboxName,
    relay: &str,
    lease: Duration,
    single_active: bool,
) -> QueryResult<LeaseId> {
    conn.transaction(|conn| {
        if single_active {
            // Ids become visible in their order: a lower one that appears later would put two to work.
            sql_query(format!(
                "LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE",
                name.lease()
            ))
            .execute(conn)?;
        }
        sql_query(format!(
            "INSERT INTO {} (relay, expires_at, single_active)
             VALUES ($1, clock_timestamp() + $2 * interval '1 millisecond', $3) RETURNING id",
            name.lease()
        ))
        .bind::<Text, _>(relay)
        .bind::<BigInt, _>(millis(lease))
        .bind::<Bool, _>(single_active)
        .get_result::<IdRow>(conn)
        .map(|row| LeaseId(row.id))
    })
}

/// What a relay is to know at each look.
#[derive(diesel::QueryableByName)]
struct StandingRow {
    #[diesel(sql_type = Timestamptz)]
    now: PgTimestamp,
    #[diesel(sql_type = Bool)]
    is_active: bool,
}

/// How a relay stands.
pub(crate) struct Standing {
    /// The database's clock, in microseconds as the database counts.
    pub(crate) now: i64,
    /// Its lease is not over, and no older one has to do the work.
    pub(crate) is_active: bool,
}

/// The database's clock, and whether this relay is to work.
pub(crate) fn standing(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
) -> QueryResult<Standing> {
    statement(format!(
        "SELECT clock_timestamp() AS now, {} AS is_active",
        is_live(name)
    ))
    .bind::<BigInt, _>(id.0)
    .get_result::<StandingRow>(conn)
    .map(|row| Standing {
        now: row.now.0,
        is_active: row.is_active,
    })
}

/// Renews a lease that is not over. `false`: it is over, for ever.
pub(crate) fn renew(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
    lease: Duration,
) -> QueryResult<bool> {
    sql_query(format!(
        "UPDATE {} SET renewed_at = clock_timestamp(),
                       expires_at = clock_timestamp() + $2 * interval '1 millisecond'
          WHERE id = $1 AND expires_at > clock_timestamp()",
        name.lease()
    ))
    .bind::<BigInt, _>(id.0)
    .bind::<BigInt, _>(millis(lease))
    .execute(conn)
    .map(|rows| rows == 1)
}

/// Ends a lease under which nothing is claimed any more.
pub(crate) fn end(conn: &mut PgConnection, name: &OutboxName, id: LeaseId) -> QueryResult<usize> {
    sql_query(format!("DELETE FROM {} WHERE id = $1", name.lease()))
        .bind::<BigInt, _>(id.0)
        .execute(conn)
}

/// The leases that are over and whose messages may be taken, the ones in `known` left out.
///
/// An UPDATE, though it changes nothing: it waits for a renewal that is under way, looks again
/// after it, and makes a later one look again. So a lease that is returned here never comes back.
pub(crate) fn newly_expired(
    conn: &mut PgConnection,
    name: &OutboxName,
    known: &[i64],
) -> QueryResult<Vec<i64>> {
    statement(format!(
        "UPDATE {} SET expires_at = expires_at
          WHERE expires_at <= clock_timestamp() AND id <> ALL($1) RETURNING id",
        name.lease()
    ))
    .bind::<Array<BigInt>, _>(known)
    .load::<IdRow>(conn)
    .map(|rows| rows.into_iter().map(|row| row.id).collect())
}

/// Ends a lease by time, so that what is claimed under it belongs to whoever takes it over.
pub(crate) fn expire(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: LeaseId,
) -> QueryResult<usize> {
    sql_query(format!(
        "UPDATE {} SET expires_at = clock_timestamp() WHERE id = $1",
        name.lease()
    ))
    .bind::<BigInt, _>(id.0)
    .execute(conn)
}

/// Who holds messages of a part of the outbox.
#[derive(Debug, diesel::QueryableByName)]
pub(crate) struct Part {
    /// Its last sequence; `None`: nothing is there, and nothing behind it.
    #[diesel(sql_type = Nullable<BigInt>)]
    pub(crate) last: Option<i64>,
    /// Leases that hold messages.
    #[diesel(sql_type = Array<BigInt>)]
    pub(crate) holders: Vec<i64>,
    /// Those of them whose rows are gone, which no relay does and an operator may. One snapshot sees
    /// both tables, and a lease is committed before its first claim: so what they hold is nobody's.
    #[diesel(sql_type = Array<BigInt>)]
    pub(crate) vanished: Vec<i64>,
}

/// The part of the outbox behind a sequence, `count` messages at most.
pub(crate) fn holders(
    conn: &mut PgConnection,
    name: &OutboxName,
    after: i64,
    count: i64,
) -> QueryResult<Part> {
    sql_query(format!(
        "SELECT max(o.sequence) AS last,
                coalesce(array_agg(DISTINCT o.locked_by) FILTER (WHERE o.locked_by IS NOT NULL),
                         '{{}}') AS holders,
                coalesce(array_agg(DISTINCT o.locked_by) FILTER (WHERE o.locked_by IS NOT NULL
                             AND NOT EXISTS (SELECT FROM {lease} l WHERE l.id = o.locked_by)),
                         '{{}}') AS vanished
           FROM (SELECT sequence, locked_by FROM {outbox} WHERE sequence > $1
                  ORDER BY sequence LIMIT $2) o",
        outbox = name.outbox(),
        lease = name.lease(),
    ))
    .bind::<BigInt, _>(after)
    .bind::<BigInt, _>(count)
    .get_result(conn)
}

/// Forgets leases that are over for `age` and are none of these: those that held something when the whole
/// outbox was gone through, which has taken no longer than `age`.
pub(crate) fn forget(
    conn: &mut PgConnection,
    name: &OutboxName,
    age: Duration,
    holders: &[i64],
) -> QueryResult<usize> {
    sql_query(format!(
        "DELETE FROM {lease} l
          WHERE l.expires_at < now() - $1 * interval '1 millisecond' AND l.id <> ALL($2)",
        lease = name.lease(),
    ))
    .bind::<BigInt, _>(millis(age))
    .bind::<Array<BigInt>, _>(holders)
    .execute(conn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::model::database::Outbox;

    #[test]
    fn holders_are_found_part_by_part_and_forgotten_when_they_hold_nothing() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        let mut register =
            |lease| register(&mut conn, name, "test", lease, false).expect("a lease");
        let [over, idle] = [Duration::ZERO, Duration::ZERO].map(&mut register);
        let live = register(Duration::from_secs(600));
        // A lease that nobody has registered holds every fifth one.
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
        assert_eq!(forgotten, 1, "only {idle} is over and holds nothing");
    }
}
