//! The application's handle of a running relay.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::shared::{Reload, Shared};
use super::{Incarnation, Launch, ShutdownError, StartError, Stats};
use crate::engine::claim::custody::Waited;
use crate::engine::observe::health::Health;
use crate::engine::observe::monitor;
use crate::lock::lock;
use crate::log;
use crate::shows::shows;

/// A running relay, as returned by [`RelayBuilder::start`](crate::RelayBuilder::start). The handle owns every
/// thread of the relay. Dropping the handle shuts the relay down, within `OUTBOX_SHUTDOWN_TIMEOUT`.
///
/// Every method takes `&self`: share the handle between threads by reference or in an [`Arc`].
///
/// ```no_run
/// use diesel_outbox::Relay;
/// use std::time::Duration;
///
/// let relay = Relay::builder("postgres://localhost/shop").url("https://receiver.example").start()?;
///
/// // After a commit, if the relay does not listen for new messages (OUTBOX_LISTENER=false).
/// relay.wake();
///
/// // For a probe: 500 restarts the process, 503 means not ready.
/// let status = match (relay.has_failed(), relay.is_healthy()) {
///     (true, _) => 500,
///     (false, false) => 503,
///     (false, true) => 200,
/// };
///
/// // At the end of a job.
/// if !relay.wait_until_idle(Duration::from_secs(60)) {
///     println!("some messages are still waiting: {:?}", relay.stats());
/// }
/// relay.shutdown(Duration::from_secs(30))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RelayHandle(Mutex<HandleState>);

struct HandleState {
    now: Arc<Incarnation>,
    /// The relays that begin to replace `now`, and those that `now` has replaced and that are still shutting down.
    others: Vec<Arc<Incarnation>>,
    /// The statistics of the replaced relays that have ended.
    ended: Stats,
}

impl RelayHandle {
    pub(crate) fn new(now: Incarnation) -> Self {
        Self(Mutex::new(HandleState {
            now: Arc::new(now),
            others: Vec::new(),
            ended: Stats::default(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, HandleState> {
        lock(&self.0)
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.state().now.shared)
    }

    /// Launches `next`, replaces the current relay with it, and shuts the current relay down. If the current relay is
    /// already shutting down, shuts `next` down instead.
    pub(crate) fn replace(
        &self,
        (next, launch): (Incarnation, Launch),
        deadline: Duration,
    ) -> Result<(), StartError> {
        let next = Arc::new(next);
        {
            // From here on `shutdown` covers the next relay: its threads, which do not exist yet, will claim nothing.
            let mut state = self.state();
            if state.now.shared.is_stopping() {
                next.shared.begin_stop();
            }
            state.others.push(Arc::clone(&next));
        }
        let launched = next.launch(launch);
        let old = {
            let mut state = self.state();
            let is_stopping = launched.is_err() || state.now.shared.is_stopping();
            let old = match is_stopping {
                true => Arc::clone(&next),
                false => std::mem::replace(&mut state.now, Arc::clone(&next)),
            };
            old.shared.begin_stop();
            state.others.retain(|one| !Arc::ptr_eq(one, &next));
            state.others.push(Arc::clone(&old));
            old
        };
        let is_reloaded = !Arc::ptr_eq(&old, &next);
        let ended = old.shutdown(deadline);
        {
            let mut state = self.state();
            state.others.retain(|one| !Arc::ptr_eq(one, &old));
            state.ended = state.ended.and(old.shared.stats());
        }
        launched?;
        let _log = self.shared().log.enter();
        if let Err(error) = ended {
            log::error!(event = "shutdown_failed", error:% = error; "reloaded the settings, but the relay with the old settings did not shut down cleanly: {error}");
        }
        if is_reloaded {
            log::info!(event = "reloaded"; "reloaded the settings");
        }
        Ok(())
    }

    /// Records that new settings could not be loaded, so that [`health`](Self::health) and the metric
    /// `diesel_outbox_problem` show it (`reload_failed`) until a [`reload`](Self::reload) succeeds. A `reload` that fails
    /// records this itself; call this if the settings cannot even be read.
    pub(crate) fn reload_failed(&self, error: impl std::fmt::Display) {
        self.shared().set_reload(Reload::Failed(error.to_string()));
    }

    /// Records that new settings are being read. If this lasts, health shows `reload_failed`.
    pub(crate) fn reload_begins(&self) {
        self.shared()
            .set_reload(Reload::Reading(crate::clock::now()));
    }

    /// Shuts the relay down: stops claiming, lets the current sends finish and settles their results, releases unsent
    /// messages without counting an attempt, ends the lease, and joins every thread. During a [`reload`](Self::reload),
    /// this covers both relays. Takes at most `deadline`. After an error, call again to continue the shutdown.
    ///
    /// ```
    /// use diesel_outbox::{RelayHandle, ShutdownError};
    /// use std::time::Duration;
    ///
    /// fn end(relay: &RelayHandle) -> Result<(), ShutdownError> {
    ///     match relay.shutdown(Duration::from_secs(20)) {
    ///         // The sends take longer: wait once more.
    ///         Err(ShutdownError::Deadline { messages, .. }) => {
    ///             println!("{messages} messages are still in flight");
    ///             relay.shutdown(Duration::from_secs(40))
    ///         }
    ///         ended => ended,
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// A [`ShutdownError`] if the deadline passes first, a thread has panicked, or this process is a fork. No message is
    /// lost.
    pub fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        let until = Instant::now().checked_add(deadline);
        let all = {
            let state = self.state();
            if state.now.is_forked() {
                return Err(ShutdownError::Forked);
            }
            let others = state.others.iter().cloned();
            let all: Vec<_> = std::iter::once(Arc::clone(&state.now))
                .chain(others)
                .collect();
            // From here on `replace` no longer replaces this relay.
            all.iter().for_each(|one| one.shared.begin_stop());
            all
        };
        // Another thread ends the others at the same time.
        let left = || {
            until.map_or(deadline, |until| {
                until.saturating_duration_since(Instant::now())
            })
        };
        let ended: Vec<_> = all.iter().map(|one| one.shutdown(left())).collect();
        ended.into_iter().collect()
    }

    /// Makes the relay poll for messages now, without waiting for the poll interval. Cheap. Useful right after a
    /// commit, if the relay does not listen for new messages.
    pub fn wake(&self) {
        let shared = self.shared();
        shared.metrics.called.increment(1);
        shared.signals.news.ring();
    }

    /// The health of the relay and its problems, for probes. The call never blocks and never queries the database.
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

    /// Updates the gauges of the relay's state in memory. The relay also updates them every second. Call this method
    /// for a page of metrics to report exact values.
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

    /// Whether all threads work, the relay holds a lease and the database responds. The same as
    /// [`Health::is_ready`] of [`health`](Self::health).
    pub fn is_healthy(&self) -> bool {
        self.health().is_ready()
    }

    /// Whether a thread has ended unasked, which only a bug can cause. Shut down the rest of the relay in this case.
    /// A relay that hangs is not detected here; use [`health`](Self::health).
    pub fn has_failed(&self) -> bool {
        let shared = self.shared();
        // The order matters: threads that end because of a stop must be seen before the stop is checked.
        shared.threads.state().ended().next().is_some() && !shared.is_stopping()
    }

    /// The counts of the relay's work since its start.
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
        let others = state.others.iter().map(|one| one.shared.stats());
        others.fold(state.ended.and(state.now.shared.stats()), Stats::and)
    }

    /// Whether this relay stands by because an older relay with `OUTBOX_SINGLE_ACTIVE` is active. `false` until the
    /// relay's first check.
    ///
    /// ```
    /// # fn example(relay: &diesel_outbox::RelayHandle) {
    /// if relay.stands_by() {
    ///     println!("another relay is active");
    /// }
    /// # }
    /// ```
    pub fn stands_by(&self) -> bool {
        self.shared().threads.stands_by()
    }

    /// Waits until no message is due and none is in flight. Returns `false` if `timeout` passes or the relay is shut down
    /// first. Always returns `false` for a relay that [stands by](Self::stands_by). After a [`reload`](Self::reload),
    /// the call also waits for the end of the relay that was replaced.
    ///
    /// Messages that are delayed or wait for a retry do not count, nor do the messages of paused destinations and
    /// topics.
    pub fn wait_until_idle(&self, timeout: Duration) -> bool {
        let until = Instant::now().checked_add(timeout);
        loop {
            let (now, others) = {
                let state = self.state();
                (Arc::clone(&state.now), state.others.clone())
            };
            // First, because the current relay sends what the replaced relays release.
            let mut replaced = others.iter().filter(|one| one.shared.is_stopping());
            if !replaced.all(|one| one.shared.threads.wait_for_ends(until, None)) {
                return false;
            }
            match now.shared.wait_until_idle(until) {
                Waited::Idle => return true,
                Waited::Stopped if !Arc::ptr_eq(&now, &self.state().now) => {}
                Waited::Stopped | Waited::TimedOut => return false,
            }
        }
    }
}

shows!(RelayHandle: stats = [stats()]);
