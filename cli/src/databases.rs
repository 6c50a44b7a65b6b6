//! `diesel-outbox run --databases FILE`: the outboxes of many databases in one process.
//!
//! A database without work costs one connection, and a thread that asks from time to time whether messages are due.
//! Then the thread closes the connection and starts a relay, which has two connections until it has found nothing for a
//! while. So the memory and the senders belong to the databases that need them, and a database that is down, or whose
//! receivers hang, takes nothing from the others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crossbeam_channel::{Receiver, Sender, bounded, select};
use diesel::PgConnection;
use diesel_outbox::config::Config;
use diesel_outbox::{ConfigError, Relay, RelayBuilder, RelayHandle, admin, program};
use secrecy::{ExposeSecret, SecretString};

use crate::admin::Bound;
use crate::number::whole;
use crate::settings::SettingFlags;
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

/// A relay that has found nothing for this time ends.
const LINGER: Duration = Duration::from_secs(5);
/// A relay whose database or process fails for this time ends, and its database waits like one that is down.
const PATIENCE: Duration = Duration::from_secs(10);
/// A relay that works for this time ends if databases wait for one.
const TURN: Duration = Duration::from_secs(30);
/// How often the thread looks at a relay.
const TICK: Duration = Duration::from_millis(500);
/// Each database has a relay at least this often: it cleans the ledger, and removes old leases.
const MAINTENANCE: Duration = Duration::from_secs(3600);
/// The longest wait before the next try, when a database cannot be reached, or a relay could do nothing for messages
/// that are due.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The wait between two questions.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// A question that takes long is asked again after this many times as long, but at most after this time.
const SHARE: u32 = 10;
const LONGEST_SHARE: Duration = Duration::from_secs(5);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn run(file: &Path, options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    logging::start(&config);
    descriptors::raise_limit();
    let (signals, reload) = signals::with_reload()?;
    let databases = read(file)?;
    let page = Bound::new(&config)?;
    let _page = page.map(Bound::serve_metrics).transpose()?;
    let mut group = Group::new(config, usize::try_from(options.busy)?);
    group.serve(databases)?;
    loop {
        select! {
            recv(signals) -> _ => break,
            recv(reload) -> _ => {
                let again = settings.load().map_err(Into::into);
                let again = again.and_then(|config| Ok((config, read(file)?)));
                match again.and_then(|(config, databases)| group.reload(config, databases)) {
                    Ok(()) => log::info!(event = "reloaded"; "reloaded the settings and the databases"),
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
        if name.is_empty() || name.contains(char::is_control) {
            return Err(bad("not a name".to_owned()).into());
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
    keepers: BTreeMap<String, Running>,
}

/// What the threads share.
struct Common {
    config: Mutex<Arc<Config>>,
    /// One for each relay that may run. Who takes one gives it back.
    seats: (Sender<()>, Receiver<()>),
}

/// A thread, and what ends it.
struct Running {
    url: SecretString,
    /// Dropped to end the thread.
    _stop: Sender<()>,
    reload: Sender<()>,
    thread: JoinHandle<()>,
}

impl Common {
    fn config(&self) -> MutexGuard<'_, Arc<Config>> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Databases may be waiting for a relay.
    fn is_full(&self) -> bool {
        self.seats.1.is_empty()
    }
}

/// The settings of each database.
fn settings_of_each(mut config: Config) -> Config {
    config.share_connection = true;
    config.listener = false;
    config
}

impl Group {
    fn new(config: Config, busy: usize) -> Self {
        let seats = bounded(busy);
        // As many as there is room for.
        while seats.0.try_send(()).is_ok() {}
        let config = Mutex::new(Arc::new(settings_of_each(config)));
        Self {
            common: Arc::new(Common { config, seats }),
            keepers: BTreeMap::new(),
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
        join(end)?;
        let count = databases.len();
        for (number, (name, url)) in (0..).zip(databases) {
            if self.keepers.contains_key(&name) {
                continue;
            }
            let (stop, stopped) = bounded(0);
            let (reload, reloaded) = bounded(1);
            let keeper = Keeper {
                name: name.clone(),
                url: url.clone(),
                common: Arc::clone(&self.common),
                stopped,
                reloaded,
                conn: None,
                failures: 0,
                idle: Idle::default(),
                // Not all at once, also not an hour later.
                maintenance: Instant::now() + MAINTENANCE * number / u32::try_from(count)?,
            };
            let thread = std::thread::Builder::new()
                .name(format!("{name} relay-keeper"))
                .spawn(move || keeper.run())
                .context("cannot start a thread")?;
            let running = Running {
                url,
                _stop: stop,
                reload,
                thread,
            };
            self.keepers.insert(name, running);
        }
        log::info!(event = "databases", count = count, busy = self.common.seats.0.capacity().unwrap_or(0); "serving {count} databases");
        Ok(())
    }

    fn reload(&mut self, config: Config, databases: Databases) -> Result<()> {
        *self.common.config() = Arc::new(settings_of_each(config));
        for running in self.keepers.values() {
            // Full: the thread will see these settings, too.
            let _ = running.reload.try_send(());
        }
        self.serve(databases)
    }

    fn has_failed(&self) -> bool {
        self.keepers.values().any(|one| one.thread.is_finished())
    }

    fn end(self) -> Result<()> {
        join(self.keepers)
    }
}

/// Ends all threads at once, and waits for them.
fn join(keepers: BTreeMap<String, Running>) -> Result<()> {
    // Drops what they wait for, all before the first is waited for.
    let threads = keepers.into_values().map(|running| running.thread);
    let threads: Vec<JoinHandle<()>> = threads.collect();
    let results: Vec<_> = threads.into_iter().map(JoinHandle::join).collect();
    ensure!(
        results.iter().all(Result::is_ok),
        "a thread panicked: the log says which"
    );
    Ok(())
}

/// What was known when a relay had nothing more to do.
#[derive(Default)]
struct Idle {
    /// The last message that waited.
    last: Option<i64>,
    /// The relays since then that found nothing to do.
    in_vain: u32,
    /// Until when messages that are due are left to it that no relay could send them.
    until: Option<Instant>,
}

/// Serves one database.
struct Keeper {
    name: String,
    url: SecretString,
    common: Arc<Common>,
    /// Disconnected when the thread is to end.
    stopped: Receiver<()>,
    reloaded: Receiver<()>,
    conn: Option<PgConnection>,
    /// Failures since the last success.
    failures: u32,
    idle: Idle,
    /// When a relay runs even if no message is due.
    maintenance: Instant,
}

impl Keeper {
    fn run(mut self) {
        loop {
            let wait = match self.look() {
                Ok(wait) => self.has_worked(wait),
                Err(error) => self.has_failed(&error),
            };
            select! {
                recv(self.stopped) -> _ => return,
                default(wait) => {}
            }
        }
    }

    fn has_worked(&mut self, wait: Duration) -> Duration {
        if self.failures > 0 {
            log::info!(event = "database_recovered", failures = self.failures; "the database {} is back", self.name);
            self.failures = 0;
        }
        program::record_ready(&self.common.config(), &self.name, true);
        wait
    }

    fn has_failed(&mut self, error: &anyhow::Error) -> Duration {
        self.conn = None;
        program::record_ready(&self.common.config(), &self.name, false);
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
                let mut conn = admin::connect(&self.url, "databases", STATEMENT_TIMEOUT)?;
                admin::check_schema(&mut conn, &config.table)?;
                none.insert(conn)
            }
        };
        let began = Instant::now();
        let (has_work, last) = program::work(conn, &config.table)?;
        let took = began.elapsed();
        let now = Instant::now();
        let is_known = last == self.idle.last && self.idle.until.is_some_and(|until| now < until);
        if now < self.maintenance && (!has_work || is_known) {
            let share = LONGEST_SHARE.min(SHARE * took);
            return Ok(config.poll_interval.max(SHORTEST_WAIT).max(share));
        }
        let (_, free) = &self.common.seats;
        select! {
            recv(self.stopped) -> _ => return Ok(Duration::ZERO),
            // Never disconnected: `common` has the sender.
            recv(free) -> _ => {}
        }
        let seat = Seat(&self.common.seats.0);
        self.conn = None;
        let has_done_something = self.serve(&config, seat)?;
        self.maintenance = Instant::now() + MAINTENANCE;
        self.idle = match has_done_something {
            true => Idle::default(),
            false => Idle {
                last,
                in_vain: self.idle.in_vain + 1,
                until: Some(Instant::now() + longer(self.idle.in_vain)),
            },
        };
        Ok(Duration::ZERO)
    }

    /// Runs a relay as long as it has work. Returns whether it did anything.
    fn serve(&self, config: &Config, seat: Seat<'_>) -> Result<bool> {
        let relay = self.relay(config)?.start()?;
        let result = self.watch(&relay);
        // The end may take as long as a send, or as a database that is down.
        drop(seat);
        let ended = relay.shutdown(config.shutdown_timeout);
        let is_idle = relay.stats() == diesel_outbox::Stats::default();
        result.and(ended.map_err(Into::into)).map(|()| !is_idle)
    }

    fn relay(&self, config: &Config) -> Result<RelayBuilder> {
        let mut config = config.clone();
        config.set("DATABASE_URL", self.url.expose_secret())?;
        Ok(Relay::from_config(config).label(&self.name))
    }

    /// Returns when the relay is to end.
    fn watch(&self, relay: &RelayHandle) -> Result<()> {
        let began = Instant::now();
        let (mut stats, mut worked, mut healthy) = (relay.stats(), began, began);
        loop {
            select! {
                recv(self.stopped) -> _ => return Ok(()),
                recv(self.reloaded) -> asked => {
                    if asked.is_err() {
                        return Ok(());
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
            let health = relay.health();
            if health.is_ready() {
                healthy = Instant::now();
            }
            ensure!(
                healthy.elapsed() < PATIENCE,
                "the relay is not ready: {health}"
            );
            let before = std::mem::replace(&mut stats, relay.stats());
            if stats != before {
                worked = Instant::now();
            }
            let is_idle = worked.elapsed() >= LINGER && relay.wait_until_idle(TICK);
            if is_idle || (began.elapsed() >= TURN && self.common.is_full()) {
                return Ok(());
            }
        }
    }
}

/// The wait after so many failures.
fn longer(failures: u32) -> Duration {
    SHORTEST_WAIT
        .saturating_mul(2_u32.saturating_pow(failures))
        .min(LONGEST_WAIT)
}

/// Lets another database have a relay, when dropped.
struct Seat<'a>(&'a Sender<()>);

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        // There is room: who takes a seat gives one back.
        let _ = self.0.try_send(());
    }
}
