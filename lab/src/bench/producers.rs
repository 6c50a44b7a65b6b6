//! The cost of the outbox for clients that write to it: commits per second of many clients, with and without the
//! table's triggers, and with a relay that is absent, asleep or busy, alone or with others.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use diesel::connection::SimpleConnection;
use diesel_outbox::admin::{self, Pausable};
use serde_json::{Value, json};

use super::children::RelayProcess;
use super::clients::{Client, beside};
use super::delivery::Patience;
use super::ground::{Fill, Ground, TOPIC};
use super::relay_process::Done;
use super::report::{Column, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Clients that commit one message after another, each on its own connection
    #[arg(long, default_value_t = 16, value_name = "NUMBER", value_parser = whole(1..=1_000_u32))]
    clients: u32,
    /// Duration of a run, in seconds
    #[arg(long, default_value_t = 5, value_name = "NUMBER", value_parser = whole(1..=3_600_u64))]
    seconds: u64,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
    /// Messages that keep a relay busy [default: 40,000 per second of a run, and 80,000]
    #[arg(long, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    backlog: Option<u64>,
}

/// More messages than a relay delivers in a second alongside busy clients.
const BACKLOG_PER_SECOND: u64 = 40_000;
/// Until a busy relay delivers, and until its last count is read.
const STARTING: Duration = Duration::from_secs(2);
/// The time after which an idle relay sleeps.
const ASLEEP_AFTER: Duration = Duration::from_secs(2);
/// The interval of checks whether a relay has begun to deliver.
const TICK: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Absent,
    /// Idle, because its only topic is paused.
    Asleep,
    /// Delivers a backlog.
    Busy,
    /// Delivers what the clients write.
    KeepsUp,
}

/// Three more relays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Others {
    None,
    /// They serve the same, and sleep in between.
    Serve,
    StandBy,
}

/// A measured situation, and the situation that it is compared with.
struct Situation {
    name: &'static str,
    has_triggers: bool,
    relay: Presence,
    others: Others,
    compared_with: &'static str,
    commits: u64,
    seconds: f64,
    /// Messages that the relay delivered meanwhile.
    delivered: u64,
}

impl Situation {
    fn all() -> Vec<Self> {
        let alone = "no_trigger";
        let busy = "relay_busy_no_trigger";
        let keeps_up = "relay_keeps_up";
        [
            (alone, false, Presence::Absent, Others::None, alone),
            ("relay_absent", true, Presence::Absent, Others::None, alone),
            ("relay_asleep", true, Presence::Asleep, Others::None, alone),
            (busy, false, Presence::Busy, Others::None, busy),
            ("relay_busy", true, Presence::Busy, Others::None, busy),
            (
                "relay_busy_three_stand_by",
                true,
                Presence::Busy,
                Others::StandBy,
                "relay_busy",
            ),
            (keeps_up, true, Presence::KeepsUp, Others::None, keeps_up),
            (
                "four_relays_keep_up",
                true,
                Presence::KeepsUp,
                Others::Serve,
                keeps_up,
            ),
        ]
        .map(|(name, has_triggers, relay, others, compared_with)| Self {
            name,
            has_triggers,
            relay,
            others,
            compared_with,
            commits: 0,
            seconds: 0.0,
            delivered: 0,
        })
        .into()
    }

    fn rate(&self) -> f64 {
        self.commits as f64 / self.seconds
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut situations = Situation::all();
    for round in 1..=options.rounds {
        for situation in &mut situations {
            ground.say(format_args!("round {round}: {}", situation.name));
            one(situation, options, ground)
                .with_context(|| format!("in the situation {}", situation.name))?;
        }
    }
    let shown = |situation: &Situation| {
        let beside = situations
            .iter()
            .find(|other| other.name == situation.compared_with)
            .map_or(f64::NAN, Situation::rate);
        json!({
            "situation": situation.name,
            "commits_per_second": situation.rate(),
            "compared_with": situation.compared_with,
            "ratio": situation.rate() / beside,
            "relay_messages_per_second": situation.delivered as f64 / situation.seconds,
        })
    };
    Ok(json!({
        "clients": options.clients,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "runs": situations.iter().map(shown).collect::<Vec<_>>(),
    }))
}

fn one(situation: &mut Situation, options: &Options, ground: &mut Ground) -> Result<()> {
    ground.fresh()?;
    if !situation.has_triggers {
        ground.conn.batch_execute(&format!(
            "ALTER TABLE {} DISABLE TRIGGER USER",
            ground.config.table
        ))?;
    }
    let backlog = options
        .backlog
        .unwrap_or((options.seconds + STARTING.as_secs()) * BACKLOG_PER_SECOND);
    let is_busy = situation.relay == Presence::Busy;
    if is_busy {
        ground.fill(&Fill::plain(backlog))?;
    }
    let is_paused = is_busy || situation.relay == Presence::Asleep;
    let table = ground.config.table.clone();
    if is_paused {
        admin::pause(
            &mut ground.conn,
            &table,
            Pausable::Topic,
            TOPIC,
            "benchmark",
            None,
        )?;
    }
    ground.quiet()?;
    let stands_by = || ("OUTBOX_SINGLE_ACTIVE", "true".to_owned());
    let more = (situation.others == Others::StandBy).then(stands_by);
    let relays = match (situation.relay, situation.others) {
        (Presence::Absent, _) => 0,
        (_, Others::None) => 1,
        (_, Others::Serve | Others::StandBy) => 4,
    };
    let mut running = Vec::new();
    for _ in 0..relays {
        let mut relay = RelayProcess::start_with(ground, more.clone())?;
        relay.begin()?;
        running.push(relay);
    }
    if relays > 0 {
        ground.wait(ASLEEP_AFTER)?;
    }
    let mut done = || {
        let mut sum = Done::default();
        for relay in &mut running {
            sum.add(relay.done()?);
        }
        anyhow::Ok(sum)
    };
    // Only now, because others take a while to start, and a busy relay must still be busy when they sleep.
    if is_busy {
        admin::resume(&mut ground.conn, &table, Pausable::Topic, TOPIC)?;
        let mut patience = Patience::new();
        loop {
            let Done {
                delivered, failed, ..
            } = done()?;
            if delivered > 0 {
                break;
            }
            patience.look(delivered, failed, backlog, &ground.config)?;
            ground.wait(TICK)?;
        }
    }
    let before = done()?.delivered;
    let (commits, seconds) = produce(options, ground)?;
    let after = done()?.delivered;
    situation.commits += commits;
    situation.seconds += seconds;
    situation.delivered += after - before;
    // A relay that is killed may leave a statement behind, which meets the drop of its tables in a deadlock.
    for relay in running {
        relay.finish()?;
    }
    ensure!(
        !is_busy || after < backlog,
        "the relay ran out of messages: raise --backlog above {backlog}"
    );
    Ok(())
}

/// Runs the clients. Returns the number of commits, and the elapsed seconds.
fn produce(options: &Options, ground: &Ground) -> Result<(u64, f64)> {
    let clients = (0..options.clients)
        .map(|_| Client::new(ground, Duration::ZERO, Duration::ZERO))
        .collect::<Result<Vec<_>>>()?;
    let began = Instant::now();
    let wait = |_: &_| ground.wait(Duration::from_secs(options.seconds));
    let ((), commits) = beside(clients, wait)?;
    Ok((commits, began.elapsed().as_secs_f64()))
}

pub(super) const COLUMNS: &[Column] = &[
    ("situation", "situation", Unit::Word),
    ("commits/s", "commits_per_second", Unit::Count),
    ("compared with", "compared_with", Unit::Word),
    ("ratio", "ratio", Unit::Ratio),
    (
        "relay's messages/s",
        "relay_messages_per_second",
        Unit::Count,
    ),
];
