//! What the order of keys costs, and whether it is kept.

use std::sync::Arc;

use anyhow::{Result, ensure};
use comfy_table::Table;
use diesel_outbox::{HttpDispatcher, Relay};
use serde_json::{Value, json};

use super::MOST_MESSAGES;
use super::delivery::{Delivery, deliver_with};
use super::ground::{Fill, Ground};
use super::order_checker::{Breaches, OrderChecker, Watched};
use super::report::{self, Unit};
use crate::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages of a run; where that is fewer than 10 for each key, 10 for each
    #[arg(long, default_value_t = 200_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Keys with as many messages each: a run for each number
    #[arg(long, value_delimiter = ',', default_value = "200,100000", value_name = "NUMBERS", value_parser = whole(1..=MOST_KEYS))]
    keys: Vec<u64>,
    /// Keys of which the n-th has an n-th of the first one's messages (Zipf); 0: no such run
    #[arg(long, default_value_t = 10_000, value_name = "NUMBER", value_parser = whole(0..=MOST_KEYS))]
    zipf_keys: u64,
    /// Messages that all have one key; 0: no such run
    #[arg(long, default_value_t = 3_000, value_name = "NUMBER", value_parser = whole(0..=MOST_MESSAGES))]
    hot_messages: u64,
}

/// With [`LEAST_PER_KEY`] messages each, as many messages as a run may have.
const MOST_KEYS: u64 = MOST_MESSAGES / LEAST_PER_KEY;
/// Fewer messages of a key are hardly in an order.
const LEAST_PER_KEY: u64 = 10;

/// How keys are spread over messages.
struct Shape {
    name: &'static str,
    keys: u64,
    messages: u64,
    /// The key of the message `n`, as SQL.
    key: String,
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut runs = Vec::new();
    for shape in shapes(options) {
        ground.say(format_args!("{}, keys: {}", shape.name, shape.keys));
        // Just before each: machines drift.
        let (unordered, _) = one(&Fill::plain(options.messages), ground)?;
        let (ordered, breaches) = one(&Fill::keyed(shape.messages, &shape.key), ground)?;
        runs.push(json!({
            "shape": shape.name,
            "keys": shape.keys,
            "messages": shape.messages,
            "messages_per_second": ordered.rate(),
            "unordered_messages_per_second": unordered.rate(),
            "ratio_to_unordered": ordered.rate() / unordered.rate(),
            "claim_ms": ordered.claim_ms(),
            "claim_p99_ms": ordered.claim_p99_ms(),
            "messages_per_claim": ordered.messages as f64 / ordered.stats.claims as f64,
            "continued_share": ordered.stats.continued as f64 / ordered.messages as f64,
            "own_cpu_us_per_message": ordered.cpu_us_per_message(),
            "misorders": breaches.misorders,
            "overlaps": breaches.overlaps,
        }));
    }
    let sum = |key: &str| runs.iter().filter_map(|run| run[key].as_u64()).sum::<u64>();
    Ok(json!({
        "misorders": sum("misorders"),
        "overlaps": sum("overlaps"),
        "runs": runs,
    }))
}

/// An error where the order of a key was broken.
pub(super) fn verdict(report: &Value) -> Result<()> {
    let count = |key: &str| report[key].as_u64().unwrap_or_default();
    let (misorders, overlaps) = (count("misorders"), count("overlaps"));
    ensure!(
        misorders + overlaps == 0,
        "the order of keys was broken: {misorders} messages were sent after a later one of their key, {overlaps} beside another one of their key"
    );
    Ok(())
}

fn shapes(options: &Options) -> Vec<Shape> {
    let mut shapes: Vec<Shape> = options
        .keys
        .iter()
        .map(|keys| Shape {
            name: "uniform",
            keys: *keys,
            messages: keys * (options.messages / keys).max(LEAST_PER_KEY),
            key: format!("'key-' || n % {keys}"),
        })
        .collect();
    if options.zipf_keys > 0 {
        let keys = options.zipf_keys;
        shapes.push(Shape {
            name: "zipf",
            keys,
            messages: options.messages,
            // The power of an evenly spread number; a hash, so that each run has the same keys.
            key: format!(
                "'key-' || floor(power({keys}, (hashint8(n) + 2147483648) / 4294967296.0))"
            ),
        });
    }
    if options.hot_messages > 0 {
        shapes.push(Shape {
            name: "hot",
            keys: 1,
            messages: options.hot_messages,
            key: "'key'".to_owned(),
        });
    }
    shapes
}

fn one(fill: &Fill, ground: &mut Ground) -> Result<(Delivery, Breaches)> {
    ground.fresh()?;
    ground.fill(fill)?;
    ground.quiet()?;
    let watched = Arc::new(Watched::default());
    let checker = OrderChecker {
        http: HttpDispatcher::new(&ground.config)?,
        watched: Arc::clone(&watched),
    };
    let relay = Relay::from_config(ground.config.clone()).dispatcher(checker);
    let delivery = deliver_with(ground, relay, fill.messages)?;
    Ok((delivery, watched.breaches()))
}

pub(super) fn table(report: &Value) -> Table {
    report::runs(
        report,
        &[
            ("shape", "shape", Unit::Word),
            ("keys", "keys", Unit::Count),
            ("messages", "messages", Unit::Count),
            ("delivered/s", "messages_per_second", Unit::Count),
            ("without keys", "unordered_messages_per_second", Unit::Count),
            ("ratio", "ratio_to_unordered", Unit::Ratio),
            ("a claim", "claim_ms", Unit::Millis),
            ("continued", "continued_share", Unit::Percent),
            ("misorders", "misorders", Unit::Count),
            ("overlaps", "overlaps", Unit::Count),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_order_is_an_error() {
        assert!(verdict(&json!({ "misorders": 0, "overlaps": 0 })).is_ok());
        for broken in [
            json!({ "misorders": 1, "overlaps": 0 }),
            json!({ "misorders": 0, "overlaps": 1 }),
        ] {
            assert!(verdict(&broken).is_err(), "{broken}");
        }
    }
}
