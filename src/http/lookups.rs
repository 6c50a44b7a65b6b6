//! Name lookups for all destinations of a dispatcher.
//!
//! A few threads look up names for all senders. Senders wait until their deadline, and results are kept for a short
//! time. If a lookup is slow, the previous result is used (RFC 8767).
//!
//! Anyone who registers a destination can give it a name whose lookup hangs, and has as many names as he likes in a domain
//! of his own. So the threads are divided:
//!
//! * The names of a domain (the last two labels) get no more threads than are left for others, so another domain always
//!   finds a thread, unless nearly as many domains hang as there are threads.
//! * Names that have never been resolved get only a part of the threads, and names whose last lookup failed a smaller
//!   part.
//! * A name without addresses is forgotten when no sender waits for it any more.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

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
/// The most threads for configured destinations and for endpoints. A hanging lookup takes about 10 s.
pub(super) const THREADS: usize = 4;
pub(super) const THREADS_OF_ENDPOINTS: usize = 32;
/// The threads are divided into this many parts. Names whose last lookup failed get at most [`OF_FAILED`] parts, and
/// together with names that have never been resolved at most [`OF_DOUBTFUL`].
const PARTS: usize = 4;
const OF_FAILED: usize = 2;
const OF_DOUBTFUL: usize = 3;
/// How long a drop waits for the threads to end.
const GRACE: Duration = Duration::from_millis(100);

/// Resolves a host and a port to addresses.
pub(super) type Lookup = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// A host and a port.
pub(super) type Name = (Arc<str>, u16);
pub(super) type LookupResult = Result<Arc<[SocketAddr]>, LookupFailed>;

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

/// Looks up names for all destinations. A thread starts when it is needed.
///
/// Dropping `Lookups` ends its threads. A thread whose lookup hangs is left running, and ends after the
/// lookup.
pub(super) struct Lookups {
    shared: Arc<SharedLookups>,
    /// Disconnected when the last thread ends.
    ended: Receiver<()>,
    alive: Option<Sender<()>>,
}

struct SharedLookups {
    lookup: Box<Lookup>,
    times: Times,
    /// At most [`MOST_KEPT`] results, plus recent results.
    kept: RwLock<HashMap<Name, KeptAddresses>>,
    /// The most threads.
    threads: usize,
    in_flight: Mutex<LookupInFlight>,
    /// Notified when a lookup ends.
    answered: Condvar,
    /// Notified when a name is asked for, and at the end.
    asked: Condvar,
}

#[derive(Default)]
struct LookupInFlight {
    /// Names that are being looked up, or wait for a thread. Each is there once.
    names: HashMap<Name, Asked>,
    /// The names that wait for a thread, by their numbers. Hardly more than there are senders.
    queue: BTreeMap<u64, Name>,
    last_number: u64,
    /// The lookups in progress: all, by what is known of the names, and by domain.
    running: usize,
    of_standings: [usize; 3],
    of_domains: HashMap<Arc<str>, usize>,
    threads: Vec<JoinHandle<()>>,
    is_stopping: bool,
}

struct Asked {
    number: u64,
    since: Instant,
    standing: Standing,
    domain: Arc<str>,
    /// The senders that wait for the result.
    waiters: usize,
}

/// What the last lookup of a name says about the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Resolved,
    New,
    Failed,
}

struct KeptAddresses {
    answer: LookupResult,
    since: Instant,
    until: Instant,
}

impl LookupInFlight {
    fn put(&mut self, name: &Name, standing: Standing, since: Instant) {
        self.last_number += 1;
        let asked = Asked {
            number: self.last_number,
            since,
            standing,
            domain: domain(&name.0).into(),
            waiters: 0,
        };
        self.queue.insert(asked.number, name.clone());
        self.names.insert(name.clone(), asked);
    }

    /// The next name to look up: first those of domains with the fewest lookups in progress.
    fn begin(&mut self, threads: usize) -> Option<Name> {
        let of_domain = |one: &Asked| self.of_domains.get(&one.domain).copied().unwrap_or(0);
        let waiting = self.queue.iter();
        let waiting = waiting.filter_map(|(number, name)| Some((*number, self.names.get(name)?)));
        let allowed = waiting.filter(|(_, one)| {
            self.has_thread(one.standing, threads)
                && of_domain(one) < threads.saturating_sub(self.running)
        });
        let (number, _) = allowed.min_by_key(|(number, one)| (of_domain(one), *number))?;
        let name = self.queue.remove(&number)?;
        let one = self.names.get(&name)?;
        self.running += 1;
        self.of_standings[one.standing as usize] += 1;
        *self.of_domains.entry(Arc::clone(&one.domain)).or_default() += 1;
        Some(name)
    }

    /// Whether another thread may look up such a name.
    fn has_thread(&self, standing: Standing, threads: usize) -> bool {
        let running = |standing: Standing| self.of_standings[standing as usize];
        let is_below = |lookups: usize, parts: usize| lookups < (threads * parts / PARTS).max(1);
        let doubtful = running(Standing::New) + running(Standing::Failed);
        match standing {
            Standing::Resolved => true,
            Standing::New => is_below(doubtful, OF_DOUBTFUL),
            Standing::Failed => {
                is_below(doubtful, OF_DOUBTFUL) && is_below(running(standing), OF_FAILED)
            }
        }
    }

    fn end(&mut self, name: &Name) {
        let Some(one) = self.names.remove(name) else {
            return;
        };
        self.running -= 1;
        self.of_standings[one.standing as usize] -= 1;
        if let Some(count) = self.of_domains.get_mut(&one.domain) {
            *count -= 1;
            if *count == 0 {
                self.of_domains.remove(&one.domain);
            }
        }
    }

    /// Forgets a name that waits for a thread, if no sender waits for its result.
    fn forget_if_unwanted(&mut self, name: &Name) {
        let one = self.names.get(name).filter(|one| one.waiters == 0);
        if one.is_some_and(|one| self.queue.remove(&one.number).is_some()) {
            self.names.remove(name);
        }
    }
}

/// The last two labels of a host. So the names under a shared suffix such as `co.uk` count as one domain. The public
/// suffix list would tell them apart, but adds 0.7 MB to the program (psl 2.1).
fn domain(host: &str) -> &str {
    let host = host.trim_end_matches('.');
    let dot = host.rmatch_indices('.').nth(1);
    dot.map_or(host, |(at, _)| &host[at + 1..])
}

impl Lookups {
    /// Runs at most `threads` lookups at once, and never two for the same name.
    pub(super) fn new(lookup: Box<Lookup>, threads: usize, times: Times) -> Self {
        let shared = Arc::new(SharedLookups {
            lookup,
            times,
            kept: RwLock::default(),
            threads,
            in_flight: Mutex::default(),
            answered: Condvar::new(),
            asked: Condvar::new(),
        });
        let (alive, ended) = bounded(0);
        Self {
            shared,
            ended,
            alive: Some(alive),
        }
    }

    /// Has a thread look for work.
    fn wake(&self, in_flight: &mut LookupInFlight) -> io::Result<()> {
        let number = in_flight.threads.len();
        let wanted = in_flight.running + in_flight.queue.len();
        if number < wanted.min(self.shared.threads) {
            let (shared, alive) = (Arc::clone(&self.shared), self.alive.clone());
            let thread = std::thread::Builder::new()
                .name(format!("relay-dns-{}", number + 1))
                .spawn(move || {
                    shared.look_up_all();
                    drop(alive);
                });
            match thread {
                Ok(thread) => in_flight.threads.push(thread),
                Err(error) if number == 0 => return Err(error),
                // The threads that run look up one name after another.
                Err(_) => {}
            }
        }
        self.shared.asked.notify_one();
        Ok(())
    }

    /// A new or recent result or, if the lookup is slow, an older result. `None`: no result before the deadline.
    pub(super) fn addresses(&self, name: &Name, deadline: Instant) -> Option<LookupResult> {
        if let Some(answer) = self.shared.kept(name, None) {
            return Some(answer);
        }
        let (asked, times) = (Instant::now(), self.shared.times);
        let mut in_flight = self.shared.in_flight();
        loop {
            // A result that arrived during the wait is new enough, even if it has already expired.
            if let Some(answer) = self.shared.kept(name, Some(asked)) {
                return Some(answer);
            }
            if !in_flight.names.contains_key(name) {
                in_flight.put(name, self.shared.standing(name), asked);
                if let Err(error) = self.wake(&mut in_flight) {
                    in_flight.forget_if_unwanted(name);
                    let shortage = Shortage::new("cannot start a thread", error);
                    return Some(Err(short(&name.0, shortage)));
                }
            }
            let now = Instant::now();
            let old = self.shared.old(name);
            let one = in_flight.names.get_mut(name)?;
            let (number, patience) = (one.number, one.since + times.patience);
            if old.is_some() && patience <= now {
                // The name stays in the queue, so that it has new addresses some time.
                return old.map(Ok);
            }
            let until = if old.is_some() {
                deadline.min(patience)
            } else {
                deadline
            };
            let Some(left) = until.checked_duration_since(now) else {
                if old.is_none() {
                    in_flight.forget_if_unwanted(name);
                }
                return None;
            };
            one.waiters += 1;
            (in_flight, _) = self
                .shared
                .answered
                .wait_timeout(in_flight, left)
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(one) = in_flight.names.get_mut(name)
                && one.number == number
            {
                one.waiters -= 1;
            }
        }
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        self.shared.in_flight().is_stopping = true;
        self.shared.asked.notify_all();
        self.alive = None;
        // Nothing is ever sent on this channel: this waits until all threads have ended, or for the grace period.
        let _ = self.ended.recv_timeout(GRACE);
        let threads = std::mem::take(&mut self.shared.in_flight().threads);
        for thread in threads {
            if thread.is_finished() {
                // The thread cannot have panicked: `look_up` catches the panic of a lookup.
                let _ = thread.join();
            }
        }
    }
}

impl SharedLookups {
    fn all_kept(&self) -> RwLockReadGuard<'_, HashMap<Name, KeptAddresses>> {
        self.kept.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self, name: &Name, asked: Option<Instant>) -> Option<LookupResult> {
        let kept = self.all_kept();
        let kept = kept.get(name)?;
        let is_new = asked.is_some_and(|asked| kept.since >= asked);
        (is_new || Instant::now() < kept.until).then(|| kept.answer.clone())
    }

    fn standing(&self, name: &Name) -> Standing {
        match self.all_kept().get(name).map(|kept| &kept.answer) {
            None => Standing::New,
            Some(Ok(_)) => Standing::Resolved,
            Some(Err(_)) => Standing::Failed,
        }
    }

    /// The last addresses, which may have changed meanwhile.
    fn old(&self, name: &Name) -> Option<Arc<[SocketAddr]>> {
        let kept = self.all_kept();
        let kept = kept
            .get(name)
            .filter(|kept| kept.since.elapsed() < OLDEST)?;
        kept.answer.clone().ok()
    }

    fn in_flight(&self) -> MutexGuard<'_, LookupInFlight> {
        lock(&self.in_flight)
    }

    fn look_up_all(&self) {
        let mut in_flight = self.in_flight();
        while !in_flight.is_stopping {
            let Some(name) = in_flight.begin(self.threads) else {
                let waited = self.asked.wait(in_flight);
                in_flight = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if !in_flight.queue.is_empty() {
                self.asked.notify_one();
            }
            drop(in_flight);
            self.keep(&name, self.look_up(&name));
            in_flight = self.in_flight();
            in_flight.end(&name);
            self.answered.notify_all();
        }
    }

    fn keep(&self, name: &Name, answer: LookupResult) {
        let now = Instant::now();
        let keep = match answer {
            Ok(_) => self.times.keep,
            Err(_) => self.times.keep_failure,
        };
        let kept = KeptAddresses {
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

    fn look_up(&self, (host, port): &Name) -> LookupResult {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn name(host: &str) -> Name {
        (host.into(), 80)
    }

    /// Lookups that hang until the end of the test for names that begin with `hangs`.
    fn hanging(threads: usize) -> (Lookups, mpsc::Sender<()>) {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let lookup = move |host: &str, port| {
            if host.starts_with("hangs") {
                // An error: the test has ended.
                let _ = lock(&hang).recv();
            }
            Ok(vec![SocketAddr::from(([8, 8, 8, 8], port))])
        };
        let lookups = Lookups::new(Box::new(lookup), threads, Times::default());
        (lookups, release)
    }

    /// R46: a thousand names of one domain, looked up by as many senders as a relay has for new destinations.
    #[test]
    fn hanging_names_of_a_domain_delay_no_new_name_of_another() {
        let (lookups, release) = hanging(THREADS_OF_ENDPOINTS);
        let is_stopping = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for sender in 0..48 {
                let (lookups, is_stopping) = (&lookups, &is_stopping);
                scope.spawn(move || {
                    for number in (0..).take_while(|_| !is_stopping.load(Ordering::Relaxed)) {
                        let host = format!("hangs-{sender}-{number}.slow.example");
                        let until = Instant::now() + Duration::from_millis(25);
                        assert!(lookups.addresses(&name(&host), until).is_none());
                    }
                });
            }
            let until = Instant::now() + SOON;
            while lookups.shared.in_flight().running < THREADS_OF_ENDPOINTS / 2 {
                assert!(
                    Instant::now() < until,
                    "the hanging names get half of the threads"
                );
                std::thread::yield_now();
            }
            for number in 0..100 {
                let host = format!("n{number}.new.example");
                let until = Instant::now() + SOON;
                let answer = lookups.addresses(&name(&host), until);
                assert!(answer.is_some_and(|answer| answer.is_ok()), "{host}");
            }
            is_stopping.store(true, Ordering::Relaxed);
        });
        let in_flight = lookups.shared.in_flight();
        assert_eq!(in_flight.running, THREADS_OF_ENDPOINTS / 2);
        assert_eq!(in_flight.queue.len(), 0, "nobody waits for these names");
        drop(in_flight);
        drop(release);
    }

    /// R46
    #[test]
    fn each_domain_gets_less_than_is_left_and_doubtful_names_get_a_part() {
        let begin = |standing: Standing, host: fn(usize) -> String| {
            let (mut in_flight, now) = (LookupInFlight::default(), Instant::now());
            (0..100).for_each(|n| in_flight.put(&name(&host(n)), standing, now));
            let begun = std::iter::from_fn(|| in_flight.begin(32)).count();
            in_flight.put(&name("known.example"), Standing::Resolved, now);
            (begun, in_flight.begin(32).is_some())
        };
        let one_domain = |n| format!("n{n}.slow.example");
        let three_domains = |n| format!("n{n}.slow-{}.example", n % 3);
        let many_domains = |n| format!("slow-{n}.example");
        assert_eq!(begin(Standing::Resolved, one_domain), (16, true));
        assert_eq!(begin(Standing::Resolved, three_domains), (24, true));
        assert_eq!(begin(Standing::New, many_domains), (24, true));
        assert_eq!(begin(Standing::Failed, many_domains), (16, true));
    }

    #[test]
    fn a_domain_is_the_last_two_labels() {
        for (host, expected) in [
            ("a.b.example.com", "example.com"),
            ("example.com.", "example.com"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(domain(host), expected);
        }
    }
}
