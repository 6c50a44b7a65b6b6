//! `outbox-lab demo`: an application, a receiver and a relay, in one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::config::Config;
use diesel_outbox::program;
use diesel_outbox::{NewMessage, Outbox, OutboxName, Relay};
use serde_json::json;

use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::settings::SettingFlags;
use diesel_outbox_cli::{logging, output};

use crate::receiver;

/// Options of `demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Orders that the application takes; every fourth order is rolled back
    #[arg(long, default_value_t = 20, value_name = "NUMBER", value_parser = whole(1..=100_000_u32))]
    orders: u32,
}

/// The schema of the demo, dropped at the end.
const SCHEMA: &str = "diesel_outbox_demo";
/// Every nth order is rolled back.
const ROLLED_BACK: u32 = 4;
/// The receiver refuses the first request of every nth order.
const REFUSED_FIRST: u64 = 5;
/// The time limit for all deliveries.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests and accepted requests at the receiver, by message id.
#[derive(Default)]
struct Seen {
    requests: HashMap<String, u32>,
    taken: HashMap<String, u32>,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    logging::start(&config)?;
    config.table = format!("{SCHEMA}.outbox").parse()?;
    config.set("OUTBOX_BACKOFF", "300ms")?;
    config.set("OUTBOX_POLL_INTERVAL", "100ms")?;
    config.routes.clear();
    config.destinations.clear();

    let mut conn = program::connect(config.database_url()?, "demo", Duration::from_secs(30))?;
    conn.batch_execute(&format!(
        "DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}"
    ))
    .context("cannot create the schema of the demo")?;
    let result = play(options, &mut config, &mut conn);
    conn.batch_execute(&format!("DROP SCHEMA {SCHEMA} CASCADE"))
        .context("cannot drop the schema of the demo")?;
    result
}

fn play(options: &Options, config: &mut Config, conn: &mut PgConnection) -> Result<()> {
    output::line("1. create the outbox")?;
    for done in diesel_outbox::migrate(conn, &config.table)? {
        output::line(format!("   {done}"))?;
    }
    conn.batch_execute(&format!(
        "CREATE TABLE {SCHEMA}.orders (id int PRIMARY KEY, euro int NOT NULL)"
    ))?;

    let seen = Arc::new(Mutex::new(Seen::default()));
    let address = start_receiver(Arc::clone(&seen))?;
    output::line(format!(
        "2. start an HTTP receiver on http://{address}/events, which refuses the first request of every fifth order"
    ))?;

    config.set("OUTBOX_URL", &format!("http://{address}/events"))?;
    let relay = Relay::from_config(config.clone()).start()?;
    output::line("3. start a relay of plain threads")?;

    output::line("4. take orders: one transaction writes each order and its message")?;
    let committed = take_orders(options.orders, config, conn)?;
    relay.wake();

    let everything_settled = wait_until_settled(conn, &config.table)?;
    let stats = relay.stats();
    relay.shutdown(config.shutdown_timeout)?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let delivered = seen.taken.len();
    let requests: u32 = seen.requests.values().sum();
    let mut summary = output::table(&["what", "count"]);
    summary
        .add_row(["orders committed", &committed.to_string()])
        .add_row([
            "orders rolled back",
            &(options.orders as usize - committed).to_string(),
        ])
        .add_row(["requests received", &requests.to_string()])
        .add_row(["failed attempts (retried)", &stats.retried.to_string()])
        .add_row(["messages delivered", &stats.delivered.to_string()])
        .add_row(["distinct messages received", &delivered.to_string()]);
    output::line("5. summary")?;
    output::line(summary)?;
    ensure!(
        everything_settled,
        "some messages were not delivered within {} s",
        PATIENCE.as_secs()
    );
    ensure!(
        delivered == committed && stats.delivered == committed as u64,
        "{committed} orders were committed, but {delivered} messages arrived"
    );
    output::line("every committed order was delivered; no rolled-back order was")
}

fn start_receiver(seen: Arc<Mutex<Seen>>) -> Result<std::net::SocketAddr> {
    receiver::start(0, move |request| {
        let id = request.header("webhook-id").unwrap_or_default().to_owned();
        let order: serde_json::Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let number = order["order_id"].as_u64().unwrap_or_default();
        let attempt = request.header("outbox-attempt").unwrap_or("?");
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let times = seen.requests.entry(id.clone()).or_default();
        *times += 1;
        let refused = number.is_multiple_of(REFUSED_FIRST) && *times == 1;
        let status = if refused { 503 } else { 200 };
        if !refused {
            *seen.taken.entry(id).or_default() += 1;
        }
        drop(seen);
        // The receiver keeps running if nobody reads the output.
        let _ = output::line(format!(
            "   received {} {order} (attempt {attempt}): {status}",
            request.header("ce-type").unwrap_or("?")
        ));
        status
    })
}

/// Returns the number of committed orders.
fn take_orders(orders: u32, config: &Config, conn: &mut PgConnection) -> Result<usize> {
    let outbox = Outbox::from(config.table.clone());
    let mut committed = 0;
    for id in 1..=orders {
        let result = conn.transaction(|conn| {
            sql_query(format!(
                "INSERT INTO {SCHEMA}.orders VALUES ({id}, {})",
                id * 10
            ))
            .execute(conn)?;
            let message =
                NewMessage::new("order.paid", &json!({ "order_id": id, "euro": id * 10 }))?
                    .idempotency_key(format!("order-{id}-paid"));
            let enqueued = outbox.enqueue(conn, message)?;
            if id.is_multiple_of(ROLLED_BACK) {
                bail!(RolledBack);
            }
            Ok(enqueued)
        });
        match result {
            Ok(enqueued) => {
                committed += 1;
                output::line(format!(
                    "   order {id} committed with message {}",
                    enqueued.sequence
                ))?;
            }
            Err(error) if error.is::<RolledBack>() => {
                output::line(format!(
                    "   order {id} rolled back together with its message"
                ))?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(committed)
}

#[derive(Debug, thiserror::Error)]
#[error("the customer changed their mind")]
struct RolledBack;

/// Waits until no message is live. Returns `false` if [`PATIENCE`] ends first.
fn wait_until_settled(conn: &mut PgConnection, name: &OutboxName) -> Result<bool> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let overview = program::overview(conn, name)?;
        let live = overview.counts.iter().any(|row| !row.status.is_final());
        if !live {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(false)
}
