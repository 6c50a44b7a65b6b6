//! `diesel-outbox run --databases FILE`: the outboxes of many databases in one process.
//!
//! A database without work costs one connection, and a thread that asks from time to time whether messages are due.
//! Then the thread closes the connection and starts a relay, which has two connections until it has found nothing for a
//! while. So the memory and the senders belong to the databases that need them, and a database that is down, or whose
//! receivers hang, takes nothing from the others.

mod shown;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Connection, Work};
use diesel_outbox::{ConfigError, Relay, RelayBuilder, RelayHandle, Stats, admin};
use secrecy::{ExposeSecret, SecretString};

use self::shown::{Shown, Shows};
use crate::admin::Bound;
use crate::number::whole;
use crate::settings::SettingFlags;
use crate::threads::spawn;
use crate::{descriptors, logging, signals};

/// Options of `run` for many databases.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Serve the outboxes of many databases: a TOML file with a line NAME = "URL" for each. All have the same settings,
    /// and DATABASE_URL is not used. SIGHUP reads the file again
    #[arg(long, value_name = "FILE")]
    pub(crate) databases: Option<PathBuf>,
    /// How many of these databases have a relay, with its threads, at the same time
    #[arg(long, value_name = "NUMBER", requires = "databases", default_value_t = 16, value_parser = whole(1..=1024_u64))]
    busy: u64,
}

/// A relay that has found nothing for this time ends. Longer than the takeover of what a dead process had in flight.
const LINGER: Duration = Duration::from_secs(10);
/// A relay that makes no progress while its database or process fails ends after this time, and its database waits like
/// one that is down.
const PATIENCE: Duration = Duration::from_secs(10);
/// A relay that works for this time ends if a database waits for one.
const TURN: Duration = Duration::from_secs(30);
/// How often the thread looks at a relay. A relay without work ends so soon if a database waits.
const TICK: Duration = Duration::from_millis(500);
/// How long the sends of a relay may take whose turn has ended. Longer than any send: what is not settled then is sent
/// again by another relay, a minute later.
const LONGEST_END: Duration = Duration::from_secs(600);
/// Beyond the time of a shutdown, until a thread that has shut its relay down has ended.
const RESERVE: Duration = Duration::from_secs(1);
/// Each database has a relay at least this often: it cleans the ledger, and removes old leases.
const MAINTENANCE: Duration = Duration::from_secs(3600);
/// The longest wait before the next try, when a database cannot be reached, or a relay could do nothing for messages
/// that are due.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The wait between two questions.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// A question that takes long is asked again after this many times as long, but at most after this time.
const SHARE: u32 = 10;
const LONGEST_SHARE: Duration = Duration::from_secs(10);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between the first connections of two databases: a server that gets hundreds at the same moment needs longer for the
/// last than a connection may take.
const SPREAD: Duration = Duration::from_millis(20);

pub(crate) fn run(file: &Path, options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config)?;
    descriptors::raise_limit();
    let (signals, reload) = signals::with_reload()?;
    let databases = read(file)?;
    program::check_relay(&config)?;
    let page = Bound::new(&config)?;
    let shown = Arc::new(Shown::default());
    let (of_metrics, of_health) = (Arc::clone(&shown), Arc::clone(&shown));
    let serve = |page: Bound| {
        page.serve_metrics(
            move |text| of_metrics.measured(text),
            move || of_health.readiness(),
        )
    };
    let _page = page.map(serve).transpose()?;
    let mut group = Group::new(config, usize::try_from(options.busy)?, shown);
    group.serve(databases)?;
    let (file, settings) = (file.to_owned(), settings.clone());
    let loads = signals::at_each(reload, move || -> Result<(Config, Databases)> {
        let config = settings.load()?;
        program::check_relay(&config)?;
        Ok((config, read(&file)?))
    })?;
    loop {
        select! {
            recv(signals) -> _ => break,
            recv(loads) -> again => {
                let Ok(again) = again else { break };
                match again {
                    Ok((config, databases)) => {
                        if let Err(error) = group.reload(config, databases) {
                            group.end()?;
                            return Err(error);
                        }
                    }
                    Err(error) => log::error!(event = "reload_failed", error:% = format!("{error:#}"); "the reload failed, and the process continues with the old settings and databases: {error:#}"),
                }
            },
            default(TICK) => {
                if group.has_failed() {
                    break;
                }
            }
        }
    }
    group.end()
}

/// The URL of each database, by its name.
type Databases = BTreeMap<String, SecretString>;

fn read(file: &Path) -> Result<Databases> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read {}", file.display()))?;
    // The error's own text would show the line, which has a password.
    let urls: BTreeMap<String, String> = toml::from_str(&text)
        .map_err(|error| ConfigError::new(file.to_string_lossy(), error.message()))?;
    let urls = urls.into_iter();
    let databases: Databases = urls.map(|(name, url)| (name, url.into())).collect();
    for (name, url) in &databases {
        let bad = |why: String| ConfigError::new(format!("{}: {name}", file.display()), why);
        // The last two would be escaped in a label of the metrics.
        if name.is_empty() || name.contains(|c: char| c.is_control() || c == '"' || c == '\\') {
            let why = "a name is not empty, and has no quotes, backslashes and control characters";
            return Err(bad(why.to_owned()).into());
        }
        let mut config = Config::default();
        let set = config.set("DATABASE_URL", url.expose_secret());
        set.map_err(|error| bad(error.reason().to_owned()))?;
    }
    ensure!(
        !databases.is_empty(),
        ConfigError::new(file.to_string_lossy(), "names no database")
    );
    Ok(databases)
}

/// The threads of all databases.
struct Group {
    common: Arc<Common>,
    shown: Arc<Shown>,
    keepers: BTreeMap<String, Running>,
    /// The threads of databases that are not served any more.
    ending: Vec<JoinHandle<()>>,
    /// Each thread has a copy of the first. So the second says when all have ended.
    ends: (Sender<()>, Receiver<()>),
}

/// What the threads share.
struct Common {
    config: Mutex<Arc<Config>>,
    /// One for each relay that may run and does not. Who takes one gives it back, or hands it over.
    free: (Sender<()>, Receiver<()>),
    /// Without a place: a seat can be handed over only to somebody who waits.
    handed_over: (Sender<()>, Receiver<()>),
}

/// A thread, and what ends it.
struct Running {
    url: SecretString,
    /// Dropped to end the thread.
    _stop: Sender<()>,
    reload: Sender<()>,
    shows: Arc<Shows>,
    thread: JoinHandle<()>,
}

impl Common {
    fn config(&self) -> MutexGuard<'_, Arc<Config>> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The settings of each database.
fn settings_of_each(mut config: Config) -> Config {
    config.share_connection = true;
    config.listener = false;
    config
}

impl Group {
    fn new(config: Config, busy: usize, shown: Arc<Shown>) -> Self {
        let free = bounded(busy);
        // As many as there is room for.
        while free.0.try_send(()).is_ok() {}
        let common = Common {
            config: Mutex::new(Arc::new(settings_of_each(config))),
            free,
            handed_over: bounded(0),
        };
        Self {
            common: Arc::new(common),
            shown,
            keepers: BTreeMap::new(),
            ending: Vec::new(),
            ends: bounded(0),
        }
    }

    /// Serves these databases, and no others from now on.
    fn serve(&mut self, databases: Databases) -> Result<()> {
        let is_same = |(name, running): &(String, Running)| {
            let url = databases.get(name).map(ExposeSecret::expose_secret);
            url == Some(running.url.expose_secret())
        };
        let all = std::mem::take(&mut self.keepers).into_iter();
        let (stay, end): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(is_same);
        self.keepers = stay;
        // Drops what they wait for. Their relays may still be sending.
        self.ending.extend(threads(end));
        let count = databases.len();
        let mut wait = Duration::ZERO;
        for (number, (name, url)) in (0..).zip(databases) {
            if self.keepers.contains_key(&name) {
                continue;
            }
            let (stop, stopped) = bounded(0);
            let (reload, reloaded) = bounded(1);
            let shows = Arc::new(Shows::default());
            let keeper = Keeper {
                name: name.clone(),
                url: url.clone(),
                common: Arc::clone(&self.common),
                shows: Arc::clone(&shows),
                stopped,
                reloaded,
                conn: None,
                failures: 0,
                in_vain: InVain::default(),
                // Not all at once, also not an hour later.
                maintenance: Instant::now() + MAINTENANCE * number / u32::try_from(count)?,
            };
            let thread = spawn(format!("{name} relay-keeper"), {
                let end = self.ends.0.clone();
                move || {
                    keeper.run(wait);
                    drop(end);
                }
            })?;
            let running = Running {
                url,
                _stop: stop,
                reload,
                shows,
                thread,
            };
            self.keepers.insert(name, running);
            wait += SPREAD;
        }
        let keepers = self.keepers.iter();
        let shows = keepers.map(|(name, running)| (name.as_str(), &running.shows));
        self.shown.serve(shows);
        log::info!(event = "databases", count = count, busy = self.common.free.0.capacity().unwrap_or(0); "serving {count} databases");
        Ok(())
    }

    fn reload(&mut self, config: Config, databases: Databases) -> Result<()> {
        *self.common.config() = Arc::new(settings_of_each(config));
        for running in self.keepers.values() {
            // Full: the thread will see these settings, too.
            let _ = running.reload.try_send(());
        }
        self.serve(databases)?;
        log::info!(event = "reloaded"; "reloaded the settings and the databases");
        Ok(())
    }

    fn has_failed(&self) -> bool {
        self.keepers.values().any(|one| one.thread.is_finished())
    }

    fn end(self) -> Result<()> {
        self.shown.end();
        let longest = self
            .common
            .config()
            .shutdown_timeout
            .saturating_add(RESERVE);
        // All are told before the first is waited for.
        let threads: Vec<_> = threads(self.keepers).chain(self.ending).collect();
        let (end, ended) = self.ends;
        drop(end);
        // Nobody sends: disconnected when all threads have ended.
        let have_ended = ended.recv_timeout(longest) == Err(RecvTimeoutError::Disconnected);
        if !have_ended {
            let hang: Vec<_> = threads.iter().filter(|one| !one.is_finished()).collect();
            let hang: Vec<_> = hang.iter().filter_map(|one| one.thread().name()).collect();
            log::warn!(event = "databases_left", threads = hang.join(", "); "{} databases do not answer: the process ends without waiting for them", hang.len());
        }
        let results: Vec<_> = threads
            .into_iter()
            .filter(|one| have_ended || one.is_finished())
            .map(JoinHandle::join)
            .collect();
        ensure!(
            results.iter().all(Result::is_ok),
            "a thread panicked: the log says which"
        );
        Ok(())
    }
}

/// Tells keepers to end.
fn threads(keepers: BTreeMap<String, Running>) -> impl Iterator<Item = JoinHandle<()>> {
    let threads: Vec<_> = keepers.into_values().map(|one| one.thread).collect();
    threads.into_iter()
}

/// Work that no relay could do.
#[derive(Default)]
struct InVain {
    work: Work,
    /// How many relays in a row could not do it.
    relays: u32,
    /// Until when no relay tries again.
    until: Option<Instant>,
}

/// Why a relay ends.
enum End {
    /// The process, or the service of this database.
    Stopped,
    /// Nothing is left to do.
    Idle,
    /// Another database has the seat.
    HandedOver,
}

/// Serves one database.
struct Keeper {
    name: String,
    url: SecretString,
    common: Arc<Common>,
    shows: Arc<Shows>,
    /// Disconnected when the thread is to end.
    stopped: Receiver<()>,
    reloaded: Receiver<()>,
    conn: Option<Connection>,
    /// Failures since the last success.
    failures: u32,
    in_vain: InVain,
    /// When a relay runs even if no message is due.
    maintenance: Instant,
}

impl Keeper {
    /// Begins after this time.
    fn run(mut self, mut wait: Duration) {
        loop {
            select! {
                recv(self.stopped) -> _ => return,
                default(wait) => {}
            }
            wait = match self.look() {
                Ok(wait) => wait,
                Err(error) => self.has_failed(&error),
            };
        }
    }

    fn is_served(&mut self) {
        if self.failures > 0 {
            log::info!(event = "database_recovered", failures = self.failures; "the database {} is back", self.name);
            self.failures = 0;
        }
        self.record_ready(true);
    }

    fn record_ready(&self, is_ready: bool) {
        self.shows.is_ready.store(is_ready, Ordering::Release);
        program::record_ready(&self.common.config(), &self.name, is_ready);
    }

    fn has_failed(&mut self, error: &anyhow::Error) -> Duration {
        self.conn = None;
        self.record_ready(false);
        if self.failures == 0 {
            log::error!(event = "database_failed", error:% = format!("{error:#}"); "the database {} cannot be served: {error:#}", self.name);
        }
        self.failures = self.failures.saturating_add(1);
        longer(self.failures)
    }

    /// Asks for work, and lets a relay do it. Returns when to ask again.
    fn look(&mut self) -> Result<Duration> {
        let config = Arc::clone(&self.common.config());
        let conn = match &mut self.conn {
            Some(conn) => conn,
            none => {
                let mut conn = Connection::open(&self.url, "databases", STATEMENT_TIMEOUT)?;
                conn.run(|conn| admin::check_schema(conn, &config.table))?;
                none.insert(conn)
            }
        };
        let began = Instant::now();
        let work = conn.run(|conn| program::work(conn, &config.table))?;
        let took = began.elapsed();
        if work != self.in_vain.work {
            self.in_vain = InVain::default();
        }
        let now = Instant::now();
        let is_in_vain = self.in_vain.until.is_some_and(|until| now < until);
        if now < self.maintenance && (work.is_nothing() || is_in_vain) {
            self.is_served();
            let share = LONGEST_SHARE.min(SHARE * took);
            return Ok(config.poll_interval.max(SHORTEST_WAIT).max(share));
        }
        let Common {
            free, handed_over, ..
        } = &*self.common;
        select! {
            recv(self.stopped) -> _ => return Ok(Duration::ZERO),
            // Never disconnected: `common` has the senders.
            recv(free.1) -> _ => {}
            recv(handed_over.1) -> _ => {}
        }
        let seat = Seat {
            common: Arc::clone(&self.common),
            is_handed_over: false,
        };
        self.conn = None;
        let has_worked = self.serve(&config, seat)?;
        self.maintenance = Instant::now() + MAINTENANCE;
        let relays = self.in_vain.relays;
        self.in_vain = match has_worked || work.is_nothing() {
            true => InVain::default(),
            false => InVain {
                work,
                relays: relays.saturating_add(1),
                until: Some(Instant::now() + longer(relays)),
            },
        };
        Ok(Duration::ZERO)
    }

    /// Runs a relay as long as it has work. Returns whether it did anything.
    fn serve(&mut self, config: &Config, mut seat: Seat) -> Result<bool> {
        let relay = self.relay(config)?.start()?;
        self.shows.has_relay.store(true, Ordering::Release);
        let result = self.watch(&relay);
        self.shows.has_relay.store(false, Ordering::Release);
        seat.is_handed_over = matches!(result, Ok(End::HandedOver));
        // The end may take as long as a send, or as a database that is down.
        drop(seat);
        let stats = self.end(relay, &result, config.shutdown_timeout)?;
        result.map(|_| stats != Stats::default())
    }

    /// Ends a relay. When only its turn has ended, the relay may finish its sends. Nobody waits for one that has failed.
    fn end(&self, relay: RelayHandle, result: &Result<End>, longest: Duration) -> Result<Stats> {
        if let Ok(End::Stopped) = result {
            return Ok(ended(&relay, longest));
        }
        let (end, stats) = bounded(1);
        spawn(format!("{} relay-end", self.name), move || {
            // Perhaps nobody waits.
            let _ = end.send(ended(&relay, LONGEST_END));
        })?;
        if result.is_err() {
            return Ok(Stats::default());
        }
        let stats = select! {
            recv(stats) -> one => one.ok(),
            recv(self.stopped) -> _ => stats.recv_timeout(longest).ok(),
        };
        Ok(stats.unwrap_or_default())
    }

    fn relay(&self, config: &Config) -> Result<RelayBuilder> {
        let mut config = config.clone();
        config.set("DATABASE_URL", self.url.expose_secret())?;
        Ok(Relay::from_config(config).label(&self.name))
    }

    /// Returns when the relay is to end.
    fn watch(&mut self, relay: &RelayHandle) -> Result<End> {
        let began = Instant::now();
        let (mut stats, mut worked, mut healthy) = (relay.stats(), began, began);
        loop {
            select! {
                recv(self.stopped) -> _ => return Ok(End::Stopped),
                recv(self.reloaded) -> asked => {
                    if asked.is_err() {
                        return Ok(End::Stopped);
                    }
                    let config = Arc::clone(&self.common.config());
                    relay.reload(self.relay(&config)?, config.shutdown_timeout)?;
                }
                default(TICK) => {}
            }
            ensure!(
                !relay.has_failed(),
                "a relay thread ended unexpectedly: the log says which"
            );
            let now = Instant::now();
            let before = std::mem::replace(&mut stats, relay.stats());
            if stats != before {
                worked = now;
            }
            let health = relay.health();
            if health.is_ready() || stats != before {
                healthy = now;
                self.is_served();
            }
            ensure!(now - healthy < PATIENCE, "the relay is not ready: {health}");
            let is_idle = now - worked >= TICK && relay.wait_until_idle(TICK);
            if is_idle && now - worked >= LINGER {
                return Ok(End::Idle);
            }
            let may_end = is_idle || now - began >= TURN;
            if may_end && self.common.handed_over.0.try_send(()).is_ok() {
                return Ok(End::HandedOver);
            }
        }
    }
}

/// What a relay has done until its end.
fn ended(relay: &RelayHandle, longest: Duration) -> Stats {
    if let Err(error) = relay.shutdown(longest) {
        log::warn!(event = "shutdown_failed", error:% = error; "a relay did not shut down cleanly: {error}");
    }
    relay.stats()
}

/// The wait after so many failures.
fn longer(failures: u32) -> Duration {
    SHORTEST_WAIT
        .saturating_mul(2_u32.saturating_pow(failures))
        .min(LONGEST_WAIT)
}

/// Lets another database have a relay, when dropped.
struct Seat {
    common: Arc<Common>,
    /// Another has it already.
    is_handed_over: bool,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.is_handed_over {
            // There is room: who takes a seat gives one back.
            let _ = self.common.free.0.try_send(());
        }
    }
}
