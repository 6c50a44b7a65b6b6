//! The effect of past deliveries on the rate of a relay, and on the WAL that it writes.

use std::time::Duration;

use anyhow::{Result, ensure};
use diesel::sql_types::{BigInt, Text};
use diesel::{RunQueryDsl, sql_query};
use serde_json::{Value, json};

use super::delivery::{Delivery, deliver, mean_of, rate_of};
use super::feed;
use super::ground::{CHUNK, Ground, TOPIC, payload};
use super::measures::{Wal, count};
use super::report::{Column, OWN_CPU, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::output;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages that each outbox delivers in each round
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Messages that the aged outbox delivers before the first round
    #[arg(long, default_value_t = 5_000_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    past: u64,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 5, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
    /// Give each message an idempotency key of this kind
    #[arg(long, value_name = "KIND")]
    keys: Option<Keys>,
    /// Deliver into a feed instead of over HTTP
    #[arg(long)]
    feed: bool,
    /// Also measure an outbox with this retention of its ledger, such as 3s
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    forget_after: Option<Duration>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Keys {
    /// Random UUIDs, as of version 4
    Random,
    /// They begin with the time, as UUIDs of version 7
    Ordered,
}

impl Keys {
    const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Ordered => "ordered",
        }
    }

    /// SQL: the next key.
    const fn next(self) -> &'static str {
        match self {
            Self::Random => "gen_random_uuid()::text",
            Self::Ordered => {
                "lpad(to_hex((1000 * extract(epoch FROM clock_timestamp()))::bigint), 12, '0') || gen_random_uuid()"
            }
        }
    }
}

/// Past messages that wait at the same time. The outbox stays as small as with a relay that keeps up.
const WAITING: u64 = 100_000;

const FRESH: &str = "fresh";
const AGED: &str = "aged";
const FORGETFUL: &str = "forgetful";

/// The measurements of one outbox.
struct Turns {
    deliveries: Vec<Delivery>,
    /// The WAL that the server wrote, from insert to settle.
    wal: Vec<Wal>,
}

impl Turns {
    const fn new() -> Self {
        Self {
            deliveries: Vec::new(),
            wal: Vec::new(),
        }
    }

    fn rate(&self) -> f64 {
        rate_of(&self.deliveries)
    }

    fn wal_bytes(&self) -> f64 {
        self.per_message(|wal| Some(wal.bytes)).unwrap_or(f64::NAN)
    }

    fn per_message(&self, measure: fn(&Wal) -> Option<f64>) -> Option<f64> {
        let messages: u64 = self.deliveries.iter().map(|one| one.messages).sum();
        let sum: Option<f64> = self.wal.iter().map(measure).sum();
        Some(sum? / messages as f64)
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    begin(AGED, options, ground)?;
    live_through(options, ground)?;
    let past = entries(ground)?;
    ensure!(
        past == options.past,
        "{} messages were delivered, but the ledger has {past}",
        options.past
    );
    begin(FORGETFUL, options, ground)?;
    let [mut fresh, mut aged, mut forgetful] = [const { Turns::new() }; 3];
    for round in 1..=options.rounds {
        ground.say(format_args!("round {round}: a new outbox"));
        begin(FRESH, options, ground)?;
        // The measured turn must not be the first to write these files: see the help.
        insert(options.messages, options, ground)?;
        deliver(ground, options.messages)?;
        turn(&mut fresh, options, ground)?;
        ground.say(format_args!("round {round}: with the past"));
        ground.enter(AGED)?;
        turn(&mut aged, options, ground)?;
        if let Some(retention) = options.forget_after {
            ground.say(format_args!("round {round}: with a short retention"));
            ground.enter(FORGETFUL)?;
            let usual = std::mem::replace(&mut ground.config.retention, retention);
            turn(&mut forgetful, options, ground)?;
            ground.config.retention = usual;
        }
    }
    let run = |outbox: &str, turns: &Turns| {
        json!({
            "outbox": outbox,
            "messages_per_second": turns.rate(),
            "rate_ratio": turns.rate() / fresh.rate(),
            "wal_bytes_per_message": turns.wal_bytes(),
            "wal_ratio": turns.wal_bytes() / fresh.wal_bytes(),
            "full_page_images_per_message": turns.per_message(|wal| wal.full_page_images),
            "claim_ms": mean_of(&turns.deliveries, Delivery::claim_ms),
            "own_cpu_us_per_message": mean_of(&turns.deliveries, Delivery::cpu_us_per_message),
        })
    };
    let mut runs = vec![run(FRESH, &fresh), run(AGED, &aged)];
    if options.forget_after.is_some() {
        ground.enter(FORGETFUL)?;
        let delivered = options.messages * u64::from(options.rounds);
        let forgotten = delivered.saturating_sub(entries(ground)?);
        ensure!(
            forgotten > 0,
            "nothing was forgotten: measure longer, or give a shorter --forget-after"
        );
        let mut of_forgetful = run(FORGETFUL, &forgetful);
        of_forgetful["forgotten_share"] = json!(forgotten as f64 / delivered as f64);
        runs.push(of_forgetful);
    }
    Ok(json!({
        "messages": options.messages,
        "past": past,
        "rounds": options.rounds,
        "keys": options.keys.map(Keys::name),
        "feed": options.feed,
        "runs": runs,
    }))
}

/// Empties this outbox, and registers its feed.
fn begin(name: &str, options: &Options, ground: &mut Ground) -> Result<()> {
    ground.enter(name)?;
    ground.fresh()?;
    match options.feed {
        true => feed::register(ground, 1),
        false => Ok(()),
    }
}

/// The number of ledger entries.
fn entries(ground: &mut Ground) -> Result<u64> {
    count(&mut ground.conn, &format!("{}_ledger", ground.config.table))
}

/// Delivers the past messages, [`WAITING`] at a time.
fn live_through(options: &Options, ground: &mut Ground) -> Result<()> {
    let mut delivered = 0;
    while delivered < options.past {
        let part = WAITING.min(options.past - delivered);
        insert(part, options, ground)?;
        deliver(ground, part)?;
        delivered += part;
        ground.say(format_args!(
            "{} of {} past messages delivered",
            output::grouped(delivered as f64),
            output::grouped(options.past as f64)
        ));
    }
    // Autovacuum would do this sooner or later: not during a measurement.
    ground.vacuum_all()
}

/// Inserts and delivers messages, right after a checkpoint.
fn turn(turns: &mut Turns, options: &Options, ground: &mut Ground) -> Result<()> {
    ground.quiet()?;
    let before = Wal::now(&mut ground.conn)?;
    insert(options.messages, options, ground)?;
    turns.deliveries.push(deliver(ground, options.messages)?);
    turns.wal.push(Wal::now(&mut ground.conn)?.since(&before));
    Ok(())
}

/// Plain INSERTs, as from any language.
fn insert(messages: u64, options: &Options, ground: &mut Ground) -> Result<()> {
    let (column, key) = match options.keys {
        Some(keys) => (", idempotency_key", format!(", {}", keys.next())),
        None => ("", String::new()),
    };
    let insert = format!(
        "INSERT INTO {} (topic, payload{column})
         SELECT $1, $2::json{key} FROM generate_series(1, $3)",
        ground.config.table
    );
    let payload = payload(ground.payload_bytes).to_string();
    let progress = ground.progress("enqueueing", messages);
    while progress.position() < messages {
        ground.wait(Duration::ZERO)?;
        let chunk = CHUNK.min(messages - progress.position());
        sql_query(&insert)
            .bind::<Text, _>(if options.feed { feed::TOPIC } else { TOPIC })
            .bind::<Text, _>(&payload)
            .bind::<BigInt, _>(i64::try_from(chunk)?)
            .execute(&mut ground.conn)?;
        progress.inc(chunk);
    }
    progress.finish_and_clear();
    Ok(())
}

pub(super) const COLUMNS: &[Column] = &[
    ("outbox", "outbox", Unit::Word),
    ("delivered/s", "messages_per_second", Unit::Count),
    ("rate ratio to fresh", "rate_ratio", Unit::Ratio),
    ("WAL per message", "wal_bytes_per_message", Unit::Bytes),
    ("WAL ratio to fresh", "wal_ratio", Unit::Ratio),
    (
        "full-page images per message",
        "full_page_images_per_message",
        Unit::Ratio,
    ),
    ("forgotten", "forgotten_share", Unit::Percent),
    ("mean claim", "claim_ms", Unit::Millis),
    OWN_CPU,
];
