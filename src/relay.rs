//! The relay: a group of plain threads that claims committed messages from PostgreSQL, sends them, and settles
//! (records) the results. All SQL is in `store`.

mod agreement;
mod batch;
mod bell;
mod breaker;
mod bucket;
pub(crate) mod builder;
mod bulkhead;
pub(crate) mod by_hand;
mod chore;
mod claimer;
mod configured;
mod custody;
mod database;
pub(crate) mod depths;
mod directory;
mod doubt;
mod ending;
mod endpoint_rows;
mod endpoint_workers;
mod error;
mod failing;
mod fair;
mod fate;
mod filter_troubles;
mod gate;
mod groups;
mod handle;
pub(crate) mod health;
mod heartbeat;
mod hooks;
mod inbox_cleaning;
mod intake;
mod janitor;
mod job;
mod keeper;
mod kept_back;
mod lease_clock;
mod limits;
mod listener;
mod metrics;
mod monitor;
mod observer;
mod of_config;
mod old_records;
mod overdue;
mod pace;
mod paused;
mod pauses;
mod planner;
mod pool;
mod registry;
mod room;
mod run;
mod running;
mod sender;
mod serving;
mod session;
mod settings;
mod settlement;
mod settler;
mod shared;
#[cfg(test)]
mod simulation;
mod sleep;
mod stats;
#[cfg(test)]
mod tests;
mod threads;
mod to;
mod told;
mod turns;
mod unrouted;
mod verdict;
mod verifications;
mod wanted;
mod workers;
mod written;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

pub use self::error::{ShutdownError, StartError};
pub use self::handle::RelayHandle;
pub use self::observer::{Observer, Settled};
pub use self::stats::Stats;

use self::bulkhead::Bulkhead;
use self::chore::NewChore;
use self::directory::Directory;
use self::ending::held;
use self::heartbeat::Ending;
use self::hooks::Hooks;
use self::job::Job;
use self::lease_clock::LeaseClock;
use self::observer::Observers;
use self::running::Running;
use self::settings::Settings;
use self::shared::{Shared, Signals};
use self::workers::Workers;
use crate::clock::BootTime;
use crate::error::DatabaseError;
use crate::log;
use crate::routes::Routes;
use crate::store::pinned::{located, pinned};
use crate::store::relay::connection::{Limits, Plans, Source};
use crate::store::relay::lease::{self, LeaseId, Registration};

/// The time limit of each statement during the start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A relay from its start to its end. A reload makes a new incarnation.
struct Incarnation {
    shared: Arc<Shared>,
    /// A channel that holds `Running`, except while a thread starts the threads or shuts the relay down.
    running: Arc<(Sender<Running>, Receiver<Running>)>,
    /// The process that has the threads.
    process: u32,
}

/// The parts of a relay that has no lease yet.
struct Assembled {
    settings: Settings,
    /// The settings on one line, without secrets.
    summary: String,
    source: Source,
    bulkheads: Vec<Bulkhead>,
    queues: Vec<Sender<Job>>,
    routes: Arc<Routes>,
    directory: Arc<dyn Directory>,
    hooks: Hooks,
    workers: Arc<dyn Workers>,
    /// The chores of the janitor, in this order.
    chores: &'static [NewChore],
    observers: Observers,
    limit: Option<u64>,
    is_one_shot: bool,
    claim_limit: Duration,
}

/// What the threads of a relay need, before they start.
struct Launch {
    workers: Arc<dyn Workers>,
    queues: Vec<Sender<Job>>,
    chores: &'static [NewChore],
    registration: Registration,
    lease_id: LeaseId,
    ending: Receiver<Ending>,
    relay_name: String,
    summary: String,
}

impl Incarnation {
    /// A relay with a lease, and without threads.
    fn prepare(assembled: Assembled) -> Result<(Self, Launch), StartError> {
        let Assembled {
            mut settings,
            summary,
            source,
            bulkheads,
            queues,
            routes,
            directory,
            hooks,
            workers,
            chores,
            observers,
            limit,
            is_one_shot,
            claim_limit,
        } = assembled;
        let limits = Limits::of_relay(START_TIMEOUT, Plans::Any);
        let mut conn = source.connect("start", limits)?.conn;
        // From here on every statement names tables with their schema.
        settings.table = located(&mut conn, &settings.table).map_err(DatabaseError::from)?;
        pinned(&mut conn, &settings.table, hooks.check)?;
        let relay_name = format!("{}:{}", host_name(), std::process::id());
        let clock = LeaseClock::of(&settings);
        let asked = BootTime::now();
        let registration = registration(&settings, &relay_name, directory.can_send(), is_one_shot);
        let lease_id = pinned(&mut conn, &settings.table, |conn, name| {
            lease::register(conn, name, &registration)
        })
        .map_err(DatabaseError::from)?;
        clock.registered(lease_id, asked);
        drop(conn);

        let (stop, stop_signal) = bounded(0);
        let (abandon, abandon_signal) = bounded(0);
        let signals = Signals::new(stop_signal, abandon_signal)?;
        let mut shared = Shared::new(
            settings,
            source,
            bulkheads,
            (routes, directory),
            hooks,
            clock,
            signals,
        );
        (shared.observers, shared.limit) = (observers, limit);
        (shared.is_one_shot, shared.claim_limit) = (is_one_shot, claim_limit);
        let shared = Arc::new(shared);
        let (ending, ending_signal) = bounded(1);
        let running = Running {
            stop: Some(stop),
            abandon: Some(abandon),
            ending,
            threads: Vec::new(),
            log: None,
        };
        let launch = Launch {
            queues,
            workers,
            chores,
            registration,
            lease_id,
            ending: ending_signal,
            relay_name,
            summary,
        };
        let prepared = Self {
            shared,
            running: Arc::new(held(running)),
            process: std::process::id(),
        };
        Ok((prepared, launch))
    }

    /// Starts the threads. If the relay has been shut down since it was prepared, they claim nothing, and a shutdown ends
    /// them.
    fn launch(&self, launch: Launch) -> Result<(), StartError> {
        let (back, running) = &*self.running;
        let Ok(mut running) = running.recv() else {
            return Ok(());
        };
        let (lease_id, table) = (launch.lease_id, &self.shared.settings.table);
        let (relay, summary) = (launch.relay_name.clone(), launch.summary.clone());
        let _log = self.shared.log.enter();
        let launched = running.spawn_all(&self.shared, launch);
        // Never full: the channel has one place, and `running` was taken from it.
        let _ = back.try_send(running);
        if let Err(error) = launched {
            // Ends the threads that have started. The caller gets the error that stopped the start.
            let _ = self.shutdown(START_TIMEOUT);
            return Err(error);
        }
        log::info!(event = "relay_started", outbox:% = table, lease = lease_id.0, relay = relay; "relay started: {summary}");
        if !table.has_endpoints() && self.shared.directory.can_send() {
            log::info!(event = "without_endpoints", outbox:% = table; "the outbox {table} has no tables of endpoints: delivering to other destinations only");
        }
        Ok(())
    }
}

/// The lease registration of a relay with these settings.
fn registration(
    settings: &Settings,
    relay: &str,
    registered: bool,
    is_one_shot: bool,
) -> Registration {
    let serves = settings.serves.clone().and_endpoints(registered);
    Registration {
        relay: relay.to_owned(),
        lease: settings.lease,
        is_single_active: settings.single_active,
        serves: settings.enabled.then(|| serves.to_json()),
        // A relay that stands by, or a job that finds nothing to do, has served nothing.
        records_topics: !settings.single_active && !is_one_shot,
        settings: settings.enabled.then(|| settings.published.clone()),
    }
}

/// The host name, for people who read the leases. Relays are told apart by their lease.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
