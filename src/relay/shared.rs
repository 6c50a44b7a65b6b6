//! What the threads of one relay have in common.

mod in_flight;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use secrecy::SecretString;

use self::in_flight::InFlight;
use super::bell::Bell;
use super::bulkhead::{Bulkhead, Serves};
use super::lease_clock::LeaseClock;
use super::metrics::Metrics;
use super::observer::Observers;
use super::planner::Policy;
use super::registered::Registered;
use super::session::Session;
use super::sleep::Sleep;
use super::stats::Stats;
use super::threads::{Post, Threads};
use super::told::Told;
use super::unrouted::Unrouted;
use super::wanted::Wanted;
use crate::config::Config;
use crate::lock::lock;
use crate::routes::Routes;
use crate::store::relay::connection::{Plans, Source};
use crate::store::relay::lease::LeaseId;

/// A claim that takes longer than this is given up and tried again.
pub(super) const CLAIM_LIMIT: Duration = Duration::from_secs(30);
/// No claim waits for longer than this for something else.
const MOMENT: Duration = Duration::from_millis(250);

/// What one thread says, and others read.
#[derive(Debug, Default)]
struct Known {
    /// The claimer's.
    policy: Arc<Policy>,
    /// The claimer's. Not a message: a settler asks whether there was a look between two moments of its own, and a
    /// message about that could come later than it asks.
    keyed_looks: KeyedLooks,
    /// The janitor's: what no relay serves.
    unrouted: Vec<Unrouted>,
}

/// How many looks at keyed lanes have begun, and ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeyedLooks(u64);

impl KeyedLooks {
    /// Whether there was one since, or one was under way then.
    pub(crate) fn has_looked_since(self, before: Self) -> bool {
        self != before || !before.0.is_multiple_of(2)
    }
}

pub(crate) struct Shared {
    pub(crate) config: Config,
    source: Source,
    pub(crate) observers: Observers,
    pub(crate) routes: Routes,
    pub(crate) bulkheads: Vec<Bulkhead>,
    pub(super) registered: Registered,
    /// Messages to claim at most.
    pub(crate) limit: Option<u64>,
    /// [`CLAIM_LIMIT`], but for tests.
    pub(crate) claim_limit: Duration,
    pub(crate) lease: LeaseClock,
    stats: Mutex<Stats>,
    pub(crate) metrics: Metrics,
    pub(crate) threads: Arc<Threads>,
    in_flight: Mutex<InFlight>,
    /// The claimer has answered a question.
    answered: Condvar,
    known: Mutex<Known>,
    pub(super) wanted: Wanted,
    /// The flag of shutdown: nothing new is claimed, nothing queued is sent.
    stopping: AtomicBool,
    pub(super) signals: Signals,
}

/// How threads are told something.
pub(crate) struct Signals {
    /// Disconnected at shutdown: whoever waits on it wakes.
    pub(super) stop: Receiver<()>,
    /// Disconnected at the deadline of a shutdown.
    pub(super) abandon: Receiver<()>,
    /// Rings the claimer. It looks again; nothing more.
    pub(super) doorbell: Bell,
    /// Tells the claimer that something new may be there: it looks from the start. Not by its inbox: applications may
    /// call as often as they like.
    pub(super) news: Bell,
    /// The claimer's inbox: what others have done. It hears of that whatever it does just now; where it has ended, the
    /// settlers of keys see to what is left there.
    pub(super) told: (Sender<Told>, Receiver<Told>),
    /// The heartbeat looks at its lease now.
    pub(super) pulse: Bell,
    /// The janitor counts what waits, as soon as it may.
    pub(super) count: Bell,
    /// Between the claimer and the listener.
    pub(super) sleep: Sleep,
}

impl Signals {
    /// # Errors
    /// When the system has no more descriptors.
    pub(super) fn new(stop: Receiver<()>, abandon: Receiver<()>) -> std::io::Result<Self> {
        Ok(Self {
            stop,
            abandon,
            doorbell: Bell::new(),
            news: Bell::new(),
            // No more than was claimed: what is in flight is bounded.
            told: unbounded(),
            pulse: Bell::new(),
            count: Bell::new(),
            sleep: Sleep::new()?,
        })
    }
}

impl Shared {
    pub(crate) fn new(
        config: Config,
        source: Source,
        bulkheads: Vec<Bulkhead>,
        registered: Registered,
        lease: LeaseClock,
        signals: Signals,
    ) -> Self {
        let metrics = Metrics::new(&config.table, &bulkheads);
        Self {
            observers: Observers::default(),
            routes: Routes::new(&config),
            threads: Arc::new(Threads::new(&metrics, &bulkheads)),
            metrics,
            bulkheads,
            registered,
            config,
            source,
            limit: None,
            claim_limit: CLAIM_LIMIT,
            lease,
            stats: Mutex::default(),
            in_flight: Mutex::default(),
            answered: Condvar::new(),
            known: Mutex::default(),
            wanted: Wanted::default(),
            stopping: AtomicBool::new(false),
            signals,
        }
    }

    /// What the relay has done.
    pub(crate) fn stats(&self) -> Stats {
        *lock(&self.stats)
    }

    /// Counts something that the relay has done: once for each statement, never for each send.
    pub(crate) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut lock(&self.stats));
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(crate) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.signals.doorbell.ring();
        self.signals.sleep.tell_listener();
        self.bulkheads
            .iter()
            .for_each(|bulkhead| bulkhead.gate.wake());
    }

    /// Messages of one settle, at most.
    pub(crate) fn batch(&self) -> usize {
        let of_bulkheads = self.bulkheads.iter().map(|bulkhead| bulkhead.batch);
        of_bulkheads.fold(self.config.batch, usize::max)
    }

    /// Messages that all senders together may hold.
    pub(crate) fn most_sending(&self) -> usize {
        self.in_use().map(Bulkhead::most_sending).sum()
    }

    /// All, but for the one of registered destinations where there are none.
    pub(super) fn in_use(&self) -> impl Iterator<Item = &Bulkhead> {
        let is_there = |one: &&Bulkhead| {
            !matches!(one.serves, Serves::Registered) || self.registered.registry().is_in_use()
        };
        self.bulkheads.iter().filter(is_there)
    }

    /// What reads more than it returns gives way to claims after this long.
    pub(crate) fn moment(&self) -> Duration {
        MOMENT.min(self.claim_limit / 2)
    }

    /// The thread count of all senders.
    pub(crate) fn senders(&self) -> usize {
        self.in_use().map(|bulkhead| bulkhead.concurrency).sum()
    }

    /// Whether the deadline of a shutdown is over: what cannot be settled is left to the lease.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.signals.abandon.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Waits between tries, or less when the relay stops or, while it does, gives up.
    pub(crate) fn pause(&self, duration: Duration) {
        let signal = if self.is_stopping() {
            &self.signals.abandon
        } else {
            &self.signals.stop
        };
        // Nothing is ever sent: this ends by time or by disconnection.
        let _ = signal.recv_timeout(duration);
    }

    pub(super) fn tell_claimer(&self, told: Told) {
        // Its other end is here.
        let _ = self.signals.told.0.send(told);
    }

    /// What the claimer has told others last. Whoever looks at several of its parts looks at one of these.
    pub(super) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&lock(&self.known).policy)
    }

    pub(super) fn set_policy(&self, policy: Policy) {
        let policy = Arc::new(policy);
        let before = std::mem::replace(&mut lock(&self.known).policy, Arc::clone(&policy));
        self.metrics.set_paused(&before.paused, &policy.paused);
    }

    pub(crate) fn set_unrouted(&self, unrouted: Vec<Unrouted>) {
        lock(&self.known).unrouted = unrouted;
    }

    /// What no relay serves, those with the most messages first.
    pub(crate) fn unrouted(&self) -> Vec<Unrouted> {
        lock(&self.known).unrouted.clone()
    }

    pub(crate) fn keyed_looks(&self) -> KeyedLooks {
        lock(&self.known).keyed_looks
    }

    /// The claimer begins a look at keyed lanes, or ends it.
    pub(crate) fn count_keyed_look(&self) {
        lock(&self.known).keyed_looks.0 += 1;
    }

    pub(crate) fn listens(&self) -> bool {
        self.config.listener && self.config.enabled
    }

    /// Where the listener connects: a manager's connections do not give their sockets away.
    pub(crate) fn listener_url(&self) -> Option<&SecretString> {
        match (&self.config.listener_url, &self.source) {
            (Some(url), _) | (None, Source::Url(url)) => Some(url),
            (None, Source::Manager(_)) => None,
        }
    }

    /// A session with no connection yet, for this thread.
    pub(crate) fn session(&self, post: Post, statement_timeout: Duration, plans: Plans) -> Session {
        Session::new(
            self.source.clone(),
            self.config.table.clone(),
            Arc::clone(&self.threads),
            post,
            statement_timeout,
            plans,
        )
        .with_own_events(self.config.own_events)
    }

    /// The lease is over, and not by this relay's will. Nothing is sent under it any more.
    pub(crate) fn lose_lease(&self, lease: LeaseId) {
        if self.lease.lost(lease) {
            self.count(|stats| stats.leases_lost += 1);
            self.metrics.leases_lost.increment(1);
            log::error!(event = "lease_lost", lease = lease.0; "lease {} expired before it was renewed: other relays take its messages over", lease.0);
        }
    }
}
