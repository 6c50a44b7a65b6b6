//! The relay: a group of plain threads that takes committed messages out of PostgreSQL and
//! delivers them. It knows no SQL.

mod breaker;
mod bucket;
mod builder;
mod bulkhead;
mod by_hand;
mod claimer;
mod database_clock;
mod depths;
mod doubt;
mod error;
mod gate;
mod groups;
mod health;
mod heartbeat;
mod idle;
mod intake;
mod janitor;
mod lanes;
mod lease_clock;
mod listener;
mod metrics;
mod monitor;
mod observer;
mod pauses;
mod progress;
mod sender;
mod session;
mod settlement;
mod settler;
mod shared;
mod sleep;
mod spans;
mod stats;
mod threads;
mod walk;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

pub use self::builder::{Relay, RelayBuilder};
pub(crate) use self::by_hand::{ByHand, Ended};
pub use self::error::{ShutdownError, StartError};
pub use self::health::{DestinationState, Health, Problem, ProblemKind};
pub use self::observer::{Observer, Settled};
pub(crate) use self::spans::Span;
pub use self::stats::Stats;

use self::bulkhead::Bulkhead;
use self::heartbeat::Ending;
use self::lease_clock::LeaseClock;
use self::observer::Observers;
use self::shared::{Shared, Signals};
use self::sleep::Sleep;
use self::threads::{Exit, HEARTBEAT, Running, Told};
use crate::config::Config;
use crate::error::DatabaseError;
use crate::store::connection::{Plans, connect};
use crate::store::{lease, rights};

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
    /// Looked at, and emptied by a shutdown only: what asks for it waits for no lock.
    exits: Receiver<Exit>,
    /// Has it, but while somebody shuts the relay down.
    running: (Sender<Running>, Receiver<Running>),
}

impl RelayHandle {
    fn start(
        config: Config,
        bulkheads: Vec<Bulkhead>,
        observers: Observers,
        limit: Option<u64>,
    ) -> Result<Self, StartError> {
        let database_url = config.database_url()?.clone();
        let mut conn = connect(&database_url, "start", START_TIMEOUT, Plans::Any)?.conn;
        rights::check_relay(&mut conn, &config.table)?;
        let relay_name = format!("{}:{}", host_name(), std::process::id());
        let clock = LeaseClock::new(config.lease, config.longest_send());
        let asked = Instant::now();
        let lease_id = lease::register(
            &mut conn,
            &config.table,
            &relay_name,
            config.lease,
            config.single_active,
        )
        .map_err(DatabaseError::from)?;
        clock.renewed(lease_id, asked);
        drop(conn);

        let (stop, stop_signal) = bounded(0);
        let (abandon, abandon_signal) = bounded(0);
        let (doorbell, ring) = bounded(1);
        let (pulse, beat) = bounded(1);
        let shared = Arc::new(Shared::new(
            config,
            database_url,
            bulkheads,
            observers,
            limit,
            clock,
            Signals {
                stop: stop_signal,
                abandon: abandon_signal,
                doorbell,
                pulse,
                sleep: Sleep::new()?,
            },
        ));
        let (ending, ending_signal) = bounded(1);
        let (exit, exits) = bounded(shared.senders() + 8);
        let mut running = Running {
            stop: Some(stop),
            abandon: Some(abandon),
            ending,
            exits,
            threads: Vec::new(),
            ended: Vec::new(),
        };
        let told = Told {
            ending: ending_signal,
            ring,
            pulse: beat,
        };
        if let Err(error) = running.spawn_all(&shared, &exit, &relay_name, lease_id, told) {
            drop(exit);
            let handle = Self {
                shared,
                exits: running.exits.clone(),
                running: held(running),
            };
            // The threads that did start end; the error that counts is the one at hand.
            let _ = handle.shutdown(START_TIMEOUT);
            return Err(error);
        }
        log::info!(event = "relay_started", outbox:% = shared.config.table, lease = lease_id.0, relay = relay_name; "relay started: {}", shared.config.summary());
        Ok(Self {
            shared,
            exits: running.exits.clone(),
            running: held(running),
        })
    }

    /// Makes the relay look for messages now and not at its next poll. Cheap; of use right after
    /// a commit where the relay does not listen.
    pub fn wake(&self) {
        self.shared.metrics.called.increment(1);
        self.shared.look();
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

    /// How each destination stands, with the groups of handlers; the last one is for what nothing serves.
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
        !self.exits.is_empty() && !self.shared.is_stopping()
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
        self.shared.stats.read()
    }

    /// Waits until nothing is due and nothing is on its way. `false`: the time was over first.
    ///
    /// It does not wait for messages that are delayed or wait for their next attempt, nor for those of
    /// paused destinations and topics.
    pub fn wait_until_idle(&self, timeout: Duration) -> bool {
        self.shared.wait_until_idle(timeout)
    }

    /// Ends the relay: claims nothing more, lets sends under way finish, writes down what became
    /// of them, gives unsent messages back at no cost, ends the lease, and joins every thread.
    /// Takes `deadline` at most. Calling it again continues.
    ///
    /// ```
    /// use diesel_outbox::{RelayHandle, ShutdownError};
    /// use std::time::Duration;
    ///
    /// fn end(relay: &RelayHandle) -> Result<(), ShutdownError> {
    ///     match relay.shutdown(Duration::from_secs(20)) {
    ///         // Sends take longer than that: once more.
    ///         Err(ShutdownError::Deadline { messages, .. }) => {
    ///             println!("{messages} messages are on their way");
    ///             relay.shutdown(Duration::from_secs(40))
    ///         }
    ///         ended => ended,
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// A [`ShutdownError`] when the deadline came first or a thread had panicked. Nothing is lost.
    pub fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        let until = Instant::now().checked_add(deadline);
        self.shared.begin_stop();
        let (back, running) = &self.running;
        let running = match until {
            Some(until) => running.recv_deadline(until).ok(),
            None => running.recv().ok(),
        };
        let Some(mut running) = running else {
            return Err(ShutdownError::Deadline {
                messages: self.shared.unsettled(),
                threads: "one that shuts the relay down, too".to_owned(),
            });
        };
        let ended = self.end(&mut running, deadline, until);
        // It has its place there.
        let _ = back.try_send(running);
        ended
    }

    fn end(
        &self,
        running: &mut Running,
        deadline: Duration,
        until: Option<Instant>,
    ) -> Result<(), ShutdownError> {
        running.stop = None;
        // A part of the time is kept for the last settle to notice that it has to give up.
        let reserve = (deadline / 10).min(Duration::from_millis(500));
        running.wait_for_exits(
            until.and_then(|at| at.checked_sub(reserve)),
            Some(HEARTBEAT),
        );
        running.abandon = None;
        running.wait_for_exits(until, Some(HEARTBEAT));
        // A claim under way may still work: then the lease has to be there, or its messages name
        // one that nobody looks for. Asked first: what it claims until then counts as left.
        let has_stopped = !running.is_at_work(Some(HEARTBEAT));
        let left = self.shared.unsettled();
        // Whatever the lease may hold that nobody here knows of: others find it when the lease expires.
        let is_in_doubt = self.shared.doubt().is_some();
        let has_panicked = running.ended.iter().any(|exit| exit.panicked);
        let ending = if left == 0 && !has_panicked && has_stopped && !is_in_doubt {
            Ending::Clean
        } else {
            Ending::LeaveLease
        };
        // Full: it was told before.
        let _ = running.ending.try_send(ending);
        running.wait_for_exits(until, None);
        running.join_ended();
        if running.threads.is_empty() {
            monitor::record_end(&self.shared);
        }
        self.report(running, left)
    }

    fn report(&self, running: &Running, left: usize) -> Result<(), ShutdownError> {
        if let Some(exit) = running.ended.iter().find(|exit| exit.panicked) {
            return Err(ShutdownError::Panic {
                thread: exit.thread.clone(),
            });
        }
        if left > 0 || !running.threads.is_empty() {
            let threads: Vec<&str> = running
                .threads
                .iter()
                .map(|(name, _)| name.as_str())
                .collect();
            return Err(ShutdownError::Deadline {
                messages: left,
                threads: threads.join(" "),
            });
        }
        log::info!(event = "relay_stopped", outbox:% = self.shared.config.table; "relay stopped");
        Ok(())
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        // Nobody else can have it now.
        let is_over = self.running.1.try_recv().is_ok_and(|running| {
            let is_over = running.stop.is_none();
            let _ = self.running.0.try_send(running);
            is_over
        });
        if !is_over && let Err(error) = self.shutdown(self.shared.config.shutdown_timeout) {
            log::error!(event = "shutdown_failed", error:% = error; "the relay was dropped and did not end cleanly");
        }
    }
}

impl std::fmt::Debug for RelayHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayHandle")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// A channel with `running` in it: whoever takes it from there has it alone, and others can wait for it
/// for as long as they like.
fn held(running: Running) -> (Sender<Running>, Receiver<Running>) {
    let (back, held) = bounded(1);
    // It has its place there.
    let _ = back.try_send(running);
    (back, held)
}

/// For people who look at leases; not used to tell relays apart.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
