//! A steady load beside an open transaction, which keeps vacuum from removing what the relay has settled: minute by
//! minute, so that growth is seen.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use diesel::connection::SimpleConnection;
use diesel::sql_types::{Double, Text};
use diesel::{RunQueryDsl, sql_query};
use serde_json::{Value, json};

use super::children::RelayProcess;
use super::clients::{Client, beside};
use super::ground::Ground;
use super::relay_process::Done;
use super::report::{Column, OWN_CPU, Unit};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Duration, in minutes; each has a row
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = whole(1..=600_u32))]
    minutes: u32,
    /// Seconds of a minute, for tests
    #[arg(long, hide = true, default_value_t = 60, value_name = "NUMBER", value_parser = whole(1..=60_u32))]
    seconds: u32,
    /// Commits per second of all clients, each of one message
    #[arg(long, default_value_t = 800, value_name = "NUMBER", value_parser = whole(1..=100_000_u32))]
    rate: u32,
}

/// Clients that share the rate.
const CLIENTS: u32 = 4;

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    ground.fresh()?;
    let mut holder = ground.connect()?;
    holder.batch_execute(
        "SET idle_in_transaction_session_timeout = 0; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()",
    )?;
    let mut relay = RelayProcess::start(ground)?;
    relay.begin()?;
    let interval = Duration::from_secs(1) / options.rate;
    let clients = (0..CLIENTS)
        .map(|number| Client::new(ground, interval * number, interval * CLIENTS))
        .collect::<Result<Vec<_>>>()?;
    let (runs, _) = beside(clients, |committed| {
        watch(options, ground, &mut relay, committed)
    })?;
    relay.finish()?;
    (holder.batch_execute("COMMIT")).context("the transaction ended before the measurement")?;
    Ok(json!({ "rate": options.rate, "minutes": options.minutes, "runs": runs }))
}

/// Measures each minute.
fn watch(
    options: &Options,
    ground: &mut Ground,
    relay: &mut RelayProcess,
    committed: &AtomicU64,
) -> Result<Vec<Value>> {
    let mut runs = Vec::new();
    let (mut before, mut committed_before) = (Done::default(), 0);
    for minute in 1..=options.minutes {
        let began = Instant::now();
        ground.wait(Duration::from_secs(options.seconds.into()))?;
        let (done, all) = (relay.done()?, committed.load(Ordering::Relaxed));
        let seconds = began.elapsed().as_secs_f64();
        let delivered = (done.delivered - before.delivered) as f64;
        let claims = (done.claims - before.claims) as f64;
        let size = Size::now(ground)?;
        runs.push(json!({
            "minute": minute,
            "committed_per_second": (all - committed_before) as f64 / seconds,
            "messages_per_second": delivered / seconds,
            "waiting": all.saturating_sub(done.delivered),
            "own_cpu_us_per_message": 1e6 * (done.cpu_seconds - before.cpu_seconds) / delivered,
            "claim_ms": (done.claim_micros - before.claim_micros) as f64 / claims / 1e3,
            "dead_versions": size.dead_versions,
            "table_mib": size.mib,
        }));
        (before, committed_before) = (done, all);
    }
    Ok(runs)
}

/// The outbox with its indexes, without the ledger.
#[derive(diesel::QueryableByName)]
struct Size {
    #[diesel(sql_type = Double)]
    dead_versions: f64,
    #[diesel(sql_type = Double)]
    mib: f64,
}

impl Size {
    /// Sessions report dead versions with a delay.
    fn now(ground: &mut Ground) -> Result<Self> {
        let table = ground.config.table.to_string();
        let size = "SELECT pg_stat_get_dead_tuples($1::regclass)::float8 AS dead_versions,
                           pg_total_relation_size($1::regclass) / 1048576.0::float8 AS mib";
        let size = sql_query(size).bind::<Text, _>(table);
        Ok(size.get_result(&mut ground.conn)?)
    }
}

pub(super) const COLUMNS: &[Column] = &[
    ("minute", "minute", Unit::Count),
    ("commits/s", "committed_per_second", Unit::Count),
    ("delivered/s", "messages_per_second", Unit::Count),
    ("waiting", "waiting", Unit::Count),
    OWN_CPU,
    ("mean claim", "claim_ms", Unit::Millis),
    ("dead versions", "dead_versions", Unit::Count),
    ("table and indexes", "table_mib", Unit::Mebibytes),
];
