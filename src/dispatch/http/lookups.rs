//! Lookups of names, for all destinations of a dispatcher.
//!
//! Two threads look up for everybody, callers wait until their deadline, and answers are kept for
//! a short time.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::lock::lock;

/// How long an answer is kept. Short, for receivers that move.
const KEEP: Duration = Duration::from_secs(10);
/// How long a failure is kept: one lookup answers all senders that wait for it.
const KEEP_FAILURE: Duration = Duration::from_secs(1);
/// Lookups that go on at once, never two of one name. A hanging one leaves the other.
pub(super) const THREADS: usize = 2;
/// The time that the threads get to end when nobody needs them any more.
const GRACE: Duration = Duration::from_millis(100);

/// From a host and a port to addresses.
pub(super) type Lookup = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// A host and a port.
pub(super) type Name = (Arc<str>, u16);
pub(super) type Answer = Result<Arc<[SocketAddr]>, LookupFailed>;

/// A name that could not be resolved.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot resolve {host}: {reason}")]
pub(super) struct LookupFailed {
    pub(super) host: Arc<str>,
    pub(super) reason: String,
}

/// Looks names up for all destinations.
///
/// Dropping it ends its threads. Only one that is in a lookup which hangs is left to itself: it
/// ends with that lookup.
pub(super) struct Lookups {
    shared: Arc<Shared>,
    /// Each name that is under way once, so its length is bounded. `None`: the end.
    queue: Option<Sender<Name>>,
    threads: Vec<JoinHandle<()>>,
    /// Disconnected when the last thread is at its end.
    ended: Receiver<()>,
}

struct Shared {
    lookup: Box<Lookup>,
    keep: Duration,
    keep_failure: Duration,
    /// As many as there are names in the settings: nobody asks for others.
    kept: RwLock<HashMap<Name, Kept>>,
    under_way: Mutex<HashSet<Name>>,
    /// Something that was under way is there.
    answered: Condvar,
}

struct Kept {
    answer: Answer,
    since: Instant,
    until: Instant,
}

impl Lookups {
    /// Starts the threads.
    pub(super) fn new(lookup: Box<Lookup>) -> io::Result<Self> {
        Self::keeping(lookup, KEEP, KEEP_FAILURE)
    }

    /// With other times to keep answers and failures than the usual ones.
    pub(super) fn keeping(
        lookup: Box<Lookup>,
        keep: Duration,
        keep_failure: Duration,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            lookup,
            keep,
            keep_failure,
            kept: RwLock::default(),
            under_way: Mutex::default(),
            answered: Condvar::new(),
        });
        let (names, queue) = unbounded();
        let (alive, ended) = bounded(0);
        let mut lookups = Self {
            shared,
            queue: Some(names),
            threads: Vec::new(),
            ended,
        };
        for number in 1..=THREADS {
            let (shared, queue) = (Arc::clone(&lookups.shared), queue.clone());
            let alive: Sender<()> = alive.clone();
            let thread = std::thread::Builder::new()
                .name(format!("relay-dns-{number}"))
                .spawn(move || {
                    shared.look_up_all(&queue);
                    drop(alive);
                })?;
            lookups.threads.push(thread);
        }
        Ok(lookups)
    }

    /// The answer of now, or of not long ago. `None`: it did not come before the deadline.
    pub(super) fn addresses(&self, name: &Name, deadline: Instant) -> Option<Answer> {
        if let Some(answer) = self.shared.kept(name, None) {
            return Some(answer);
        }
        let asked = Instant::now();
        let mut under_way = self.shared.under_way();
        loop {
            // What was looked up while this one waited is new enough, however short it is kept.
            if let Some(answer) = self.shared.kept(name, Some(asked)) {
                return Some(answer);
            }
            if !under_way.contains(name) {
                self.queue.as_ref()?.send(name.clone()).ok()?;
                under_way.insert(name.clone());
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            (under_way, _) = self
                .shared
                .answered
                .wait_timeout(under_way, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        self.queue = None;
        // Nobody sends: this waits for the end, or for as long as it may.
        let _ = self.ended.recv_timeout(GRACE);
        for thread in self.threads.drain(..) {
            if thread.is_finished() {
                // It cannot have panicked: a lookup's panic is an answer.
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn kept(&self, name: &Name, asked: Option<Instant>) -> Option<Answer> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let kept = kept.get(name)?;
        let is_new = asked.is_some_and(|asked| kept.since >= asked);
        (is_new || Instant::now() < kept.until).then(|| kept.answer.clone())
    }

    fn under_way(&self) -> MutexGuard<'_, HashSet<Name>> {
        lock(&self.under_way)
    }

    fn look_up_all(&self, queue: &Receiver<Name>) {
        for name in queue {
            let answer = self.look_up(&name);
            let now = Instant::now();
            let keep = if answer.is_ok() {
                self.keep
            } else {
                self.keep_failure
            };
            let kept = Kept {
                answer,
                since: now,
                until: now + keep,
            };
            self.kept
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(name.clone(), kept);
            self.under_way().remove(&name);
            self.answered.notify_all();
        }
    }

    fn look_up(&self, (host, port): &Name) -> Answer {
        let failed = |reason: String| LookupFailed {
            host: Arc::clone(host),
            reason,
        };
        // Without its thread all destinations would be without names.
        let found = catch_unwind(AssertUnwindSafe(|| (self.lookup)(host, *port)))
            .map_err(|_| failed("the lookup panicked".to_owned()))?
            .map_err(|error| failed(error.to_string()))?;
        if found.is_empty() {
            return Err(failed("it has no address".to_owned()));
        }
        Ok(found.into())
    }
}

/// The system's lookup.
pub(super) fn system_lookup(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match (host, port).to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        // Known without a lookup (RFC 6761), also where there is no /etc/hosts.
        Err(_) if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") => Ok(vec![
            SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
        ]),
        Err(error) => Err(error),
    }
}
