//! The effect of a large backlog, waiting behind the delivered messages, on the relay.

use anyhow::Result;
use diesel_outbox::Relay;
use serde_json::{Value, json};

use super::delivery::{Delivery, deliver_with, mean_of, rate_of};
use super::ground::{Fill, Ground};
use super::report::{Column, OWN_CPU, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages delivered from each outbox in each round
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Backlogs behind these messages; one run for each number
    #[arg(long, value_delimiter = ',', default_value = "10000,1000000,10000000", value_name = "NUMBERS", value_parser = whole(0..=MOST_MESSAGES))]
    waiting: Vec<u64>,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// Deliveries from an outbox with `waiting` messages behind the delivered messages.
struct Run {
    waiting: u64,
    table: String,
    deliveries: Vec<Delivery>,
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut runs = Vec::new();
    for (index, waiting) in options.waiting.iter().enumerate() {
        let run = Run {
            waiting: *waiting,
            table: format!("waiting_{index}"),
            deliveries: Vec::new(),
        };
        ground.enter(&run.table)?;
        ground.fresh()?;
        let delivered = options.messages * u64::from(options.rounds);
        ground.fill(&Fill::plain(delivered + waiting))?;
        ground.quiet()?;
        runs.push(run);
    }
    for round in 1..=options.rounds {
        for run in &mut runs {
            ground.say(format_args!("round {round}: {} waiting", run.waiting));
            ground.enter(&run.table)?;
            let relay = Relay::from_config(ground.config.clone()).limit(options.messages);
            run.deliveries
                .push(deliver_with(ground, relay, options.messages)?);
        }
    }
    let smallest = runs.iter().min_by_key(|run| run.waiting);
    let shown = |run: &Run| {
        let beside = &smallest.unwrap_or(run).deliveries;
        let claim_ms = mean_of(&run.deliveries, Delivery::claim_ms);
        json!({
            "waiting": run.waiting,
            "messages_per_second": rate_of(&run.deliveries),
            "rate_ratio_to_smallest": rate_of(&run.deliveries) / rate_of(beside),
            "claim_ms": claim_ms,
            "claim_ratio_to_smallest": claim_ms / mean_of(beside, Delivery::claim_ms),
            "claim_p99_ms": mean_of(&run.deliveries, Delivery::claim_p99_ms),
            "claim_max_ms": mean_of(&run.deliveries, Delivery::claim_max_ms),
            "own_cpu_us_per_message": mean_of(&run.deliveries, Delivery::cpu_us_per_message),
        })
    };
    Ok(json!({
        "messages": options.messages,
        "rounds": options.rounds,
        "runs": runs.iter().map(shown).collect::<Vec<_>>(),
    }))
}

pub(super) const COLUMNS: &[Column] = &[
    ("waiting behind", "waiting", Unit::Count),
    ("delivered/s", "messages_per_second", Unit::Count),
    (
        "rate ratio to the fewest",
        "rate_ratio_to_smallest",
        Unit::Ratio,
    ),
    ("mean claim", "claim_ms", Unit::Millis),
    (
        "claim ratio to the fewest",
        "claim_ratio_to_smallest",
        Unit::Ratio,
    ),
    ("p99 claim", "claim_p99_ms", Unit::Millis),
    ("max claim", "claim_max_ms", Unit::Millis),
    OWN_CPU,
];
