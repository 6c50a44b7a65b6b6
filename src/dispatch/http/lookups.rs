//! Lookups of names, for all destinations of a dispatcher.
//!
//! A few threads look up for everybody, callers wait until their deadline, and answers are kept for
//! a short time. Where a lookup takes long, the answer before it is used (RFC 8767): names that hang, which
//! anybody may have who registers a destination, would else keep the threads from those that do not.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never, select_biased, unbounded};

use crate::lock::lock;

/// How long an answer is kept. Short, for receivers that move.
const KEEP: Duration = Duration::from_secs(10);
/// How long a failure is kept: one lookup answers all senders that wait for it.
const KEEP_FAILURE: Duration = Duration::from_secs(1);
/// How long a new answer is waited for where there is an old one, and how old that may be.
const PATIENCE: Duration = Duration::from_millis(250);
const OLDEST: Duration = Duration::from_secs(3600);
/// Names of all destinations, while those come and go. More than these are kept while they are new.
const MOST_KEPT: usize = 20_000;
/// Threads for destinations of settings, and for registered ones. Half of them are not for names that failed.
pub(super) const THREADS: usize = 2;
pub(super) const THREADS_OF_REGISTERED: usize = 4;
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

/// How long what it does goes on.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) keep: Duration,
    pub(super) keep_failure: Duration,
    /// After so long an old answer is good enough.
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

/// Looks names up for all destinations. Its threads start with the first name.
///
/// Dropping it ends its threads. Only one that is in a lookup which hangs is left to itself: it
/// ends with that lookup.
pub(super) struct Lookups {
    shared: Arc<Shared>,
    /// Each name that is under way once, so their lengths are bounded. `None`: the end.
    queues: Option<Queues<Sender<Name>>>,
    asked: Queues<Receiver<Name>>,
    threads: usize,
    /// Disconnected when the last thread is at its end.
    ended: Receiver<()>,
    alive: Option<Sender<()>>,
}

/// Names to look up.
#[derive(Clone)]
struct Queues<T> {
    /// Those that are new, and those that had an answer.
    good: T,
    /// Those whose last lookup failed.
    bad: T,
}

struct Shared {
    lookup: Box<Lookup>,
    times: Times,
    /// [`MOST_KEPT`], and more only while they are new.
    kept: RwLock<HashMap<Name, Kept>>,
    under_way: Mutex<UnderWay>,
    /// Something that was under way is there.
    answered: Condvar,
}

#[derive(Default)]
struct UnderWay {
    /// Since when.
    names: HashMap<Name, Instant>,
    threads: Vec<JoinHandle<()>>,
}

struct Kept {
    answer: Answer,
    since: Instant,
    until: Instant,
}

impl Lookups {
    /// So many lookups may go on at once, never two of one name.
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
                // Names that fail, and hang at that, leave these to the others.
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

    /// The answer of now, or of not long ago; an older one where a new one takes long. `None`: there was none before the
    /// deadline.
    pub(super) fn addresses(&self, name: &Name, deadline: Instant) -> Option<Answer> {
        if let Some(answer) = self.shared.kept(name, None) {
            return Some(answer);
        }
        let (asked, times) = (Instant::now(), self.shared.times);
        let mut under_way = self.shared.under_way();
        loop {
            // What was looked up while this one waited is new enough, however short it is kept.
            if let Some(answer) = self.shared.kept(name, Some(asked)) {
                return Some(answer);
            }
            let since = match under_way.names.get(name) {
                Some(since) => *since,
                None => {
                    if let Err(error) = self.start(&mut under_way.threads) {
                        return Some(Err(failed(&name.0, format!("no thread: {error}"))));
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
        // Nobody sends: this waits for the end, or for as long as it may.
        let _ = self.ended.recv_timeout(GRACE);
        let threads = std::mem::take(&mut self.shared.under_way().threads);
        for thread in threads {
            if thread.is_finished() {
                // It cannot have panicked: a lookup's panic is an answer.
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

    /// Addresses that may have changed since.
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

fn failed(host: &Arc<str>, reason: String) -> LookupFailed {
    LookupFailed {
        host: Arc::clone(host),
        reason,
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
