//! The server process of a connection.

use diesel::dsl::exists;
use diesel::pg::data_types::PgTimestamp;
use diesel::result::QueryResult;
use diesel::{ExpressionMethods, PgConnection, PgExpressionMethods, QueryDsl, RunQueryDsl, select};

use crate::store::catalogue::pg_stat_activity;
use crate::store::sql::pg_backend_pid;

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

/// Whether one of these server processes still exists: it may finish a statement whose client is gone.
pub(crate) fn are_at_work(
    conn: &mut PgConnection,
    backends: impl IntoIterator<Item = Backend>,
) -> QueryResult<bool> {
    for backend in backends {
        let found = pg_stat_activity::table
            .filter(pg_stat_activity::pid.eq(backend.pid))
            .filter(pg_stat_activity::backend_start.is_not_distinct_from(backend.started()));
        if select(exists(found)).get_result(conn)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chaos test found this: the number of a claim's process was used again after a restart of the server, so the
    /// relay believed that the claim was still running.
    #[test]
    fn a_process_with_the_number_of_another_is_not_that_one() {
        let conn = &mut crate::store::tests::Outbox::new().connect();
        let backend = backend(conn).expect("a process");
        assert!(backend.started > 0);
        let earlier = Backend {
            started: backend.started - 1,
            ..backend
        };
        assert_eq!(are_at_work(conn, [earlier, backend]), Ok(true));
        assert_eq!(are_at_work(conn, [earlier]), Ok(false));
    }
}
