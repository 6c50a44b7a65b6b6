//! `diesel-outbox bench`: what the relay does on this machine.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Double, Text};
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::admin;
use diesel_outbox::{
    Config, Destination, Dispatcher, HttpDispatcher, Message, NewMessage, Outbox, Outcome, Relay,
    RelayHandle, Route, Stats,
};
use hdrhistogram::Histogram;
use serde_json::{Value, json};

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
const TICK: Duration = Duration::from_millis(100);
const SHORT_TICK: Duration = Duration::from_millis(20);
/// Goes to the destination that never answers.
const DEAD_TOPIC: &str = "bench.dead";
/// Clock ticks per second in /proc: fixed by Linux's ABI.
const TICKS_PER_SECOND: f64 = 100.0;

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
    while !is_done(&relay) && !relay.wait_until_idle(SHORT_TICK) {
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

/// Remembers when each message was committed and how long it took until it was answered.
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

/// Commits at a steady rate on an idle outbox; from the commit to the receiver's answer.
fn paced(options: &Options, config: &Config, conn: &mut PgConnection) -> Result<Value> {
    let count = options.rate * options.paced_seconds;
    if count == 0 {
        return Ok(Value::Null);
    }
    let times = Arc::new(Times {
        committed: Mutex::default(),
        // A microsecond to an hour.
        latencies: Mutex::new(Histogram::new_with_bounds(1, 3_600_000_000, 3)?),
    });
    let dispatcher = Timed {
        http: HttpDispatcher::new(config)?,
        times: Arc::clone(&times),
    };
    let relay = Relay::from_config(config.clone())
        .dispatcher(dispatcher)
        .start()?;
    let outbox = Outbox::new(&config.table.to_string())?;
    let payload = payload(options.payload_bytes);
    let began = Instant::now();
    for n in 0..count {
        let due = began + Duration::from_secs(1) * n / options.rate;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let message = NewMessage::new("bench.message", &payload)?;
        let id = message.message_id();
        let mut committed = None;
        conn.transaction::<_, anyhow::Error, _>(|conn| {
            outbox.enqueue(conn, message)?;
            // Just before the commit: a relay may be faster than our next line after it.
            committed = Some(Instant::now());
            times
                .committed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend(committed.map(|at| (id, at)));
            Ok(())
        })?;
    }
    ensure!(
        relay.wait_until_idle(Duration::from_secs(60)),
        "the paced run did not end"
    );
    relay.shutdown(config.shutdown_timeout)?;
    let latencies = times
        .latencies
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let millis = |quantile: f64| latencies.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(json!({
        "per_second": options.rate,
        "messages": latencies.len(),
        "p50_ms": millis(0.5),
        "p90_ms": millis(0.9),
        "p99_ms": millis(0.99),
        "max_ms": latencies.max() as f64 / 1000.0,
    }))
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

#[derive(diesel::QueryableByName)]
struct NumberRow {
    #[diesel(sql_type = Double)]
    number: f64,
}

fn wal_position(conn: &mut PgConnection) -> Result<f64> {
    Ok(
        sql_query("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 AS number")
            .get_result::<NumberRow>(conn)?
            .number,
    )
}

#[derive(diesel::QueryableByName)]
struct UpdatesRow {
    #[diesel(sql_type = BigInt)]
    updates: i64,
    #[diesel(sql_type = BigInt)]
    hot: i64,
}

/// The share of updates that touched no index. Backends report what they did with a delay.
fn hot_share(conn: &mut PgConnection, schema: &str, stats: Stats) -> Result<f64> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        sql_query("SELECT pg_stat_clear_snapshot()").execute(conn)?;
        let row: UpdatesRow = sql_query(
            "SELECT n_tup_upd AS updates, n_tup_hot_upd AS hot FROM pg_stat_all_tables
              WHERE schemaname = $1 AND relname = 'outbox'",
        )
        .bind::<Text, _>(schema)
        .get_result(conn)?;
        let is_complete = u64::try_from(row.updates).unwrap_or(0) >= stats.claimed;
        if is_complete || Instant::now() >= until {
            return Ok(row.hot as f64 / row.updates.max(1) as f64);
        }
        std::thread::sleep(TICK);
    }
}

/// User and system time of this process.
fn cpu_seconds() -> Result<f64> {
    let stat =
        std::fs::read_to_string("/proc/self/stat").context("no /proc: CPU cannot be measured")?;
    // The name, in brackets, may hold spaces; the 14th and 15th fields are the times.
    let after = stat.rsplit_once(')').context("/proc/self/stat is odd")?.1;
    let ticks: f64 = after
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<f64>().unwrap_or_default())
        .sum();
    Ok(ticks / TICKS_PER_SECOND)
}

fn peak_memory_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")
        .context("no /proc: memory cannot be measured")?;
    let kib: f64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.split_whitespace().next())
        .context("/proc/self/status has no VmHWM")?
        .parse()?;
    Ok(kib / 1024.0)
}
