//! `diesel-outbox demo`: an application, a receiver and a relay, in one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::admin;
use diesel_outbox::{Config, NewMessage, Outbox, OutboxName, Relay, Status};
use serde_json::json;

use crate::number::whole;
use crate::settings::SettingFlags;
use crate::{logging, output, receiver};

/// Options of `demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Orders that the application takes
    #[arg(long, default_value_t = 20, value_name = "NUMBER", value_parser = whole(1..=100_000_u32))]
    orders: u32,
}

/// A schema of the demo's own, removed at its end.
const SCHEMA: &str = "diesel_outbox_demo";
/// Every so many orders are rolled back.
const ROLLED_BACK: u32 = 4;
/// Every so many orders are refused by the receiver at first.
const REFUSED_FIRST: u64 = 5;
/// By then everything has arrived, or something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the receiver saw: how often each message came, and was taken.
#[derive(Default)]
struct Seen {
    requests: HashMap<String, u32>,
    taken: HashMap<String, u32>,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    logging::start(&config);
    config.table = format!("{SCHEMA}.outbox").parse()?;
    config.set("OUTBOX_BACKOFF", "300ms")?;
    config.set("OUTBOX_POLL_INTERVAL", "100ms")?;
    config.routes.clear();
    config.destinations.clear();

    let mut conn = admin::connect(config.database_url()?, "demo", Duration::from_secs(30))?;
    conn.batch_execute(&format!(
        "DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}"
    ))
    .context("cannot make a schema for the demo")?;
    let result = play(options, &mut config, &mut conn);
    conn.batch_execute(&format!("DROP SCHEMA {SCHEMA} CASCADE"))
        .context("cannot remove the demo's schema")?;
    result
}

fn play(options: &Options, config: &mut Config, conn: &mut PgConnection) -> Result<()> {
    output::line("1. migrations")?;
    for done in admin::migrate(conn, &config.table)? {
        output::line(format!("   {done}"))?;
    }
    conn.batch_execute(&format!(
        "CREATE TABLE {SCHEMA}.orders (id int PRIMARY KEY, euro int NOT NULL)"
    ))?;

    let seen = Arc::new(Mutex::new(Seen::default()));
    let address = start_receiver(Arc::clone(&seen))?;
    output::line(format!(
        "2. an HTTP receiver on http://{address}/events, which refuses every fifth order at first"
    ))?;

    config.set("OUTBOX_URL", &format!("http://{address}/events"))?;
    let relay = Relay::from_config(config.clone()).start()?;
    output::line("3. a relay of plain threads")?;

    output::line("4. an application takes orders, each with its message in one transaction")?;
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
        .add_row(["requests at the receiver", &requests.to_string()])
        .add_row([
            "attempts that failed and were repeated",
            &stats.retried.to_string(),
        ])
        .add_row(["messages delivered", &stats.delivered.to_string()])
        .add_row(["different messages at the receiver", &delivered.to_string()]);
    output::line("5. summary")?;
    output::line(summary)?;
    ensure!(
        everything_settled,
        "not everything was delivered within {} s",
        PATIENCE.as_secs()
    );
    ensure!(
        delivered == committed && stats.delivered == committed as u64,
        "{committed} orders were committed, and {delivered} messages arrived"
    );
    output::line("every committed order arrived; none that was rolled back did")
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
        // The receiver goes on without an audience.
        let _ = output::line(format!(
            "   received {} {order} (attempt {attempt}): {status}",
            request.header("ce-type").unwrap_or("?")
        ));
        status
    })
}

/// Returns how many orders were committed.
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
                    "   order {id} rolled back, and its message with it"
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

/// Waits until no message is live.
fn wait_until_settled(conn: &mut PgConnection, name: &OutboxName) -> Result<bool> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let overview = admin::overview(conn, name)?;
        let live = overview
            .counts
            .iter()
            .any(|row| !matches!(row.status, Status::Delivered | Status::Dead));
        if !live {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(false)
}
