//! The idle connections of destinations: which may be used again, and which are closed.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ureq::Agent;

use super::socket::is_quiet;
use super::sockets::Permit;
use crate::lock::lock;

/// How long a connection may be idle.
pub(super) const IDLE_AGE: Duration = Duration::from_secs(15);
/// How long a connection is used, so that a name that moves is followed also under load.
const LIFETIME: Duration = Duration::from_secs(120);
/// A connection is closed earlier by this time than its receiver would close it.
const EARLIER: Duration = Duration::from_secs(1);
/// The most idle connections of destinations that share them.
const MOST_SHARED: usize = 512;
/// After this many requests in a row that a reused connection has lost, connections are not reused for a while.
const MOST_LOST: u32 = 2;
const NO_REUSE: Duration = Duration::from_secs(60);

/// All pools of this process, for [`close_idle`].
static POOLS: Mutex<Vec<Weak<Lines>>> = Mutex::new(Vec::new());

/// Closes the idle connections that receivers have closed, or that have been idle for too long.
pub(crate) fn close_idle() {
    let pools: Vec<_> = lock(&POOLS).iter().filter_map(Weak::upgrade).collect();
    for pool in pools {
        pool.close_idle();
    }
}

/// An agent, which has at most one connection, and the right to it.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) agent: Agent,
    pub(super) permit: Permit,
    pub(super) watch: Arc<LineWatch>,
}

/// What is known of the connection of a line.
#[derive(Debug, Default)]
pub(super) struct LineWatch {
    connection: Mutex<Option<LineConnection>>,
    has_answered: AtomicBool,
}

#[derive(Debug)]
struct LineConnection {
    /// Ends with the connection.
    stream: Weak<TcpStream>,
    since: Instant,
    /// How long the connection may be idle.
    idle: Duration,
}

impl LineWatch {
    /// A connection has been made.
    pub(super) fn connects(&self, stream: &Arc<TcpStream>) {
        *lock(&self.connection) = Some(LineConnection {
            stream: Arc::downgrade(stream),
            since: Instant::now(),
            idle: IDLE_AGE,
        });
    }

    /// A request begins.
    pub(super) fn begins(&self) {
        self.has_answered.store(false, Ordering::Relaxed);
    }

    /// A byte of the response has arrived.
    pub(super) fn answers(&self) {
        self.has_answered.store(true, Ordering::Relaxed);
    }

    /// Whether a byte of the last response has arrived.
    pub(super) fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    /// The receiver says how long it keeps an idle connection.
    pub(super) fn keeps(&self, timeout: Option<Duration>) {
        let Some(timeout) = timeout else { return };
        if let Some(connection) = &mut *lock(&self.connection) {
            let shorter = timeout.saturating_sub(EARLIER).max(timeout / 2);
            connection.idle = shorter.min(IDLE_AGE);
        }
    }

    fn is_connected(&self) -> bool {
        (lock(&self.connection).as_ref()).is_some_and(|one| one.stream.strong_count() > 0)
    }

    /// Whether the connection may be used again after it has been idle since then.
    fn is_usable(&self, since: Instant, now: Instant) -> bool {
        let connection = lock(&self.connection);
        let Some(connection) = connection.as_ref() else {
            return false;
        };
        let is_young = now.saturating_duration_since(since) < connection.idle
            && now.saturating_duration_since(connection.since) < LIFETIME;
        is_young && (connection.stream.upgrade()).is_some_and(|stream| is_quiet(&stream))
    }
}

/// The idle lines of one origin, each with the time since which it has been idle.
#[derive(Debug)]
pub(super) struct Lines {
    idle: Mutex<Vec<(Instant, Line)>>,
    sharing: Arc<Sharing>,
}

/// The origins that share connections.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    origins: Mutex<HashMap<String, Weak<Lines>>>,
    /// The idle lines of all origins.
    count: AtomicUsize,
}

impl Sharing {
    /// The lines of an origin, which all its destinations share.
    pub(super) fn of(self: &Arc<Self>, origin: String) -> Arc<Lines> {
        let mut origins = lock(&self.origins);
        if let Some(lines) = origins.get(&origin).and_then(Weak::upgrade) {
            return lines;
        }
        origins.retain(|_, lines| lines.strong_count() > 0);
        let lines = Arc::new(Lines {
            idle: Mutex::default(),
            sharing: Arc::clone(self),
        });
        origins.insert(origin, Arc::downgrade(&lines));
        let mut pools = lock(&POOLS);
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(&lines));
        lines
    }
}

impl Lines {
    /// A line with an open connection.
    pub(super) fn take(&self, now: Instant) -> Option<Line> {
        loop {
            let (since, line) = lock(&self.idle).pop()?;
            self.sharing.count.fetch_sub(1, Ordering::Relaxed);
            if line.watch.is_usable(since, now) {
                return Some(line);
            }
        }
    }

    /// Keeps a line for the next send, if it has a connection and no other destination needs one.
    pub(super) fn put(&self, line: Line) {
        if line.permit.is_scarce() || !line.watch.is_connected() {
            return;
        }
        let count = self.sharing.count.fetch_add(1, Ordering::Relaxed);
        if count >= MOST_SHARED {
            self.sharing.count.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        lock(&self.idle).push((Instant::now(), line));
    }

    /// The idle connections have been made earlier by this time.
    #[cfg(test)]
    pub(super) fn grow_older(&self, by: Duration) {
        for (_, line) in &*lock(&self.idle) {
            if let Some(connection) = &mut *lock(&line.watch.connection) {
                connection.since -= by;
            }
        }
    }

    fn close_idle(&self) {
        let now = Instant::now();
        let is_closed = |(since, line): &mut (Instant, Line)| !line.watch.is_usable(*since, now);
        let closed: Vec<_> = lock(&self.idle).extract_if(.., is_closed).collect();
        self.sharing
            .count
            .fetch_sub(closed.len(), Ordering::Relaxed);
        // Outside of the lock: this closes the connections.
        drop(closed);
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let count = lock(&self.idle).len();
        self.sharing.count.fetch_sub(count, Ordering::Relaxed);
    }
}

/// Whether a destination's connections are worth keeping.
#[derive(Debug, Default)]
pub(super) struct Reuse {
    /// Requests in a row that reused connections have lost. At most [`MOST_LOST`]: then connections are not reused.
    lost: AtomicU32,
    until: Mutex<Option<Instant>>,
}

impl Reuse {
    /// A reused connection has ended before the response to its request began.
    pub(super) fn lost(&self) {
        let count = self.lost.load(Ordering::Relaxed) + 1;
        if count >= MOST_LOST {
            *lock(&self.until) = Some(Instant::now() + NO_REUSE);
        }
        self.lost.store(count.min(MOST_LOST), Ordering::Relaxed);
    }

    /// A reused connection has brought a response.
    pub(super) fn worked(&self) {
        if (1..MOST_LOST).contains(&self.lost.load(Ordering::Relaxed)) {
            self.lost.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn is_worth_it(&self) -> bool {
        if self.lost.load(Ordering::Relaxed) < MOST_LOST {
            return true;
        }
        let has_expired = lock(&self.until).is_none_or(|until| until <= Instant::now());
        if has_expired {
            self.lost.store(0, Ordering::Relaxed);
        }
        has_expired
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn connected() -> (LineWatch, Arc<TcpStream>, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let stream = Arc::new(TcpStream::connect(address).expect("a listener"));
        let watch = LineWatch::default();
        watch.connects(&stream);
        (watch, stream, listener)
    }

    #[test]
    fn a_connection_is_used_until_its_age_or_its_idle_time_ends_it() {
        let (watch, stream, _listener) = connected();
        let seconds = Duration::from_secs;
        let now = Instant::now();
        let after = |idle: Duration| watch.is_usable(now, now + idle);
        assert!(after(seconds(14)) && !after(seconds(15)));
        for (timeout, idle) in [(1, 500), (2, 1000), (5, 4000), (100, 15_000)] {
            watch.keeps(Some(seconds(timeout)));
            let idle = Duration::from_millis(idle);
            assert!(!after(idle), "{timeout}");
            assert!(after(idle - Duration::from_millis(1)), "{timeout}");
        }
        let later = now + LIFETIME + seconds(1);
        assert!(!watch.is_usable(later, later));
        watch.connects(&stream);
        assert!(after(Duration::ZERO));
        drop(stream);
        assert!(!after(Duration::ZERO) && !watch.is_connected());
    }

    #[test]
    fn after_two_losses_in_a_row_connections_are_not_reused_for_a_while() {
        let reuse = Reuse::default();
        reuse.lost();
        reuse.worked();
        reuse.lost();
        assert!(reuse.is_worth_it());
        reuse.lost();
        reuse.worked();
        assert!(!reuse.is_worth_it());
        *lock(&reuse.until) = Some(Instant::now());
        assert!(reuse.is_worth_it());
        reuse.lost();
        assert!(reuse.is_worth_it());
    }
}
