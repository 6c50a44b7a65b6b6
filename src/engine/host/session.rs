//! A thread's own database connection, reopened when it breaks.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, PgConnection};

use super::hooks::Check;
use super::sql::connection::{
    Connected, KEEP_MEMORY, POOLERS_TURN, Plans, Source, StatementLimits,
};
use super::threads::{Cause, MARGIN, Post, Threads};
use crate::engine::lease::sql::backend::{Backend, backend};
use crate::engine::settle::sql::witness::OwnWitness;
use crate::error::DatabaseError;
use crate::lock::lock;
use crate::name::OutboxName;
use crate::sql::brief::{NO_WAIT, has_timed_out};
use crate::sql::pinned::{is_in_transaction, pin, pinned};

/// The first wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait after failures of a session that is connected. For one that is not, see `sql/logins.rs`.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// The longest time that a connect may normally take. libpq's limit is 5 s for each address, but a name lookup has no
/// limit, and is slow while name servers do not respond.
const LONGEST_CONNECT: Duration = Duration::from_secs(120);

/// What to do with a connection after the server has refused a statement because of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterRefusal {
    /// Close the connection: a new one may succeed, for example after a change of the tables.
    Reconnect,
    /// Keep the connection, because the refusal was expected. The database counts as available.
    Keep,
}

/// A connection that threads of a relay use in turn.
// Why: docs/decisions.md#one-connection
pub(crate) type SharedConnection = Arc<Mutex<BetweenTurns>>;

#[derive(Default)]
pub(crate) struct BetweenTurns {
    /// `None`: not open.
    pub(super) open: Option<InTurn>,
    /// See [`Session::lost`].
    lost: u64,
}

type BoxedStatements<'a> = Box<dyn FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<()> + 'a>;

/// An open connection between two turns.
pub(crate) struct InTurn {
    connected: Connected,
    backend: Option<Backend>,
    /// The thread of the last turn, whose settings the connection has.
    last: Post,
}

/// A connection that is opened on demand and closed after an error.
pub(crate) struct Session {
    source: Source,
    outbox: OutboxName,
    pub(super) threads: Arc<Threads>,
    pub(super) post: Post,
    limits: StatementLimits,
    /// The caller of [`run_with`](Self::run_with) knows what to do if another session holds a lock for longer than the limit.
    expects_locks: bool,
    /// Finds what the outbox lacks, after a statement has failed.
    check: Check,
    /// If the connection is shared, it is here only while the thread has its turn.
    conn: Option<Connected>,
    /// A connection that other threads use, too.
    pub(super) shared: Option<SharedConnection>,
    /// The server process of the last connection. `None` behind a pooler, where any process may serve a statement.
    pub(super) backend: Option<Backend>,
    failures: u32,
    /// The connections of this thread that have ended without an answer to a statement. Of a shared connection: those of all
    /// threads, at the last turn of this one.
    // Why: docs/decisions.md#new-server
    pub(super) lost: u64,
    /// When the last statements began.
    began: Instant,
    /// The cause of the last error was a problem of the outbox.
    pub(super) is_missing: bool,
    /// The last error came after a time limit: the statement was slow, or waited for a lock.
    pub(super) has_timed_out: bool,
    pub(crate) witness: OwnWitness,
    /// The time limit of the statement that must not wait.
    moment: Option<Duration>,
}

/// The value of statements that have not failed.
fn ran<T>(value: Option<T>) -> T {
    value.expect("the statements have run")
}

impl Session {
    pub(crate) fn new(
        source: Source,
        outbox: OutboxName,
        threads: Arc<Threads>,
        post: Post,
        limits: StatementLimits,
        check: Check,
    ) -> Self {
        Self {
            source,
            outbox,
            threads,
            post,
            limits,
            expects_locks: false,
            check,
            conn: None,
            shared: None,
            backend: None,
            failures: 0,
            lost: 0,
            began: Instant::now(),
            is_missing: false,
            has_timed_out: false,
            witness: None,
            moment: None,
        }
    }

    /// A lock that another session holds for longer than this is no failure of the database, and keeps the connection.
    pub(crate) fn expecting_locks(mut self, lock_limit: Duration) -> Self {
        (self.limits.lock_timeout, self.expects_locks) = (lock_limit, true);
        self
    }

    /// Runs statements on the outbox. An error closes the connection, and the next call opens a new one.
    pub(crate) fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        self.run_and_judge(None, statements).map(ran)
    }

    /// Runs one statement that must not wait for a lock, nor take longer than `moment`. `None`: it has, and nothing was
    /// done. The limits stay set until another statement needs others: an idle relay sets them once.
    // Why: docs/decisions.md#an-idle-relay
    pub(crate) fn run_briefly<T>(
        &mut self,
        moment: Duration,
        statement: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<Option<T>, DatabaseError> {
        self.moment = Some(moment);
        let done = self.run_and_judge(None, statement);
        self.moment = None;
        done
    }

    /// [`run`](Self::run), with `after` to decide about the connection after a refusal.
    pub(crate) fn run_with<T>(
        &mut self,
        after: AfterRefusal,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        self.run_and_judge(Some(after), statements).map(ran)
    }

    /// Keeps the value of the statements aside, so that what surrounds them is compiled once, not for each type of value.
    fn run_and_judge<T>(
        &mut self,
        after: Option<AfterRefusal>,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> QueryResult<T>,
    ) -> Result<Option<T>, DatabaseError> {
        let mut value = None;
        self.take_turn(
            after,
            Box::new(|conn, outbox| {
                value = Some(statements(conn, outbox)?);
                Ok(())
            }),
        )?;
        Ok(value)
    }

    /// Opens a new connection for the next statements: this one may be of a server that another one has replaced. The
    /// thread that has met the other server shares its connection, if any.
    pub(super) fn replace(&mut self) {
        self.conn = None;
        self.lost += 1;
    }

    /// Waits for the turn of this thread, if the connection is shared.
    fn take_turn(
        &mut self,
        after: Option<AfterRefusal>,
        statements: BoxedStatements<'_>,
    ) -> Result<(), DatabaseError> {
        let shared = self.shared.clone();
        let Some(mut in_turn) = shared.as_deref().map(lock) else {
            return self.run_in_turn(after, statements);
        };
        self.lost = in_turn.lost;
        let is_taken_over = in_turn.open.take().is_some_and(|open| self.take_over(open));
        let result = self.run_in_turn(after, statements);
        if is_taken_over && result.is_ok() {
            self.threads.set_connected(self.post, true);
        }
        in_turn.lost = self.lost;
        in_turn.open = self.conn.take().map(|connected| InTurn {
            connected,
            backend: self.backend,
            last: self.post,
        });
        result
    }

    /// Gives a shared connection the settings of this thread. Returns whether another thread had the last turn.
    fn take_over(&mut self, open: InTurn) -> bool {
        let InTurn {
            mut connected,
            backend,
            last,
        } = open;
        let is_taken_over = last != self.post;
        if is_taken_over {
            let longest = self.longest(&connected);
            let threads = Arc::clone(&self.threads);
            let _within = threads.in_database(self.post).within(longest);
            // A connection that fails here is lost, and a new one is opened.
            if let Err(error) = connected.set_limits(self.limits) {
                if DatabaseError::from(error).is_without_answer() {
                    self.lost += 1;
                }
                return true;
            }
            limit_each_statement(&mut connected, &self.threads, self.post, longest);
        }
        (self.conn, self.backend) = (Some(connected), backend);
        is_taken_over
    }

    fn run_in_turn(
        &mut self,
        after: Option<AfterRefusal>,
        statements: BoxedStatements<'_>,
    ) -> Result<(), DatabaseError> {
        let (threads, post) = (Arc::clone(&self.threads), self.post);
        let is_new = self.conn.is_none();
        // No failure of this thread: another thread's try has failed, or is not over.
        if is_new && let Some(error) = threads.logins.refusal(Instant::now()) {
            return Err(error);
        }
        let connected = self.conn.as_ref();
        let limit = connected.map_or(LONGEST_CONNECT, |connected| self.longest(connected));
        self.began = Instant::now();
        let in_database = threads.in_database(post);
        let _within = in_database.within(limit);
        let mut result = self.try_run(statements);
        if self.moment.is_some() && self.exceeds(&result, NO_WAIT) && self.is_outside() {
            result = Ok(());
        }
        self.has_timed_out = self.exceeds(&result, self.limits.lock_timeout);
        match &result {
            Ok(()) => (self.failures, self.is_missing) = (0, false),
            Err(_) if self.is_expected(&result, after) && self.is_outside() => {
                threads.count_error(post);
            }
            Err(error) => {
                self.fail(error);
                return result;
            }
        }
        if is_new {
            threads.set_connected(post, true);
        }
        result
    }

    /// Whether the statements have failed because they took longer.
    fn exceeds(&self, result: &Result<(), DatabaseError>, limit: Duration) -> bool {
        let took = self.began.elapsed();
        matches!(result, Err(DatabaseError::Statement(error)) if has_timed_out(error, took, limit))
    }

    /// Whether the caller knows what to do about the error.
    fn is_expected(&self, result: &Result<(), DatabaseError>, after: Option<AfterRefusal>) -> bool {
        match after {
            None => false,
            Some(_) if self.has_timed_out => {
                self.expects_locks && !self.exceeds(result, self.limits.statement_timeout)
            }
            Some(after) => {
                let is_refusal = result.as_ref().is_err_and(DatabaseError::is_refusal);
                after == AfterRefusal::Keep && is_refusal
            }
        }
    }

    /// Closes the connection, and says why this thread is without its database.
    fn fail(&mut self, error: &DatabaseError) {
        let cause = match self.has_timed_out {
            true => Cause::TimeOut,
            false => self.missing(error).map_or(Cause::Other, Cause::Missing),
        };
        self.is_missing = matches!(cause, Cause::Missing(_));
        self.conn = None;
        if error.is_without_answer() {
            self.lost += 1;
        }
        self.failures = self.failures.saturating_add(1);
        self.threads.failed(self.post, error, cause);
    }

    /// Whether a connection is open without a transaction.
    fn is_outside(&mut self) -> bool {
        let connected = self.conn.as_mut();
        connected.is_some_and(|connected| !is_in_transaction(&mut connected.conn))
    }

    /// The longest time that one statement may normally take.
    fn longest(&self, connected: &Connected) -> Duration {
        let turn = connected.pooled.map_or(Duration::ZERO, |_| POOLERS_TURN);
        self.limits
            .statement_timeout
            .saturating_add(MARGIN)
            .saturating_add(turn)
    }

    /// The problem of the outbox, if it made the statement fail.
    fn missing(&mut self, error: &DatabaseError) -> Option<String> {
        // Missing tables, columns and rights are errors of the kind `Unknown`.
        let DatabaseError::Statement(Error::DatabaseError(DatabaseErrorKind::Unknown, _)) = error
        else {
            return None;
        };
        let Connected { conn, .. } = self.conn.as_mut()?;
        let (check, outbox) = (self.check, self.outbox.clone());
        let checked = pinned(conn, &self.outbox, |conn, name| {
            // Tables that this relay has used are not left out, but lost.
            name.has_parts_of(&outbox);
            check(conn, name)
        });
        match checked {
            Err(DatabaseError::Schema(what)) => Some(what),
            Ok(()) | Err(_) => None,
        }
    }

    fn try_run(&mut self, statements: BoxedStatements<'_>) -> Result<(), DatabaseError> {
        let connected = match self.conn.take() {
            Some(connected) => connected,
            None => self.connect()?,
        };
        let connected = self.conn.insert(connected);
        self.began = Instant::now();
        let set = connected.limit_by(self.moment, self.limits);
        let conn = &mut connected.conn;
        let done = set.and_then(|()| match connected.pooled {
            None => statements(conn, &self.outbox),
            // Why: docs/decisions.md#poolers
            Some(pooled) => conn.transaction(|conn| {
                pooled.within(self.moment).set_local(conn)?;
                statements(conn, &self.outbox)
            }),
        });
        Ok(done.map_err(|error| connected.explained(error))?)
    }

    fn connect(&mut self) -> Result<Connected, DatabaseError> {
        let purpose = match self.shared {
            Some(_) => "relay",
            None => self.post.as_str(),
        };
        let attempt = self.threads.logins.begin(Instant::now())?;
        let connected = self.source.connect(purpose, self.limits);
        attempt.end(&connected, Instant::now());
        let mut connected = connected?;
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
        // Only claims and settles need much memory. A shared connection has them all.
        if !is_pooled && (self.limits.plans == Plans::ByIndex || self.shared.is_some()) {
            conn.batch_execute(KEEP_MEMORY)?;
        }
        limit_each_statement(&mut connected, &self.threads, self.post, longest);
        Ok(connected)
    }

    /// How long to wait before the next attempt: longer after each consecutive failure. If the relay cannot connect, all
    /// its threads wait for the same try.
    pub(crate) fn wait(&self) -> Duration {
        if self.conn.is_none()
            && let Some(wait) = self.threads.logins.wait(Instant::now())
        {
            return wait;
        }
        FIRST_WAIT
            .saturating_mul(2_u32.saturating_pow(self.failures.saturating_sub(1)))
            .min(LONGEST_WAIT)
    }
}

/// Gives each statement of the connection its own time limit, also inside one stay of several statements.
fn limit_each_statement(
    connected: &mut Connected,
    threads: &Arc<Threads>,
    post: Post,
    limit: Duration,
) {
    let threads = Arc::clone(threads);
    connected.on_each_statement(move || {
        let stay = threads.in_database(post);
        if stay.is_inside() {
            stay.begin(limit);
        }
    });
}
