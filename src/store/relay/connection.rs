//! A connection of the relay: it has a name and limits on every statement, and quickly notices a lost server.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::r2d2::ManageConnection;
use diesel::result::QueryResult;
use diesel::{Connection, PgConnection};
use secrecy::{ExposeSecret, SecretString};

use super::address::{OF_SESSION, with_parameters, without_password};
use super::notifications::has_own_process;
use crate::error::DatabaseError;
use crate::lock::lock;

/// glibc returns memory to the system whenever more than 128 KiB of it are free, and a claim or a settle of 500 messages
/// needs and frees blocks of megabytes: pages of memory came and went with each statement, which took a claim from 0.9 ms
/// to 1.6 ms. Once a block of 8 MiB is freed, as here, glibc keeps what statements free, up to twice that (mallopt(3),
/// `M_MMAP_THRESHOLD`). Repeating a long text, and not counting characters, makes it 9 ms instead of 36.
const KEEP_MEMORY: &str =
    "SELECT pg_catalog.octet_length(pg_catalog.repeat(pg_catalog.repeat('x', 65536), 128))";

/// How long it counts that a URL leads to a server process of one's own. A relay opens all its connections at once, and
/// each check opens another.
const KNOWN: Duration = Duration::from_secs(10);

/// How long a relay's transaction may wait for its next statement. A relay that is stopped or cut off during a
/// transaction holds rows and the lock of keyed claims for at most this time.
const LONGEST_IDLE: Duration = Duration::from_secs(2);

/// Where a relay's connections come from.
#[derive(Clone)]
pub(crate) enum Source {
    Url(Arc<Address>),
    Manager(Arc<dyn Manager>),
}

/// A URL, and when it was last seen to lead to a server process of one's own.
pub(crate) struct Address {
    pub(crate) url: SecretString,
    own_at: Mutex<Option<Instant>>,
}

impl Address {
    fn has_own_process(&self) -> Result<bool, DatabaseError> {
        let is_recent = |at: Instant| at.elapsed() < KNOWN;
        let known = *lock(&self.own_at);
        if known.is_some_and(is_recent) {
            return Ok(true);
        }
        let is_own = has_own_process(&self.url)?;
        *lock(&self.own_at) = is_own.then(Instant::now);
        Ok(is_own)
    }
}

/// An r2d2 connection manager with any error type.
pub(crate) trait Manager: Send + Sync {
    fn connect(&self) -> Result<PgConnection, DatabaseError>;

    /// Whether the connection still works. Asks the server.
    fn is_valid(&self, conn: &mut PgConnection) -> bool;

    /// Whether the connection is known to be broken.
    fn has_broken(&self, conn: &mut PgConnection) -> bool;
}

impl<M: ManageConnection<Connection = PgConnection>> Manager for M {
    fn connect(&self) -> Result<PgConnection, DatabaseError> {
        ManageConnection::connect(self)
            .map_err(|error| DatabaseError::Connect(format!("connection manager: {error}")))
    }

    fn is_valid(&self, conn: &mut PgConnection) -> bool {
        ManageConnection::is_valid(self, conn).is_ok()
    }

    fn has_broken(&self, conn: &mut PgConnection) -> bool {
        ManageConnection::has_broken(self, conn)
    }
}

impl Source {
    pub(crate) fn of_url(url: SecretString) -> Self {
        let own_at = Mutex::new(None);
        Self::Url(Arc::new(Address { url, own_at }))
    }

    /// Connects; by a URL, as [`connect`] does. A manager's connection gets the same settings, except those that only
    /// a URL can set: how soon the connection notices a lost server.
    pub(crate) fn connect(
        &self,
        purpose: &str,
        limits: Limits,
    ) -> Result<Connected, DatabaseError> {
        match self {
            Self::Url(address) => {
                let is_own = address.has_own_process()?;
                connect_to(&address.url, purpose, limits, is_own)
            }
            Self::Manager(manager) => {
                let mut conn = manager.connect()?;
                limits.set(&mut conn)?;
                conn.batch_execute(&format!("SET application_name = 'diesel-outbox {purpose}'"))?;
                Ok(Connected { conn, pooled: None })
            }
        }
    }
}

/// A connection, and whether a pooler is between it and the server.
pub(crate) struct Connected {
    pub(crate) conn: PgConnection,
    /// Set behind a pooler that gives each transaction another connection: settings last no longer than a
    /// transaction.
    pub(crate) pooled: Option<Limits>,
}

/// The limits of each statement, and the planner's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    statement_timeout: Duration,
    lock_timeout: Duration,
    /// How long a transaction may wait for its next statement.
    longest_idle: Duration,
    plans: Plans,
}

/// How the server finds rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plans {
    /// By any plan of the server's choice.
    Any,
    /// Always by an index, with one plan for all values. A prepared statement keeps its plan, which may be wrong once
    /// the table has grown. A new plan for each claim would cost a tenth of the claim, and more in a large table.
    ByIndex,
}

/// Lets the server process keep memory between statements.
pub(crate) fn keep_memory(conn: &mut PgConnection) -> QueryResult<()> {
    conn.batch_execute(KEEP_MEMORY)
}

/// How long a statement with this timeout may wait for a lock.
pub(crate) fn lock_limit(statement_timeout: Duration) -> Duration {
    statement_timeout / 2
}

impl Limits {
    /// The limits of a relay's threads.
    pub(crate) fn of_relay(statement_timeout: Duration, plans: Plans) -> Self {
        Self {
            statement_timeout,
            lock_timeout: lock_limit(statement_timeout),
            longest_idle: LONGEST_IDLE,
            plans,
        }
    }

    /// With statements that wait for a lock no longer than this.
    pub(crate) fn with_lock_timeout(self, lock_timeout: Duration) -> Self {
        Self {
            lock_timeout,
            ..self
        }
    }

    /// The limits of a connection whose transactions belong to the caller.
    pub(crate) fn of_caller(statement_timeout: Duration) -> Self {
        Self {
            statement_timeout,
            lock_timeout: lock_limit(statement_timeout),
            longest_idle: statement_timeout.saturating_add(Duration::from_secs(10)),
            plans: Plans::Any,
        }
    }

    /// Merge joins are off: they would read the primary key from the first to the last of a few scattered sequences.
    /// JIT is off: the planner overestimates the cost of a claim, and would compile for seconds for a claim of
    /// milliseconds. Row security is off: a policy that would hide rows is an error, not an empty outbox.
    fn settings(self) -> [(&'static str, String); 10] {
        let (other_plans, plan_cache_mode) = match self.plans {
            Plans::Any => ("on", "auto"),
            Plans::ByIndex => ("off", "force_generic_plan"),
        };
        let timeout = crate::store::millis(self.statement_timeout).max(1);
        let lock_timeout = crate::store::millis(self.lock_timeout).max(1);
        [
            ("statement_timeout", timeout.to_string()),
            ("lock_timeout", lock_timeout.to_string()),
            (
                "idle_in_transaction_session_timeout",
                crate::store::millis(self.longest_idle).to_string(),
            ),
            ("enable_mergejoin", "off".to_owned()),
            ("enable_bitmapscan", other_plans.to_owned()),
            ("enable_seqscan", other_plans.to_owned()),
            ("plan_cache_mode", plan_cache_mode.to_owned()),
            ("jit", "off".to_owned()),
            ("row_security", "off".to_owned()),
            ("client_min_messages", "warning".to_owned()),
        ]
    }

    /// Sets the limits until the connection closes.
    pub(crate) fn set(self, conn: &mut PgConnection) -> QueryResult<()> {
        let set = |(name, value)| format!("SET {name} = {value};");
        let settings: String = self.settings().into_iter().map(set).collect();
        conn.batch_execute(&format!(
            "{settings} {OF_SESSION}; SET default_transaction_isolation = 'read committed'"
        ))
    }

    /// Sets the limits for the transaction that has just begun.
    pub(crate) fn set_local(self, conn: &mut PgConnection) -> QueryResult<()> {
        let set = |(name, value)| format!("SET LOCAL {name} = {value};");
        let settings: String = self.settings().into_iter().map(set).collect();
        conn.batch_execute(&format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL search_path = {}; {settings}",
            crate::store::pinned::PATH
        ))
    }
}

/// Connects. `purpose` appears in `pg_stat_activity`. No statement runs longer than its limit, or waits for a lock
/// longer than half the limit.
///
/// The connection sends no `options`: those of the URL, of `PGOPTIONS` and of a service file stay, and a pooler either
/// refuses options or drops them. Behind a pooler nothing is set for the session, because other clients would get the
/// settings too, and no statement is prepared by name.
pub(crate) fn connect(
    database_url: &SecretString,
    purpose: &str,
    limits: Limits,
) -> Result<Connected, DatabaseError> {
    connect_to(
        database_url,
        purpose,
        limits,
        has_own_process(database_url)?,
    )
}

fn connect_to(
    database_url: &SecretString,
    purpose: &str,
    limits: Limits,
    is_own: bool,
) -> Result<Connected, DatabaseError> {
    let url = database_url.expose_secret();
    if !is_own {
        return Ok(behind_pooler(establish(url, &[])?, limits));
    }
    let name = format!("diesel-outbox {purpose}");
    let mut conn = establish(url, &[("application_name", name)])?;
    limits.set(&mut conn)?;
    Ok(Connected { conn, pooled: None })
}

fn behind_pooler(mut conn: PgConnection, limits: Limits) -> Connected {
    conn.set_prepared_statement_cache_size(CacheSize::Disabled);
    let pooled = Some(limits);
    Connected { conn, pooled }
}

fn establish(
    database_url: &str,
    parameters: &[(&str, String)],
) -> Result<PgConnection, DatabaseError> {
    let url = with_parameters(database_url, parameters);
    PgConnection::establish(&url).map_err(|error| {
        let error = without_password(&error.to_string(), database_url);
        let lines: Vec<&str> = error.lines().map(str::trim).collect();
        DatabaseError::Connect(lines.join("; "))
    })
}

#[cfg(test)]
mod tests {
    use diesel::{RunQueryDsl, select};

    use super::*;

    #[test]
    fn a_managers_connection_has_the_settings_that_a_url_gives() {
        let url = std::env::var("DATABASE_URL")
            .expect("DATABASE_URL is set: run `make test`, or `scripts/with-postgres cargo test`");
        let manager = diesel::r2d2::ConnectionManager::<PgConnection>::new(&url);
        let limits = Limits::of_relay(Duration::from_millis(7_654), Plans::ByIndex);
        let settings = |source: Source| {
            let connected = source.connect("test", limits).expect("connected");
            assert!(connected.pooled.is_none());
            let mut conn = connected.conn;
            let names = limits.settings().map(|(name, _)| name).into_iter();
            let names = names.chain(["application_name", "default_transaction_isolation"]);
            let value = |name: &str| -> String {
                select(crate::store::sql::current_setting(name))
                    .get_result(&mut conn)
                    .expect("a setting")
            };
            names.map(value).collect::<Vec<_>>()
        };
        let managed = settings(Source::Manager(Arc::new(manager)));
        assert_eq!(managed, settings(Source::of_url(url.into())));
        assert!(managed.contains(&"7654ms".to_owned()), "{managed:?}");
    }
}
