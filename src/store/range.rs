//! Reading a part of the outbox, and no longer than for a moment.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::millis;

/// Sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// All of them are greater.
    pub(crate) after: i64,
    /// None of them is.
    pub(crate) upto: i64,
}

impl Range {
    pub(crate) const ALL: Self = Self {
        after: i64::MIN,
        upto: i64::MAX,
    };
}

/// Runs statements in a transaction, and undoes them where one of them takes longer than `timeout`: `None`.
pub(crate) fn briefly<T>(
    conn: &mut PgConnection,
    timeout: Duration,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<Option<T>> {
    let began = Instant::now();
    let done = conn.transaction(|conn| {
        let limit = millis(timeout).max(1);
        conn.batch_execute(&format!("SET LOCAL statement_timeout = {limit}"))?;
        work(conn)
    });
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if is_over_time(&error, began.elapsed(), timeout) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a statement has failed because it took too long. By its time and not by what the server says of
/// it, which may be in any language. Two clocks: the server's may be a little faster.
pub(crate) fn is_over_time(error: &Error, took: Duration, limit: Duration) -> bool {
    matches!(error, Error::DatabaseError(DatabaseErrorKind::Unknown, _))
        && took >= limit.mul_f64(0.9)
}

#[cfg(test)]
mod tests {
    use diesel::RunQueryDsl;
    use diesel::sql_query;

    use super::*;
    use crate::store::model::database::Outbox;

    #[test]
    fn what_takes_too_long_is_undone_and_the_connection_goes_on() {
        let mut conn = Outbox::new().connect();
        conn.batch_execute("CREATE TEMP TABLE done (n int)")
            .expect("a table");
        let timeout = Duration::from_millis(100);
        let mut run = |sql: &str| {
            briefly(&mut conn, timeout, |conn| {
                sql_query("INSERT INTO done VALUES (1)").execute(conn)?;
                conn.batch_execute(sql)
            })
            .map_err(drop)
        };
        assert_eq!(run("SELECT pg_sleep(60)"), Ok(None));
        assert_eq!(run("SELECT FROM nowhere"), Err(()));
        assert_eq!(run("SELECT 1"), Ok(Some(())));
        let count = sql_query("SELECT FROM done").execute(&mut conn);
        assert_eq!(count, Ok(1));
    }
}
