//! Looking without a trace: limits and plans of its own for a few statements, whatever the connection's are.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::result::{Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::millis;

/// Runs statements that change nothing in a transaction (or a savepoint of the caller's) that is always
/// rolled back, so what is set for them ends with them. Plans are as the server likes, without compiling
/// and without parallel workers, which would cost more than they save. `timeout`: for each statement;
/// `None`: as the connection has it.
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
            "{limit} SET LOCAL jit = off; SET LOCAL max_parallel_workers_per_gather = 0;
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

/// The same, and `None` where a statement took longer than `timeout`.
pub(crate) fn looking_briefly<T>(
    conn: &mut PgConnection,
    timeout: Duration,
    look: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<Option<T>> {
    match looking(conn, Some(timeout), look) {
        Ok(seen) => Ok(Some(seen)),
        Err(error) if error.to_string().contains("statement timeout") => Ok(None),
        Err(error) => Err(error),
    }
}
