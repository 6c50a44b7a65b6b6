//! Several relays on one outbox, each in its own process.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use super::children::RelayProcess;
use super::delivery::Patience;
use super::ground::{Fill, Ground};
use super::relay_process::Done;
use super::report::{Column, OWN_CPU, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages per run
    #[arg(long, default_value_t = 200_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Relay processes; one run for each number
    #[arg(long, value_delimiter = ',', default_value = "1,2,4", value_name = "NUMBERS", value_parser = whole(1..=64_u64))]
    processes: Vec<u64>,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// The interval between two readings of the relays' counts.
const TICK: Duration = Duration::from_millis(20);

/// All rounds with this number of relays.
struct Run {
    processes: u64,
    seconds: f64,
    /// The counts of each relay.
    done: Vec<Done>,
}

impl Run {
    fn new(processes: u64) -> Self {
        Self {
            processes,
            seconds: 0.0,
            done: (0..processes).map(|_| Done::default()).collect(),
        }
    }

    fn delivered(&self) -> f64 {
        self.sum(|done| done.delivered)
    }

    fn rate(&self) -> f64 {
        self.delivered() / self.seconds
    }

    fn sum(&self, count: fn(&Done) -> u64) -> f64 {
        self.done.iter().map(|done| count(done) as f64).sum()
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut runs: Vec<Run> = options.processes.iter().map(|one| Run::new(*one)).collect();
    for round in 1..=options.rounds {
        for run in &mut runs {
            ground.say(format_args!("round {round}: relays: {}", run.processes));
            one(run, options.messages, ground)?;
        }
    }
    let fewest = runs.iter().min_by_key(|run| run.processes);
    let fewest = fewest.map_or(f64::NAN, Run::rate);
    let shown = |run: &Run| {
        let share = |done: &Done| done.delivered as f64 / run.delivered();
        let cpu: f64 = run.done.iter().map(|done| done.cpu_seconds).sum();
        let claims = run.sum(|done| done.claims);
        json!({
            "processes": run.processes,
            "messages_per_second": run.rate(),
            "ratio_to_fewest": run.rate() / fewest,
            "shares": run.done.iter().map(share).collect::<Vec<_>>(),
            "least_share": run.done.iter().map(share).fold(1.0, f64::min),
            "most_share": run.done.iter().map(share).fold(0.0, f64::max),
            "conflicts": run.sum(|done| done.conflicts) as u64,
            "messages_per_claim": run.delivered() / claims,
            "claim_ms": run.sum(|done| done.claim_micros) / 1000.0 / claims,
            "own_cpu_us_per_message": cpu * 1e6 / run.delivered(),
        })
    };
    Ok(json!({
        "messages": options.messages,
        "rounds": options.rounds,
        "runs": runs.iter().map(shown).collect::<Vec<_>>(),
    }))
}

fn one(run: &mut Run, messages: u64, ground: &mut Ground) -> Result<()> {
    ground.fresh()?;
    ground.fill(&Fill::plain(messages))?;
    ground.quiet()?;
    let mut relays = (0..run.processes)
        .map(|_| RelayProcess::start(ground))
        .collect::<Result<Vec<_>>>()?;
    let progress = ground.progress("delivering", messages);
    let mut patience = Patience::new();
    let began = Instant::now();
    for relay in &mut relays {
        relay.begin()?;
    }
    loop {
        let mut all = Done::default();
        for relay in &mut relays {
            all.add(relay.done()?);
        }
        progress.set_position(all.delivered);
        if all.delivered >= messages {
            break;
        }
        patience.look(all.delivered, all.failed, messages, &ground.config)?;
        ground.wait(TICK)?;
    }
    run.seconds += began.elapsed().as_secs_f64();
    progress.finish_and_clear();
    for (relay, sum) in relays.into_iter().zip(&mut run.done) {
        sum.add(relay.finish()?);
    }
    Ok(())
}

pub(super) const COLUMNS: &[Column] = &[
    ("relays", "processes", Unit::Count),
    ("delivered/s", "messages_per_second", Unit::Count),
    ("ratio to the fewest", "ratio_to_fewest", Unit::Ratio),
    ("least share", "least_share", Unit::Percent),
    ("most share", "most_share", Unit::Percent),
    ("conflicts", "conflicts", Unit::Count),
    ("messages per claim", "messages_per_claim", Unit::Count),
    ("mean claim", "claim_ms", Unit::Millis),
    OWN_CPU,
];
