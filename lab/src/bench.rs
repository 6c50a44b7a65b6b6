//! `outbox-lab bench`: measures the relay on this machine.

mod aged;
mod backlog;
mod children;
mod clients;
mod databases;
mod delivery;
mod drain;
mod enqueue;
mod failing;
mod feed;
mod ground;
mod held_snapshot;
mod latency;
mod measures;
mod order_checker;
mod ordered;
mod page;
mod pinned;
mod producers;
mod registered;
mod relay_process;
mod relays;
mod report;

use anyhow::Result;
use comfy_table::Table;
use diesel_outbox::config::Config;
use serde_json::{Value, json};

use self::children::Receiver;
use self::ground::Ground;
use self::report::runs;
use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::settings::SettingFlags;
use diesel_outbox_cli::{logging, output, signals};

/// The most messages of a run: about 100 GB on the server's disk.
const MOST_MESSAGES: u64 = 100_000_000;
const MOST_ROUNDS: u32 = 100;

/// Options of `bench`.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_help_heading = "Scenarios"
)]
#[command(subcommand_value_name = "SCENARIO")]
#[command(
    after_help = "Without a scenario, runs `drain` and `latency` with the options above. \
    Works in a temporary schema, which is dropped at the end, even after Ctrl-C. Without \
    OUTBOX_URL, starts a receiver in its own process."
)]
pub(crate) struct Options {
    #[command(subcommand)]
    work: Option<Work>,
    #[command(flatten)]
    drain: drain::Options,
    #[command(flatten)]
    latency: latency::Options,
    #[command(flatten)]
    common: Common,
}

impl Options {
    fn scenario(&self) -> Option<&Scenario> {
        match &self.work {
            Some(Work::Scenario(scenario)) => Some(scenario),
            _ => None,
        }
    }
}

/// Options of every scenario. `--batch`, `--mode` and `--url` are settings.
#[derive(Debug, clap::Args)]
#[group(skip)]
struct Common {
    /// Size of each payload, in bytes
    #[arg(long, global = true, default_value_t = 250, value_name = "NUMBER", value_parser = whole(16..=1_000_000_u32))]
    payload_bytes: u32,
    /// Number of sender threads [default: the setting --concurrency]
    #[arg(long, global = true, value_name = "NUMBER", value_parser = whole(1..=1_024_usize))]
    senders: Option<usize>,
    /// Print the result as JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Work {
    #[command(flatten)]
    Scenario(Scenario),
    /// Run a relay that reports its progress, for other scenarios
    #[command(hide = true)]
    RelayProcess,
}

#[derive(Debug, clap::Subcommand)]
enum Scenario {
    /// Measure the rate and the cost of delivering a backlog (10 s, 200 MB)
    Drain(drain::Options),
    /// Measure the time from commit to response, on an idle outbox (5 s)
    Latency(latency::Options),
    /// Measure the effect of a large backlog on the relay (5 min, 15 GB)
    ///
    /// Ten million waiting messages take about 12 GB on the server, plus WAL: --waiting sets their
    /// number. If they slow the relay down, the scenario takes longer.
    Backlog(backlog::Options),
    /// Measure the effect of an open transaction that holds back vacuum (5 min, 3 GB)
    ///
    /// Messages settled meanwhile leave dead rows in the table and its indexes. If the relay reads
    /// them again, the scenario takes much longer.
    HeldSnapshot(held_snapshot::Options),
    /// Measure a steady load beside an open transaction, minute by minute (2 min, 100 MB)
    ///
    /// A transaction with a number and an old snapshot stays open, so vacuum removes nothing that the relay settles.
    /// Beside such a transaction, many queues get slower with each minute.
    Pinned(pinned::Options),
    /// Measure the effect of past deliveries on rate and WAL (10 min, 8 GB)
    ///
    /// The aged outbox first inserts and delivers all past messages. Then a fresh outbox and the aged outbox take
    /// turns; with --forget-after, so does an outbox that deletes its ledger entries while it runs. The fresh outbox
    /// delivers as many messages before each turn, because files written for the first time are up to 10 % faster:
    /// an effect that ends within an outbox's first minutes.
    Aged(aged::Options),
    /// Measure the cost of ordering keys, and check the order (5 min, 2 GB)
    ///
    /// Exits with code 1 if a message is sent after a later message of its key (misorder), or at the
    /// same time as another message of its key (overlap).
    Ordered(ordered::Options),
    /// Measure the effect of a failing destination on the others (20 s, 200 MB)
    Failing(failing::Options),
    /// Measure feeds: storing beside a drain over HTTP, reading, long polls (1 min, 500 MB)
    Feed(feed::Options),
    /// Measure cost, fairness and isolation of many endpoints (7 min, 2 GB)
    ///
    /// Compares their rate with one configured destination, for tenants of very different sizes. Then measures how
    /// fairly destinations with a backlog are served, and the latency at a steady rate: alone, alongside destinations
    /// that never respond, and alongside a tenant with a million waiting messages. All destinations have the URL of
    /// OUTBOX_URL.
    Registered(registered::Options),
    /// Measure several relay processes on one outbox (1 min, 500 MB)
    Relays(relays::Options),
    /// Measure one process for many databases, of which few are busy (2 min, 3 GB)
    Databases(databases::Options),
    /// Measure the cost of the admin page, and its response times (3 min, 3 GB)
    ///
    /// Every page is loaded once a second while a relay delivers, with many waiting messages and
    /// many dead letters.
    Page(page::Options),
    /// Measure the enqueue rate of one client, for each function (1 min, 500 MB)
    Enqueue(enqueue::Options),
    /// Measure the cost of the outbox for clients that write to it (2 min, 500 MB)
    ///
    /// Compares commits with and without the table's trigger, which wakes a sleeping relay: while
    /// there is no relay, while a relay sleeps, and while a relay process delivers a backlog. The
    /// trigger is disabled only on the table of the bench.
    Producers(producers::Options),
}

impl Scenario {
    /// The name, and the table of a report.
    fn shown(&self) -> (&'static str, fn(&Value) -> Table) {
        match self {
            Self::Drain(_) => ("drain", drain::table),
            Self::Latency(_) => ("latency", latency::table),
            Self::Backlog(_) => ("backlog", |of| runs(of, backlog::COLUMNS)),
            Self::HeldSnapshot(_) => ("held-snapshot", |of| runs(of, held_snapshot::COLUMNS)),
            Self::Pinned(_) => ("pinned", |of| runs(of, pinned::COLUMNS)),
            Self::Aged(_) => ("aged", |of| runs(of, aged::COLUMNS)),
            Self::Ordered(_) => ("ordered", |of| runs(of, ordered::COLUMNS)),
            Self::Failing(_) => ("failing", |of| runs(of, failing::COLUMNS)),
            Self::Feed(_) => ("feed", feed::table),
            Self::Registered(_) => ("registered", registered::table),
            Self::Relays(_) => ("relays", |of| runs(of, relays::COLUMNS)),
            Self::Databases(_) => ("databases", |of| runs(of, databases::COLUMNS)),
            Self::Page(_) => ("page", page::table),
            Self::Enqueue(_) => ("enqueue", |of| runs(of, enqueue::COLUMNS)),
            Self::Producers(_) => ("producers", |of| runs(of, producers::COLUMNS)),
        }
    }

    fn measure(&self, ground: &mut Ground) -> Result<Value> {
        match self {
            Self::Drain(options) => drain::measure(options, ground),
            Self::Latency(options) => latency::measure(options, ground),
            Self::Backlog(options) => backlog::measure(options, ground),
            Self::HeldSnapshot(options) => held_snapshot::measure(options, ground),
            Self::Pinned(options) => pinned::measure(options, ground),
            Self::Aged(options) => aged::measure(options, ground),
            Self::Ordered(options) => ordered::measure(options, ground),
            Self::Failing(options) => failing::measure(options, ground),
            Self::Feed(options) => feed::measure(options, ground),
            Self::Registered(options) => registered::measure(options, ground),
            Self::Relays(options) => relays::measure(options, ground),
            Self::Databases(options) => databases::measure(options, ground),
            Self::Page(options) => page::measure(options, ground),
            Self::Enqueue(options) => enqueue::measure(options, ground),
            Self::Producers(options) => producers::measure(options, ground),
        }
    }

    /// Fails if the report shows a broken guarantee.
    fn verdict(&self, report: &Value) -> Result<()> {
        match self {
            Self::Ordered(_) => ordered::verdict(report),
            _ => Ok(()),
        }
    }
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    if std::env::var_os("RUST_LOG").is_some() {
        logging::start(&config)?;
    }
    if let Some(senders) = options.common.senders {
        config.set("OUTBOX_CONCURRENCY", &senders.to_string())?;
    }
    // Each scenario sets its own routes and destinations.
    config.routes.clear();
    config.destinations.clear();
    if let Some(Work::RelayProcess) = options.work {
        return relay_process::run(config);
    }
    if cfg!(debug_assertions) {
        eprintln!(
            "outbox-lab: this is a debug build: only a release build gives meaningful numbers"
        );
    }
    let report = on_ground(options, config, settings)?;
    if options.common.json {
        output::json(&report)?;
    } else {
        show(options, &report)?;
    }
    options
        .scenario()
        .map_or(Ok(()), |scenario| scenario.verdict(&report))
}

/// Measures in a temporary schema.
fn on_ground(options: &Options, mut config: Config, flags: &SettingFlags) -> Result<Value> {
    let signals = signals::channel()?;
    let _receiver = match config.url {
        Some(_) => None,
        None => {
            let receiver = Receiver::start(200)?;
            config.set("OUTBOX_URL", &receiver.url)?;
            Some(receiver)
        }
    };
    let mut ground = Ground::new(config, &options.common, flags, signals)?;
    let result = measure(options, &mut ground);
    ground.remove()?;
    result
}

fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut report = match options.scenario() {
        Some(scenario) => scenario.measure(ground)?,
        None => {
            let mut report = drain::measure(&options.drain, ground)?;
            report["paced"] = match options.latency.commits() {
                0 => Value::Null,
                _ => latency::measure(&options.latency, ground)?,
            };
            report
        }
    };
    let name = options
        .scenario()
        .map_or("all", |scenario| scenario.shown().0);
    report["scenario"] = json!(name);
    ground.describe(&mut report);
    Ok(report)
}

fn show(options: &Options, report: &Value) -> Result<()> {
    let table = match options.scenario() {
        Some(scenario) => scenario.shown().1(report),
        None => {
            let mut table = drain::table(report);
            if !report["paced"].is_null() {
                table.add_row(latency::row(&report["paced"]));
            }
            table
        }
    };
    output::line(report::heading(report))?;
    output::line(table)
}
