//! The rate and the cost of delivering a backlog.

use std::net::TcpListener;
use std::time::Instant;

use anyhow::{Context, Result};
use comfy_table::Table;
use diesel::sql_types::{BigInt, Text};
use diesel::{RunQueryDsl, sql_query};
use diesel_outbox::{Destination, NewMessage, Outbox, Route, program};
use serde_json::{Value, json};

use super::MOST_MESSAGES;
use super::delivery::{Delivery, deliver};
use super::ground::{Ground, TOPIC, payload};
use super::measures::{hot_share, peak_memory_mib, wal_position};
use super::report::{self, OWN_CPU, Unit};
use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::output;

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// Messages to drain
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Also drain alongside this many messages for a destination that never responds; 0 skips this
    #[arg(long, default_value_t = 0, value_name = "NUMBER", value_parser = whole(0..=MOST_MESSAGES))]
    behind_dead: u64,
}

/// Messages enqueued in one transaction.
const ENQUEUE_BATCH: u64 = 1000;
/// The topic of the destination that never responds.
const DEAD_TOPIC: &str = "bench.dead";

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    ground.fresh()?;
    let enqueue_seconds = enqueue(options.messages, ground)?;
    ground.quiet()?;
    let wal_before = wal_position(&mut ground.conn)?;
    let alone = deliver(ground, options.messages)?;
    let wal = wal_position(&mut ground.conn)? - wal_before;
    let hot = hot_share(&mut ground.conn, &ground.schema, alone.stats)?;
    let count = options.messages as f64;
    let statements = program::statements(&alone.stats);
    let mut report = json!({
        "messages": options.messages,
        "enqueued_per_second": count / enqueue_seconds,
        "seconds": alone.seconds,
        "messages_per_second": alone.rate(),
        "own_cpu_us_per_message": alone.cpu_us_per_message(),
        "wal_bytes_per_message": wal / count,
        "hot_update_share": hot,
        "messages_per_claim": count / statements.claims as f64,
        "messages_per_settle": count / statements.settles as f64,
        "claim_ms": alone.claim_ms(),
        "claim_p99_ms": alone.claim_p99_ms(),
        "peak_memory_mib": peak_memory_mib()?,
    });
    if options.behind_dead > 0 {
        let beside = beside_dead(options, ground)?;
        report["beside_dead"] = json!({
            "waiting": options.behind_dead,
            "messages_per_second": beside.rate(),
            "share_of_rate_alone": beside.rate() / alone.rate(),
            "claim_ms": beside.claim_ms(),
        });
    }
    Ok(report)
}

/// The same drain alongside messages for a destination that never responds.
fn beside_dead(options: &Options, ground: &mut Ground) -> Result<Delivery> {
    // The system accepts connections, and nothing reads from them.
    let dead = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
    let url = format!("http://{}/", dead.local_addr()?);
    ground.fresh()?;
    // Due for an hour: a claim in the order of due times would read these messages first.
    sql_query(format!(
        "INSERT INTO {} (topic, payload, available_at)
         SELECT '{DEAD_TOPIC}', $1::json, now() - interval '1 hour' FROM generate_series(1, $2)",
        ground.config.table
    ))
    .bind::<Text, _>(payload(ground.payload_bytes).to_string())
    .bind::<BigInt, _>(i64::try_from(options.behind_dead)?)
    .execute(&mut ground.conn)?;
    enqueue(options.messages, ground)?;
    ground.quiet()?;
    ground
        .config
        .destinations
        .push(Destination::new("dead", &url)?);
    ground.config.routes.push(Route::new(DEAD_TOPIC, "dead"));
    let delivery = deliver(ground, options.messages);
    ground.config.destinations.clear();
    ground.config.routes.clear();
    delivery
}

/// Enqueues messages without anything else, as an import does. Returns the elapsed seconds.
fn enqueue(messages: u64, ground: &mut Ground) -> Result<f64> {
    let outbox = Outbox::from(ground.config.table.clone()).allow_outside_transaction();
    let payload = payload(ground.payload_bytes);
    let progress = ground.progress("enqueueing", messages);
    let began = Instant::now();
    while progress.position() < messages {
        ground.wait(std::time::Duration::ZERO)?;
        let count = ENQUEUE_BATCH.min(messages - progress.position());
        let batch: Vec<NewMessage> = (0..count)
            .map(|_| NewMessage::new(TOPIC, &payload))
            .collect::<Result<_, _>>()?;
        outbox.enqueue_batch(&mut ground.conn, batch)?;
        progress.inc(count);
    }
    progress.finish_and_clear();
    Ok(began.elapsed().as_secs_f64())
}

pub(super) fn table(report: &Value) -> Table {
    let mut table = output::table(&["measure", "value"]);
    for (name, key, unit) in [
        ("messages", "messages", Unit::Count),
        (
            "enqueued/s (batches of 1,000)",
            "enqueued_per_second",
            Unit::Count,
        ),
        ("delivered/s", "messages_per_second", Unit::Count),
        OWN_CPU,
        ("WAL per message", "wal_bytes_per_message", Unit::Bytes),
        ("HOT updates", "hot_update_share", Unit::Percent),
        ("messages per claim", "messages_per_claim", Unit::Count),
        ("messages per settle", "messages_per_settle", Unit::Count),
        ("mean claim", "claim_ms", Unit::Millis),
        ("p99 claim", "claim_p99_ms", Unit::Millis),
        ("peak memory", "peak_memory_mib", Unit::Mebibytes),
    ] {
        table.add_row([name.to_owned(), report::shown(&report[key], unit)]);
    }
    let beside = &report["beside_dead"];
    if !beside.is_null() {
        table.add_row([
            format!(
                "alongside {} for a dead destination",
                report::shown(&beside["waiting"], Unit::Count)
            ),
            format!(
                "delivered/s {} ({} of the rate alone), mean claim {}",
                report::shown(&beside["messages_per_second"], Unit::Count),
                report::shown(&beside["share_of_rate_alone"], Unit::Percent),
                report::shown(&beside["claim_ms"], Unit::Millis),
            ),
        ]);
    }
    table
}
