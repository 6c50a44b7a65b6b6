//! `diesel-outbox bench`: what the relay does on this machine.

mod measures;
mod paced;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::admin;
use diesel_outbox::{Config, Destination, NewMessage, Outbox, Relay, RelayHandle, Route, Stats};
use serde_json::{Value, json};

use self::measures::{cpu_seconds, hot_share, peak_memory_mib, wal_position};
use self::paced::paced;
use crate::settings::SettingFlags;
use crate::{logging, output, signals};

/// Options of `bench`. `--batch` and `--url` are settings.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Messages to drain
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER")]
    messages: usize,
    /// Bytes of each payload
    #[arg(long, default_value_t = 250, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    payload_bytes: u32,
    /// Threads that send [default: the setting --concurrency]
    #[arg(long, value_name = "NUMBER")]
    senders: Option<usize>,
    /// Commits per second of the paced run; 0: none
    #[arg(long, default_value_t = 100, value_name = "NUMBER")]
    rate: u32,
    /// Seconds of the paced run
    #[arg(long, default_value_t = 5, value_name = "NUMBER")]
    paced_seconds: u32,
    /// Drain once more beside so many messages for another destination, which never answers
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    behind_dead: usize,
    /// Show the result as JSON
    #[arg(long)]
    json: bool,
}

/// Messages enqueued in one transaction.
const ENQUEUE_BATCH: usize = 1000;
/// Between two looks whether a drain is done.
const TICK: Duration = Duration::from_millis(20);
/// Goes to the destination that never answers.
const DEAD_TOPIC: &str = "bench.dead";

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    if std::env::var_os("RUST_LOG").is_some() {
        logging::start(&config);
    }
    if let Some(senders) = options.senders {
        config.set("OUTBOX_CONCURRENCY", &senders.to_string())?;
    }
    ensure!(options.messages > 0, "--messages: at least one");
    if cfg!(debug_assertions) {
        eprintln!("diesel-outbox: this is not a release build: its numbers mean little");
    }
    let signals = signals::channel()?;
    let receiver = match config.url {
        Some(_) => None,
        None => {
            let receiver = Receiver::start()?;
            config.set("OUTBOX_URL", &receiver.url)?;
            Some(receiver)
        }
    };
    config.routes.clear();
    config.destinations.clear();
    // Connections are accepted by the system, and nobody reads them.
    let dead = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
    if options.behind_dead > 0 {
        let url = format!("http://{}/", dead.local_addr()?);
        config.destinations.push(Destination::new("dead", &url)?);
        config.routes.push(Route::new(DEAD_TOPIC, "dead"));
    }
    let schema = format!("diesel_outbox_bench_{}", std::process::id());
    config.table = format!("{schema}.outbox").parse()?;
    let mut conn = admin::connect(config.database_url()?, "bench", Duration::from_secs(3600))?;
    conn.batch_execute(&format!("CREATE SCHEMA {schema}"))?;
    let result = measure(options, &config, &mut conn, &schema, &signals);
    conn.batch_execute(&format!("DROP SCHEMA {schema} CASCADE"))
        .context("cannot remove the benchmark's schema")?;
    drop((receiver, dead));
    let report = result?;
    if options.json {
        output::json(&report)
    } else {
        show(&report)
    }
}

fn measure(
    options: &Options,
    config: &Config,
    conn: &mut PgConnection,
    schema: &str,
    signals: &crossbeam_channel::Receiver<i32>,
) -> Result<Value> {
    admin::migrate(conn, &config.table)?;
    let enqueue_seconds = enqueue(options, config, conn)?;
    quiet(config)?;
    let wal_before = wal_position(conn)?;
    let drained = drain(options, config, signals)?;
    let wal = wal_position(conn)? - wal_before;
    let hot = hot_share(conn, schema, drained.stats)?;
    let count = options.messages as f64;
    let mut report = json!({
        "messages": options.messages,
        "payload_bytes": options.payload_bytes,
        "senders": config.concurrency,
        "batch": config.batch,
        "mode": config.mode.to_string(),
        "enqueued_per_second": count / enqueue_seconds,
        "seconds": drained.seconds,
        "messages_per_second": count / drained.seconds,
        "own_cpu_us_per_message": drained.cpu * 1e6 / count,
        "wal_bytes_per_message": wal / count,
        "hot_update_share": hot,
        "messages_per_claim": count / drained.stats.claims as f64,
        "messages_per_settle": count / drained.stats.settles as f64,
        "claim_ms": drained.claim_ms(),
        "peak_memory_mib": peak_memory_mib()?,
    });
    report["paced"] = paced(options, config, conn)?;
    if options.behind_dead > 0 {
        let beside = beside_dead(options, config, conn, signals)?;
        report["beside_dead"] = json!({
            "waiting": options.behind_dead,
            "messages_per_second": count / beside.seconds,
            "share_of_rate_alone": drained.seconds / beside.seconds,
            "claim_ms": beside.claim_ms(),
        });
    }
    Ok(report)
}

/// The same drain in an outbox of its own, beside messages for a destination that never answers.
fn beside_dead(
    options: &Options,
    config: &Config,
    conn: &mut PgConnection,
    signals: &crossbeam_channel::Receiver<i32>,
) -> Result<Drained> {
    let mut config = config.clone();
    conn.batch_execute(&format!("SELECT outbox_drop('{}')", config.table))?;
    config.table = format!("{}_beside", config.table).parse()?;
    conn.batch_execute(&format!("SELECT outbox_create('{}')", config.table))?;
    enqueue_dead(options, &config, conn)?;
    enqueue(options, &config, conn)?;
    quiet(&config)?;
    drain(options, &config, signals)
}

/// Lets the database do now what it would do soon, because of what was just enqueued.
fn quiet(config: &Config) -> Result<()> {
    let mut conn = admin::connect(config.database_url()?, "bench", Duration::from_secs(3600))?;
    conn.batch_execute(&format!("VACUUM ANALYZE {}", config.table))?;
    if let Err(error) = conn.batch_execute("CHECKPOINT") {
        eprintln!("diesel-outbox: a checkpoint may disturb the measurement: {error}");
    }
    Ok(())
}

/// What a drain took.
struct Drained {
    seconds: f64,
    /// Seconds of this process.
    cpu: f64,
    stats: Stats,
}

impl Drained {
    /// A claim's mean time.
    fn claim_ms(&self) -> f64 {
        self.stats.claim_micros as f64 / 1000.0 / self.stats.claims.max(1) as f64
    }
}

/// Delivers what `enqueue` has enqueued.
fn drain(
    options: &Options,
    config: &Config,
    signals: &crossbeam_channel::Receiver<i32>,
) -> Result<Drained> {
    let messages = options.messages as u64;
    let cpu_before = cpu_seconds()?;
    let began = Instant::now();
    let relay = Relay::from_config(config.clone()).start()?;
    let is_done = |relay: &RelayHandle| relay.stats().delivered >= messages;
    // Where something waits behind a dead destination, the relay may never be idle.
    while !is_done(&relay) && !relay.wait_until_idle(TICK) {
        if signals.try_recv().is_ok() {
            bail!("interrupted by a signal");
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let cpu = cpu_seconds()? - cpu_before;
    relay.shutdown(config.shutdown_timeout)?;
    let stats = relay.stats();
    ensure!(
        stats.delivered == messages,
        "{messages} messages were enqueued and {} delivered: does {} answer with 2xx?",
        stats.delivered,
        config.summary(),
    );
    Ok(Drained {
        seconds,
        cpu,
        stats,
    })
}

fn enqueue_dead(options: &Options, config: &Config, conn: &mut PgConnection) -> Result<()> {
    let count = i64::try_from(options.behind_dead)?;
    // An hour ago: the claim would read them first.
    sql_query(format!(
        "INSERT INTO {} (topic, payload, available_at)
         SELECT '{DEAD_TOPIC}', $1::json, now() - interval '1 hour' FROM generate_series(1, $2)",
        config.table
    ))
    .bind::<Text, _>(payload(options.payload_bytes).to_string())
    .bind::<BigInt, _>(count)
    .execute(conn)?;
    Ok(())
}

fn payload(bytes: u32) -> Value {
    json!({ "fill": "x".repeat(bytes as usize - r#"{"fill":""}"#.len()) })
}

fn enqueue(options: &Options, config: &Config, conn: &mut PgConnection) -> Result<f64> {
    let outbox = Outbox::new(&config.table.to_string())?;
    let payload = payload(options.payload_bytes);
    let began = Instant::now();
    let mut left = options.messages;
    while left > 0 {
        let count = left.min(ENQUEUE_BATCH);
        let batch: Vec<NewMessage> = (0..count)
            .map(|_| NewMessage::new("bench.message", &payload))
            .collect::<Result<_, _>>()?;
        outbox.enqueue_batch(conn, batch)?;
        left -= count;
    }
    Ok(began.elapsed().as_secs_f64())
}

fn show(report: &Value) -> Result<()> {
    let number = |key: &str| report[key].as_f64().unwrap_or_default();
    let mut table = output::table(&["measure", "value"]);
    for (name, value) in [
        ("messages", output::grouped(number("messages"))),
        ("payload bytes", output::grouped(number("payload_bytes"))),
        (
            "mode, senders, batch",
            format!(
                "{}, {}, {}",
                config_word(&report["mode"]),
                report["senders"],
                report["batch"]
            ),
        ),
        (
            "enqueued/s (batches of 1,000)",
            output::grouped(number("enqueued_per_second")),
        ),
        (
            "delivered/s",
            output::grouped(number("messages_per_second")),
        ),
        (
            "own CPU per message",
            format!("{:.1} µs", number("own_cpu_us_per_message")),
        ),
        (
            "WAL per message",
            format!("{:.0} bytes", number("wal_bytes_per_message")),
        ),
        (
            "HOT updates",
            format!("{:.1} %", 100.0 * number("hot_update_share")),
        ),
        (
            "messages per claim",
            format!("{:.0}", number("messages_per_claim")),
        ),
        (
            "messages per settle",
            format!("{:.0}", number("messages_per_settle")),
        ),
        (
            "peak memory",
            format!("{:.1} MiB", number("peak_memory_mib")),
        ),
    ] {
        table.add_row([name.to_owned(), value]);
    }
    table.add_row([
        "a claim".to_owned(),
        format!("{:.1} ms", number("claim_ms")),
    ]);
    let beside = &report["beside_dead"];
    if !beside.is_null() {
        let number = |key: &str| beside[key].as_f64().unwrap_or_default();
        table.add_row([
            format!(
                "beside {} behind a dead one",
                output::grouped(number("waiting"))
            ),
            format!(
                "delivered/s {} ({:.0} % of the rate alone), a claim {:.1} ms",
                output::grouped(number("messages_per_second")),
                100.0 * number("share_of_rate_alone"),
                number("claim_ms"),
            ),
        ]);
    }
    let paced = &report["paced"];
    if !paced.is_null() {
        let millis = |key: &str| paced[key].as_f64().unwrap_or_default();
        table.add_row([
            format!("commit to answer at {}/s", paced["per_second"]),
            format!(
                "p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
                millis("p50_ms"),
                millis("p90_ms"),
                millis("p99_ms"),
                millis("max_ms")
            ),
        ]);
    }
    output::line(table)
}

fn config_word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A receiver in a process of its own, so that its CPU is not counted as ours.
struct Receiver {
    process: Child,
    url: String,
}

impl Receiver {
    fn start() -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg("receive")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a receiver")?;
        let mut url = String::new();
        let out = process
            .stdout
            .take()
            .context("the receiver has no output")?;
        BufReader::new(out).read_line(&mut url)?;
        ensure!(!url.is_empty(), "the receiver did not say where it listens");
        Ok(Self {
            process,
            url: url.trim().to_owned(),
        })
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // It ends by itself when its standard input is closed; this is faster.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
