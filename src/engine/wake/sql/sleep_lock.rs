//! The sessions that hold the advisory lock (outbox, 1): while any session holds the lock, inserts notify. And the sessions
//! that share a lock of relays that are awake: meanwhile others do not make inserts notify.
//!
//! A sleeping relay's listener holds it. A frozen relay keeps its session, and so the lock, for as long as it is frozen:
//! each commit notifies, and commits that notify wait for one another. So the relay's lease names the listener's server
//! process, and when the lease has ended, another relay ends the session. Any role may take the lock, and give its
//! session any name, but only roles with rights may write into a lease.
//!
//! Text: PostgreSQL's catalogue.
//!
//! Why: docs/decisions.md#notify-while-asleep

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl, select};

use crate::engine::lease::sql::backend::MAY_END;
use crate::name::OutboxName;
use crate::sql::OUTBOX_NUMBER;
use crate::sql::functions::pg_terminate_backend;
use crate::sql::statement::unprepared_statement;

/// A session that holds or shares a lock, and is not the listener of a relay whose lease is alive.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct Holder {
    pub(crate) pid: i32,
    /// Application, user and address.
    pub(crate) who: String,
    /// The ended lease whose listener the session is. `None`: the session is no relay's listener.
    pub(crate) lease: Option<i64>,
    /// Whether this role may end the session.
    may_end: bool,
}

/// The sessions that hold the lock without a live lease. Only sessions that are older than a few beats of a heartbeat,
/// which writes the listener of a new session into the lease. A role without `pg_read_all_stats` does not see when the
/// processes of others began, and tells them by their numbers.
pub(crate) fn holders(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Holder>> {
    unprepared_statement(format!(
        "SELECT a.pid, concat_ws(', ', 'application ' || nullif(a.application_name, ''), 'user ' || a.usename,
                       'from ' || a.client_addr::text) AS who,
                n.id,
                {MAY_END} AS may_end
           FROM pg_locks k JOIN pg_stat_activity a ON a.pid = k.pid JOIN pg_roles r ON r.oid = a.usesysid
           LEFT JOIN LATERAL (
                SELECT l.id, l.ended FROM {lease} l
                 WHERE l.listener_pid = a.pid AND coalesce(l.listener_started = a.backend_start, true)
                 ORDER BY l.id DESC LIMIT 1) n ON true
          WHERE k.locktype = 'advisory' AND k.objsubid = 2
            AND k.classid::bigint::bit(32)::integer = {OUTBOX_NUMBER}
            AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND k.granted AND CASE k.objid WHEN 1 THEN k.mode = 'ExclusiveLock' AND n.ended IS NOT FALSE
                                   ELSE k.mode = 'ShareLock' AND n.ended END
            AND coalesce(a.backend_start < clock_timestamp() - interval '5 s', true)
          ORDER BY a.pid",
        lease = name.lease()
    ))
    .bind::<Text, _>(name.outbox())
    .giving::<(Integer, Text, Nullable<BigInt>, Bool)>()
    .load(conn)
}

/// Ends the listeners of ended leases that hold the lock. Returns the sessions that hold the lock still: listeners that
/// this role may not end, and sessions that are no relay's.
pub(crate) fn end_holders(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Holder>> {
    let ends = |one: &Holder| one.lease.is_some() && one.may_end;
    let (gone, kept): (Vec<Holder>, Vec<Holder>) = holders(conn, name)?.into_iter().partition(ends);
    for one in gone {
        select(pg_terminate_backend(one.pid)).execute(conn)?;
    }
    Ok(kept)
}
