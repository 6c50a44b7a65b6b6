//! The relay: a group of plain threads that takes committed messages out of PostgreSQL and
//! delivers them. It knows no SQL.

mod breaker;
mod bucket;
mod builder;
mod bulkhead;
mod by_hand;
mod claimer;
mod database;
mod depths;
mod doubt;
mod ending;
mod error;
mod fate;
mod gate;
mod groups;
mod health;
mod heartbeat;
mod intake;
mod janitor;
mod job;
mod lease_clock;
mod listener;
mod metrics;
mod monitor;
mod observer;
mod pauses;
mod planner;
mod registered;
mod running;
mod sender;
mod session;
mod settlement;
mod settler;
mod shared;
#[cfg(test)]
mod simulation;
mod sleep;
mod spans;
mod stats;
#[cfg(test)]
mod tests;
mod threads;
mod to;
mod told;
mod turns;
mod unrouted;
mod verdict;
mod wanted;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

pub use self::builder::{Relay, RelayBuilder};
pub(crate) use self::by_hand::{ByHand, Ended};
pub use self::depths::DepthGauges;
pub use self::error::{ShutdownError, StartError};
pub use self::health::{DestinationState, Health, Problem, ProblemKind};
pub use self::observer::{Observer, Settled};
pub(crate) use self::spans::Span;
pub use self::stats::Stats;

use self::builder::Assembled;
use self::bulkhead::Bulkhead;
use self::ending::held;
use self::lease_clock::{BootTime, LeaseClock};
use self::registered::Registered;
use self::running::Running;
use self::shared::{Shared, Signals};
use crate::config::Config;
use crate::error::DatabaseError;
use crate::routes::Serves;
use crate::store::pinned::{located, pinned};
use crate::store::relay::connection::{Limits, Plans, Source};
use crate::store::relay::lease::{self, Registration};
use crate::store::setup::rights;

/// The limit of each statement at the start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A running relay. It owns every thread; dropping it shuts the relay down, in the time of
/// `OUTBOX_SHUTDOWN_TIMEOUT`. Made by [`RelayBuilder::start`].
///
/// Share it between threads by reference or in an [`Arc`]: each method takes `&self`.
///
/// ```no_run
/// use diesel_outbox::Relay;
/// use std::time::Duration;
///
/// let relay = Relay::builder("postgres://localhost/shop").url("https://receiver.example").start()?;
///
/// // After a commit of which the database does not tell the relay (OUTBOX_LISTENER=false).
/// relay.wake();
///
/// // For a probe: not ready, or to be restarted.
/// let status = match (relay.has_failed(), relay.is_healthy()) {
///     (true, _) => 500,
///     (false, false) => 503,
///     (false, true) => 200,
/// };
///
/// // At the end of a job.
/// if !relay.wait_until_idle(Duration::from_secs(60)) {
///     println!("some messages wait: {:?}", relay.stats());
/// }
/// relay.shutdown(Duration::from_secs(30))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RelayHandle {
    shared: Arc<Shared>,
    /// Has it, but while somebody shuts the relay down.
    running: (Sender<Running>, Receiver<Running>),
}

impl RelayHandle {
    fn start(assembled: Assembled) -> Result<Self, StartError> {
        let Assembled {
            mut config,
            manager,
            dispatchers,
            observers,
            limit,
            claim_limit,
        } = assembled;
        let registered = Registered::new(&config, dispatchers.customers.clone());
        let (bulkheads, queues) = Bulkhead::all(&config, dispatchers);
        let source = match manager {
            Some(manager) => Source::Manager(manager),
            None => Source::Url(config.database_url()?.clone()),
        };
        let limits = Limits::of_relay(START_TIMEOUT, Plans::Any);
        let mut conn = source.connect("start", limits)?.conn;
        // From here on tables are named with their schema.
        config.table = located(&mut conn, &config.table).map_err(DatabaseError::from)?;
        pinned(&mut conn, &config.table, rights::check_relay)?;
        let summary = match &source {
            Source::Url(_) => config.summary(),
            Source::Manager(_) => config.summary_at("managed"),
        };
        let relay_name = format!("{}:{}", host_name(), std::process::id());
        let clock = LeaseClock::of(&config);
        let asked = BootTime::now();
        let registration = registration(&config, &relay_name, registered.is_on());
        let lease_id = pinned(&mut conn, &config.table, |conn, name| {
            lease::register(conn, name, &registration)
        })
        .map_err(DatabaseError::from)?;
        clock.registered(lease_id, asked);
        drop(conn);

        let (stop, stop_signal) = bounded(0);
        let (abandon, abandon_signal) = bounded(0);
        let signals = Signals::new(stop_signal, abandon_signal)?;
        let mut shared = Shared::new(config, source, bulkheads, registered, clock, signals);
        (shared.observers, shared.limit) = (observers, limit);
        shared.claim_limit = claim_limit;
        let shared = Arc::new(shared);
        let (ending, ending_signal) = bounded(1);
        let mut running = Running {
            stop: Some(stop),
            abandon: Some(abandon),
            ending,
            threads: Vec::new(),
        };
        if let Err(error) =
            running.spawn_all(&shared, queues, registration, lease_id, ending_signal)
        {
            let handle = Self {
                shared,
                running: held(running),
            };
            // The threads that did start end; the error that counts is the one at hand.
            let _ = handle.shutdown(START_TIMEOUT);
            return Err(error);
        }
        log::info!(event = "relay_started", outbox:% = shared.config.table, lease = lease_id.0, relay = relay_name; "relay started: {summary}");
        Ok(Self {
            shared,
            running: held(running),
        })
    }

    /// Makes the relay look for messages now and not at its next poll. Cheap; of use right after
    /// a commit where the relay does not listen.
    pub fn wake(&self) {
        self.shared.metrics.called.increment(1);
        self.shared.signals.news.ring();
    }

    /// How the relay is, and why: for probes. It never waits, and asks no database.
    ///
    /// ```
    /// # fn example(relay: &diesel_outbox::RelayHandle) {
    /// let health = relay.health();
    /// if !health.is_ready() {
    ///     println!("not ready: {health}");
    /// }
    /// for problem in health.problems() {
    ///     println!("{}: {}", problem.kind, problem.what);
    /// }
    /// # }
    /// ```
    pub fn health(&self) -> Health {
        monitor::health(&self.shared)
    }

    /// How each destination stands, with the groups of handlers. One without a name is the application's own
    /// dispatcher.
    ///
    /// ```
    /// # fn example(relay: &diesel_outbox::RelayHandle) {
    /// for one in relay.destinations() {
    ///     println!("{}: {}, {} of {} threads busy, {} queued", one.name, one.state, one.busy, one.threads, one.queued);
    /// }
    /// # }
    /// ```
    pub fn destinations(&self) -> Vec<DestinationState> {
        monitor::destinations(&self.shared)
    }

    /// Sets the gauges of what is in memory to how it is now. The relay does so each second by itself: an
    /// endpoint that is scraped calls it to be exact.
    ///
    /// ```
    /// # fn render() -> String { String::new() }
    /// fn scrape(relay: &diesel_outbox::RelayHandle) -> String {
    ///     relay.record_metrics();
    ///     render()
    /// }
    /// ```
    pub fn record_metrics(&self) {
        monitor::record(&self.shared);
    }

    /// Whether all threads are at work, a lease is held and the database answers:
    /// [`health`](Self::health) without the reasons.
    pub fn is_healthy(&self) -> bool {
        self.health().is_ready()
    }

    /// Whether a thread has ended while nobody had asked it to, which only a defect can cause.
    /// The rest of the relay should then be shut down. Of a relay that hangs it says nothing:
    /// [`health`](Self::health) does.
    pub fn has_failed(&self) -> bool {
        // In this order: whatever has ended since the stop is seen after it.
        self.shared.threads.state().ended().next().is_some() && !self.shared.is_stopping()
    }

    /// What the relay has done since it started.
    ///
    /// ```
    /// # fn example(relay: &diesel_outbox::RelayHandle) {
    /// let before = relay.stats();
    /// std::thread::sleep(std::time::Duration::from_secs(60));
    /// let now = relay.stats();
    /// println!("{} messages a minute, {} dead", now.processed() - before.processed(), now.dead - before.dead);
    /// # }
    /// ```
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// Whether an older relay with `OUTBOX_SINGLE_ACTIVE` does the work, and this one stands by. Known after the
    /// relay's first look.
    ///
    /// ```
    /// # fn example(relay: &diesel_outbox::RelayHandle) {
    /// if relay.stands_by() {
    ///     println!("another relay is active");
    /// }
    /// # }
    /// ```
    pub fn stands_by(&self) -> bool {
        self.shared.threads.state().stands_by
    }

    /// Waits until nothing is due and nothing is on its way. `false`: the time was over first, as it always
    /// is where the relay [stands by](Self::stands_by).
    ///
    /// It does not wait for messages that are delayed or wait for their next attempt, nor for those of
    /// paused destinations and topics.
    pub fn wait_until_idle(&self, timeout: Duration) -> bool {
        self.shared.wait_until_idle(timeout)
    }
}

impl std::fmt::Debug for RelayHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayHandle")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// The lease that a relay of these settings wants.
fn registration(config: &Config, relay: &str, registered: bool) -> Registration {
    let serves = Serves::new(config).and_registered(registered);
    Registration {
        relay: relay.to_owned(),
        lease: config.lease,
        is_single_active: config.single_active,
        serves: config.enabled.then(|| serves.to_json()),
    }
}

/// For people who look at leases; not used to tell relays apart.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
