//! The state that the threads of one relay share.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use secrecy::SecretString;

use super::hooks::Hooks;
use super::session::{Session, SharedConnection};
use super::settings::Settings;
use super::sql::connection::{Plans, Source, StatementLimits};
use super::stats::Stats;
use super::threads::{Post, Threads};
use crate::engine::claim::custody::{Custody, Waited};
use crate::engine::claim::told::Told;
use crate::engine::directory::Directory;
use crate::engine::lease::clock::LeaseClock;
use crate::engine::lease::sql::backend::Backend;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::observe::health::Problem;
use crate::engine::observe::lately::Lately;
use crate::engine::observe::metrics::Metrics;
use crate::engine::observe::observer::Observers;
use crate::engine::plan::Policy;
use crate::engine::send::bulkhead::{Bulkhead, SendsTo};
use crate::engine::serves::routes::Routes;
use crate::engine::wake::bell::Bell;
use crate::engine::wake::sleep::Sleep;
use crate::lock::lock;
use crate::log::{self, Queue};

/// The time limit of a claim. A claim that takes longer is given up and retried.
pub(crate) const CLAIM_LIMIT: Duration = Duration::from_secs(30);
/// The longest time for which another statement of the claimer delays a claim.
const MOMENT: Duration = Duration::from_millis(250);

/// What one thread publishes and others read.
#[derive(Debug, Default)]
struct Published {
    /// Published by the claimer.
    policy: Arc<Policy>,
    /// Published by the claimer. Shared state and not a message: a settler must know whether the claimer queried keyed
    /// lanes between two points in time, and a message could arrive too late.
    keyed_looks: KeyedLooks,
    /// Published by a chore of the janitor: what it has found of messages and settings.
    found: Vec<Problem>,
    /// Published by the listener: its server process.
    listener: Option<Backend>,
    /// Published by the heartbeat: the listener's server process that the lease names.
    named_listener: Option<Backend>,
    /// Published by the application.
    reload: Option<Reload>,
}

/// A reload that has not replaced this relay.
#[derive(Debug, Clone)]
pub(crate) enum Reload {
    /// It began then: the settings are being read.
    Reading(Instant),
    /// It failed for this reason.
    Failed(String),
}

/// The number of begins plus the number of ends of the claimer's queries of keyed lanes. A keyed lane is the waiting
/// messages with an ordering key of one topic and destination.
// Why: docs/decisions.md#shared-facts
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeyedLooks(u64);

impl KeyedLooks {
    /// Whether a query has begun since `before`, or was running then.
    pub(crate) fn has_looked_since(self, before: Self) -> bool {
        self != before || !before.0.is_multiple_of(2)
    }
}

/// What a relay is made of before it has a lease.
pub(crate) struct SharedParts {
    pub(crate) settings: Settings,
    pub(crate) source: Source,
    pub(crate) bulkheads: Vec<Bulkhead>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) hooks: Hooks,
    pub(crate) observers: Observers,
    pub(crate) limit: Option<u64>,
    pub(crate) is_one_shot: bool,
    pub(crate) claim_limit: Duration,
}

#[cfg(test)]
impl SharedParts {
    /// Of a relay without a database.
    pub(crate) fn of_tests(
        settings: Settings,
        bulkheads: Vec<Bulkhead>,
        (routes, directory): (Arc<Routes>, Arc<dyn Directory>),
    ) -> Self {
        Self {
            settings,
            source: Source::of_url(SecretString::from("")),
            bulkheads,
            routes,
            directory,
            hooks: Hooks::NONE,
            observers: Observers::default(),
            limit: None,
            is_one_shot: false,
            claim_limit: CLAIM_LIMIT,
        }
    }
}

pub(crate) struct Shared {
    pub(crate) settings: Settings,
    source: Source,
    /// The connection that the threads use in turn. `None`: each has its own.
    connection: Option<SharedConnection>,
    pub(crate) observers: Observers,
    pub(crate) routes: Arc<Routes>,
    pub(crate) bulkheads: Vec<Bulkhead>,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) hooks: Hooks,
    /// The most messages to claim.
    pub(crate) limit: Option<u64>,
    /// Whether the relay is a one-shot job.
    pub(crate) is_one_shot: bool,
    /// [`CLAIM_LIMIT`], except in tests.
    pub(crate) claim_limit: Duration,
    pub(crate) lease: LeaseClock,
    stats: Mutex<Stats>,
    pub(crate) metrics: Metrics,
    pub(crate) threads: Arc<Threads>,
    /// The lines of the threads on their way to the logger.
    pub(crate) log: Queue,
    pub(crate) custody: Custody,
    /// Topics that are not declared, and whose messages wait.
    pub(crate) undeclared: Lately,
    /// Topics whose messages have ended without a subscriber.
    pub(crate) unwanted: Lately,
    published: Mutex<Published>,
    /// Whether the relay is shutting down: it claims nothing more, and sends no queued message.
    stopping: AtomicBool,
    pub(crate) signals: Signals,
}

/// The signals between threads.
pub(crate) struct Signals {
    /// Disconnected at shutdown, which wakes every thread that waits for it.
    pub(crate) stop: Receiver<()>,
    /// Disconnected at the deadline of a shutdown.
    pub(super) abandon: Receiver<()>,
    /// Wakes the claimer to check its state again.
    pub(crate) doorbell: Bell,
    /// Tells the claimer that new messages may exist, so a new survey is due. A bell and not an entry of the inbox,
    /// because applications may call as often as they like.
    pub(crate) news: Bell,
    /// The claimer's inbox. The claimer reads it in every state. After the claimer has ended, the settlers of keys
    /// handle the remaining entries.
    pub(crate) told: (Sender<Told>, Receiver<Told>),
    /// Makes the heartbeat check its lease now.
    pub(crate) pulse: Bell,
    /// Makes the janitor count the waiting messages as soon as permitted.
    pub(crate) count: Bell,
    /// Wakes the janitor: a chore has work.
    pub(crate) chores: Bell,
    /// Connects the claimer and the listener.
    pub(crate) sleep: Sleep,
}

impl Signals {
    /// # Errors
    /// An error if the system has no more file descriptors.
    pub(crate) fn new(stop: Receiver<()>, abandon: Receiver<()>) -> std::io::Result<Self> {
        Ok(Self {
            stop,
            abandon,
            doorbell: Bell::new(),
            news: Bell::new(),
            // Bounded in effect: the entries are claimed messages, whose number is bounded.
            told: unbounded(),
            pulse: Bell::new(),
            count: Bell::new(),
            chores: Bell::new(),
            sleep: Sleep::new()?,
        })
    }
}

impl Shared {
    pub(crate) fn new(parts: SharedParts, lease: LeaseClock, signals: Signals) -> Self {
        let (settings, bulkheads) = (parts.settings, parts.bulkheads);
        let metrics = Metrics::new(settings.metrics_label(), &bulkheads);
        let most_aside = 2 * most_of_a_settle(&settings, &bulkheads);
        Self {
            source: parts.source,
            connection: settings.share_connection.then(SharedConnection::default),
            observers: parts.observers,
            routes: parts.routes,
            directory: parts.directory,
            hooks: parts.hooks,
            limit: parts.limit,
            is_one_shot: parts.is_one_shot,
            claim_limit: parts.claim_limit,
            lease,
            stats: Mutex::default(),
            threads: Arc::new(Threads::new(&metrics, &bulkheads)),
            metrics,
            log: Queue::new(),
            custody: Custody::new(most_aside, signals.doorbell.clone()),
            undeclared: Lately::default(),
            unwanted: Lately::default(),
            published: Mutex::default(),
            stopping: AtomicBool::new(false),
            signals,
            settings,
            bulkheads,
        }
    }

    /// The counts of the relay's work.
    pub(crate) fn stats(&self) -> Stats {
        *lock(&self.stats)
    }

    /// Updates the counts. Called once for each statement, never for each send.
    pub(crate) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut lock(&self.stats));
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(crate) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.custody.wake_askers();
        self.signals.doorbell.ring();
        self.signals.sleep.tell_listener();
        self.bulkheads
            .iter()
            .for_each(|bulkhead| bulkhead.gate.wake());
    }

    /// The most messages of one settle.
    pub(crate) fn batch(&self) -> usize {
        most_of_a_settle(&self.settings, &self.bulkheads)
    }

    /// All bulkheads. The bulkhead of members is left out while there is no member.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = &Bulkhead> {
        let is_there = |one: &&Bulkhead| {
            !matches!(one.serves, SendsTo::Members(_)) || !self.directory.roster().is_empty()
        };
        self.bulkheads.iter().filter(is_there)
    }

    /// The time limit of statements that may read much more than they return, so that they do not delay claims.
    pub(crate) fn moment(&self) -> Duration {
        MOMENT.min(self.claim_limit / 2)
    }

    /// The number of sender threads.
    pub(crate) fn senders(&self) -> usize {
        self.in_use()
            .map(|bulkhead| bulkhead.limits.concurrency)
            .sum()
    }

    /// Whether the deadline of a shutdown has passed. Unsettled messages are then taken over when the lease expires.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.signals.abandon.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Waits between attempts. Ends early when the relay stops, or gives up during a shutdown.
    pub(crate) fn pause(&self, duration: Duration) {
        let signal = if self.is_stopping() {
            &self.signals.abandon
        } else {
            &self.signals.stop
        };
        // No value is ever sent: the wait ends by timeout or by disconnection.
        let _ = signal.recv_timeout(duration);
    }

    pub(crate) fn tell_claimer(&self, told: Told) {
        // Never disconnected: `signals` holds the receiver.
        let _ = self.signals.told.0.send(told);
    }

    /// The policy that the claimer published last. A caller that needs several parts reads them from one copy.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&lock(&self.published).policy)
    }

    pub(crate) fn set_policy(&self, policy: Policy) {
        lock(&self.published).policy = Arc::new(policy);
    }

    /// Replaces the problems that a chore has found.
    pub(crate) fn set_found(&self, found: Vec<Problem>) {
        lock(&self.published).found = found;
    }

    pub(crate) fn found(&self) -> Vec<Problem> {
        lock(&self.published).found.clone()
    }

    pub(super) fn set_reload(&self, reload: Reload) {
        lock(&self.published).reload = Some(reload);
    }

    /// The last reload. A reload that succeeds replaces this relay.
    pub(crate) fn reload(&self) -> Option<Reload> {
        lock(&self.published).reload.clone()
    }

    /// Records the listener's new connection, and makes the heartbeat write it into the lease.
    pub(crate) fn set_listener(&self, backend: Backend) {
        lock(&self.published).listener = Some(backend);
        self.signals.pulse.ring();
    }

    /// The server process of the listener's last connection.
    pub(crate) fn listener(&self) -> Option<Backend> {
        lock(&self.published).listener
    }

    /// Records which listener the lease names, and tells the listener.
    pub(crate) fn set_named_listener(&self, named: Option<Backend>) {
        let before = std::mem::replace(&mut lock(&self.published).named_listener, named);
        if before != named {
            self.signals.sleep.tell_listener();
        }
    }

    /// Whether the lease names the listener's last connection. Only then may the listener hold a lock: if this process is
    /// frozen, others end the session that its lease names.
    // Why: docs/decisions.md#notify-while-asleep
    pub(crate) fn is_listener_named(&self) -> bool {
        let published = lock(&self.published);
        published.listener == published.named_listener
    }

    pub(crate) fn keyed_looks(&self) -> KeyedLooks {
        lock(&self.published).keyed_looks
    }

    /// Records that the claimer begins or ends a query of keyed lanes.
    pub(crate) fn count_keyed_look(&self) {
        lock(&self.published).keyed_looks.0 += 1;
    }

    /// Sets the paused topics, and the paused destinations without a gate.
    pub(crate) fn set_paused(&self, topics: HashSet<String>, destinations: HashSet<String>) {
        let before = self.custody.set_paused(topics.clone(), destinations);
        self.metrics.set_paused(&before, &topics);
    }

    /// Whether an operator has paused the topic.
    pub(crate) fn is_paused(&self, topic: &str) -> bool {
        self.custody.kept_back().topics.contains(topic)
    }

    /// Asks whether nothing is due. Returns the number of the question.
    pub(crate) fn ask(&self) -> u64 {
        let question = self.custody.ask();
        self.signals.news.ring();
        question
    }

    /// Waits until no message is due and none is in flight.
    pub(super) fn wait_until_idle(&self, until: Option<Instant>) -> Waited {
        let question = self.ask();
        let is_stopping = || self.is_stopping();
        self.custody.wait_for_answer(question, until, is_stopping)
    }

    pub(crate) fn listens(&self) -> bool {
        self.settings.listener && self.settings.enabled
    }

    /// The URL of the listener's connection. A manager cannot provide it, because its connections do not expose their
    /// sockets.
    pub(crate) fn listener_url(&self) -> Option<&SecretString> {
        match (&self.settings.listener_url, &self.source) {
            (Some(url), _) => Some(url),
            (None, Source::Url(address)) => Some(&address.url),
            (None, Source::Manager(_)) => None,
        }
    }

    /// A session for this thread, not yet connected.
    pub(crate) fn session(&self, post: Post, statement_timeout: Duration, plans: Plans) -> Session {
        let mut session = Session::new(
            self.source.clone(),
            self.settings.table.clone(),
            Arc::clone(&self.threads),
            post,
            StatementLimits::of_relay(statement_timeout, plans),
            self.hooks.check,
        );
        session.shared = self.connection.clone().filter(|_| post != Post::Heartbeat);
        session.witness = self.settings.witness;
        session
    }

    /// Closes the connection that the threads have used in turn.
    pub(super) fn close_connection(&self) {
        if let Some(connection) = &self.connection {
            lock(connection).open.take();
        }
    }

    /// Records that the lease was lost against the relay's will. The relay sends nothing more under the lease.
    pub(crate) fn lose_lease(&self, lease: LeaseId) {
        if self.lease.lost(lease) {
            self.count(|stats| stats.leases_lost += 1);
            self.metrics.leases_lost.increment(1);
            log::error!(event = "lease_lost", lease = lease.0; "lease {} expired before it was renewed: other relays take over its messages, and this relay registers a new lease", lease.0);
        }
    }
}

fn most_of_a_settle(settings: &Settings, bulkheads: &[Bulkhead]) -> usize {
    let of_bulkheads = bulkheads.iter().map(|bulkhead| bulkhead.limits.batch);
    of_bulkheads.fold(settings.batch, usize::max)
}
