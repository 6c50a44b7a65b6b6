//! Feeds beside a drain over HTTP: rate and WAL of storing, the rate of reading, and the latency of a long poll.

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use diesel::sql_types::BigInt;
use diesel::{Connection, RunQueryDsl, sql_query};
use diesel_outbox::admin::Note;
use diesel_outbox::{NewMessage, Outbox, program};
use hdrhistogram::Histogram;
use secrecy::ExposeSecret;
use serde_json::{Value, json};

use super::children::RelayProcess;
use super::delivery::{Delivery, deliver, mean_of, rate_of};
use super::ground::{Fill, Ground, payload};
use super::latency;
use super::measures::wal_position;
use super::report::{self, OWN_CPU, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages of each run of each round, and events to read
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Feeds of the run with many
    #[arg(long, default_value_t = 100, value_name = "NUMBER", value_parser = whole(1..=1_000_u64))]
    feeds: u64,
    /// Readers of the run with many
    #[arg(long, default_value_t = 20, value_name = "NUMBER", value_parser = whole(1..=64_usize))]
    readers: usize,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
    #[command(flatten)]
    latency: latency::Options,
}

/// Events of a page.
const PAGE: u32 = 500;
/// The feed that is read.
const FEED: &str = "feed-0";
/// Its topic.
pub(super) const TOPIC: &str = "bench.f0";
const KEEP: Duration = Duration::from_secs(3600);

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let url = ground.config.url.clone();
    let mut runs: [(&str, u64, Vec<Delivery>, f64); 3] = [
        ("over HTTP", 0, Vec::new(), 0.0),
        ("into one feed", 1, Vec::new(), 0.0),
        ("into many feeds", options.feeds, Vec::new(), 0.0),
    ];
    for round in 1..=options.rounds {
        for (name, feeds, deliveries, wal) in &mut runs {
            ground.say(format_args!("round {round}: {name}"));
            ground.fresh()?;
            match *feeds {
                0 => ground.fill(&Fill::plain(options.messages))?,
                feeds => {
                    register(ground, feeds)?;
                    ground.fill(&of_feeds(options.messages, feeds))?;
                }
            }
            ground.quiet()?;
            let before = wal_position(&mut ground.conn)?;
            deliveries.push(deliver(ground, options.messages)?);
            *wal += wal_position(&mut ground.conn)? - before;
            ground.config.url.clone_from(&url);
        }
    }
    let over_http = rate_of(&runs[0].2);
    let shown = runs.iter().map(|(name, _, deliveries, wal)| {
        json!({
            "run": name,
            "messages_per_second": rate_of(deliveries),
            "ratio_to_http": rate_of(deliveries) / over_http,
            "own_cpu_us_per_message": mean_of(deliveries, Delivery::cpu_us_per_message),
            "wal_bytes_per_message": wal / (f64::from(options.rounds) * options.messages as f64),
        })
    });
    let shown: Vec<Value> = shown.collect();
    let reading = reading(options, ground)?;
    ground.config.url = url;
    let webhook = latency::measure(&options.latency, ground)?;
    Ok(json!({
        "messages": options.messages,
        "rounds": options.rounds,
        "runs": shown,
        "reading": reading,
        "webhook_latency": webhook,
    }))
}

/// Makes so many feeds, and no other destination.
pub(super) fn register(ground: &mut Ground, feeds: u64) -> Result<()> {
    ground.config.url = None;
    ground.config.set("OUTBOX_ENDPOINT_THREADS", "1")?;
    sql_query(format!(
        "INSERT INTO {}_endpoint (name, kind, topics)
         SELECT 'feed-' || n, 'feed', ARRAY['bench.f' || n] FROM generate_series(0, $1 - 1) n",
        ground.config.table
    ))
    .bind::<BigInt, _>(i64::try_from(feeds)?)
    .execute(&mut ground.conn)
    .context("cannot register feeds")?;
    Ok(())
}

fn of_feeds(messages: u64, feeds: u64) -> Fill {
    Fill {
        topic: format!("'bench.f' || n % {feeds}"),
        ..Fill::plain(messages)
    }
}

/// Reads the events of a feed over HTTP, with one reader and with many; then the time from a commit to a reader that waits.
fn reading(options: &Options, ground: &mut Ground) -> Result<Value> {
    ground.fresh()?;
    register(ground, 1)?;
    ground.fill(&of_feeds(options.messages, 1))?;
    deliver(ground, options.messages)?;
    let note = Note::new("bench", "");
    let token =
        program::make_feed_token(&mut ground.conn, &ground.config.table, FEED, KEEP, &note)?;
    let token = token.context("the feed is gone")?;
    // A free port, which the relay process takes.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let variables = [
        ("OUTBOX_ADMIN_ADDR", address.to_string()),
        ("OUTBOX_ENDPOINT_THREADS", "1".to_owned()),
    ];
    let mut relay = RelayProcess::start_with(ground, variables)?;
    relay.begin()?;
    let consumer = Consumer {
        url: format!("http://{address}/api/v1/feeds/{FEED}/events"),
        token: format!("Bearer {}", token.expose_secret()),
    };
    consumer.wait_for_server(ground)?;
    let mut rates = Vec::new();
    for readers in [1, options.readers] {
        ground.say(format_args!("{readers} readers"));
        let began = Instant::now();
        let read = std::thread::scope(|scope| {
            let all: Vec<_> = (0..readers)
                .map(|_| scope.spawn(|| consumer.read_all()))
                .collect();
            let read = all.into_iter().map(|one| one.join());
            let read =
                read.map(|one| one.unwrap_or_else(|_| Err(anyhow::anyhow!("a reader panicked"))));
            read.sum::<Result<u64>>()
        })?;
        ensure!(
            read == options.messages * readers as u64,
            "{read} events were read"
        );
        rates.push(json!({
            "readers": readers,
            "events_per_second": read as f64 / began.elapsed().as_secs_f64(),
        }));
    }
    let latency = polled(options, ground, &consumer)?;
    relay.finish()?;
    Ok(json!({ "rates": rates, "latency": latency }))
}

/// A consumer of the feed.
struct Consumer {
    url: String,
    token: String,
}

/// The ids of a page, and the cursor behind it.
struct Read {
    ids: Vec<String>,
    next: String,
}

impl Consumer {
    fn page(&self, after: &str, wait: &str) -> Result<Read> {
        let answer = ureq::get(format!(
            "{}?after={after}&limit={PAGE}&wait={wait}",
            self.url
        ))
        .header("authorization", &self.token)
        .call()?;
        let next = answer.headers().get("outbox-feed-next");
        let next = next.context("no cursor")?.to_str()?.to_owned();
        let body = answer.into_body().read_to_vec()?;
        let events: Vec<Value> = serde_json::from_slice(&body)?;
        let id = |event: &Value| event["id"].as_str().unwrap_or_default().to_owned();
        Ok(Read {
            ids: events.iter().map(id).collect(),
            next,
        })
    }

    fn wait_for_server(&self, ground: &Ground) -> Result<()> {
        let began = Instant::now();
        while let Err(error) = self.page("end", "0s") {
            ensure!(
                began.elapsed() < KEEP / 120,
                "the feed is not served: {error:#}"
            );
            ground.wait(Duration::from_millis(20))?;
        }
        Ok(())
    }

    fn read_all(&self) -> Result<u64> {
        let (mut after, mut read) = ("begin".to_owned(), 0);
        loop {
            let page = self.page(&after, "0s")?;
            if page.ids.is_empty() {
                return Ok(read);
            }
            read += page.ids.len() as u64;
            after = page.next;
        }
    }
}

/// The time from a commit to a reader that waits, at a steady rate.
fn polled(options: &Options, ground: &mut Ground, consumer: &Consumer) -> Result<Value> {
    let committed: Mutex<HashMap<String, Instant>> = Mutex::default();
    let (mut after, count) = (consumer.page("end", "0s")?.next, options.latency.commits());
    let histogram = std::thread::scope(|scope| {
        let reader = scope.spawn(|| -> Result<Histogram<u64>> {
            let mut histogram = Histogram::new_with_bounds(1, 3_600_000_000, 3)?;
            while histogram.len() < u64::from(count) {
                let page = consumer.page(&after, "20s")?;
                ensure!(!page.ids.is_empty(), "no event within 20 s");
                let now = Instant::now();
                let mut committed = committed.lock().unwrap_or_else(PoisonError::into_inner);
                for at in page.ids.iter().filter_map(|id| committed.remove(id)) {
                    let micros = u64::try_from((now - at).as_micros()).unwrap_or(u64::MAX);
                    histogram.saturating_record(micros);
                }
                after = page.next;
            }
            Ok(histogram)
        });
        let outbox = Outbox::from(ground.config.table.clone());
        let payload = payload(ground.payload_bytes);
        let began = Instant::now();
        for n in 0..count {
            let due = began + options.latency.due(n);
            ground.wait(due.saturating_duration_since(Instant::now()))?;
            let message = NewMessage::new(TOPIC, &payload)?;
            let id = message.message_id().to_string();
            ground.conn.transaction::<_, anyhow::Error, _>(|conn| {
                outbox.enqueue(conn, message)?;
                let mut committed = committed.lock().unwrap_or_else(PoisonError::into_inner);
                committed.insert(id, Instant::now());
                Ok(())
            })?;
        }
        let read = reader.join();
        read.unwrap_or_else(|_| Err(anyhow::anyhow!("the reader panicked")))
    })?;
    let millis = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(json!({ "p50_ms": millis(0.5), "p99_ms": millis(0.99) }))
}

pub(super) fn table(report: &Value) -> Table {
    let columns = [
        ("messages", "run", Unit::Word),
        ("messages/s", "messages_per_second", Unit::Count),
        ("ratio to HTTP", "ratio_to_http", Unit::Ratio),
        OWN_CPU,
        ("WAL per message", "wal_bytes_per_message", Unit::Bytes),
    ];
    let mut table = report::runs(report, &columns);
    let reading = &report["reading"];
    for rate in reading["rates"].as_array().into_iter().flatten() {
        let readers = report::shown(&rate["readers"], Unit::Count);
        let rate = report::shown(&rate["events_per_second"], Unit::Count);
        table.add_row([format!("read by {readers}"), rate]);
    }
    for (name, of) in [
        ("commit to a long poll", &reading["latency"]),
        ("commit to a webhook's response", &report["webhook_latency"]),
    ] {
        let shown = |key: &str| report::shown(&of[key], Unit::Millis);
        table.add_row([
            name.to_owned(),
            format!("p50 {}, p99 {}", shown("p50_ms"), shown("p99_ms")),
        ]);
    }
    table
}
