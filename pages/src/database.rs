//! Database connections that pages take turns to use.

use std::cell::Cell;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use crossbeam_channel::{Receiver, Sender, bounded};
use diesel::connection::{SimpleConnection, TransactionManager};
use diesel::{Connection as _, PgConnection};
use diesel_outbox::config::Config;
use diesel_outbox::{ConfigError, DatabaseError, OutboxName, admin};
use secrecy::SecretString;

/// How long a page waits for its turn.
const TURN: Duration = Duration::from_secs(2);
/// How long a statement may take.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Begins and ends transactions.
type Manager = <PgConnection as diesel::Connection>::TransactionManager;

thread_local! {
    /// The connection of the act that this thread carries out, if all that the act does is one transaction.
    static ACT: Cell<Option<PgConnection>> = const { Cell::new(None) };
}

/// Calls the work with a connection of the application.
type Lend = dyn Fn(&mut dyn FnMut(&mut PgConnection)) -> Result<(), Box<dyn Error + Send + Sync>>
    + Send
    + Sync;

/// Where connections come from.
#[derive(Clone)]
pub(crate) enum Source {
    /// The pages open their own.
    Url(SecretString),
    /// The application lends one for each use.
    Lent(Arc<Lend>),
}

impl Source {
    /// Own connections, to the database in the settings.
    pub(crate) fn of(config: &Config) -> Result<Self, ConfigError> {
        Ok(Self::Url(config.database_url()?.clone()))
    }
}

/// One connection. An own one is opened on first use and dropped after an error.
pub(crate) struct Connection {
    source: Source,
    purpose: &'static str,
    timeout: Duration,
    kept: Option<PgConnection>,
}

impl Connection {
    /// `timeout`: how long a statement may take.
    pub(crate) fn new(source: &Source, purpose: &'static str, timeout: Duration) -> Self {
        Self {
            source: source.clone(),
            purpose,
            timeout,
            kept: None,
        }
    }

    /// An own connection.
    fn open(&mut self) -> Result<Option<PgConnection>> {
        Ok(match (self.kept.take(), &self.source) {
            (None, Source::Url(url)) => Some(admin::connect(url, self.purpose, self.timeout)?),
            (kept, _) => kept,
        })
    }

    /// Runs statements in one transaction.
    pub(crate) fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        if let Some(mut conn) = self.open()? {
            let value = limited(&mut conn, self.timeout, statements)?;
            self.kept = Some(conn);
            return Ok(value);
        }
        let Source::Lent(lend) = &self.source else {
            return Err(anyhow!("no connection was opened"));
        };
        let (mut statements, mut done) = (Some(statements), None);
        lend(&mut |conn| {
            done = statements
                .take()
                .map(|statements| limited(conn, self.timeout, statements));
        })
        .map_err(|error| anyhow!(error))
        .context("the application has no connection for the page")?;
        Ok(done.context("the application has lent no connection to the page")??)
    }
}

/// A connection for the pages. A page that waits for it too long fails, so that a hanging database blocks one page and
/// not all of them.
pub(crate) struct Database {
    outbox: OutboxName,
    turn: (Sender<Connection>, Receiver<Connection>),
}

impl Database {
    pub(crate) fn new(source: &Source, outbox: &OutboxName, purpose: &'static str) -> Self {
        Self::several(source, outbox, purpose, 1)
    }

    /// With so many connections, each opened when all others are in use.
    pub(crate) fn several(
        source: &Source,
        outbox: &OutboxName,
        purpose: &'static str,
        connections: usize,
    ) -> Self {
        let turn = bounded(connections);
        for _ in 0..connections {
            let connection = Connection::new(source, purpose, STATEMENT_TIMEOUT);
            // The channel has room, so this always succeeds.
            let _ = turn.0.try_send(connection);
        }
        Self {
            outbox: outbox.clone(),
            turn,
        }
    }

    /// Runs statements on the outbox, in one transaction, or as a part of that of the [act](Self::together).
    pub(crate) fn run<T>(
        &self,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        let statements = |conn: &mut PgConnection| statements(conn, &self.outbox);
        if let Some(mut conn) = ACT.take() {
            let done = limited(&mut conn, STATEMENT_TIMEOUT, statements);
            ACT.set(Some(conn));
            return Ok(done?);
        }
        self.turn()?.connection()?.run(statements)
    }

    /// Carries out an act in one transaction: all that this thread does in the database meanwhile is a part of it, whichever
    /// [`Database`] it asks. An error of the act undoes everything. With connections of the application, which cannot be
    /// kept from one call to the next, each call is a transaction of its own.
    pub(crate) fn together<T, E>(
        &self,
        act: impl FnOnce() -> Result<T, E>,
    ) -> Result<Result<T, E>> {
        let mut turn = self.turn()?;
        let connection = turn.connection()?;
        let Some(mut conn) = connection.open()? else {
            drop(turn);
            return Ok(act());
        };
        Manager::begin_transaction(&mut conn)?;
        ACT.set(Some(conn));
        let ending = Ending;
        let done = act();
        let mut conn = ACT.take().context("the act has its connection")?;
        drop(ending);
        match &done {
            Ok(_) => Manager::commit_transaction(&mut conn)?,
            Err(_) => Manager::rollback_transaction(&mut conn)?,
        }
        connection.kept = Some(conn);
        Ok(done)
    }

    fn turn(&self) -> Result<Turn<'_>> {
        let (back, turn) = &self.turn;
        let held = turn.recv_timeout(TURN).map_err(|_| {
            anyhow!("the database is slow or hangs: another page is still waiting for it")
        })?;
        Ok(Turn(back, Some(held)))
    }
}

/// Closes the connection of an act that panics: no other act of the thread may go on with it.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        ACT.take();
    }
}

/// Runs statements in a transaction and limits the time of each. Settings of the session would not hold behind a
/// pooler in transaction mode.
fn limited<T>(
    conn: &mut PgConnection,
    timeout: Duration,
    statements: impl FnOnce(&mut PgConnection) -> Result<T, DatabaseError>,
) -> Result<T, DatabaseError> {
    let millis = timeout.as_millis();
    conn.transaction(|conn| {
        conn.batch_execute(&format!(
            "SET LOCAL statement_timeout = {millis}; SET LOCAL lock_timeout = {millis}"
        ))?;
        statements(conn)
    })
}

/// Passes the turn on when dropped.
struct Turn<'a>(&'a Sender<Connection>, Option<Connection>);

impl Turn<'_> {
    fn connection(&mut self) -> Result<&mut Connection> {
        self.1.as_mut().context("this page has its turn")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.1.take() {
            // The holder of the turn has left room in the channel, so this always succeeds.
            let _ = self.0.try_send(connection);
        }
    }
}
