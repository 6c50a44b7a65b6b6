//! The relay: a group of plain threads that claims committed messages from PostgreSQL, sends them, and settles
//! (records) the results. SQL is in folders named `sql`.

pub(crate) mod database;
mod ending;
mod error;
mod handle;
pub(crate) mod hooks;
mod running;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod shared;
pub(crate) mod sql;
mod stats;
pub(crate) mod threads;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

pub use self::error::{ShutdownError, StartError};
pub use self::handle::RelayHandle;
pub use self::stats::Stats;
pub use super::observe::observer::{Observer, Settled};

use self::ending::held;
use self::hooks::Hooks;
use self::running::Running;
use self::settings::Settings;
use self::shared::{Shared, Signals};
use self::sql::connection::{Limits, Plans, Source};
use super::clean::chore::NewChore;
use super::directory::Directory;
use super::lease::clock::LeaseClock;
use super::lease::heartbeat::Ending;
use super::lease::sql::lease::{self, LeaseId, Registration};
use super::observe::observer::Observers;
use super::send::bulkhead::Bulkhead;
use super::send::job::Job;
use super::serves::routes::Routes;
use super::workers::Workers;
use crate::clock::BootTime;
use crate::error::DatabaseError;
use crate::log;
use crate::sql::pinned::{located, pinned};

/// The time limit of each statement during the start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A relay from its start to its end. A reload makes a new incarnation.
pub(crate) struct Incarnation {
    shared: Arc<Shared>,
    /// A channel that holds `Running`, except while a thread starts the threads or shuts the relay down.
    running: Arc<(Sender<Running>, Receiver<Running>)>,
    /// The process that has the threads.
    process: u32,
}

/// The parts of a relay that has no lease yet.
pub(crate) struct Assembled {
    pub(crate) settings: Settings,
    /// The settings on one line, without secrets.
    pub(crate) summary: String,
    pub(crate) source: Source,
    pub(crate) bulkheads: Vec<Bulkhead>,
    pub(crate) queues: Vec<Sender<Job>>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) hooks: Hooks,
    /// `None`: this relay knows no member.
    pub(crate) workers: Option<Arc<dyn Workers>>,
    /// The chores of the janitor, in this order.
    pub(crate) chores: &'static [NewChore],
    pub(crate) observers: Observers,
    pub(crate) limit: Option<u64>,
    pub(crate) is_one_shot: bool,
    pub(crate) claim_limit: Duration,
}

/// What the threads of a relay need, before they start.
pub(crate) struct Launch {
    workers: Option<Arc<dyn Workers>>,
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
    pub(crate) fn prepare(assembled: Assembled) -> Result<(Self, Launch), StartError> {
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
    pub(crate) fn launch(&self, launch: Launch) -> Result<(), StartError> {
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
        Ok(())
    }
}

/// The lease registration of a relay with these settings.
pub(crate) fn registration(
    settings: &Settings,
    relay: &str,
    registered: bool,
    is_one_shot: bool,
) -> Registration {
    let serves = settings.serves.clone().and_members(registered);
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
