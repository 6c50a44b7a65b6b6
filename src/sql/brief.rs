//! Statements with a short time limit.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::millis;

/// How long a statement that must not wait waits for a lock.
#[cfg(feature = "relay")]
pub(crate) const NO_WAIT: Duration = Duration::from_millis(20);

/// The result of statements that do not wait for locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg(feature = "relay")]
pub(crate) enum Tried<T> {
    Done(T),
    /// Another session holds a lock. Nothing was changed.
    Locked,
}

/// Whether statements wait for locks of other sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg(feature = "relay")]
pub(crate) enum Locks {
    WaitedFor,
    NotWaitedFor,
}

/// Runs statements in a transaction that limits each, and its waits for locks. Settings of the session would not hold
/// behind a pooler in transaction mode.
///
/// # Errors
/// That of the statements.
#[cfg(feature = "operate")]
pub fn limited<T, E: From<Error>>(
    conn: &mut PgConnection,
    timeout: Duration,
    work: impl FnOnce(&mut PgConnection) -> Result<T, E>,
) -> Result<T, E> {
    let limit = millis(timeout).max(1);
    conn.transaction(|conn| {
        conn.batch_execute(&format!(
            "SET LOCAL statement_timeout = {limit}; SET LOCAL lock_timeout = {limit}"
        ))?;
        work(conn)
    })
}

/// Runs statements in a transaction. If another session holds a row or table that they need, rolls back at once: what
/// people and applications may lock must not hold up a relay.
// Why: docs/decisions.md#locked-rows
#[cfg(feature = "relay")]
pub(crate) fn without_waiting<T>(
    conn: &mut PgConnection,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<Tried<T>> {
    let mut began = Instant::now();
    let done = conn.transaction(|conn| {
        let limit = millis(NO_WAIT);
        conn.batch_execute(&format!("SET LOCAL lock_timeout = {limit}"))?;
        // The way to the server and back may take half of the limit.
        began = Instant::now();
        work(conn)
    });
    match done {
        Ok(done) => Ok(Tried::Done(done)),
        Err(error) if has_timed_out(&error, began.elapsed(), NO_WAIT) => {
            // A slow statement that the server refuses for another reason looks the same.
            log::debug!(event = "not_waited", error:% = error; "did not wait for another session, tried again later: {error}");
            Ok(Tried::Locked)
        }
        Err(error) => Err(error),
    }
}

/// Runs statements in a transaction. If a statement takes longer than `timeout`, rolls back and returns `None`.
pub(crate) fn briefly<T>(
    conn: &mut PgConnection,
    timeout: Duration,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<Option<T>> {
    let mut began = Instant::now();
    let done = conn.transaction(|conn| {
        let limit = millis(timeout).max(1);
        conn.batch_execute(&format!("SET LOCAL statement_timeout = {limit}"))?;
        began = Instant::now();
        work(conn)
    });
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if has_timed_out(&error, began.elapsed(), timeout) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a statement failed because it exceeded `limit`. The elapsed time decides: the server's message is in the
/// server's language, and Diesel hides the SQLSTATE. The tolerance allows for a slightly faster server clock.
pub(crate) fn has_timed_out(error: &Error, took: Duration, limit: Duration) -> bool {
    matches!(error, Error::DatabaseError(DatabaseErrorKind::Unknown, _))
        && took >= limit.mul_f64(0.9)
}

#[cfg(test)]
mod tests {
    use diesel::RunQueryDsl;
    use diesel::sql_query;

    use super::super::tests::Outbox;
    use super::*;

    /// R30: the server's message is in the language of `lc_messages`, and a user's trigger may raise any text.
    #[test]
    fn a_timeout_is_known_by_its_time_and_not_by_words() {
        let error = |kind, text: &str| Error::DatabaseError(kind, Box::new(text.to_owned()));
        let unknown = |text| error(DatabaseErrorKind::Unknown, text);
        let limit = Duration::from_secs(5);
        let german = unknown("storniere Anfrage wegen Zeitüberschreitung der Sperre");
        assert!(has_timed_out(&german, limit, limit));
        assert!(has_timed_out(
            &german,
            limit - Duration::from_millis(1),
            limit
        ));
        let forged = unknown("canceling statement due to statement timeout");
        assert!(!has_timed_out(&forged, Duration::from_millis(3), limit));
        let gone = error(
            DatabaseErrorKind::ClosedConnection,
            "server closed the connection",
        );
        assert!(!has_timed_out(&gone, limit * 4, limit));
    }

    /// R50
    #[test]
    #[cfg(feature = "relay")]
    fn a_row_that_another_session_holds_is_not_waited_for() {
        let outbox = Outbox::new();
        let (mut conn, mut other) = (outbox.connect(), outbox.connect());
        let pause = outbox.name.pause();
        let put = |conn: &mut PgConnection| {
            let row = format!(
                "INSERT INTO {pause} (kind, name, reason) VALUES ('topic', 't', 'BY_HAND')
                 ON CONFLICT (kind, name, paused_by) DO UPDATE SET reason = 'AGAIN'"
            );
            sql_query(row).execute(conn)
        };
        other.begin_test_transaction().expect("begun");
        put(&mut other).expect("held");
        let began = Instant::now();
        assert_eq!(without_waiting(&mut conn, put), Ok(Tried::Locked));
        assert!(began.elapsed() < Duration::from_secs(5));
        other.batch_execute("ROLLBACK").expect("free");
        assert_eq!(without_waiting(&mut conn, put), Ok(Tried::Done(1)));
        // Of a kind that no timeout has: the time says nothing, however slow the server is.
        let broken = |conn: &mut PgConnection| {
            sql_query(format!("INSERT INTO {pause} (kind) VALUES (NULL)")).execute(conn)
        };
        assert!(without_waiting(&mut conn, broken).is_err());
    }

    #[test]
    fn a_query_that_takes_too_long_is_undone_and_the_connection_stays_usable() {
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
