//! Read-only queries that leave no trace: they have their own limits and planner settings on any connection.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::result::{Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::brief::has_timed_out;
use super::millis;

/// Runs read-only statements in a transaction, or a savepoint of the caller's. It is always rolled back, so the
/// settings end with the statements. The server chooses the plans, but without JIT compilation and parallel
/// workers, which would cost more than they save, and describes types and expressions as it does by default. `timeout` limits each statement; `None` keeps the connection's
/// limit.
pub(crate) fn looking<T>(
    conn: &mut PgConnection,
    timeout: Option<Duration>,
    look: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    let limit = timeout.map_or(String::new(), |timeout| {
        format!("SET LOCAL statement_timeout = {};", millis(timeout).max(1))
    });
    let mut seen = None;
    let end = conn.transaction::<(), Error, _>(|conn| {
        conn.batch_execute(&format!(
            "{limit} SET LOCAL quote_all_identifiers = off; SET LOCAL jit = off; SET LOCAL max_parallel_workers_per_gather = 0;
             SET LOCAL enable_seqscan = on; SET LOCAL enable_bitmapscan = on"
        ))?;
        seen = Some(look(conn)?);
        Err(Error::RollbackTransaction)
    });
    match (seen, end) {
        (Some(seen), Err(Error::RollbackTransaction)) => Ok(seen),
        (_, Err(error)) => Err(error),
        (_, Ok(())) => Err(Error::RollbackTransaction),
    }
}

/// Like [`looking`], but returns `None` if a statement took longer than `timeout`. The elapsed time decides,
/// because the server's message may be in any language.
pub(crate) fn looking_briefly<T>(
    conn: &mut PgConnection,
    timeout: Duration,
    look: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<Option<T>> {
    let mut began = Instant::now();
    let seen = looking(conn, Some(timeout), |conn| {
        began = Instant::now();
        look(conn)
    });
    match seen {
        Ok(seen) => Ok(Some(seen)),
        Err(error) if has_timed_out(&error, began.elapsed(), timeout) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_query_is_given_up_in_any_language_of_the_server() {
        let url = std::env::var("DATABASE_URL")
            .expect("DATABASE_URL is set: run `make test`, or `scripts/with-postgres cargo test`");
        let mut conn = PgConnection::establish(&url).expect("PostgreSQL is running");
        let timeout = Duration::from_millis(100);
        let mut look = |sql: &str| {
            looking_briefly(&mut conn, timeout, |conn| conn.batch_execute(sql)).map_err(drop)
        };
        assert_eq!(look("SELECT 1"), Ok(Some(())));
        assert_eq!(look("SELECT pg_sleep(60)"), Ok(None));
        let in_german = "DO $$ BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN
            RAISE EXCEPTION 'storniere Anfrage wegen Zeitüberschreitung der Anfrage'
            USING ERRCODE = 'query_canceled'; END $$";
        assert_eq!(look(in_german), Ok(None));
        assert_eq!(look("SELECT FROM nowhere"), Err(()));
    }
}
