//! The server process of a connection.
//!
//! Text: PostgreSQL's catalogue.

use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::sql_types::{Integer, Nullable, Timestamptz};
use diesel::{ExpressionMethods, PgConnection, QueryDsl, RunQueryDsl};

use crate::sql::functions::pg_backend_pid;
use crate::sql::statement::unprepared_statement;

diesel::table! {
    /// The server's processes.
    pg_catalog.pg_stat_activity (pid) {
        pid -> Integer,
        backend_start -> Nullable<Timestamptz>,
        query -> Nullable<Text>,
    }
}

/// A server process. The number of a process that has ended is used again, soon where many processes start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backend {
    pub(crate) pid: i32,
    /// In microseconds since 2000; 0 if the role of the session must not see it, because it has taken another role.
    pub(crate) started: i64,
}

impl Backend {
    pub(crate) fn started(self) -> Option<PgTimestamp> {
        (self.started != 0).then_some(PgTimestamp(self.started))
    }
}

/// The server process of a connection.
pub(crate) fn backend(conn: &mut PgConnection) -> QueryResult<Backend> {
    let (pid, started) = pg_stat_activity::table
        .filter(pg_stat_activity::pid.eq(pg_backend_pid()))
        .select((pg_stat_activity::pid, pg_stat_activity::backend_start))
        .get_result::<(i32, Option<PgTimestamp>)>(conn)?;
    let started = started.map_or(0, |started| started.0);
    Ok(Backend { pid, started })
}

/// SQL: whether this role may end a session of `pg_stat_activity` (`a`) with the role `r`.
pub(crate) const MAY_END: &str =
    "(pg_has_role(a.usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE'))
     AND (NOT r.rolsuper OR current_setting('is_superuser')::bool)";

/// Whether one of these server processes still exists: it may finish a statement whose client is gone. Asks those to end
/// that this role may ask: a process that has lost its client without notice would wait for hours.
pub(crate) fn end(conn: &mut PgConnection, backends: &[Backend]) -> QueryResult<bool> {
    let mut exists = false;
    for one in backends {
        let found = unprepared_statement(format!(
            "SELECT CASE WHEN {MAY_END} THEN pg_terminate_backend(a.pid) END
               FROM pg_stat_activity a LEFT JOIN pg_roles r ON r.oid = a.usesysid
              WHERE a.pid = $1 AND a.backend_start IS NOT DISTINCT FROM $2"
        ));
        let found = found
            .bind::<Integer, _>(one.pid)
            .bind::<Nullable<Timestamptz>, _>(one.started());
        exists |= found.execute(conn)? > 0;
    }
    Ok(exists)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chaos test found this: the number of a claim's process was used again after a restart of the server, so the
    /// relay believed that the claim was still running.
    #[test]
    fn a_process_with_the_number_of_another_is_not_that_one_and_continues() {
        let outbox = crate::sql::tests::Outbox::new();
        let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
        let lost = backend(other).expect("a process");
        assert!(lost.started > 0);
        let earlier = Backend {
            started: lost.started - 1,
            ..lost
        };
        assert_eq!(end(conn, &[earlier]), Ok(false));
        assert_eq!(backend(other), Ok(lost), "the process works");
    }

    /// R65: a process whose client has vanished without notice does not keep a claim in doubt.
    #[test]
    fn a_process_that_has_lost_its_client_is_ended() {
        let outbox = crate::sql::tests::Outbox::new();
        let (conn, lost) = (&mut outbox.connect(), &mut outbox.connect());
        let of_lost = backend(lost).expect("a process");
        assert_eq!(end(conn, &[of_lost]), Ok(true));
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while end(conn, &[of_lost]) == Ok(true) {
            assert!(
                std::time::Instant::now() < until,
                "the process still exists"
            );
        }
        assert!(backend(lost).is_err(), "the session has ended");
    }

    /// A role must not end a process of another role, and is told that the process exists.
    #[test]
    fn a_process_of_another_role_is_not_ended() {
        let outbox = crate::sql::tests::Outbox::new();
        let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
        let of_other = backend(other).expect("a process");
        // This role must not see when the process was started.
        let hidden = Backend {
            started: 0,
            ..of_other
        };
        let role = format!("doubtful_{}", of_other.pid);
        diesel::sql_query(format!("CREATE ROLE {role}"))
            .execute(conn)
            .expect("a role");
        diesel::sql_query(format!("SET ROLE {role}"))
            .execute(conn)
            .expect("the role");
        let exists = end(conn, &[hidden]);
        diesel::sql_query("RESET ROLE")
            .execute(conn)
            .expect("the role before");
        diesel::sql_query(format!("DROP ROLE {role}"))
            .execute(conn)
            .expect("dropped");
        assert_eq!(exists, Ok(true));
        assert_eq!(backend(other), Ok(of_other), "the process works");
    }
}
