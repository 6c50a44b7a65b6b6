//! A thread's own connection, made anew when it breaks, and one log line for all of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, TransactionManager};
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::progress::{MARGIN, Post, each_statement};
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::brief::is_over_time;
use crate::store::pinned::{pin, pinned};
use crate::store::relay::connection::{Connected, Limits, Plans, Source, backend, lock_limit};
use crate::store::setup::rights;

/// How long a pooler lets a client wait for its turn: the default of PgBouncer's `query_wait_timeout`.
const POOLERS_TURN: Duration = Duration::from_secs(120);
/// The first wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait between tries to reach a database that is gone.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// A connect may take so long by right: libpq's limit is 5 s for each address, but looking a name up has
/// none, and does not fail at once where the name servers are away.
const LONGEST_CONNECT: Duration = Duration::from_secs(120);
/// The thread that the relay can do without.
pub(super) const LISTENER: &str = "listener";
/// An outage shorter than this after the last one is the same one to the log.
const QUIET: Duration = Duration::from_secs(15);

/// What becomes of a connection on which a statement was refused for its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterRefusal {
    /// It is given up: a new one may know better, for example after a change of the tables.
    Reconnect,
    /// It is kept, and the database counts as there: the refusal was to be expected.
    Keep,
}

/// A connection that is made when it is needed, and given up after any error.
pub(crate) struct Session {
    source: Source,
    outbox: OutboxName,
    post: Arc<Post>,
    statement_timeout: Duration,
    plans: Plans,
    conn: Option<Connected>,
    /// The server's process behind the last connection; behind a pooler it may be any.
    backend: Option<i32>,
    outage: Arc<Outage>,
    failures: u32,
    /// The last error came from what is wrong with the outbox.
    is_missing: bool,
}

impl Session {
    pub(crate) fn new(
        source: Source,
        outbox: OutboxName,
        post: &Arc<Post>,
        statement_timeout: Duration,
        plans: Plans,
        outage: &Arc<Outage>,
    ) -> Self {
        Self {
            source,
            outbox,
            post: Arc::clone(post),
            statement_timeout,
            plans,
            conn: None,
            backend: None,
            outage: Arc::clone(outage),
            failures: 0,
            is_missing: false,
        }
    }

    /// Runs statements. After an error the connection is gone, and the next call makes a new one.
    pub(crate) fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        self.run_with(AfterRefusal::Reconnect, statements)
    }

    /// The same, where `after` says what a refusal means.
    pub(crate) fn run_with<T>(
        &mut self,
        after: AfterRefusal,
        statements: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let post = Arc::clone(&self.post);
        let limit = match &self.conn {
            Some(connected) => self.longest(connected.pooled.is_some()),
            None => LONGEST_CONNECT,
        };
        let stay = post.in_database.within(limit);
        let result = self.try_run(statements);
        match &result {
            Ok(_) => {
                self.failures = 0;
                self.is_missing = false;
                self.outage.over(post.thread);
            }
            Err(error)
                if after == AfterRefusal::Keep && error.is_refusal() && self.is_outside() =>
            {
                post.errors.increment(1);
            }
            Err(error) => {
                let limit = lock_limit(self.statement_timeout);
                let took = post.in_database.stayed();
                let is_timeout = matches!(error, DatabaseError::Statement(error) if is_over_time(error, took, limit));
                let cause = if is_timeout {
                    Cause::TimeOut
                } else {
                    self.missing(error).map_or(Cause::Other, Cause::Missing)
                };
                self.is_missing = matches!(cause, Cause::Missing(_));
                self.conn = None;
                self.failures = self.failures.saturating_add(1);
                post.errors.increment(1);
                self.outage.noticed(post.thread, error, cause);
            }
        }
        drop(stay);
        post.set_connected(self.conn.is_some());
        result
    }

    /// Whether there is a connection and no transaction is open on it.
    fn is_outside(&mut self) -> bool {
        self.conn.as_mut().is_some_and(|connected| {
            let status =
                AnsiTransactionManager::transaction_manager_status_mut(&mut connected.conn);
            matches!(status.transaction_depth(), Ok(None))
        })
    }

    /// Whether something is wrong with the outbox: then everything is refused.
    pub(crate) fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// What has failed was refused for its values: the database is there.
    pub(crate) fn was_only_refused(&self) {
        self.outage.over(self.post.thread);
    }

    /// The longest that one statement takes by right.
    fn longest(&self, is_pooled: bool) -> Duration {
        let turn = if is_pooled {
            POOLERS_TURN
        } else {
            Duration::ZERO
        };
        self.statement_timeout
            .saturating_add(MARGIN)
            .saturating_add(turn)
    }

    /// What is wrong with the outbox, where that is why a statement has failed.
    fn missing(&mut self, error: &DatabaseError) -> Option<String> {
        // Of its kind are missing tables and columns, and missing rights.
        let DatabaseError::Statement(Error::DatabaseError(DatabaseErrorKind::Unknown, _)) = error
        else {
            return None;
        };
        let Connected { conn, .. } = self.conn.as_mut()?;
        match pinned(conn, &self.outbox, rights::check_relay) {
            Err(DatabaseError::Schema(what)) => Some(what),
            Ok(()) | Err(_) => None,
        }
    }

    fn try_run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let of_ours = self.longest(false);
        let of_pooled = self.longest(true);
        let Connected { conn, pooled } = match &mut self.conn {
            Some(connected) => connected,
            none => {
                let limits = Limits::of_relay(self.statement_timeout, self.plans);
                let mut connected = self.source.connect(self.post.thread, limits)?;
                let longest = match connected.pooled {
                    None => of_ours,
                    Some(_) => of_pooled,
                };
                if connected.pooled.is_none() {
                    pin(&mut connected.conn)?;
                }
                self.post.in_database.begin(longest);
                self.backend = match connected.pooled {
                    None => Some(backend(&mut connected.conn)?),
                    Some(_) => None,
                };
                let told = each_statement(Arc::clone(&self.post), longest);
                connected.conn.set_instrumentation(told);
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

/// Why a statement has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// It, or a lock that it waited for, took longer than its limit.
    TimeOut,
    /// Something is wrong with the outbox.
    Missing(String),
    Other,
}

/// Which threads have no database just now. Says so once, and once when all have it again.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    state: Mutex<OutageState>,
}

#[derive(Debug, Default)]
struct OutageState {
    without: BTreeMap<&'static str, Trouble>,
    began: Option<Instant>,
    ended: Option<Instant>,
    logged: bool,
}

/// Why a thread has no database.
#[derive(Debug, Clone)]
pub(crate) struct Trouble {
    pub(super) since: Instant,
    pub(super) error: String,
    /// The database is there, and this is wrong with the outbox.
    pub(super) missing: Option<String>,
}

impl Outage {
    pub(super) fn noticed(&self, purpose: &'static str, error: &DatabaseError, cause: Cause) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = state.without.is_empty();
        let trouble = state.without.entry(purpose).or_insert_with(|| Trouble {
            since: Instant::now(),
            error: String::new(),
            missing: None,
        });
        trouble.error = error.to_string();
        let event = match &cause {
            Cause::TimeOut => "db_timeout",
            Cause::Missing(_) | Cause::Other => "db_error",
        };
        trouble.missing = match cause {
            Cause::Missing(what) => Some(what),
            Cause::TimeOut | Cause::Other => None,
        };
        if first {
            state.began = Some(Instant::now());
            state.logged = state.ended.is_none_or(|ended| ended.elapsed() > QUIET);
        }
        let level = if first && state.logged {
            log::Level::Error
        } else {
            log::Level::Debug
        };
        log::log!(level, event = event, thread = purpose, error:% = error; "the database failed; trying again until it is back");
    }

    pub(super) fn over(&self, purpose: &'static str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.without.remove(purpose).is_none() || !state.without.is_empty() {
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

    /// The threads that are without their database, but for the one that the relay can do without.
    pub(super) fn troubles(&self) -> Vec<(&'static str, Trouble)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let needed = state
            .without
            .iter()
            .filter(|(thread, _)| **thread != LISTENER);
        needed
            .map(|(thread, trouble)| (*thread, trouble.clone()))
            .collect()
    }
}
