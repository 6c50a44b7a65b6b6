//! What an application has of a relay.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::shared::Shared;
use super::{DestinationState, Health, Incarnation, ShutdownError, Stats, monitor};
use crate::lock::lock;

/// A running relay. It owns every thread; dropping it shuts the relay down, in the time of
/// `OUTBOX_SHUTDOWN_TIMEOUT`. Made by [`RelayBuilder::start`](crate::RelayBuilder::start).
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
pub struct RelayHandle(Mutex<State>);

struct State {
    now: Arc<Incarnation>,
    /// Others whose place it has taken.
    ending: Vec<Arc<Incarnation>>,
    /// What those have done that have ended.
    ended: Stats,
}

impl RelayHandle {
    pub(super) fn new(now: Incarnation) -> Self {
        Self(Mutex::new(State {
            now: Arc::new(now),
            ending: Vec::new(),
            ended: Stats::default(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.state().now.shared)
    }

    /// This one takes the place of the one before, which ends. Where somebody shuts the relay down, this one ends.
    pub(super) fn replace(&self, next: Incarnation, deadline: Duration) {
        let next = Arc::new(next);
        let (old, is_over) = {
            let mut state = self.state();
            let is_over = state.now.shared.is_stopping();
            let old = match is_over {
                true => next,
                false => std::mem::replace(&mut state.now, next),
            };
            state.ending.push(Arc::clone(&old));
            (old, is_over)
        };
        if let Err(error) = old.shutdown(deadline) {
            log::error!(event = "shutdown_failed", error:% = error; "reloaded, but the relay with the old settings did not shut down cleanly: {error}");
        }
        let mut state = self.state();
        state.ending.retain(|one| !Arc::ptr_eq(one, &old));
        state.ended = state.ended.and(old.shared.stats());
        if !is_over {
            log::info!(event = "reloaded"; "reloaded the settings");
        }
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
        let now = {
            let state = self.state();
            // From here on no other takes its place.
            state.now.shared.begin_stop();
            Arc::clone(&state.now)
        };
        now.shutdown(deadline)
    }

    /// Makes the relay look for messages now and not at its next poll. Cheap; of use right after
    /// a commit where the relay does not listen.
    pub fn wake(&self) {
        let shared = self.shared();
        shared.metrics.called.increment(1);
        shared.signals.news.ring();
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
        monitor::health(&self.shared())
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
        monitor::destinations(&self.shared())
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
        monitor::record(&self.shared());
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
        let shared = self.shared();
        // In this order: whatever has ended since the stop is seen after it.
        shared.threads.state().ended().next().is_some() && !shared.is_stopping()
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
        let state = self.state();
        let ending = state.ending.iter().map(|one| one.shared.stats());
        ending.fold(state.ended.and(state.now.shared.stats()), Stats::and)
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
        self.shared().threads.state().stands_by
    }

    /// Waits until nothing is due and nothing is on its way. `false`: the time was over first, as it always
    /// is where the relay [stands by](Self::stands_by).
    ///
    /// It does not wait for messages that are delayed or wait for their next attempt, nor for those of
    /// paused destinations and topics.
    pub fn wait_until_idle(&self, timeout: Duration) -> bool {
        self.shared().wait_until_idle(timeout)
    }
}

impl std::fmt::Debug for RelayHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayHandle")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
