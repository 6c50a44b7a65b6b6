//! `diesel-outbox bench`: what the relay does on this machine.

mod aged;
mod backlog;
mod children;
mod delivery;
mod drain;
mod enqueue;
mod failing;
mod ground;
mod held_snapshot;
mod latency;
mod measures;
mod order_checker;
mod ordered;
mod page;
mod producers;
mod registered;
mod relay_process;
mod relays;
mod report;

use anyhow::Result;
use diesel_outbox::Config;
use serde_json::{Value, json};

use self::children::Receiver;
use self::ground::Ground;
use crate::number::whole;
use crate::settings::SettingFlags;
use crate::{logging, output, signals};

/// Messages of a run, at most: about 100 GB of the server's disk.
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
    after_help = "Without a scenario: a drain and paced commits, with the options above. \
    Works in a schema of its own, which is removed at the end, also after Ctrl-C. Without \
    OUTBOX_URL a receiver is started in a process of its own."
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

/// What every scenario has. `--batch`, `--mode` and `--url` are settings.
#[derive(Debug, clap::Args)]
#[group(skip)]
struct Common {
    /// Bytes of each payload
    #[arg(long, global = true, default_value_t = 250, value_name = "NUMBER", value_parser = whole(16..=1_000_000_u32))]
    payload_bytes: u32,
    /// Threads that send [default: the setting --concurrency]
    #[arg(long, global = true, value_name = "NUMBER", value_parser = whole(1..=1_024_usize))]
    senders: Option<usize>,
    /// Show the result as JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Work {
    #[command(flatten)]
    Scenario(Scenario),
    /// A relay that tells what it does, for `relays` and `producers`
    #[command(hide = true)]
    RelayProcess,
}

#[derive(Debug, clap::Subcommand)]
enum Scenario {
    /// How fast what waits is delivered, and what it costs (10 s, 200 MB)
    Drain(drain::Options),
    /// From the commit to the receiver's answer, on an idle outbox (5 s)
    Latency(latency::Options),
    /// Whether it slows down with what waits behind (5 minutes, 15 GB)
    ///
    /// Ten million messages take the server about 12 GB, and its log some more: --waiting says how
    /// many there are. A relay that is slow with them takes longer.
    Backlog(backlog::Options),
    /// Whether it slows down while an open transaction holds vacuum up (5 minutes, 3 GB)
    ///
    /// What is settled meanwhile stays in the table and its indexes. A relay that reads it all again
    /// takes much longer.
    HeldSnapshot(held_snapshot::Options),
    /// Whether it slows down, or writes more, with what was delivered before (10 minutes, 8 GB)
    ///
    /// The past is lived through: messages are inserted and delivered. Then a new outbox and the aged one take
    /// turns, and with --forget-after one that forgets what it has delivered while it goes on. The new one delivers
    /// as many messages before each of its turns: files that are written for the first time are up to a tenth
    /// faster, and that is gone after an outbox's first minutes.
    Aged(aged::Options),
    /// What the order of keys costs, and whether it is kept (5 minutes, 2 GB)
    ///
    /// Ends with exit code 1 where a message is sent after a later one of its key (misorders), or
    /// beside another one of its key (overlaps).
    Ordered(ordered::Options),
    /// What messages for a destination that always fails take from the others (20 s, 200 MB)
    Failing(failing::Options),
    /// What many registered destinations cost, and take from each other (5 minutes, 2 GB)
    ///
    /// Beside one configured destination, with tenants of very different sizes; how fairly those with a backlog are
    /// served; and how soon messages come at a steady rate, alone, beside destinations that never answer, and beside
    /// a tenant with a million messages waiting. With OUTBOX_URL as the receiver of all.
    Registered(registered::Options),
    /// What more relays, each a process, deliver from one outbox (1 minute, 500 MB)
    Relays(relays::Options),
    /// What the admin page costs the relay beside it, and how soon it answers (3 minutes, 3 GB)
    ///
    /// Every page is loaded once a second while a relay delivers, with many messages waiting behind
    /// and many dead.
    Page(page::Options),
    /// How fast one client enqueues, by each of the three functions for it (1 minute, 500 MB)
    Enqueue(enqueue::Options),
    /// What the outbox costs the clients that write into it (2 minutes, 500 MB)
    ///
    /// Without and with the table's trigger, which wakes a relay that sleeps, while no relay is
    /// there, while one sleeps, and while one delivers a backlog in a process of its own. The
    /// trigger is disabled for the comparison, on the bench's own table only.
    Producers(producers::Options),
}

impl Scenario {
    fn name(&self) -> &'static str {
        match self {
            Self::Drain(_) => "drain",
            Self::Latency(_) => "latency",
            Self::Backlog(_) => "backlog",
            Self::HeldSnapshot(_) => "held-snapshot",
            Self::Aged(_) => "aged",
            Self::Ordered(_) => "ordered",
            Self::Failing(_) => "failing",
            Self::Registered(_) => "registered",
            Self::Relays(_) => "relays",
            Self::Page(_) => "page",
            Self::Enqueue(_) => "enqueue",
            Self::Producers(_) => "producers",
        }
    }

    fn measure(&self, ground: &mut Ground) -> Result<Value> {
        match self {
            Self::Drain(options) => drain::measure(options, ground),
            Self::Latency(options) => latency::measure(options, ground),
            Self::Backlog(options) => backlog::measure(options, ground),
            Self::HeldSnapshot(options) => held_snapshot::measure(options, ground),
            Self::Aged(options) => aged::measure(options, ground),
            Self::Ordered(options) => ordered::measure(options, ground),
            Self::Failing(options) => failing::measure(options, ground),
            Self::Registered(options) => registered::measure(options, ground),
            Self::Relays(options) => relays::measure(options, ground),
            Self::Page(options) => page::measure(options, ground),
            Self::Enqueue(options) => enqueue::measure(options, ground),
            Self::Producers(options) => producers::measure(options, ground),
        }
    }

    /// An error where the report shows that a promise was broken.
    fn verdict(&self, report: &Value) -> Result<()> {
        match self {
            Self::Ordered(_) => ordered::verdict(report),
            _ => Ok(()),
        }
    }

    fn table(&self, report: &Value) -> comfy_table::Table {
        match self {
            Self::Drain(_) => drain::table(report),
            Self::Latency(_) => latency::table(report),
            Self::Backlog(_) => backlog::table(report),
            Self::HeldSnapshot(_) => held_snapshot::table(report),
            Self::Aged(_) => aged::table(report),
            Self::Ordered(_) => ordered::table(report),
            Self::Failing(_) => failing::table(report),
            Self::Registered(_) => registered::table(report),
            Self::Relays(_) => relays::table(report),
            Self::Page(_) => page::table(report),
            Self::Enqueue(_) => enqueue::table(report),
            Self::Producers(_) => producers::table(report),
        }
    }
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    if std::env::var_os("RUST_LOG").is_some() {
        logging::start(&config);
    }
    if let Some(senders) = options.common.senders {
        config.set("OUTBOX_CONCURRENCY", &senders.to_string())?;
    }
    // The messages of a scenario go where the scenario wants them.
    config.routes.clear();
    config.destinations.clear();
    if let Some(Work::RelayProcess) = options.work {
        return relay_process::run(config);
    }
    if cfg!(debug_assertions) {
        eprintln!("diesel-outbox: this is not a release build: its numbers mean little");
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

/// Measures in a schema that is there for as long as it takes.
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
    let name = options.scenario().map_or("all", Scenario::name);
    report["scenario"] = json!(name);
    ground.describe(&mut report);
    Ok(report)
}

fn show(options: &Options, report: &Value) -> Result<()> {
    let table = match options.scenario() {
        Some(scenario) => scenario.table(report),
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
