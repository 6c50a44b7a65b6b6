//! A thread's own connection, made anew when it breaks.

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::{
    AnsiTransactionManager, Instrumentation, InstrumentationEvent, TransactionManager,
    get_default_instrumentation,
};
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::threads::{Cause, MARGIN, Post, Threads};
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
    pub(super) threads: Arc<Threads>,
    pub(super) post: Post,
    statement_timeout: Duration,
    plans: Plans,
    pub(super) conn: Option<Connected>,
    /// The server's process behind the last connection; behind a pooler it may be any.
    pub(super) backend: Option<i32>,
    failures: u32,
    /// The last error came from what is wrong with the outbox.
    pub(super) is_missing: bool,
    /// The outbox tells of itself.
    pub(super) own_events: bool,
}

impl Session {
    pub(crate) fn new(
        source: Source,
        outbox: OutboxName,
        threads: Arc<Threads>,
        post: Post,
        statement_timeout: Duration,
        plans: Plans,
    ) -> Self {
        Self {
            source,
            outbox,
            threads,
            post,
            statement_timeout,
            plans,
            conn: None,
            backend: None,
            failures: 0,
            is_missing: false,
            own_events: false,
        }
    }

    pub(crate) fn with_own_events(mut self, is_so: bool) -> Self {
        self.own_events = is_so;
        self
    }

    /// Runs statements on its outbox. After an error the connection is gone, and the next call makes a new one.
    pub(crate) fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        self.run_with(AfterRefusal::Reconnect, statements)
    }

    /// The same, where `after` says what a refusal means.
    pub(crate) fn run_with<T>(
        &mut self,
        after: AfterRefusal,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let (threads, post) = (Arc::clone(&self.threads), self.post);
        let limit = match &self.conn {
            Some(connected) => self.longest(connected),
            None => LONGEST_CONNECT,
        };
        let is_new = self.conn.is_none();
        let in_database = threads.in_database(post);
        let _within = in_database.within(limit);
        let result = self.try_run(statements);
        match &result {
            Ok(_) => {
                self.failures = 0;
                self.is_missing = false;
            }
            Err(error)
                if after == AfterRefusal::Keep && error.is_refusal() && self.is_outside() =>
            {
                threads.count_error(post);
            }
            Err(error) => {
                let limit = lock_limit(self.statement_timeout);
                let took = in_database.stayed();
                let is_timeout = matches!(error, DatabaseError::Statement(error) if is_over_time(error, took, limit));
                let cause = if is_timeout {
                    Cause::TimeOut
                } else {
                    self.missing(error).map_or(Cause::Other, Cause::Missing)
                };
                self.is_missing = matches!(cause, Cause::Missing(_));
                self.conn = None;
                self.failures = self.failures.saturating_add(1);
                threads.failed(post, error, cause);
                return result;
            }
        }
        if is_new {
            threads.set_connected(post, true);
        }
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

    /// The longest that one statement takes by right.
    fn longest(&self, connected: &Connected) -> Duration {
        let turn = connected.pooled.map_or(Duration::ZERO, |_| POOLERS_TURN);
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
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let connected = match self.conn.take() {
            Some(connected) => connected,
            None => self.connect()?,
        };
        let Connected { conn, pooled } = self.conn.insert(connected);
        let Some(limits) = *pooled else {
            return Ok(statements(conn, &self.outbox)?);
        };
        Ok(conn.transaction(|conn| {
            limits.set_local(conn)?;
            statements(conn, &self.outbox)
        })?)
    }

    fn connect(&mut self) -> Result<Connected, DatabaseError> {
        let limits = Limits::of_relay(self.statement_timeout, self.plans);
        let mut connected = self.source.connect(self.post.name(), limits)?;
        let longest = self.longest(&connected);
        let is_pooled = connected.pooled.is_some();
        let conn = &mut connected.conn;
        if !is_pooled {
            pin(conn)?;
        }
        self.threads.in_database(self.post).begin(longest);
        self.backend = match is_pooled {
            false => Some(backend(conn)?),
            true => None,
        };
        conn.set_instrumentation(each_statement(&self.threads, self.post, longest));
        Ok(connected)
    }

    /// How long to wait before the next try: longer with each failure in a row.
    pub(crate) fn wait(&self) -> Duration {
        FIRST_WAIT
            .saturating_mul(2_u32.saturating_pow(self.failures.saturating_sub(1)))
            .min(LONGEST_WAIT)
    }
}

/// Each statement of a connection has its own time, `limit`: what a thread does by many is not one stay.
fn each_statement(
    threads: &Arc<Threads>,
    post: Post,
    limit: Duration,
) -> impl Instrumentation + use<> {
    let threads = Arc::clone(threads);
    // The one that it takes the place of, where the application has set one.
    let mut default = get_default_instrumentation();
    move |event: InstrumentationEvent<'_>| {
        let stay = threads.in_database(post);
        let is_next = matches!(event, InstrumentationEvent::StartQuery { .. });
        if is_next && stay.is_inside() {
            stay.begin(limit);
        }
        if let Some(default) = &mut default {
            default.on_connection_event(event);
        }
    }
}
