//! The time from a commit to the receiver's response, at a steady rate on an idle outbox. Nothing calls
//! `RelayHandle::wake`: the relay learns of a commit on its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use comfy_table::Table;
use diesel::Connection;
use diesel_outbox::program;
use diesel_outbox::{
    ConfigError, Dispatcher, HttpDispatcher, Message, NewMessage, Outbox, Outcome, Relay,
};
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::ground::{Ground, TOPIC, payload};
use super::report::{self, Unit};
use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::output;

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// Paced commits per second; 0 for none
    #[arg(long, default_value_t = 100, value_name = "NUMBER", value_parser = whole(0..=100_000_u32))]
    rate: u32,
    /// Duration of the paced commits, in seconds
    #[arg(long, default_value_t = 5, value_name = "NUMBER", value_parser = whole(0..=3_600_u32))]
    paced_seconds: u32,
}

/// The time limit for the last response.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures the time from the commit of each message to the response.
struct Timed {
    http: HttpDispatcher,
    times: Arc<Times>,
}

struct Times {
    committed: Mutex<HashMap<uuid::Uuid, Instant>>,
    latencies: Mutex<Histogram<u64>>,
}

impl Dispatcher for Timed {
    fn dispatch(&self, message: &Message) -> Outcome {
        let outcome = self.http.dispatch(message);
        let now = Instant::now();
        let committed = self
            .times
            .committed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&message.message_id);
        if let Some(committed) = committed {
            let micros = u64::try_from((now - committed).as_micros()).unwrap_or(u64::MAX);
            let mut latencies = self
                .times
                .latencies
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            latencies.saturating_record(micros);
        }
        outcome
    }
}

impl Times {
    fn new() -> Result<Self> {
        Ok(Self {
            committed: Mutex::default(),
            // A microsecond to an hour.
            latencies: Mutex::new(Histogram::new_with_bounds(1, 3_600_000_000, 3)?),
        })
    }

    fn commits(&self, id: uuid::Uuid) {
        self.committed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, Instant::now());
    }
}

impl Options {
    pub(super) fn commits(&self) -> u32 {
        self.rate.saturating_mul(self.paced_seconds)
    }

    /// When the commit with this number is due, after the first.
    pub(super) fn due(&self, number: u32) -> Duration {
        Duration::from_secs(1) * number / self.rate
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    if options.commits() == 0 {
        let why = "--rate and --paced-seconds must be at least 1";
        return Err(ConfigError::new("bench latency", why).into());
    }
    ground.fresh()?;
    let times = Arc::new(Times::new()?);
    let dispatcher = Timed {
        http: HttpDispatcher::new(&ground.config)?,
        times: Arc::clone(&times),
    };
    let relay = Relay::from_config(ground.config.clone())
        .dispatcher(dispatcher)
        .start()?;
    let committed_per_second = commit_at_a_pace(options, ground, &times)?;
    ensure!(
        relay.wait_until_idle(PATIENCE),
        "the last messages were not settled within {} s",
        PATIENCE.as_secs()
    );
    relay.shutdown(ground.config.shutdown_timeout)?;
    ensure!(
        relay.stats().delivered == u64::from(options.commits()),
        "{} messages were committed, but {} were delivered: does the receiver respond with 2xx? ({})",
        options.commits(),
        relay.stats().delivered,
        program::summary(&ground.config),
    );
    let latencies = times
        .latencies
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    ensure!(
        latencies.len() == u64::from(options.commits()),
        "{} messages were committed, but {} got a response",
        options.commits(),
        latencies.len()
    );
    let millis = |quantile: f64| latencies.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(json!({
        "per_second": options.rate,
        "committed_per_second": committed_per_second,
        "messages": latencies.len(),
        "p50_ms": millis(0.5),
        "p90_ms": millis(0.9),
        "p99_ms": millis(0.99),
        "max_ms": latencies.max() as f64 / 1000.0,
    }))
}

/// Returns the commits per second, which are fewer than wanted if the server is slower.
fn commit_at_a_pace(options: &Options, ground: &mut Ground, times: &Times) -> Result<f64> {
    let outbox = Outbox::from(ground.config.table.clone());
    let payload = payload(ground.payload_bytes);
    let progress = ground.progress("committing", u64::from(options.commits()));
    let began = Instant::now();
    for n in 0..options.commits() {
        let due = began + options.due(n);
        ground.wait(due.saturating_duration_since(Instant::now()))?;
        let message = NewMessage::new(TOPIC, &payload)?;
        let id = message.message_id();
        ground.conn.transaction::<_, anyhow::Error, _>(|conn| {
            outbox.enqueue(conn, message)?;
            // Just before the commit: a relay may be faster than the next line of this code.
            times.commits(id);
            Ok(())
        })?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(f64::from(options.commits()) / began.elapsed().as_secs_f64())
}

/// The row in the table of a bench without a scenario.
pub(super) fn row(report: &Value) -> [String; 2] {
    let shown = |key: &str| report::shown(&report[key], Unit::Millis);
    [
        format!(
            "commit to response at {}/s",
            report::shown(&report["per_second"], Unit::Count)
        ),
        format!(
            "p50 {}, p90 {}, p99 {}, max {}",
            shown("p50_ms"),
            shown("p90_ms"),
            shown("p99_ms"),
            shown("max_ms")
        ),
    ]
}

pub(super) fn table(report: &Value) -> Table {
    let mut table = output::table(&["measure", "value"]);
    for (name, key, unit) in [
        ("wanted commits/s", "per_second", Unit::Count),
        ("commits/s", "committed_per_second", Unit::Count),
        ("messages", "messages", Unit::Count),
        ("commit to response, p50", "p50_ms", Unit::Millis),
        ("p90", "p90_ms", Unit::Millis),
        ("p99", "p99_ms", Unit::Millis),
        ("max", "max_ms", Unit::Millis),
    ] {
        table.add_row([name.to_owned(), report::shown(&report[key], unit)]);
    }
    table
}
