//! Whether a relay slows down with what waits behind the messages that it delivers.

use anyhow::Result;
use comfy_table::Table;
use diesel_outbox::Relay;
use serde_json::{Value, json};

use super::delivery::{Delivery, deliver_with};
use super::ground::{Fill, Ground};
use super::report::{self, Unit};

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages to deliver
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,
    /// Messages that wait behind these: a run for each number
    #[arg(long, value_delimiter = ',', default_value = "10000,1000000,10000000", value_name = "NUMBERS", value_parser = report::count)]
    waiting: Vec<u64>,
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut runs = Vec::new();
    for waiting in &options.waiting {
        ground.say(format_args!("{waiting} waiting"));
        ground.fresh()?;
        ground.fill(&Fill::plain(options.messages + waiting))?;
        ground.quiet()?;
        let relay = Relay::from_config(ground.config.clone()).limit(options.messages);
        runs.push((*waiting, deliver_with(ground, relay, options.messages)?));
    }
    let smallest = runs.iter().min_by_key(|(waiting, _)| *waiting);
    let shown = |(waiting, run): &(u64, Delivery)| {
        let beside = smallest.map_or(run, |(_, run)| run);
        json!({
            "waiting": waiting,
            "messages_per_second": run.rate(),
            "rate_ratio_to_smallest": run.rate() / beside.rate(),
            "claim_ms": run.claim_ms(),
            "claim_ratio_to_smallest": run.claim_ms() / beside.claim_ms(),
            "claim_p99_ms": run.claim_p99_ms(),
            "own_cpu_us_per_message": run.cpu_us_per_message(),
        })
    };
    Ok(json!({
        "messages": options.messages,
        "runs": runs.iter().map(shown).collect::<Vec<_>>(),
    }))
}

pub(super) fn table(report: &Value) -> Table {
    report::runs(
        report,
        &[
            ("waiting behind", "waiting", Unit::Count),
            ("delivered/s", "messages_per_second", Unit::Count),
            (
                "of the rate with the fewest",
                "rate_ratio_to_smallest",
                Unit::Ratio,
            ),
            ("a claim", "claim_ms", Unit::Millis),
            (
                "of a claim with the fewest",
                "claim_ratio_to_smallest",
                Unit::Ratio,
            ),
            ("99 % of claims", "claim_p99_ms", Unit::Millis),
            (
                "own CPU per message",
                "own_cpu_us_per_message",
                Unit::Micros,
            ),
        ],
    )
}
