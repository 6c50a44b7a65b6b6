//! A thread's own connection, made anew when it breaks, and one log line for all of them.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel::result::QueryResult;
use diesel::{Connection, PgConnection};
use secrecy::SecretString;

use crate::error::DatabaseError;
use crate::store::connection::{Connected, Plans, backend, connect};

/// The first wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait between tries to reach a database that is gone.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// The thread that the relay can do without.
pub(super) const LISTENER: &str = "listener";
/// An outage shorter than this after the last one is the same one to the log.
const QUIET: Duration = Duration::from_secs(10);

/// A connection that is made when it is needed, and given up after any error.
pub(crate) struct Session {
    database_url: SecretString,
    purpose: &'static str,
    statement_timeout: Duration,
    plans: Plans,
    conn: Option<Connected>,
    /// The server's process behind the last connection; behind a pooler it may be any.
    backend: Option<i32>,
    outage: Arc<Outage>,
    failures: u32,
}

impl Session {
    pub(crate) fn new(
        database_url: SecretString,
        purpose: &'static str,
        statement_timeout: Duration,
        plans: Plans,
        outage: Arc<Outage>,
    ) -> Self {
        Self {
            database_url,
            purpose,
            statement_timeout,
            plans,
            conn: None,
            backend: None,
            outage,
            failures: 0,
        }
    }

    /// Runs statements. After an error the connection is gone, and the next call makes a new one.
    pub(crate) fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let result = self.try_run(statements);
        match &result {
            Ok(_) => {
                self.failures = 0;
                self.outage.over(self.purpose);
            }
            Err(error) => {
                self.conn = None;
                self.failures = self.failures.saturating_add(1);
                self.outage.noticed(self.purpose, error);
            }
        }
        result
    }

    fn try_run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let Connected { conn, pooled } = match &mut self.conn {
            Some(connected) => connected,
            none => {
                let mut connected = connect(
                    &self.database_url,
                    self.purpose,
                    self.statement_timeout,
                    self.plans,
                )?;
                self.backend = match connected.pooled {
                    None => Some(backend(&mut connected.conn)?),
                    Some(_) => None,
                };
                none.insert(connected)
            }
        };
        let Some(limits) = *pooled else {
            return Ok(statements(conn)?);
        };
        Ok(conn.transaction(|conn| {
            limits.set_local(conn)?;
            statements(conn)
        })?)
    }

    /// The server's process that the last statements ran in.
    pub(crate) fn backend(&self) -> Option<i32> {
        self.backend
    }

    /// How long to wait before the next try: longer with each failure in a row.
    pub(crate) fn wait(&self) -> Duration {
        FIRST_WAIT
            .saturating_mul(2_u32.saturating_pow(self.failures.saturating_sub(1)))
            .min(LONGEST_WAIT)
    }
}

/// Which threads have no database just now. Says so once, and once when all have it again.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    state: Mutex<OutageState>,
}

#[derive(Debug, Default)]
struct OutageState {
    without: HashSet<&'static str>,
    began: Option<Instant>,
    ended: Option<Instant>,
    logged: bool,
}

impl Outage {
    pub(super) fn noticed(&self, purpose: &'static str, error: &DatabaseError) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = state.without.is_empty();
        state.without.insert(purpose);
        if first {
            state.began = Some(Instant::now());
            state.logged = state.ended.is_none_or(|ended| ended.elapsed() > QUIET);
        }
        let level = if first && state.logged {
            log::Level::Error
        } else {
            log::Level::Debug
        };
        let event = if error.is_timeout() {
            "db_timeout"
        } else {
            "db_error"
        };
        log::log!(level, event = event, thread = purpose, error:% = error; "the database failed; trying again until it is back");
    }

    pub(super) fn over(&self, purpose: &'static str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.without.remove(purpose) || !state.without.is_empty() {
            return;
        }
        let level = if state.logged {
            log::Level::Info
        } else {
            log::Level::Debug
        };
        let seconds = state
            .began
            .map_or(0.0, |began| began.elapsed().as_secs_f64());
        state.ended = Some(Instant::now());
        log::log!(level, event = "db_recovered", seconds = seconds; "the database is back");
    }

    /// Whether a thread that the relay needs is without its database.
    pub(crate) fn is_on(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.without.iter().any(|purpose| *purpose != LISTENER)
    }
}
