//! Waiting for notifications: a separate libpq connection, because Diesel does not expose its socket, and the
//! advisory lock that tells inserts that a relay sleeps.
//!
//! The only `unsafe` code of the crate beside [`descriptor`](super::descriptor). Its invariants:
//! - `Raw::conn` comes from `PQconnectdb`, is not null, is used by one thread at a time (`&mut self`),
//!   and is freed once, by `Drop`.
//! - Each result and each notification is freed once, after its text is copied.
//! - Every text passed to libpq is a `CString` that lives during the call.

#![allow(
    unsafe_code,
    reason = "there is no other way to libpq's socket and notifications"
)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use pq_sys::{ConnStatusType, ExecStatusType, PGconn, PGresult};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use secrecy::{ExposeSecret, SecretString};

use super::address::{OF_SESSION, POOLERS_TURN, with_parameters, without_password};
use super::backend::Backend;
use super::descriptor::with_descriptor;
use super::socket::{Kind, Socket};
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::store::millis;

/// Where a URL leads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    /// Whether it leads to a server process that serves this client alone, and not to a pooler: a pooler greets its
    /// clients with an invented process id. Only then may settings last longer than a transaction. That a process stays
    /// the same for some transactions proves nothing: a pooler may give its clients the same one again.
    pub(super) is_own: bool,
    pub(super) kind: Kind,
}

impl Way {
    /// Opens a connection to find out.
    pub(super) fn of(url: &SecretString) -> Result<Self, DatabaseError> {
        let mut raw = Raw::connect(url, POOLERS_TURN)?;
        let is_own = raw.has_own_process()?;
        Ok(Self {
            is_own,
            kind: raw.kind,
        })
    }
}

/// A connection that listens for messages of one outbox.
///
/// Its advisory locks have the number of the outbox and a second key. While a session holds the key 1 exclusively, inserts
/// notify. A relay that is awake shares a key that stands for what it serves: as long as one does, relays that serve the
/// same sleep without the lock.
pub(crate) struct Listener {
    raw: Raw,
    /// The oid of the outbox.
    oid: u32,
    /// The second key of the lock of relays that are awake and serve the same.
    awake: i32,
    /// Whether this session shares that lock.
    pub(crate) is_awake: bool,
    /// Whether this session holds the lock that makes inserts notify.
    pub(crate) has_lock: bool,
    /// Notifications that arrived and are not reported yet.
    heard: usize,
    /// The server process of this session.
    pub(crate) backend: Backend,
    /// Whether a pooler seems to be between this process and the server. A pooler passes notifications only if each
    /// client has its own connection.
    pub(crate) is_pooled: bool,
}

/// Whether a relay may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lock {
    /// This relay has the lock: inserts will notify.
    Taken,
    /// Another relay has the lock: inserts will notify all relays.
    Another,
    /// A relay that serves the same is awake, and needs no notifications.
    Awake,
    /// An insert is in progress that will not notify.
    Insert,
}

impl Listener {
    /// Connects and listens. `None`: something between this process and the server, such as a pooler, would stop
    /// notifications. `is_direct`: the URL was chosen for listening, so a pooler is accepted. `serves`: what the relay
    /// serves, the same text for relays that serve the same.
    ///
    /// # Errors
    /// [`DatabaseError::Connect`] with libpq's message, without the URL's password.
    pub(crate) fn connect(
        url: &SecretString,
        name: &OutboxName,
        statement_timeout: Duration,
        is_direct: bool,
        serves: &str,
    ) -> Result<Option<Self>, DatabaseError> {
        let mut raw = Raw::connect(url, POOLERS_TURN)?;
        let is_pooled = !raw.has_own_process()?;
        if is_pooled && !is_direct {
            return Ok(None);
        }
        let timeout = millis(statement_timeout).max(1);
        raw.execute(&format!(
            "SET application_name = 'diesel-outbox listener'; SET statement_timeout = {timeout}; {OF_SESSION}"
        ))?;
        if !is_pooled {
            raw.answer = statement_timeout;
        }
        let none = || DatabaseError::Schema(format!("there is no outbox {name}"));
        let table = quoted(&name.outbox());
        let oid: u32 = raw
            .number(&format!("to_regclass({table})::pg_catalog.oid"))?
            .ok_or_else(none)?;
        // Never 1, the key of the lock of sleeping relays.
        let awake = raw
            .number(&format!("hashtext({}) | 2", quoted(serves)))?
            .ok_or_else(none)?;
        let backend = raw.backend()?;
        raw.execute(&format!("SET search_path = {}", crate::store::pinned::PATH))?;
        raw.execute(&format!("LISTEN outbox_{oid}"))?;
        Ok(Some(Self {
            raw,
            oid,
            awake,
            is_awake: false,
            has_lock: false,
            heard: 0,
            backend,
            is_pooled,
        }))
    }

    /// The first half of the keys of the outbox's advisory locks: the same number as `OUTBOX_NUMBER`.
    fn number(&self) -> i32 {
        self.oid.cast_signed()
    }

    /// Tries to take the lock that makes inserts notify, for a relay that is not awake any more.
    ///
    /// The relay gives up its share first. So of relays that fall asleep at the same time, at least one finds nobody awake.
    pub(crate) fn try_lock(&mut self) -> Result<Lock, DatabaseError> {
        let (number, awake) = (self.number(), self.awake);
        let give_up = match std::mem::take(&mut self.is_awake) {
            true => format!("SELECT pg_advisory_unlock_shared({number}, {awake});"),
            false => String::new(),
        };
        let taken = self.raw.execute(&format!(
            "{give_up} SELECT CASE WHEN NOT pg_try_advisory_xact_lock({number}, {awake}) THEN 'awake'
                         WHEN pg_try_advisory_lock({number}, 1) THEN 'taken' END"
        ))?;
        match taken.as_deref() {
            Some("taken") => {
                self.has_lock = true;
                return Ok(Lock::Taken);
            }
            Some("awake") => return Ok(Lock::Awake),
            _ => {}
        }
        let oid = self.oid;
        let another = self.raw.execute(&format!(
            "SELECT EXISTS (
                SELECT FROM pg_locks
                 WHERE locktype = 'advisory' AND classid = {oid} AND objid = 1
                   AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
        ))?;
        Ok(match another.as_deref() {
            Some("t") => Lock::Another,
            _ => Lock::Insert,
        })
    }

    /// Proves that the server still answers. A proxy between may keep a connection whose server is gone.
    ///
    /// # Errors
    /// If there is no answer in time.
    pub(crate) fn prove(&mut self) -> Result<(), DatabaseError> {
        self.raw.execute("SELECT 1").map(drop)
    }

    /// Releases the lock if this session has it. `stays`: tells relays that serve the same that this relay is awake, and
    /// else takes that back. Any role may hold the lock for that, so this waits for nobody: the caller tries again.
    pub(crate) fn wake(&mut self, stays: bool) -> Result<(), DatabaseError> {
        let (number, awake) = (self.number(), self.awake);
        let mut statements = String::new();
        if std::mem::take(&mut self.has_lock) {
            statements += &format!("SELECT pg_advisory_unlock({number}, 1);");
        }
        match (self.is_awake, stays) {
            (false, true) => {
                statements += &format!("SELECT pg_try_advisory_lock_shared({number}, {awake});");
            }
            (true, false) => {
                statements += &format!("SELECT pg_advisory_unlock_shared({number}, {awake});");
            }
            _ => {}
        }
        if !statements.is_empty() {
            let last = self.raw.execute(&statements)?;
            self.is_awake = stays && (self.is_awake || last.as_deref() == Some("t"));
        }
        Ok(())
    }

    /// Waits until the server sends something, `other` is readable, or `time` has passed. Returns at once if
    /// notifications came with the result of a statement: those are no longer in the socket.
    ///
    /// # Errors
    /// If the connection is closed.
    pub(crate) fn wait(
        &mut self,
        other: BorrowedFd<'_>,
        time: Option<Duration>,
    ) -> Result<(), DatabaseError> {
        self.heard += self.raw.notifications();
        if self.heard > 0 {
            return Ok(());
        }
        self.raw.wait(Some(other), time)
    }

    /// The number of notifications since the last call.
    pub(crate) fn notifications(&mut self) -> usize {
        std::mem::take(&mut self.heard) + self.raw.notifications()
    }
}

/// A literal of SQL.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// A libpq connection.
struct Raw {
    conn: *mut PGconn,
    url: SecretString,
    /// How long to wait for the answer to a statement.
    answer: Duration,
    kind: Kind,
    /// While it is kept, the socket is taken for no other connection's.
    socket: Socket,
}

// SAFETY: any thread may use a connection, one thread at a time; `&mut self` ensures that.
unsafe impl Send for Raw {}

impl Raw {
    fn connect(url: &SecretString, answer: Duration) -> Result<Self, DatabaseError> {
        let socket = Socket::new();
        let parameters = CString::new(with_parameters(url.expose_secret(), &[socket.parameter()]))
            .map_err(|_| DatabaseError::Connect("the URL contains a NUL byte".to_owned()))?;
        // SAFETY: `parameters` lives until the call returns.
        let conn = unsafe { pq_sys::PQconnectdb(parameters.as_ptr()) };
        if conn.is_null() {
            return Err(DatabaseError::Connect("out of memory".to_owned()));
        }
        let mut raw = Self {
            conn,
            url: url.clone(),
            answer,
            kind: Kind::Tagged,
            socket,
        };
        // SAFETY: `conn` is a connection, in any state. The notice processor needs no argument.
        let status = unsafe {
            pq_sys::PQsetNoticeProcessor(raw.conn, Some(ignore), std::ptr::null_mut());
            pq_sys::PQstatus(raw.conn)
        };
        if status != ConnStatusType::CONNECTION_OK {
            return Err(raw.error());
        }
        // SAFETY: `conn` is an open connection, so it has a socket.
        let number = unsafe { pq_sys::PQsocket(raw.conn) };
        raw.kind = with_descriptor(number, |fd| raw.socket.found(fd));
        Ok(raw)
    }

    /// Whether the server process is the one that greeted this client.
    fn has_own_process(&mut self) -> Result<bool, DatabaseError> {
        // SAFETY: `conn` is a connection.
        let greeted_by = unsafe { pq_sys::PQbackendPID(self.conn) };
        let pid = self.execute("SELECT pg_catalog.pg_backend_pid()")?;
        Ok(pid == Some(greeted_by.to_string()))
    }

    /// The server process. Text, like all that this connection asks.
    fn backend(&mut self) -> Result<Backend, DatabaseError> {
        let found = self.execute(
            "SELECT pid || ' ' || coalesce(((extract(epoch FROM backend_start)
                                    - extract(epoch FROM timestamptz '2000-01-01 00:00:00Z')) * 1000000)::bigint, 0)
               FROM pg_catalog.pg_stat_activity WHERE pid = pg_catalog.pg_backend_pid()",
        )?;
        let parsed = found.as_deref().and_then(|found| {
            let (pid, started) = found.split_once(' ')?;
            Some(Backend {
                pid: pid.parse().ok()?,
                started: started.parse().ok()?,
            })
        });
        parsed.ok_or_else(|| DatabaseError::Schema("the listener has no server process".into()))
    }

    /// The value of a function of the server.
    fn number<N: FromStr>(&mut self, call: &str) -> Result<Option<N>, DatabaseError> {
        let value = self.execute(&format!("SELECT pg_catalog.{call}"))?;
        Ok(value.and_then(|value| value.parse().ok()))
    }

    /// Runs SQL and returns the first value of the last result.
    ///
    /// # Errors
    /// Also if there is no answer in time. The connection cannot be used afterwards.
    fn execute(&mut self, sql: &str) -> Result<Option<String>, DatabaseError> {
        let sql = CString::new(sql)
            .map_err(|_| DatabaseError::Connect("a statement contains a NUL byte".to_owned()))?;
        // SAFETY: `conn` is a connection, `sql` lives until the call returns.
        if unsafe { pq_sys::PQsendQuery(self.conn, sql.as_ptr()) } != 1 {
            return Err(self.error());
        }
        let until = Instant::now() + self.answer;
        let mut last = Ok(None);
        loop {
            self.wait_for_result(until)?;
            // SAFETY: `conn` is a connection. The result is freed below, after its text is copied.
            unsafe {
                let result: *mut PGresult = pq_sys::PQgetResult(self.conn);
                if result.is_null() {
                    return last;
                }
                let of_this = match pq_sys::PQresultStatus(result) {
                    ExecStatusType::PGRES_COMMAND_OK => Ok(None),
                    ExecStatusType::PGRES_TUPLES_OK if pq_sys::PQntuples(result) > 0 => {
                        Ok(Some(text(pq_sys::PQgetvalue(result, 0, 0))))
                    }
                    ExecStatusType::PGRES_TUPLES_OK => Ok(None),
                    _ => Err(self.error()),
                };
                pq_sys::PQclear(result);
                last = last.and(of_this);
            }
        }
    }

    /// Waits until [`PQgetResult`](pq_sys::PQgetResult) has an answer without waiting.
    fn wait_for_result(&mut self, until: Instant) -> Result<(), DatabaseError> {
        // SAFETY: `conn` is a connection.
        while unsafe { pq_sys::PQisBusy(self.conn) } == 1 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let answer = self.answer;
                return Err(DatabaseError::Connect(format!(
                    "the server did not answer within {answer:?}"
                )));
            }
            self.wait(None, Some(left))?;
        }
        Ok(())
    }

    /// Waits until the server sends something, the other is readable, or the time has passed.
    fn wait(
        &mut self,
        other: Option<BorrowedFd<'_>>,
        time: Option<Duration>,
    ) -> Result<(), DatabaseError> {
        // SAFETY: `conn` is a connection.
        let socket = unsafe { pq_sys::PQsocket(self.conn) };
        if socket < 0 {
            return Err(self.error());
        }
        // SAFETY: the connection owns the socket, and keeps it open until `PQconsumeInput` below.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut descriptors = vec![readable(socket)];
        descriptors.extend(other.map(readable));
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut descriptors, time.as_ref()) {
            // The caller checks for notifications, and calls again.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(DatabaseError::Connect(format!("cannot wait: {error}"))),
        }
        if descriptors[0].revents().is_empty() {
            return Ok(());
        }
        // SAFETY: `conn` is a connection.
        match unsafe { pq_sys::PQconsumeInput(self.conn) } {
            1 => Ok(()),
            _ => Err(self.error()),
        }
    }

    fn notifications(&mut self) -> usize {
        let mut count = 0;
        loop {
            // SAFETY: `conn` is a connection; a notification that is not null must be freed here.
            unsafe {
                let notification = pq_sys::PQnotifies(self.conn);
                if notification.is_null() {
                    return count;
                }
                pq_sys::PQfreemem(notification.cast::<c_void>());
            }
            count += 1;
        }
    }

    fn error(&self) -> DatabaseError {
        // SAFETY: `conn` is a connection; the text is copied at once.
        let error = unsafe { text(pq_sys::PQerrorMessage(self.conn)) };
        let error = without_password(&error, self.url.expose_secret());
        let lines: Vec<&str> = error.lines().map(str::trim).collect();
        DatabaseError::Connect(lines.join("; "))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: `conn` is a connection, and is not used afterwards.
        unsafe { pq_sys::PQfinish(self.conn) };
    }
}

/// Copies a text of libpq.
///
/// # Safety
/// `text` is null, or a C string that lives until the function returns.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees a C string that lives long enough.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Ignores notices, which libpq would write to standard error.
extern "C" fn ignore(_: *mut c_void, _: *const c_char) {}
