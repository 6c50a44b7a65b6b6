//! Name lookups for all destinations of a dispatcher.
//!
//! A few threads look up names for all senders. Senders wait until their deadline, and results are kept for a short
//! time. If a lookup is slow, the previous result is used (RFC 8767).
//!
//! Anyone who registers a destination can give it a name whose lookup hangs. Therefore names whose last lookup failed
//! get only half of the threads.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never, select_biased, unbounded};

use super::shortage::Shortage;
use crate::lock::lock;

/// How long addresses are kept. The time is short because receivers may move.
const KEEP: Duration = Duration::from_secs(10);
/// How long a failure is kept, so that one lookup serves all waiting senders.
const KEEP_FAILURE: Duration = Duration::from_secs(1);
/// How long to wait for a new result if there is an old result, and the maximum age of the old result.
const PATIENCE: Duration = Duration::from_millis(250);
const OLDEST: Duration = Duration::from_secs(3600);
/// The most names to keep, as destinations come and go. Only recent results may exceed this number.
const MOST_KEPT: usize = 20_000;
/// The number of threads for configured and for registered destinations. Half of them do not look up names whose last
/// lookup failed.
pub(super) const THREADS: usize = 2;
pub(super) const THREADS_OF_REGISTERED: usize = 4;
/// How long a drop waits for the threads to end.
const GRACE: Duration = Duration::from_millis(100);

/// Resolves a host and a port to addresses.
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
    /// Why this machine could not ask.
    pub(super) shortage: Option<Shortage>,
}

/// How long results are kept, and how long to wait for them.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) keep: Duration,
    pub(super) keep_failure: Duration,
    /// The longest wait for a new result if there is an old result.
    pub(super) patience: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            keep: KEEP,
            keep_failure: KEEP_FAILURE,
            patience: PATIENCE,
        }
    }
}

/// Looks up names for all destinations. The threads start with the first lookup.
///
/// Dropping `Lookups` ends its threads. A thread whose lookup hangs is left running, and ends after the
/// lookup.
pub(super) struct Lookups {
    shared: Arc<Shared>,
    /// Each name is in the queues at most once, so their lengths are bounded. `None`: `Lookups` is being dropped.
    queues: Option<Queues<Sender<Name>>>,
    asked: Queues<Receiver<Name>>,
    threads: usize,
    /// Disconnected when the last thread ends.
    ended: Receiver<()>,
    alive: Option<Sender<()>>,
}

/// Names to look up.
#[derive(Clone)]
struct Queues<T> {
    /// New names, and names whose last lookup succeeded.
    good: T,
    /// Names whose last lookup failed.
    bad: T,
}

struct Shared {
    lookup: Box<Lookup>,
    times: Times,
    /// At most [`MOST_KEPT`] results, plus recent results.
    kept: RwLock<HashMap<Name, Kept>>,
    under_way: Mutex<UnderWay>,
    /// Notified when a lookup ends.
    answered: Condvar,
}

#[derive(Default)]
struct UnderWay {
    /// Names that are being looked up, each with the start time.
    names: HashMap<Name, Instant>,
    threads: Vec<JoinHandle<()>>,
}

struct Kept {
    answer: Answer,
    since: Instant,
    until: Instant,
}

impl Lookups {
    /// Runs at most `threads` lookups at once, and never two for the same name.
    pub(super) fn new(lookup: Box<Lookup>, threads: usize, times: Times) -> Self {
        let shared = Arc::new(Shared {
            lookup,
            times,
            kept: RwLock::default(),
            under_way: Mutex::default(),
            answered: Condvar::new(),
        });
        let ((good, good_asked), (bad, bad_asked)) = (unbounded(), unbounded());
        let (alive, ended) = bounded(0);
        Self {
            shared,
            queues: Some(Queues { good, bad }),
            asked: Queues {
                good: good_asked,
                bad: bad_asked,
            },
            threads,
            ended,
            alive: Some(alive),
        }
    }

    fn start(&self, threads: &mut Vec<JoinHandle<()>>) -> io::Result<()> {
        while threads.len() < self.threads {
            let number = threads.len();
            let mut asked = self.asked.clone();
            if number < self.threads / 2 {
                // Failing names that hang cannot block these threads.
                asked.bad = never();
            }
            let (shared, alive) = (Arc::clone(&self.shared), self.alive.clone());
            let thread = std::thread::Builder::new()
                .name(format!("relay-dns-{}", number + 1))
                .spawn(move || {
                    shared.look_up_all(&asked);
                    drop(alive);
                })?;
            threads.push(thread);
        }
        Ok(())
    }

    /// A new or recent result or, if the lookup is slow, an older result. `None`: no result before the deadline.
    pub(super) fn addresses(&self, name: &Name, deadline: Instant) -> Option<Answer> {
        if let Some(answer) = self.shared.kept(name, None) {
            return Some(answer);
        }
        let (asked, times) = (Instant::now(), self.shared.times);
        let mut under_way = self.shared.under_way();
        loop {
            // A result that arrived during the wait is new enough, even if it has already expired.
            if let Some(answer) = self.shared.kept(name, Some(asked)) {
                return Some(answer);
            }
            let since = match under_way.names.get(name) {
                Some(since) => *since,
                None => {
                    if let Err(error) = self.start(&mut under_way.threads) {
                        let shortage = Shortage::new("cannot start a thread", error);
                        return Some(Err(short(&name.0, shortage)));
                    }
                    let queues = self.queues.as_ref()?;
                    let queue = match self.shared.has_failed(name) {
                        true => &queues.bad,
                        false => &queues.good,
                    };
                    queue.send(name.clone()).ok()?;
                    under_way.names.insert(name.clone(), asked);
                    asked
                }
            };
            let now = Instant::now();
            let old = self.shared.old(name);
            let patience = since + times.patience;
            if old.is_some() && patience <= now {
                return old.map(Ok);
            }
            let until = if old.is_some() {
                deadline.min(patience)
            } else {
                deadline
            };
            let left = until.checked_duration_since(now)?;
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
        (self.queues, self.alive) = (None, None);
        // Nothing is ever sent on this channel: this waits until all threads have ended, or for the grace period.
        let _ = self.ended.recv_timeout(GRACE);
        let threads = std::mem::take(&mut self.shared.under_way().threads);
        for thread in threads {
            if thread.is_finished() {
                // The thread cannot have panicked: `look_up` catches the panic of a lookup.
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn all_kept(&self) -> RwLockReadGuard<'_, HashMap<Name, Kept>> {
        self.kept.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self, name: &Name, asked: Option<Instant>) -> Option<Answer> {
        let kept = self.all_kept();
        let kept = kept.get(name)?;
        let is_new = asked.is_some_and(|asked| kept.since >= asked);
        (is_new || Instant::now() < kept.until).then(|| kept.answer.clone())
    }

    fn has_failed(&self, name: &Name) -> bool {
        self.all_kept()
            .get(name)
            .is_some_and(|kept| kept.answer.is_err())
    }

    /// The last addresses, which may have changed meanwhile.
    fn old(&self, name: &Name) -> Option<Arc<[SocketAddr]>> {
        let kept = self.all_kept();
        let kept = kept
            .get(name)
            .filter(|kept| kept.since.elapsed() < OLDEST)?;
        kept.answer.clone().ok()
    }

    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        lock(&self.under_way)
    }

    fn look_up_all(&self, asked: &Queues<Receiver<Name>>) {
        loop {
            let name = select_biased! {
                recv(asked.good) -> name => name,
                recv(asked.bad) -> name => name,
            };
            let Ok(name) = name else { break };
            self.keep(&name, self.look_up(&name));
            self.under_way().names.remove(&name);
            self.answered.notify_all();
        }
    }

    fn keep(&self, name: &Name, answer: Answer) {
        let now = Instant::now();
        let keep = match answer {
            Ok(_) => self.times.keep,
            Err(_) => self.times.keep_failure,
        };
        let kept = Kept {
            answer,
            since: now,
            until: now + keep,
        };
        let mut all = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MOST_KEPT && !all.contains_key(name) {
            all.retain(|_, kept| kept.until > now);
        }
        all.insert(name.clone(), kept);
    }

    fn look_up(&self, (host, port): &Name) -> Answer {
        let failed = |reason: String| failed(host, reason);
        // A panic must not end the thread, because all destinations need it.
        let found = catch_unwind(AssertUnwindSafe(|| (self.lookup)(host, *port)))
            .map_err(|_| failed("the lookup panicked".to_owned()))?
            .map_err(|error| match Shortage::of_lookup(&error) {
                Some(shortage) => short(host, shortage),
                None => failed(error.to_string()),
            })?;
        if found.is_empty() {
            return Err(failed("the name has no address".to_owned()));
        }
        Ok(found.into())
    }
}

fn failed(host: &Arc<str>, reason: String) -> LookupFailed {
    LookupFailed {
        host: Arc::clone(host),
        reason,
        shortage: None,
    }
}

/// The error of a lookup that this machine could not make.
fn short(host: &Arc<str>, shortage: Shortage) -> LookupFailed {
    LookupFailed {
        shortage: Some(shortage.clone()),
        ..failed(host, shortage.to_string())
    }
}

/// The system's lookup.
pub(super) fn system_lookup(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match (host, port).to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        // `localhost` is known without a lookup (RFC 6761), even without /etc/hosts.
        Err(_) if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") => Ok(vec![
            SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
        ]),
        Err(error) => Err(error),
    }
}
