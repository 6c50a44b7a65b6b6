//! Database connections that pages take turns to use.

use std::cell::RefCell;
use std::error::Error;
use std::ops::DerefMut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use diesel::result::Error::RollbackTransaction;
use diesel::{Connection as _, PgConnection};
use diesel_outbox::{DatabaseError, OutboxName, program};
use secrecy::SecretString;

/// How long a page waits for its turn.
const TURN: Duration = Duration::from_secs(2);
/// How long a kept connection has to answer before a page takes another: the server may have been restarted, or the
/// connection may lead nowhere.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// How long a statement may take.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// After this time an act on many messages stops, so that there is an answer. Asked again, it continues with the rest.
pub(crate) const LONGEST_ACT: Duration = Duration::from_secs(8);

type Lent = Result<(), Box<dyn Error + Send + Sync>>;
/// Calls the work with a connection.
type Lend<'a> = dyn Fn(&mut dyn FnMut(&mut PgConnection)) -> Lent + 'a;
type Lender = dyn Fn(&mut dyn FnMut(&mut PgConnection)) -> Lent + Send + Sync;
type Statements<'a> = Box<dyn FnOnce(&mut PgConnection) -> Result<(), DatabaseError> + 'a>;
/// A line of the audit log.
type Line = Box<dyn FnOnce()>;

/// An act that is one transaction, whichever [`Database`] its statements ask.
#[derive(Clone, Copy)]
pub(crate) struct Act<'a> {
    lend: &'a Lend<'a>,
    after: &'a RefCell<Vec<Line>>,
}

impl Act<'_> {
    /// Writes the line after the commit.
    pub(crate) fn after(self, line: Line) {
        self.after.borrow_mut().push(line);
    }
}

/// Where the pages get their connections: from the URL of a database, to which they open their own, or from a function of
/// the application, such as that of its pool.
///
/// ```
/// use diesel::r2d2::{ConnectionManager, Pool};
/// use diesel::PgConnection;
/// use diesel_outbox_pages::Connections;
/// use secrecy::SecretString;
///
/// let own: Connections = (&SecretString::from("postgres://localhost/shop")).into();
/// let manager = ConnectionManager::<PgConnection>::new("postgres://localhost/shop");
/// let pool = Pool::builder().build_unchecked(manager);
/// let lent: Connections = (move || pool.get()).into();
/// # let _ = (own, lent);
/// ```
#[derive(Clone)]
pub struct Connections(Source);

#[derive(Clone)]
enum Source {
    /// The pages open their own.
    Url(SecretString),
    /// The application lends one for each use.
    Lent(Arc<Lender>),
}

impl From<&SecretString> for Connections {
    fn from(url: &SecretString) -> Self {
        Self(Source::Url(url.clone()))
    }
}

impl<F, C, E> From<F> for Connections
where
    F: Fn() -> std::result::Result<C, E> + Send + Sync + 'static,
    C: DerefMut<Target = PgConnection>,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    fn from(get: F) -> Self {
        Self(Source::Lent(Arc::new(move |work| {
            let mut conn = get().map_err(Into::into)?;
            work(&mut conn);
            Ok(())
        })))
    }
}

/// One connection. An own one is opened on first use and dropped after an error, and if it does not answer.
pub(crate) struct Connection {
    source: Source,
    purpose: &'static str,
    timeout: Duration,
    kept: Option<program::Connection>,
}

impl Connection {
    /// `timeout`: how long a statement may take.
    pub(crate) fn new(source: &Connections, purpose: &'static str, timeout: Duration) -> Self {
        Self {
            source: source.0.clone(),
            purpose,
            timeout,
            kept: None,
        }
    }

    /// An own connection.
    fn open(&mut self) -> Result<Option<program::Connection>> {
        let Source::Url(url) = &self.source else {
            return Ok(None);
        };
        if let Some(mut kept) = self.kept.take()
            && kept.answers(SIGN_OF_LIFE)
        {
            return Ok(Some(kept));
        }
        let opened = program::Connection::open(url, self.purpose, self.timeout);
        Ok(Some(opened?))
    }

    /// Runs statements in one transaction.
    pub(crate) fn run<T>(
        &mut self,
        statements: impl FnOnce(&mut PgConnection) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        valued(statements, |statements| self.execute(statements))
    }

    fn execute(&mut self, statements: Statements<'_>) -> Result<()> {
        let timeout = self.timeout;
        self.lend(Box::new(move |conn| limited(conn, timeout, statements)))
    }

    /// Runs statements without a transaction around them.
    fn lend(&mut self, statements: Statements<'_>) -> Result<()> {
        if let Some(mut conn) = self.open()? {
            conn.run(statements)?;
            self.kept = Some(conn);
            return Ok(());
        }
        match &self.source {
            Source::Lent(lend) => self::lent(&**lend, statements),
            Source::Url(_) => Err(anyhow!("no connection was opened")),
        }
    }
}

/// Keeps the value of the statements aside while `run` runs them, so that what surrounds statements is compiled once, not
/// for each type of value.
fn valued<T>(
    statements: impl FnOnce(&mut PgConnection) -> Result<T, DatabaseError>,
    run: impl FnOnce(Statements<'_>) -> Result<()>,
) -> Result<T> {
    let mut value = None;
    run(Box::new(|conn| {
        value = Some(statements(conn)?);
        Ok(())
    }))?;
    value.context("the statements did not run")
}

/// Runs statements with a connection that is lent.
fn lent(lend: &Lend<'_>, statements: Statements<'_>) -> Result<()> {
    let (mut statements, mut done) = (Some(statements), None);
    lend(&mut |conn| done = statements.take().map(|run| run(conn)))
        .map_err(|error| anyhow!(error))
        .context("the application has no connection for the page")?;
    Ok(done.context("the application has lent no connection to the page")??)
}

/// Connections for the pages. A page that waits for one too long fails, so that a hanging database blocks some pages and
/// not all of them.
pub(crate) struct Database {
    outbox: OutboxName,
    /// The most connections that one party uses at the same time.
    share: usize,
    turns: Mutex<Turns>,
    returned: Condvar,
}

struct Turns {
    free: Vec<Connection>,
    /// Who uses a connection: a name for each.
    parties: Vec<String>,
}

impl Turns {
    fn is_closed_to(&self, party: &str, share: usize) -> bool {
        let own = self.parties.iter().filter(|one| *one == party);
        self.free.is_empty() || own.count() >= share
    }
}

impl Database {
    /// With so many connections, each opened when all others are in use. One party gets at most half of them.
    pub(crate) fn several(
        source: &Connections,
        outbox: &OutboxName,
        purpose: &'static str,
        connections: usize,
    ) -> Self {
        let connection = || Connection::new(source, purpose, STATEMENT_TIMEOUT);
        Self {
            outbox: outbox.clone(),
            share: connections.div_ceil(2),
            turns: Mutex::new(Turns {
                free: std::iter::repeat_with(connection)
                    .take(connections)
                    .collect(),
                parties: Vec::new(),
            }),
            returned: Condvar::new(),
        }
    }

    /// Runs statements on the outbox, in one transaction.
    pub(crate) fn run<T>(
        &self,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        self.within(None, "", statements)
    }

    /// Runs statements of a party on the outbox as a part of this act, or else in one transaction.
    pub(crate) fn within<T>(
        &self,
        act: Option<Act<'_>>,
        party: &str,
        statements: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        let statements = |conn: &mut PgConnection| statements(conn, &self.outbox);
        valued(statements, |statements| match act {
            Some(act) => lent(
                act.lend,
                Box::new(|conn| limited(conn, STATEMENT_TIMEOUT, statements)),
            ),
            None => self.turn(party)?.connection()?.execute(statements),
        })
    }

    /// Runs an act of a party whose steps are transactions of their own. The act limits its statements to
    /// [`STATEMENT_TIMEOUT`].
    pub(crate) fn in_steps<T>(
        &self,
        party: &str,
        act: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, DatabaseError>,
    ) -> Result<T> {
        let statements = |conn: &mut PgConnection| act(conn, &self.outbox);
        valued(statements, |statements| {
            self.turn(party)?.connection()?.lend(statements)
        })
    }

    /// Carries out an act of a party in one transaction. An error of the act undoes everything.
    pub(crate) fn together<T, E>(
        &self,
        party: &str,
        act: impl FnOnce(Act<'_>) -> Result<T, E>,
    ) -> Result<Result<T, E>> {
        let after = RefCell::default();
        let done = self.turn(party)?.connection()?.run(|conn| {
            let mut done = None;
            let ended = conn.transaction(|conn| {
                let conn = RefCell::new(conn);
                let lend: &Lend<'_> = &|work| {
                    work(&mut **conn.try_borrow_mut()?);
                    Ok(())
                };
                let after = &after;
                match done.insert(act(Act { lend, after })) {
                    Ok(_) => Ok(()),
                    Err(_) => Err(RollbackTransaction),
                }
            });
            match (done, ended) {
                (Some(done), Ok(()) | Err(RollbackTransaction)) => Ok(done),
                (_, Err(error)) => Err(error.into()),
                (None, Ok(())) => Err(RollbackTransaction.into()),
            }
        })?;
        if done.is_ok() {
            after.take().into_iter().for_each(|line: Line| line());
        }
        Ok(done)
    }

    fn turn<'a>(&'a self, party: &'a str) -> Result<Turn<'a>> {
        let is_closed = |turns: &mut Turns| turns.is_closed_to(party, self.share);
        let waited = (self.returned).wait_timeout_while(self.turns(), TURN, is_closed);
        let (mut turns, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if turns.is_closed_to(party, self.share) {
            return Err(anyhow!(
                "no connection is free: the database is slow, or others do much at the same time"
            ));
        }
        let connection = turns.free.pop();
        turns.parties.push(party.to_owned());
        Ok(Turn {
            database: self,
            party,
            connection,
        })
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs statements in a transaction that limits each.
fn limited(
    conn: &mut PgConnection,
    timeout: Duration,
    statements: Statements<'_>,
) -> Result<(), DatabaseError> {
    program::limited(conn, timeout, statements)
}

/// Passes the turn on when dropped.
struct Turn<'a> {
    database: &'a Database,
    party: &'a str,
    connection: Option<Connection>,
}

impl Turn<'_> {
    fn connection(&mut self) -> Result<&mut Connection> {
        self.connection.as_mut().context("this page has its turn")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.database.turns();
        turns.free.extend(self.connection.take());
        if let Some(own) = turns.parties.iter().position(|one| one == self.party) {
            turns.parties.swap_remove(own);
        }
        drop(turns);
        self.database.returned.notify_all();
    }
}
