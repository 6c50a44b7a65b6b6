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

use self::running::Running;
use self::settings::Settings;
use self::shared::{Shared, SharedParts, Signals};
use self::sql::connection::{Plans, StatementLimits};
use super::clean::chore::NewChore;
use super::lease::clock::LeaseClock;
use super::lease::heartbeat::Ending;
use super::lease::sql::lease::{self, LeaseId, Registration};
use super::send::job::Job;
use super::serves::routes::Serves;
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
    /// A channel that holds `Running`, except while a thread starts the threads or shuts the relay down. Others wait for it with a
    /// deadline of their own.
    running: Arc<(Sender<Running>, Receiver<Running>)>,
    /// The process that has the threads.
    process: u32,
}

/// The parts of a relay that has no lease yet.
pub(crate) struct Assembled {
    pub(crate) parts: SharedParts,
    pub(crate) work: ThreadWork,
}

/// What the threads of a relay do, beside what they share.
pub(crate) struct ThreadWork {
    pub(crate) queues: Vec<Sender<Job>>,
    /// `None`: this relay knows no member.
    pub(crate) workers: Option<Arc<dyn Workers>>,
    /// The chores of the janitor, in this order.
    pub(crate) chores: &'static [NewChore],
    /// The settings on one line, without secrets.
    pub(crate) summary: String,
}

/// What the threads of a relay need, before they start.
pub(crate) struct Launch {
    work: ThreadWork,
    registration: Registration,
    lease_id: LeaseId,
    ending: Receiver<Ending>,
}

impl Incarnation {
    /// A relay with a lease, and without threads.
    pub(crate) fn prepare(assembled: Assembled) -> Result<(Self, Launch), StartError> {
        let Assembled { mut parts, work } = assembled;
        let relay = format!("{}:{}", host_name(), std::process::id());
        let (registered, is_one_shot) = (parts.directory.can_send(), parts.is_one_shot);
        let registration = registration(&parts.settings, &relay, registered, is_one_shot);
        let lease = LeaseClock::of(&parts.settings);
        let lease_id = register(&mut parts, &registration, &lease)?;

        let (stop, stop_signal) = bounded(0);
        let (abandon, abandon_signal) = bounded(0);
        let (ending, ending_signal) = bounded(1);
        let signals = Signals::new(stop_signal, abandon_signal)?;
        let running = Running {
            stop: Some(stop),
            abandon: Some(abandon),
            ending,
            threads: Vec::new(),
            log: None,
        };
        let held = bounded(1);
        // Never full: the channel is new and has one place.
        let _ = held.0.try_send(running);
        let launch = Launch {
            work,
            registration,
            lease_id,
            ending: ending_signal,
        };
        let prepared = Self {
            shared: Arc::new(Shared::new(parts, lease, signals)),
            running: Arc::new(held),
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
        let summary = launch.work.summary.clone();
        let relay = launch.registration.relay.clone();
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

/// Finds the outbox and registers the relay.
fn register(
    parts: &mut SharedParts,
    registration: &Registration,
    clock: &LeaseClock,
) -> Result<LeaseId, DatabaseError> {
    let limits = StatementLimits::of_relay(START_TIMEOUT, Plans::Any);
    let mut conn = parts.source.connect("start", limits)?.conn;
    // From here on every statement names tables with their schema.
    let table = located(&mut conn, &parts.settings.table)?;
    pinned(&mut conn, &table, parts.hooks.check)?;
    let asked = BootTime::now();
    let lease_id = pinned(&mut conn, &table, |conn, name| {
        lease::register(conn, name, registration)
    })?;
    clock.registered(lease_id, asked);
    parts.settings.table = table;
    Ok(lease_id)
}

/// The lease registration of a relay with these settings.
pub(crate) fn registration(
    settings: &Settings,
    relay: &str,
    registered: bool,
    is_one_shot: bool,
) -> Registration {
    let serves = Serves {
        members: registered,
        ..settings.serves.clone()
    };
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
