//! A connection of the relay: it has a name and limits on every statement, and quickly notices a lost server.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel::connection::{
    CacheSize, Instrumentation as _, InstrumentationEvent, SimpleConnection,
    get_default_instrumentation,
};
use diesel::r2d2::ManageConnection;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::{Connection, PgConnection};
use secrecy::{ExposeSecret, SecretString};

pub(crate) use super::address::POOLERS_TURN;
use super::address::{OF_SESSION, refused, with_parameters};
use super::socket::{Kind, Socket, cookies, opened_since};
use crate::deadline::Deadline;
use crate::engine::wake::sql::notifications::UrlWay;
use crate::error::DatabaseError;
use crate::lock::lock;
use crate::log;
use crate::sql::brief::NO_WAIT;

/// glibc returns memory to the system whenever more than 128 KiB of it are free, and a claim or a settle of 500 messages
/// needs and frees blocks of megabytes: pages of memory came and went with each statement, which took a claim from 0.9 ms
/// to 1.6 ms. Once a block of 8 MiB is freed, as here, glibc keeps what statements free, up to twice that (mallopt(3),
/// `M_MMAP_THRESHOLD`). Repeating a long text, and not counting characters, makes it 9 ms instead of 36.
pub(crate) const KEEP_MEMORY: &str =
    "SELECT pg_catalog.octet_length(pg_catalog.repeat(pg_catalog.repeat('x', 65536), 128))";

/// How long the way counts that leads to a server process of one's own. A relay opens all its connections at once, and
/// each check opens another.
const KNOWN: Duration = Duration::from_secs(10);

/// How long a relay's transaction may wait for its next statement. A relay that is stopped or cut off during a
/// transaction holds rows and the lock of keyed claims for at most this time.
const LONGEST_IDLE: Duration = Duration::from_secs(2);

/// How long an answer may take beyond the limit that the server keeps. Then the connection is closed: a server that
/// hangs keeps no limit, and behind a proxy an open connection may lead nowhere.
const GRACE: Duration = Duration::from_secs(5);
/// The longest time to connect. libpq has a limit for each address (`connect_timeout`), but Diesel asks the server twice
/// more. After this time libpq gives up the present address.
const LONGEST_CONNECT: Duration = Duration::from_secs(20);
/// How often a connection is opened again because others were opened at the same moment, so that its socket is not known.
const MORE_TRIES: u32 = 5;
/// How often the sockets are looked at again before another connection is opened, in about a second: a connection that
/// is just being opened becomes known.
const MORE_LOOKS: u32 = 40;
/// How long a thread waits while another opens a connection whose socket has no tag.
const LONGEST_TURN: Duration = Duration::from_secs(5);
/// The longest pause before the sockets are looked at again.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Where a relay's connections come from.
#[derive(Clone)]
pub(crate) enum Source {
    Url(Arc<Address>),
    Manager(Arc<dyn Manager>),
}

/// A URL, and the way that was last seen to lead to a server process of one's own.
pub(crate) struct Address {
    pub(crate) url: SecretString,
    known: Mutex<Option<(Instant, UrlWay)>>,
}

impl Address {
    fn way(&self) -> Result<UrlWay, DatabaseError> {
        let known = *lock(&self.known);
        if let Some((at, way)) = known
            && at.elapsed() < KNOWN
        {
            return Ok(way);
        }
        let way = UrlWay::of(&self.url)?;
        *lock(&self.known) = way.is_own.then(|| (Instant::now(), way));
        Ok(way)
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
        let known = Mutex::new(None);
        Self::Url(Arc::new(Address { url, known }))
    }

    /// Connects; by a URL, as [`connect`] does. A manager's connection gets the same settings, except those that only
    /// a URL can set: how soon the connection notices a lost server.
    pub(crate) fn connect(
        &self,
        purpose: &str,
        limits: StatementLimits,
    ) -> Result<Connected, DatabaseError> {
        match self {
            Self::Url(address) => connect_to(&address.url, purpose, limits, address.way()?),
            Self::Manager(manager) => {
                let open = |_: &Socket| manager.connect();
                let mut connected = Connected::open(limits, 0, Kind::Untagged, open)?;
                connected.set_limits(limits)?;
                let name = format!("SET application_name = 'diesel-outbox {purpose}'");
                connected.conn.batch_execute(&name)?;
                Ok(connected)
            }
        }
    }
}

/// Connections whose sockets have no tag are opened in turn, so that each can be told from the others. One that hangs
/// holds up nobody for longer than [`LONGEST_TURN`].
pub(crate) struct LoginTurn(bool);

static IS_TAKEN: Mutex<bool> = Mutex::new(false);
static TURN_ENDS: Condvar = Condvar::new();

impl LoginTurn {
    pub(crate) fn wait() -> Self {
        let waited = TURN_ENDS.wait_timeout_while(lock(&IS_TAKEN), LONGEST_TURN, |taken| *taken);
        let mut is_taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        Self(!std::mem::replace(&mut *is_taken, true))
    }
}

impl Drop for LoginTurn {
    fn drop(&mut self) {
        if self.0 {
            *lock(&IS_TAKEN) = false;
            TURN_ENDS.notify_one();
        }
    }
}

/// A connection, and whether a pooler is between it and the server.
pub(crate) struct Connected {
    pub(crate) conn: PgConnection,
    /// Set behind a pooler that gives each transaction another connection: settings last no longer than a
    /// transaction.
    pub(crate) pooled: Option<StatementLimits>,
    /// Closes the connection if a statement has no answer in time.
    deadline: Arc<Deadline>,
    /// The time limit that the session has now, in place of that of its limits: see [`Limits::within`].
    moment: Option<Duration>,
}

impl Connected {
    /// Opens a connection whose statements have a deadline. `more_tries`: how often another is opened, because others were
    /// opened at the same moment.
    fn open(
        limits: StatementLimits,
        more_tries: u32,
        kind: Kind,
        open: impl Fn(&Socket) -> Result<PgConnection, DatabaseError>,
    ) -> Result<Self, DatabaseError> {
        let mut turn = None;
        let mut tries = 0;
        loop {
            if turn.is_none() && (kind != Kind::Tagged || tries > 0) {
                turn = Some(LoginTurn::wait());
            }
            let before = cookies();
            let socket = Arc::new(Socket::new());
            let of_deadline = Arc::clone(&socket);
            let deadline = Deadline::new(LONGEST_CONNECT, move || of_deadline.shut_down());
            deadline.begin();
            let opened = open(&socket);
            deadline.finish();
            let conn = opened?;
            if !socket.is_tagged() {
                let mut found = opened_since(&before, kind);
                for _ in 0..MORE_LOOKS {
                    if found.len() < 2 {
                        break;
                    }
                    std::thread::sleep(LONGEST_PAUSE.mul_f64(fastrand::f64()));
                    found = opened_since(&before, kind);
                }
                match found.as_slice() {
                    [cookie] => socket.set_cookie(*cookie),
                    [_, _, ..] if tries < more_tries => {
                        tries += 1;
                        continue;
                    }
                    _ => {
                        log::warn!(event = "no_socket"; "cannot find the socket of a connection to the database: its statements have no deadline");
                    }
                }
            }
            deadline.set_limit(limits.longest_answer());
            let mut connected = Self {
                conn,
                pooled: None,
                deadline,
                moment: None,
            };
            connected.on_each_statement(|| {});
            return Ok(connected);
        }
    }

    /// Calls `begins` when a statement begins. Each statement has its own deadline.
    pub(crate) fn on_each_statement(&mut self, mut begins: impl FnMut() + Send + 'static) {
        let deadline = Arc::clone(&self.deadline);
        // The instrumentation that the application has set, if any. It is still called.
        let mut default = get_default_instrumentation();
        (self.conn).set_instrumentation(move |event: InstrumentationEvent<'_>| {
            match event {
                InstrumentationEvent::StartQuery { .. } => {
                    deadline.begin();
                    begins();
                }
                InstrumentationEvent::FinishQuery { .. } => deadline.finish(),
                _ => {}
            }
            if let Some(default) = &mut default {
                default.on_connection_event(event);
            }
        });
    }

    /// Changes the limits of the next statements.
    pub(crate) fn set_limits(&mut self, limits: StatementLimits) -> QueryResult<()> {
        match &mut self.pooled {
            Some(pooled) => *pooled = limits,
            None => limits.set(&mut self.conn)?,
        }
        self.moment = None;
        self.deadline.set_limit(self.longest_answer(limits));
        Ok(())
    }

    /// Sets the time limits of statements and locks of this moment, unless they are set already. Behind a pooler each
    /// transaction sets them.
    pub(crate) fn limit_by(
        &mut self,
        moment: Option<Duration>,
        limits: StatementLimits,
    ) -> QueryResult<()> {
        if self.pooled.is_none() && self.moment != moment {
            limits.within(moment).set_timeouts(&mut self.conn)?;
            self.moment = moment;
        }
        Ok(())
    }

    /// Waits for the answers to some statements at most for this time.
    pub(crate) fn within<T>(
        &mut self,
        limit: Duration,
        statements: impl FnOnce(&mut PgConnection) -> T,
    ) -> T {
        let before = self.deadline.set_limit(limit);
        let result = statements(&mut self.conn);
        self.deadline.set_limit(before);
        result
    }

    /// The error of a statement. Of a connection that its deadline has closed, libpq says that the server closed it.
    pub(crate) fn explained(&self, error: Error) -> Error {
        match self.deadline.ended() {
            None => error,
            Some(limit) => {
                let text = format!("no answer within {} s", limit.as_secs());
                Error::DatabaseError(DatabaseErrorKind::ClosedConnection, Box::new(text))
            }
        }
    }

    /// How long to wait for an answer. A pooler may let its client wait for a turn.
    fn longest_answer(&self, limits: StatementLimits) -> Duration {
        let turn = self.pooled.map_or(Duration::ZERO, |_| POOLERS_TURN);
        limits.longest_answer().saturating_add(turn)
    }
}

/// The limits of each statement, and the planner's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StatementLimits {
    pub(crate) statement_timeout: Duration,
    /// How long a statement may wait for a lock.
    pub(crate) lock_timeout: Duration,
    /// How long a transaction may wait for its next statement.
    longest_idle: Duration,
    pub(crate) plans: Plans,
}

/// The settings of [`StatementLimits`] that limit statements and locks.
const TIMEOUTS: usize = 2;

/// How the server finds rows.
// Why: docs/decisions.md#plans
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plans {
    /// By any plan of the server's choice.
    Any,
    /// Always by an index, with one plan for all values. A prepared statement keeps its plan, which may be wrong once
    /// the table has grown. A new plan for each claim would cost a tenth of the claim, and more in a large table.
    ByIndex,
}

impl StatementLimits {
    /// The limits of a relay's threads.
    pub(crate) fn of_relay(statement_timeout: Duration, plans: Plans) -> Self {
        Self {
            statement_timeout,
            lock_timeout: statement_timeout / 2,
            longest_idle: LONGEST_IDLE,
            plans,
        }
    }

    /// The limits of a statement that must not wait for a lock, nor take longer than this time, if any is given.
    pub(crate) fn within(self, moment: Option<Duration>) -> Self {
        match moment {
            Some(statement_timeout) => Self {
                statement_timeout,
                lock_timeout: NO_WAIT,
                ..self
            },
            None => self,
        }
    }

    /// Sets the time limits of statements and locks until the connection closes.
    fn set_timeouts(self, conn: &mut PgConnection) -> QueryResult<()> {
        conn.batch_execute(&self.written("SET", TIMEOUTS))
    }

    /// The limits of a connection whose transactions belong to the caller.
    pub(crate) fn of_caller(statement_timeout: Duration) -> Self {
        Self {
            statement_timeout,
            lock_timeout: statement_timeout / 2,
            longest_idle: statement_timeout.saturating_add(Duration::from_secs(10)),
            plans: Plans::Any,
        }
    }

    /// How long to wait for the answer to a statement.
    fn longest_answer(self) -> Duration {
        self.statement_timeout.saturating_add(GRACE)
    }

    /// The timeouts come first. Merge joins are off: they would read the primary key from the first to the last of a few scattered sequences.
    /// JIT is off: the planner overestimates the cost of a claim, and would compile for seconds for a claim of
    /// milliseconds. Parallel workers would cost more than they save. Row security is off: a policy that would hide rows is an error, not an empty outbox.
    fn settings(self) -> [(&'static str, String); 12] {
        let (other_plans, plan_cache_mode) = match self.plans {
            Plans::Any => ("on", "auto"),
            Plans::ByIndex => ("off", "force_generic_plan"),
        };
        let timeout = crate::sql::millis(self.statement_timeout).max(1);
        let lock_timeout = crate::sql::millis(self.lock_timeout).max(1);
        [
            ("statement_timeout", timeout.to_string()),
            ("lock_timeout", lock_timeout.to_string()),
            (
                "idle_in_transaction_session_timeout",
                crate::sql::millis(self.longest_idle).to_string(),
            ),
            ("enable_mergejoin", "off".to_owned()),
            ("enable_bitmapscan", other_plans.to_owned()),
            ("enable_seqscan", other_plans.to_owned()),
            ("plan_cache_mode", plan_cache_mode.to_owned()),
            ("jit", "off".to_owned()),
            ("max_parallel_workers_per_gather", "0".to_owned()),
            ("quote_all_identifiers", "off".to_owned()),
            ("row_security", "off".to_owned()),
            ("client_min_messages", "warning".to_owned()),
        ]
    }

    /// The first `most` settings, as SQL.
    fn written(self, set: &str, most: usize) -> String {
        let settings = self.settings().into_iter().take(most);
        let written = |(name, value)| format!("{set} {name} = {value};");
        settings.map(written).collect()
    }

    /// Sets the limits until the connection closes.
    fn set(self, conn: &mut PgConnection) -> QueryResult<()> {
        let settings = self.written("SET", usize::MAX);
        conn.batch_execute(&format!(
            "{settings} {OF_SESSION}; SET default_transaction_isolation = 'read committed'"
        ))
    }

    /// Sets the limits for the transaction that has just begun.
    pub(crate) fn set_local(self, conn: &mut PgConnection) -> QueryResult<()> {
        let settings = self.written("SET LOCAL", usize::MAX);
        conn.batch_execute(&format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL search_path = {}; {settings}",
            crate::sql::pinned::PATH
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
    limits: StatementLimits,
) -> Result<Connected, DatabaseError> {
    connect_to(database_url, purpose, limits, UrlWay::of(database_url)?)
}

fn connect_to(
    database_url: &SecretString,
    purpose: &str,
    limits: StatementLimits,
    way: UrlWay,
) -> Result<Connected, DatabaseError> {
    let url = database_url.expose_secret();
    let name = ("application_name", format!("diesel-outbox {purpose}"));
    let mut connected = Connected::open(limits, MORE_TRIES, way.kind, |socket| {
        let mut parameters = vec![socket.parameter()];
        parameters.extend(way.is_own.then(|| name.clone()));
        establish(url, &parameters)
    })?;
    if !way.is_own {
        (connected.conn).set_prepared_statement_cache_size(CacheSize::Disabled);
        connected.pooled = Some(limits);
    }
    let set = connected.set_limits(limits);
    set.map_err(|error| connected.explained(error))?;
    Ok(connected)
}

fn establish(
    database_url: &str,
    parameters: &[(&str, String)],
) -> Result<PgConnection, DatabaseError> {
    let url = with_parameters(database_url, parameters);
    PgConnection::establish(&url).map_err(|error| refused(&error.to_string(), database_url))
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
        let limits = StatementLimits::of_relay(Duration::from_millis(7_654), Plans::ByIndex);
        let settings = |source: Source| {
            let connected = source.connect("test", limits).expect("connected");
            assert!(connected.pooled.is_none());
            let mut conn = connected.conn;
            let names = limits.settings().map(|(name, _)| name).into_iter();
            let names = names.chain(["application_name", "default_transaction_isolation"]);
            let value = |name: &str| -> String {
                select(crate::sql::functions::current_setting(name))
                    .get_result(&mut conn)
                    .expect("a setting")
            };
            names.map(value).collect::<Vec<_>>()
        };
        let managed = settings(Source::Manager(Arc::new(manager)));
        assert_eq!(managed, settings(Source::of_url(url.into())));
        assert!(managed.contains(&"7654ms".to_owned()), "{managed:?}");
    }

    /// Also where the socket has no tag, and many are opened at once. Connections of others are left alone. In a process
    /// of its own: other tests open connections at the same moment.
    #[test]
    fn a_statement_without_an_answer_ends_on_every_kind_of_connection() {
        const NAME: &str = "engine::host::sql::connection::tests::a_statement_without_an_answer_ends_on_every_kind_of_connection";
        const MARK: &str = "A_PROCESS_OF_ITS_OWN";
        if std::env::var_os(MARK).is_none() {
            let program = std::env::current_exe().expect("this program");
            let mut command = std::process::Command::new(program);
            let output = command.args(["--exact", NAME]).env(MARK, "1").output();
            let output = output.expect("the test runs");
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && stdout.contains("1 passed"),
                "{stdout}"
            );
            return;
        }
        let url = std::env::var("DATABASE_URL").expect("DATABASE_URL is set");
        let mut bystander = PgConnection::establish(&url).expect("PostgreSQL is there");
        let mut setting = |name: &str| -> String {
            select(crate::sql::functions::current_setting(name))
                .get_result(&mut bystander)
                .expect("a setting")
        };
        let (folders, port) = (setting("unix_socket_directories"), setting("port"));
        let with = |more: &str| {
            let separator = if url.contains('?') { '&' } else { '?' };
            format!("{url}{separator}{more}")
        };
        let manager = diesel::r2d2::ConnectionManager::<PgConnection>::new(&url);
        let sources = [
            Source::of_url(url.clone().into()),
            Source::of_url(with("tcp_user_timeout=15000").into()),
            Source::of_url(with("keepalives=0").into()),
            Source::of_url(with(&format!("host={folders}&port={port}")).into()),
            Source::Manager(Arc::new(manager)),
        ];
        std::thread::scope(|scope| {
            for source in sources.iter().cycle().take(3 * sources.len()) {
                scope.spawn(move || {
                    let limits = StatementLimits::of_relay(Duration::from_secs(1), Plans::Any);
                    let mut connected = source.connect("test", limits).expect("connected");
                    let conn = &mut connected.conn;
                    conn.batch_execute("SET statement_timeout = 0")
                        .expect("no limit of the server");
                    let error = conn
                        .batch_execute("SELECT pg_sleep(30)")
                        .expect_err("too long");
                    let error = connected.explained(error).to_string();
                    assert_eq!(error, "no answer within 6 s");
                });
            }
        });
        bystander
            .batch_execute("SELECT 1")
            .expect("its connection is as before");
    }
}
