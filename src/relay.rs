//! The relay: a group of plain threads that takes committed messages out of PostgreSQL and
//! delivers them. It knows no SQL.

mod claimer;
mod heartbeat;
mod janitor;
mod lanes;
mod sender;
mod session;
mod settler;
mod shared;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

pub use self::shared::Stats;

use self::claimer::Claimer;
use self::heartbeat::Ending;
use self::shared::{LeaseClock, Shared, Signals};
use crate::backoff::Backoff;
use crate::config::{Config, ConfigError, Destination, Route};
use crate::dispatch::{Dispatcher, HttpDispatcher};
use crate::error::DatabaseError;
use crate::store::connection::connect;
use crate::store::lease::LeaseId;
use crate::store::{inspect, lease};

/// The thread that ends last, told how.
const HEARTBEAT: &str = "relay-heartbeat";
/// The limit of each statement at the start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A relay that is being set up.
///
/// ```no_run
/// use diesel_outbox::Relay;
/// use std::time::Duration;
///
/// let relay = Relay::builder("postgres://localhost/shop")
///     .url("https://receiver.example/events")
///     .concurrency(8)
///     .start()?;
/// // … the application runs …
/// relay.shutdown(Duration::from_secs(30))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Relay;

impl Relay {
    /// A relay for the outbox `outbox` in this database, with default settings.
    pub fn builder(database_url: impl Into<String>) -> RelayBuilder {
        let mut builder = Self::from_config(Config::default());
        builder.set("DATABASE_URL", &database_url.into());
        builder
    }

    /// A relay with these settings, for example those of [`config::from_env`](crate::config::from_env).
    pub fn from_config(config: Config) -> RelayBuilder {
        RelayBuilder {
            config,
            dispatcher: None,
            limit: None,
            error: None,
        }
    }
}

/// Settings of a relay. What is wrong with them is told by [`start`](Self::start).
pub struct RelayBuilder {
    config: Config,
    dispatcher: Option<Arc<dyn Dispatcher>>,
    limit: Option<u64>,
    /// The first setting that could not be used.
    error: Option<ConfigError>,
}

impl RelayBuilder {
    fn set(&mut self, variable: &str, value: &str) {
        if let Err(error) = self.config.set(variable, value) {
            self.error.get_or_insert(error);
        }
    }

    /// The outbox to work on: `name` or `schema.name`. Defaults to `outbox`.
    #[must_use]
    pub fn outbox(mut self, name: &str) -> Self {
        self.set("OUTBOX_TABLE", name);
        self
    }

    /// Where messages go that no route serves. Defaults to nowhere.
    #[must_use]
    pub fn url(mut self, url: &str) -> Self {
        self.set("OUTBOX_URL", url);
        self
    }

    /// Adds a named destination.
    #[must_use]
    pub fn destination(mut self, destination: Destination) -> Self {
        self.config.destinations.push(destination);
        self
    }

    /// Adds a route: topics that match the pattern `topic` go to the destination named `to`.
    #[must_use]
    pub fn route(mut self, topic: &str, to: &str) -> Self {
        self.config.routes.push(Route::new(topic, to));
        self
    }

    /// Sends with this instead of HTTP.
    #[must_use]
    pub fn dispatcher(mut self, dispatcher: impl Dispatcher) -> Self {
        self.dispatcher = Some(Arc::new(dispatcher));
        self
    }

    /// Threads that send. Defaults to 16.
    #[must_use]
    pub fn concurrency(mut self, threads: usize) -> Self {
        self.set("OUTBOX_CONCURRENCY", &threads.to_string());
        self
    }

    /// Messages claimed, and settled, by one statement at most. Defaults to 500.
    #[must_use]
    pub fn batch(mut self, messages: usize) -> Self {
        self.set("OUTBOX_BATCH", &messages.to_string());
        self
    }

    /// How long an idle relay waits before it looks again. Defaults to 500 ms.
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.config.poll_interval = interval;
        self
    }

    /// How long a silent relay keeps its messages. Defaults to 60 s.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease;
        self
    }

    /// The limit for one send. Defaults to 2.5 s.
    #[must_use]
    pub fn send_timeout(mut self, timeout: Duration) -> Self {
        self.config.send_timeout = timeout;
        self
    }

    /// Failed attempts after which a message is dead. Defaults to 20.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.set("OUTBOX_MAX_ATTEMPTS", &attempts.to_string());
        self
    }

    /// The delay between attempts. Defaults to `exponential(5s, 1h)`.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.config.backoff = backoff;
        self
    }

    /// How long the ledger keeps settled messages; `None`: for ever. Defaults to a week.
    #[must_use]
    pub fn retention(mut self, retention: Option<Duration>) -> Self {
        self.config.cleaner = retention.is_some();
        if let Some(retention) = retention {
            self.config.retention = retention;
        }
        self
    }

    /// Whether messages are claimed and sent; without, the relay stands by. Defaults to true.
    #[must_use]
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.config.enabled = enabled;
        self
    }

    /// Claims this many messages and then no more: for jobs that do a bounded amount of work.
    /// Defaults to no limit.
    #[must_use]
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = Some(messages);
        self
    }

    /// Checks the settings and the database, takes a lease and starts the threads.
    ///
    /// The relay opens four connections of its own: they do not come out of the application's
    /// pool, so neither can starve the other.
    ///
    /// # Errors
    /// A [`StartError`]: a bad setting, no database, no outbox in it or one of another version,
    /// or no thread. Nothing is left running.
    pub fn start(self) -> Result<RelayHandle, StartError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        let config = self.config;
        config.validate()?;
        let dispatcher = match self.dispatcher {
            Some(dispatcher) => dispatcher,
            None => Arc::new(HttpDispatcher::new(&config)?),
        };
        RelayHandle::start(config, dispatcher, self.limit)
    }
}

/// Why a relay did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is bad, or contradicts another.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database cannot be reached, or the outbox is not there.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The system gave no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// What a thread leaves when it ends.
#[derive(Debug)]
struct Exit {
    thread: String,
    panicked: bool,
}

/// A running relay. It owns every thread; dropping it shuts the relay down.
pub struct RelayHandle {
    shared: Arc<Shared>,
    /// Looked at, and emptied by a shutdown only: what asks for it waits for no lock.
    exits: Receiver<Exit>,
    running: Mutex<Running>,
}

/// What is needed to end the relay, given up bit by bit.
struct Running {
    /// Dropped to stop.
    stop: Option<Sender<()>>,
    /// Dropped to give up.
    abandon: Option<Sender<()>>,
    ending: Sender<Ending>,
    exits: Receiver<Exit>,
    threads: Vec<(String, JoinHandle<()>)>,
    ended: Vec<Exit>,
}

/// Why a shutdown was not clean. Nothing is lost: what was left is taken over by the next relay
/// when the lease is over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShutdownError {
    /// The deadline came first.
    #[error(
        "{messages} messages were not settled at the deadline (threads still at work: {threads}); another relay takes them when the lease is over"
    )]
    Deadline {
        /// Messages claimed and neither settled nor released.
        messages: usize,
        /// Names of the threads that had not ended.
        threads: String,
    },
    /// A thread had panicked.
    #[error("the relay's thread {thread} panicked")]
    Panic {
        /// Its name.
        thread: String,
    },
}

impl RelayHandle {
    fn start(
        config: Config,
        dispatcher: Arc<dyn Dispatcher>,
        limit: Option<u64>,
    ) -> Result<Self, StartError> {
        let database_url = config.database_url()?.clone();
        let mut conn = connect(&database_url, "start", START_TIMEOUT)?;
        inspect::check(&mut conn, &config.table)?;
        let relay_name = format!("{}:{}", host_name(), std::process::id());
        let longest_send = config
            .destinations
            .iter()
            .filter_map(|destination| destination.timeout)
            .fold(config.send_timeout, Duration::max);
        let clock = LeaseClock::new(config.lease, longest_send);
        let asked = Instant::now();
        let lease_id = lease::register(&mut conn, &config.table, &relay_name, config.lease)
            .map_err(DatabaseError::from)?;
        clock.renewed(lease_id, asked);
        drop(conn);

        let (stop, stop_signal) = bounded(0);
        let (abandon, abandon_signal) = bounded(0);
        let (doorbell, ring) = bounded(1);
        let shared = Arc::new(Shared::new(
            config,
            database_url,
            dispatcher,
            limit,
            clock,
            Signals {
                stop: stop_signal,
                abandon: abandon_signal,
                doorbell,
            },
        ));
        let (ending, ending_signal) = bounded(1);
        let (exit, exits) = bounded(shared.config.concurrency + 8);
        let mut running = Running {
            stop: Some(stop),
            abandon: Some(abandon),
            ending,
            exits,
            threads: Vec::new(),
            ended: Vec::new(),
        };
        if let Err(error) =
            running.spawn_all(&shared, &exit, &relay_name, lease_id, &ending_signal, &ring)
        {
            drop(exit);
            let handle = Self {
                shared,
                exits: running.exits.clone(),
                running: Mutex::new(running),
            };
            // The threads that did start end; the error that counts is the one at hand.
            let _ = handle.shutdown(START_TIMEOUT);
            return Err(error);
        }
        log::info!(event = "relay_started", outbox:% = shared.config.table, lease = lease_id.0, relay = relay_name; "relay started: {}", shared.config.summary());
        Ok(Self {
            shared,
            exits: running.exits.clone(),
            running: Mutex::new(running),
        })
    }

    /// Makes the relay look for messages now and not at its next poll. Cheap; of use right after
    /// a commit.
    pub fn wake(&self) {
        self.shared.ring();
    }

    /// Whether all threads are at work, a lease is held and the database answers.
    pub fn is_healthy(&self) -> bool {
        self.exits.is_empty()
            && !self.shared.is_stopping()
            && self.shared.lease.current().is_some()
            && !self.shared.outage.is_on()
    }

    /// Whether a thread has ended while nobody had asked it to, which only a defect can cause.
    /// The rest of the relay should then be shut down.
    pub fn has_failed(&self) -> bool {
        // In this order: whatever has ended since the stop is seen after it.
        !self.exits.is_empty() && !self.shared.is_stopping()
    }

    /// What the relay has done since it started.
    pub fn stats(&self) -> Stats {
        self.shared.stats.read()
    }

    /// Waits until nothing is due and nothing is on its way. `false`: the time was over first.
    pub fn wait_until_idle(&self, timeout: Duration) -> bool {
        self.shared.wait_until_idle(timeout)
    }

    /// Ends the relay: claims nothing more, lets sends under way finish, writes down what became
    /// of them, gives unsent messages back at no cost, ends the lease, and joins every thread.
    /// Takes `deadline` at most. Calling it again continues.
    ///
    /// # Errors
    /// A [`ShutdownError`] when the deadline came first or a thread had panicked. Nothing is lost.
    pub fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownError> {
        let until = Instant::now().checked_add(deadline);
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.begin_stop();
        running.stop = None;
        // A part of the time is kept for the last settle to notice that it has to give up.
        let reserve = (deadline / 10).min(Duration::from_millis(500));
        running.wait_for_exits(
            until.and_then(|at| at.checked_sub(reserve)),
            Some(HEARTBEAT),
        );
        running.abandon = None;
        running.wait_for_exits(until, Some(HEARTBEAT));
        let left = self
            .shared
            .in_flight
            .load(std::sync::atomic::Ordering::Acquire);
        let keep_lease = self
            .shared
            .keep_lease
            .load(std::sync::atomic::Ordering::Acquire);
        // A claim under way may still work: then the lease has to be there, or its messages name
        // one that nobody looks for.
        let has_stopped = !running.is_at_work(Some(HEARTBEAT));
        let ending = if left == 0 && has_stopped && !keep_lease {
            Ending::Clean
        } else {
            Ending::LeaveLease
        };
        // Full: it was told before.
        let _ = running.ending.try_send(ending);
        running.wait_for_exits(until, None);
        running.join_ended();
        self.report(&running, left)
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
        let is_over = {
            let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            running.stop.is_none()
        };
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

impl Running {
    /// In the order of the data: a channel's receiver runs before its senders.
    fn spawn_all(
        &mut self,
        shared: &Arc<Shared>,
        exit: &Sender<Exit>,
        relay_name: &str,
        lease_id: LeaseId,
        ending: &Receiver<Ending>,
        ring: &Receiver<()>,
    ) -> Result<(), StartError> {
        let config = &shared.config;
        // Twice a batch: one is sent while the next is claimed.
        let (jobs, job_queue) = bounded(2 * config.batch);
        // Claimed messages are bounded, so a send into it never waits for long.
        let (outcomes, outcome_queue) = bounded(2 * config.batch + config.concurrency);

        let (state, name, ending) = (Arc::clone(shared), relay_name.to_owned(), ending.clone());
        self.spawn(HEARTBEAT, exit, move || {
            heartbeat::run(&state, &name, lease_id, &ending);
        })?;
        let state = Arc::clone(shared);
        self.spawn("relay-settler", exit, move || {
            settler::run(&state, &outcome_queue)
        })?;
        for number in 1..=config.concurrency {
            let (state, jobs, outcomes) = (Arc::clone(shared), job_queue.clone(), outcomes.clone());
            self.spawn(&format!("relay-send-{number}"), exit, move || {
                sender::run(&state, &jobs, &outcomes);
            })?;
        }
        let state = Arc::clone(shared);
        self.spawn("relay-janitor", exit, move || {
            janitor::run(&state);
        })?;
        let (state, ring) = (Arc::clone(shared), ring.clone());
        self.spawn("relay-claimer", exit, move || {
            Claimer::new(&state, jobs, job_queue, outcomes, ring).run();
        })
    }

    fn spawn(
        &mut self,
        name: &str,
        exit: &Sender<Exit>,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let guard = ExitGuard {
            thread: name.to_owned(),
            exit: exit.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _guard = guard;
                work();
            })?;
        self.threads.push((name.to_owned(), thread));
        Ok(())
    }

    /// Waits until every thread has ended, but for the one named `but`, or `until`.
    fn wait_for_exits(&mut self, until: Option<Instant>, but: Option<&str>) {
        self.ended.extend(self.exits.try_iter());
        while self.is_at_work(but) {
            let exit = match until {
                Some(until) => self.exits.recv_deadline(until).ok(),
                None => self.exits.recv().ok(),
            };
            match exit {
                Some(exit) => self.ended.push(exit),
                None => return,
            }
        }
    }

    /// Whether a thread has not ended, other than the one named `but`.
    fn is_at_work(&self, but: Option<&str>) -> bool {
        self.threads.iter().any(|(name, _)| {
            Some(name.as_str()) != but && !self.ended.iter().any(|exit| exit.thread == *name)
        })
    }

    /// Joins the threads that have ended; the others stay.
    fn join_ended(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        for (name, thread) in threads {
            if !self.ended.iter().any(|exit| exit.thread == name) {
                self.threads.push((name, thread));
            } else if thread.join().is_err() {
                log::error!(event = "thread_panicked", thread = name; "a thread of the relay panicked");
            }
        }
    }
}

/// Reports a thread's end, also when it ends by a panic.
struct ExitGuard {
    thread: String,
    exit: Sender<Exit>,
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        // The channel has room for every thread; nobody listens when the handle is gone.
        let _ = self.exit.try_send(Exit {
            thread: std::mem::take(&mut self.thread),
            panicked: std::thread::panicking(),
        });
    }
}

/// For people who look at leases; not used to tell relays apart.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
