//! The effect of a failing destination on the others.

use anyhow::Result;
use diesel_outbox::{Destination, Route};
use serde_json::{Value, json};

use super::children::Receiver;
use super::delivery::{Delivery, deliver, rate_of};
use super::ground::{Fill, Ground, TOPIC};
use super::report::{Column, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages for the working destination
    #[arg(long, default_value_t = 70_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Share of all messages that go to the failing destination, in percent
    #[arg(long, default_value_t = 30, value_name = "PERCENT", value_parser = whole(1..=99_u64))]
    percent: u64,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// The topic of the failing destination.
const FAILING_TOPIC: &str = "bench.failing";
const FAILING: &str = "failing";

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let receiver = Receiver::start(500)?;
    ground
        .config
        .destinations
        .push(Destination::new(FAILING, &receiver.url)?);
    ground
        .config
        .routes
        .push(Route::new(FAILING_TOPIC, FAILING));
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        ground.say(format_args!("round {round}"));
        alone.push(one(&Fill::plain(options.messages), options, ground)?);
        beside.push(one(&mixed(options), options, ground)?);
    }
    let run = |what: &str, deliveries: &[Delivery]| {
        json!({
            "what": what,
            "messages_per_second": rate_of(deliveries),
            "ratio": rate_of(deliveries) / rate_of(&alone),
            "failed_attempts": deliveries.iter().map(|one| one.stats.retried).sum::<u64>(),
            "released": deliveries.iter().map(|one| one.stats.released).sum::<u64>(),
        })
    };
    Ok(json!({
        "messages": options.messages,
        "failing_percent": options.percent,
        "rounds": options.rounds,
        "runs": [run("alone", &alone), run("beside_failing", &beside)],
    }))
}

fn one(fill: &Fill, options: &Options, ground: &mut Ground) -> Result<Delivery> {
    ground.fresh()?;
    ground.fill(fill)?;
    ground.quiet()?;
    deliver(ground, options.messages)
}

/// The same number of working messages, with failing messages spread evenly between them.
fn mixed(options: &Options) -> Fill {
    let working = 100 - options.percent;
    let failing = options.messages * options.percent / working;
    let all = options.messages + failing;
    Fill {
        messages: all,
        // The number of failing messages grows by one at n: n is a failing message.
        topic: format!(
            "CASE WHEN (n + 1) * {failing} / {all} > n * {failing} / {all}
                  THEN '{FAILING_TOPIC}' ELSE '{TOPIC}' END"
        ),
        ordering_key: "NULL".into(),
    }
}

pub(super) const COLUMNS: &[Column] = &[
    ("the working destination", "what", Unit::Word),
    ("delivered/s", "messages_per_second", Unit::Count),
    ("ratio to alone", "ratio", Unit::Ratio),
    ("failed attempts", "failed_attempts", Unit::Count),
    ("released unsent", "released", Unit::Count),
];
