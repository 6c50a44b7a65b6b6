//! The sessions that hold the advisory lock (outbox, 1): while any session holds the lock, inserts notify.
//!
//! A sleeping relay's listener holds it. A frozen relay keeps its session, and so the lock, for as long as it is frozen:
//! each commit notifies, and commits that notify wait for one another. So the session is named after the relay's lease
//! ([`name_of`]), and when the lease has ended, another relay ends the session.
//!
//! Text: PostgreSQL's catalogue.

use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text};
use diesel::{PgConnection, RunQueryDsl, select};

use super::lease::LeaseId;
use crate::name::OutboxName;
use crate::store::OUTBOX_NUMBER;
use crate::store::sql::pg_terminate_backend;
use crate::store::statement::statement_anew;

/// The `application_name` of a listener whose relay has this lease.
pub(crate) fn name_of(lease: Option<LeaseId>) -> String {
    match lease {
        Some(lease) => format!("diesel-outbox listener {lease}"),
        None => "diesel-outbox listener".to_owned(),
    }
}

/// A session that holds the lock, and is not the listener of a relay whose lease is alive.
#[derive(Debug, diesel::Queryable)]
pub(crate) struct Holder {
    pub(crate) pid: i32,
    /// Application, user and address.
    pub(crate) who: String,
    /// The lease that the session is named after, if any.
    pub(crate) lease: Option<i64>,
    /// Whether this role may end the session.
    may_end: bool,
}

/// The sessions that hold the lock without a live lease.
pub(crate) fn holders(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<Holder>> {
    statement_anew(format!(
        "SELECT a.pid, concat_ws(', ', 'application ' || nullif(a.application_name, ''), 'user ' || a.usename,
                       'from ' || a.client_addr::text) AS who,
                n.lease,
                (pg_has_role(a.usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE'))
                AND (NOT r.rolsuper OR current_setting('is_superuser')::bool) AS may_end
           FROM pg_locks k JOIN pg_stat_activity a ON a.pid = k.pid JOIN pg_roles r ON r.oid = a.usesysid
          CROSS JOIN LATERAL (SELECT substring(a.application_name FROM '^diesel-outbox listener ([0-9]{{1,18}})$')::bigint) n(lease)
          WHERE k.locktype = 'advisory' AND k.objsubid = 2 AND k.objid = 1
            AND k.classid::bigint::bit(32)::integer = {OUTBOX_NUMBER}
            AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND k.mode = 'ExclusiveLock' AND k.granted
            AND NOT EXISTS (SELECT FROM {lease} l WHERE l.id = n.lease AND NOT l.ended)
          ORDER BY a.pid",
        lease = name.lease()
    ))
    .bind::<Text, _>(name.outbox())
    .giving::<(Integer, Text, Nullable<BigInt>, Bool)>()
    .load(conn)
}

/// Ends the sessions that hold the lock and are named after one of these leases, which have ended. Returns the sessions
/// that hold the lock still, because this role may not end them.
pub(crate) fn end_holders(
    conn: &mut PgConnection,
    name: &OutboxName,
    ended: &[i64],
) -> QueryResult<Vec<Holder>> {
    let mut kept = holders(conn, name)?;
    kept.retain(|one| one.lease.is_some_and(|lease| ended.contains(&lease)));
    let (gone, kept): (Vec<Holder>, Vec<Holder>) = kept.into_iter().partition(|one| one.may_end);
    for one in gone {
        select(pg_terminate_backend(one.pid)).execute(conn)?;
    }
    Ok(kept)
}
