//! Waiting for notifications: a separate libpq connection, because Diesel does not expose its socket, and the
//! advisory lock that tells inserts that a relay sleeps.

use std::ffi::CString;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use secrecy::{ExposeSecret, SecretString};

use crate::engine::host::sql::address::{OF_SESSION, POOLERS_TURN, refused, with_parameters};
use crate::engine::host::sql::libpq::Pq;
use crate::engine::host::sql::socket::{Kind, Socket};
use crate::engine::lease::sql::backend::Backend;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::millis;

/// Where a URL leads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UrlWay {
    /// Whether it leads to a server process that serves this client alone, and not to a pooler: a pooler greets its
    /// clients with an invented process id. Only then may settings last longer than a transaction. That a process stays
    /// the same for some transactions proves nothing: a pooler may give its clients the same one again.
    pub(crate) is_own: bool,
    pub(crate) kind: Kind,
}

impl UrlWay {
    /// Opens a connection to find out.
    pub(crate) fn of(url: &SecretString) -> Result<Self, DatabaseError> {
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
    /// The oid of the outbox. As a signed number, the first half of the keys of its advisory locks: the same number as
    /// `OUTBOX_NUMBER`.
    oid: u32,
    /// The second key of the lock of relays that are awake and serve the same.
    awake: i32,
    /// Whether this session shares that lock.
    pub(crate) is_awake: bool,
    /// Whether this session holds the lock that makes inserts notify.
    pub(crate) has_lock: bool,
    /// A notification has arrived and is not reported yet.
    has_heard: bool,
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
        raw.execute(&format!("SET search_path = {}", crate::sql::pinned::PATH))?;
        raw.execute(&format!("LISTEN outbox_{oid}"))?;
        Ok(Some(Self {
            raw,
            oid,
            awake,
            is_awake: false,
            has_lock: false,
            has_heard: false,
            backend,
            is_pooled,
        }))
    }

    /// Tries to take the lock that makes inserts notify, for a relay that is not awake any more.
    ///
    /// The relay gives up its share first. So of relays that fall asleep at the same time, at least one finds nobody awake.
    pub(crate) fn try_lock(&mut self) -> Result<Lock, DatabaseError> {
        let (number, awake) = (self.oid.cast_signed(), self.awake);
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
        let (number, awake) = (self.oid.cast_signed(), self.awake);
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
        time: Duration,
    ) -> Result<(), DatabaseError> {
        self.has_heard |= self.raw.take_notifications();
        match self.has_heard {
            true => Ok(()),
            false => self.raw.wait(Some(other), time),
        }
    }

    /// Whether a notification has arrived since the last call.
    pub(crate) fn has_news(&mut self) -> bool {
        self.raw.take_notifications() | std::mem::take(&mut self.has_heard)
    }
}

/// A literal of SQL.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// A libpq connection.
struct Raw {
    pq: Pq,
    url: SecretString,
    /// How long to wait for the answer to a statement.
    answer: Duration,
    kind: Kind,
    /// While it is kept, the socket is taken for no other connection's.
    _socket: Socket,
}

impl Raw {
    fn connect(url: &SecretString, answer: Duration) -> Result<Self, DatabaseError> {
        let socket = Socket::new();
        let parameters = CString::new(with_parameters(url.expose_secret(), &[socket.parameter()]))
            .map_err(|_| DatabaseError::Connect("the URL contains a NUL byte".to_owned()))?;
        let pq = Pq::connect(&parameters)
            .ok_or_else(|| DatabaseError::Connect("out of memory".to_owned()))?;
        let found = pq.is_open().then(|| pq.with_socket(|fd| socket.found(fd)));
        match found.flatten() {
            Some(kind) => Ok(Self {
                pq,
                url: url.clone(),
                answer,
                kind,
                _socket: socket,
            }),
            None => Err(refused(&pq.error(), url.expose_secret())),
        }
    }

    /// Whether the server process is the one that greeted this client.
    fn has_own_process(&mut self) -> Result<bool, DatabaseError> {
        let greeted_by = self.pq.greeted_by();
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
        if !self.pq.send(&sql) {
            return Err(self.error());
        }
        let until = Instant::now() + self.answer;
        let mut last = Ok(None);
        loop {
            self.wait_for_result(until)?;
            let Some(of_this) = self.pq.next_result() else {
                return last;
            };
            last = last.and(of_this.map_err(|text| refused(&text, self.url.expose_secret())));
        }
    }

    /// Waits until [`Pq::next_result`] has an answer without waiting.
    fn wait_for_result(&mut self, until: Instant) -> Result<(), DatabaseError> {
        while self.pq.is_busy() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let answer = self.answer;
                return Err(DatabaseError::Connect(format!(
                    "the server did not answer within {answer:?}"
                )));
            }
            self.wait(None, left)?;
        }
        Ok(())
    }

    /// Waits until the server sends something, the other is readable, or the time has passed.
    fn wait(&mut self, other: Option<BorrowedFd<'_>>, time: Duration) -> Result<(), DatabaseError> {
        let time = Timespec::try_from(time).ok();
        let polled = self.pq.with_socket(|socket| {
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut descriptors = vec![readable(socket)];
            descriptors.extend(other.map(readable));
            poll(&mut descriptors, time.as_ref()).map(|_| !descriptors[0].revents().is_empty())
        });
        match polled {
            // The caller checks for notifications, and calls again.
            Some(Ok(false) | Err(Errno::INTR)) => Ok(()),
            Some(Err(error)) => Err(DatabaseError::Connect(format!("cannot wait: {error}"))),
            Some(Ok(true)) if self.pq.read() => Ok(()),
            Some(Ok(true)) | None => Err(self.error()),
        }
    }

    /// Whether there was any.
    fn take_notifications(&mut self) -> bool {
        let is_any = self.pq.take_notification();
        while self.pq.take_notification() {}
        is_any
    }

    fn error(&self) -> DatabaseError {
        refused(&self.pq.error(), self.url.expose_secret())
    }
}
