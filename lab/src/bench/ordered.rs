//! The cost of ordering keys, and a check that the order is kept.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use diesel_outbox::{Destination, HttpDispatcher, Relay, Route, program};
use serde_json::{Value, json};

use super::MOST_MESSAGES;
use super::delivery::{Delivery, deliver_with};
use super::ground::{Fill, Ground};
use super::order_checker::{Breaches, OrderChecker, Watched};
use super::report::{Column, Unit};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages per run, at least 10 for each key
    #[arg(long, default_value_t = 200_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Keys with equally many messages; one run for each number
    #[arg(long, value_delimiter = ',', default_value = "200,100000", value_name = "NUMBERS", value_parser = whole(1..=MOST_KEYS))]
    keys: Vec<u64>,
    /// Keys of the Zipf run: the nth key has 1/n of the first key's messages; 0 skips the run
    #[arg(long, default_value_t = 10_000, value_name = "NUMBER", value_parser = whole(0..=MOST_KEYS))]
    zipf_keys: u64,
    /// Messages of the run with a single key; 0 skips the run
    #[arg(long, default_value_t = 3_000, value_name = "NUMBER", value_parser = whole(0..=MOST_MESSAGES))]
    hot_messages: u64,
    /// The key_run of the destination, 1 to 500; each shape has a run for each number
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "NUMBERS", value_parser = whole(1..=LONGEST_RUN))]
    key_run: Vec<u64>,
}

/// The largest key_run.
const LONGEST_RUN: u64 = 500;
/// The destination of all messages.
const DESTINATION: &str = "ordered";

/// The most keys: with [`LEAST_PER_KEY`] messages each, a run has [`MOST_MESSAGES`].
const MOST_KEYS: u64 = MOST_MESSAGES / LEAST_PER_KEY;
/// The fewest messages of a key: fewer would hardly test the order.
const LEAST_PER_KEY: u64 = 10;

/// The distribution of keys over messages.
struct Shape {
    name: &'static str,
    keys: u64,
    messages: u64,
    /// The key of message `n`, as an SQL expression.
    key: String,
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut runs = Vec::new();
    let shapes = shapes(options).into_iter();
    let of_shape = |shape| {
        options
            .key_run
            .iter()
            .map(move |key_run| (Arc::clone(&shape), *key_run))
    };
    for (shape, key_run) in shapes.map(Arc::new).flat_map(of_shape) {
        ground.say(format_args!(
            "{}, keys: {}, key_run: {key_run}",
            shape.name, shape.keys
        ));
        // Measured right before each ordered run, because machines drift.
        let (unordered, _) = one(&Fill::plain(options.messages), key_run, ground)?;
        let (ordered, breaches) = one(&Fill::keyed(shape.messages, &shape.key), key_run, ground)?;
        runs.push(json!({
            "shape": shape.name,
            "keys": shape.keys,
            "key_run": key_run,
            "messages": shape.messages,
            "messages_per_second": ordered.rate(),
            "unordered_messages_per_second": unordered.rate(),
            "ratio_to_unordered": ordered.rate() / unordered.rate(),
            "claim_ms": ordered.claim_ms(),
            "claim_p99_ms": ordered.claim_p99_ms(),
            "messages_per_claim": ordered.messages as f64 / program::statements(&ordered.stats).claims as f64,
            "continued_share": program::statements(&ordered.stats).continued as f64 / ordered.messages as f64,
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

/// Fails if the order of a key was broken.
pub(super) fn verdict(report: &Value) -> Result<()> {
    let count = |key: &str| report[key].as_u64().unwrap_or_default();
    let (misorders, overlaps) = (count("misorders"), count("overlaps"));
    ensure!(
        misorders + overlaps == 0,
        "the order of keys was broken: {misorders} messages were sent after a later message of their key, {overlaps} at the same time as another message of their key"
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
            // A power of an evenly distributed number, which is a hash so that each run has the same keys.
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

fn one(fill: &Fill, key_run: u64, ground: &mut Ground) -> Result<(Delivery, Breaches)> {
    let mut config = ground.config.clone();
    let url = config.url.take().context("no URL of the receiver")?;
    let destination = Destination::new(DESTINATION, url.as_str())?;
    let key_run = usize::try_from(key_run)?;
    config
        .destinations
        .push(destination.configure(|destination| destination.policy.key_run = key_run));
    config.routes.push(Route::new("*", DESTINATION));
    ground.fresh()?;
    ground.fill(fill)?;
    ground.quiet()?;
    let watched = Arc::new(Watched::default());
    let checker = OrderChecker {
        http: HttpDispatcher::new(&config)?,
        watched: Arc::clone(&watched),
    };
    let relay = Relay::from_config(config).dispatcher(checker);
    let delivery = deliver_with(ground, relay, fill.messages)?;
    Ok((delivery, watched.breaches()))
}

pub(super) const COLUMNS: &[Column] = &[
    ("shape", "shape", Unit::Word),
    ("keys", "keys", Unit::Count),
    ("key_run", "key_run", Unit::Count),
    ("messages", "messages", Unit::Count),
    ("delivered/s", "messages_per_second", Unit::Count),
    ("without keys", "unordered_messages_per_second", Unit::Count),
    ("ratio", "ratio_to_unordered", Unit::Ratio),
    ("mean claim", "claim_ms", Unit::Millis),
    ("continued", "continued_share", Unit::Percent),
    ("misorders", "misorders", Unit::Count),
    ("overlaps", "overlaps", Unit::Count),
];

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
