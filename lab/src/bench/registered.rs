//! The cost of many endpoints compared with one configured destination, the fairness between them, and
//! the effect of hanging and busy destinations on the others.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use diesel::sql_types::{BigInt, Double, Text};
use diesel::{RunQueryDsl, sql_query};
use diesel_outbox::config::SigningSecret;
use diesel_outbox::{Relay, RelayBuilder, program};
use serde_json::{Value, json};

use super::delivery::{Delivery, deliver_behind, deliver_with, mean_of, rate_of};
use super::ground::{CHUNK, Fill, Ground, TOPIC};
use super::measures::{self, peak_memory_mib};
use super::report::{self, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Endpoints, one for each tenant
    #[arg(long, default_value_t = 10_000, value_name = "NUMBER", value_parser = whole(1..=1_000_000_u64))]
    destinations: u64,
    /// Messages per run, distributed over the tenants by Zipf's law
    #[arg(long, default_value_t = 100_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Filters that do not match, for each message of a run beside one that matches
    #[arg(long, default_value_t = 100, value_name = "NUMBER", value_parser = whole(0..=100_000_u64))]
    filters: u64,
    /// Number of rounds; each round makes each run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
    /// Destinations with a backlog each, for the measure of fairness
    #[arg(long, default_value_t = 200, value_name = "NUMBER", value_parser = whole(2..=10_000_u64))]
    backlogged: u64,
    /// Destinations of the paced runs
    #[arg(long, default_value_t = 2_000, value_name = "NUMBER", value_parser = whole(2..=1_000_000_u64))]
    paced: u64,
    /// Destinations of the paced runs that accept connections and never respond
    #[arg(long, default_value_t = 200, value_name = "NUMBER", value_parser = whole(0..=1_000_000_u64))]
    hanging: u64,
    /// Waiting messages of one tenant alongside a paced run
    #[arg(long, default_value_t = 1_000_000, value_name = "NUMBER", value_parser = whole(0..=MOST_MESSAGES))]
    waiting: u64,
    /// Changed rows of endpoints per second alongside a paced run, at two relays
    #[arg(long, default_value_t = 1_000, value_name = "NUMBER", value_parser = whole(0..=100_000_u64))]
    changes: u64,
    /// Messages per second of the paced runs
    #[arg(long, default_value_t = 1_000, value_name = "NUMBER", value_parser = whole(20..=100_000_u64))]
    rate: u64,
    /// Duration of a paced run, in seconds, after a warm-up of the same duration
    #[arg(long, default_value_t = 20, value_name = "NUMBER", value_parser = whole(1..=3_600_u64))]
    seconds: u64,
}

/// The interval of inserts in a paced run.
const TICK: Duration = Duration::from_millis(50);
const TICKS_PER_SECOND: u64 = 20;
/// The time limit for the last deliveries of a paced run.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of the tenant with many waiting messages, and of its destination.
const BUSY: u64 = 1;

#[derive(diesel::QueryableByName)]
struct PacedRow {
    #[diesel(sql_type = BigInt)]
    delivered: i64,
    #[diesel(sql_type = Double)]
    p50: f64,
    #[diesel(sql_type = Double)]
    p99: f64,
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let url = ground.config.url.take().context("the bench has no URL")?;
    let (mut configured, mut registered, mut filtered) = (Vec::new(), Vec::new(), Vec::new());
    // The first messages wait until the relay knows its destinations.
    let warm = options.messages / 5;
    let (mut most_threads, mut memory) = (0.0_f64, 0.0);
    for round in 1..=options.rounds {
        ground.say(format_args!("round {round}: one configured destination"));
        ground.fresh()?;
        ground.fill(&Fill::plain(warm + options.messages))?;
        ground.quiet()?;
        ground.config.url = Some(url.clone());
        // The endpoints sign, too.
        ground.config.secrets = vec![SigningSecret::random()];
        let relay_of_one = Relay::from_config(ground.config.clone());
        configured.push(deliver_behind(
            ground,
            relay_of_one,
            warm,
            options.messages,
        )?);
        (ground.config.url, ground.config.secrets) = (None, Vec::new());

        for (filters, deliveries) in [
            (None, &mut registered),
            (Some(options.filters), &mut filtered),
        ] {
            ground.say(format_args!(
                "round {round}: {} endpoints{}",
                options.destinations,
                filters.map_or_else(String::new, |more| format!(
                    " with filters, {more} of which do not match"
                ))
            ));
            ground.fresh()?;
            register(ground, url.as_str(), 1, options.destinations)?;
            if let Some(more) = filters {
                add_filters(ground, url.as_str(), more)?;
            }
            // Zipf's law, approximated by an integral.
            let zipf = format!("ceil(exp(random() * ln({})))::bigint", options.destinations);
            fill(ground, warm + options.messages, &zipf, "''")?;
            ground.quiet()?;
            let one = deliver_behind(ground, relay(ground), warm, options.messages)?;
            most_threads = most_threads.max(one.threads);
            if round == 1 && filters.is_none() {
                // Later relays of this process find the allocator's arenas filled by the threads of those before.
                memory = peak_memory_mib()?;
            }
            deliveries.push(one);
        }
    }
    let fairness = fairness(options, ground, url.as_str())?;
    let mut paced_runs: [Vec<PacedRow>; Beside::ALL.len()] = Default::default();
    for round in 1..=options.rounds {
        for (beside, runs) in Beside::ALL.into_iter().zip(&mut paced_runs) {
            ground.say(format_args!("round {round}: {}", beside.name()));
            runs.push(paced(options, ground, url.as_str(), beside)?);
        }
    }
    let run = |what: &str, deliveries: &[Delivery]| {
        json!({
            "what": what,
            "messages_per_second": rate_of(deliveries),
            "ratio": rate_of(deliveries) / rate_of(&configured),
            "own_cpu_us_per_message": mean_of(deliveries, Delivery::cpu_us_per_message),
            "messages_per_claim": mean_of(deliveries, |one| one.stats.claimed as f64 / program::statements(&one.stats).claims as f64),
            "split": deliveries.iter().map(|one| one.stats.split).sum::<u64>(),
        })
    };
    // Each run is compared with the run alone of the same round: the machine may be slower in another round.
    let alone = &paced_runs[0];
    let paced = |(beside, rows): (Beside, &Vec<PacedRow>)| {
        let median_of = |of: &dyn Fn(&PacedRow, &PacedRow) -> f64| {
            median(rows.iter().zip(alone).map(|(row, alone)| of(row, alone)))
        };
        json!({
            "what": beside.name(),
            "messages_per_second": median_of(&|row, _| row.delivered as f64) / options.seconds as f64,
            "ratio": median_of(&|row, alone| row.delivered as f64 / alone.delivered as f64),
            "p50_ms": median_of(&|row, _| row.p50),
            "p99_ms": median_of(&|row, _| row.p99),
            "p99_ratio": median_of(&|row, alone| row.p99 / alone.p99),
        })
    };
    let mut runs = vec![
        run("one_configured", &configured),
        run("registered", &registered),
        run("registered_with_filters", &filtered),
    ];
    runs.extend(Beside::ALL.into_iter().zip(&paced_runs).map(paced));
    Ok(json!({
        "destinations": options.destinations,
        "messages": options.messages,
        "filters": options.filters,
        "rounds": options.rounds,
        "fairness": fairness,
        "threads": most_threads,
        "peak_memory_mib": memory,
        "runs": runs,
    }))
}

/// A relay that delivers to endpoints on this machine.
fn relay(ground: &Ground) -> RelayBuilder {
    let threads = ground.config.endpoint_threads;
    Relay::from_config(ground.config.clone())
        .endpoint_threads(threads)
        .configure(|config| config.endpoint_https_only = false)
        .configure(|config| config.endpoint_public_only = false)
}

/// Registers the destinations with these numbers, each with the tenant of the same number.
fn register(ground: &mut Ground, url: &str, first: u64, last: u64) -> Result<()> {
    sql_query(format!(
        "INSERT INTO {}_endpoint (name, url, tenant_id, secret)
         SELECT 'd' || n, $1, {}, 'whsec_' || encode(sha256(n::text::bytea), 'base64')
           FROM generate_series($2, $3) AS n",
        ground.config.table,
        tenant("n")
    ))
    .bind::<Text, _>(url)
    .bind::<BigInt, _>(i64::try_from(first)?)
    .bind::<BigInt, _>(i64::try_from(last)?)
    .execute(&mut ground.conn)?;
    Ok(())
}

/// Gives each destination a filter that matches, and adds destinations of no tenant with filters that do not.
fn add_filters(ground: &mut Ground, url: &str, more: u64) -> Result<()> {
    let table = &ground.config.table;
    sql_query(format!("UPDATE {table}_endpoint SET filter = $1::json"))
        .bind::<Text, _>(filter("paid"))
        .execute(&mut ground.conn)?;
    sql_query(format!(
        "INSERT INTO {table}_endpoint (name, url, filter)
         SELECT 'other-' || n, $1, replace($2, 'STATUS', 'status ' || n)::json FROM generate_series(1, $3) AS n"
    ))
    .bind::<Text, _>(url)
    .bind::<Text, _>(filter("STATUS"))
    .bind::<BigInt, _>(i64::try_from(more)?)
    .execute(&mut ground.conn)?;
    Ok(())
}

/// A filter of three fields, all of which are read.
fn filter(status: &str) -> String {
    json!({
        "country": ["AT", "DE"],
        "euro": [{ "numeric": [">=", 100] }],
        "status": [status],
    })
    .to_string()
}

/// A payload of this size with the fields that filters ask for.
fn order(bytes: u32) -> String {
    let of = |fill: &str| {
        json!({ "country": "DE", "euro": 120.5, "fill": fill, "status": "paid" }).to_string()
    };
    let rest = (bytes as usize).saturating_sub(of("").len());
    of(&"x".repeat(rest))
}

/// The tenant of a number, as an SQL expression.
fn tenant(number: &str) -> String {
    format!("lpad(to_hex({number}), 32, '0')::uuid")
}

/// Enqueues messages. `number` (of the tenant) and `destination` are SQL expressions, in which `n` counts from 0.
fn fill(ground: &mut Ground, messages: u64, number: &str, destination: &str) -> Result<()> {
    let insert = format!(
        "INSERT INTO {} (topic, payload, tenant_id, destination)
         SELECT '{TOPIC}', $1::json, {}, {destination} FROM generate_series($2, $3) AS n",
        ground.config.table,
        tenant(number)
    );
    let payload = order(ground.payload_bytes);
    for first in (0..messages).step_by(CHUNK as usize) {
        ground.wait(Duration::ZERO)?;
        sql_query(&insert)
            .bind::<Text, _>(&payload)
            .bind::<BigInt, _>(i64::try_from(first)?)
            .bind::<BigInt, _>(i64::try_from(messages.min(first + CHUNK) - 1)?)
            .execute(&mut ground.conn)?;
    }
    Ok(())
}

/// Jain's fairness index of deliveries to destinations with a backlog in the same time: 1 if all got equally many.
fn fairness(options: &Options, ground: &mut Ground, url: &str) -> Result<f64> {
    ground.say("fairness");
    ground.fresh()?;
    register(ground, url, 1, options.backlogged)?;
    // One destination after another: the least fair order in the table.
    let each = options.messages.div_ceil(options.backlogged);
    let number = format!("(n / {each} + 1)");
    fill(
        ground,
        each * options.backlogged,
        &number,
        &format!("'d' || {number}"),
    )?;
    ground.quiet()?;
    deliver_with(ground, relay(ground), each * options.backlogged / 2)?;
    let index = format!(
        "SELECT (sum(got) ^ 2 / (count(*) * sum(got ^ 2)))::float8 AS number
           FROM (SELECT (SELECT count(*) FROM {0}_ledger l WHERE l.destination = d.name) AS got
                   FROM {0}_endpoint d) AS each",
        ground.config.table
    );
    measures::number(&mut ground.conn, &index)
}

/// The load alongside a paced run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// Some destinations never respond.
    Hanging,
    /// A tenant has many messages waiting.
    Waiting,
    /// Rows are changed, inserted and deleted all the time, and a second relay runs.
    Changes,
}

impl Beside {
    const ALL: [Self; 4] = [Self::Nothing, Self::Hanging, Self::Waiting, Self::Changes];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "paced",
            Self::Hanging => "paced_beside_hanging",
            Self::Waiting => "paced_beside_waiting",
            Self::Changes => "paced_beside_changes",
        }
    }
}

/// Enqueues messages for all destinations at a steady rate. Measures only destinations that respond and have
/// no backlog.
fn paced(options: &Options, ground: &mut Ground, url: &str, beside: Beside) -> Result<PacedRow> {
    ground.fresh()?;
    // The system accepts connections, and nothing reads from them.
    let dead = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
    let dead = format!("http://{}/", dead.local_addr()?);
    let hanging = options.hanging.min(options.paced);
    let first_good = hanging.max(BUSY) + 1;
    let of_first = if beside == Beside::Hanging {
        dead.as_str()
    } else {
        url
    };
    register(ground, of_first, 1, first_good - 1)?;
    register(ground, url, first_good, options.paced)?;
    if beside == Beside::Waiting {
        fill(
            ground,
            options.waiting,
            &BUSY.to_string(),
            &format!("'d{BUSY}'"),
        )?;
    }
    ground.quiet()?;
    let mut relays = vec![relay(ground).start()?];
    if beside == Beside::Changes {
        relays.push(relay(ground).start()?);
    }
    let number = format!("(1 + floor(random() * {}))::bigint", options.paced);
    let began = Instant::now();
    let mut measured_from = 0.0;
    for tick in 0..2 * options.seconds * TICKS_PER_SECOND {
        if tick == options.seconds * TICKS_PER_SECOND {
            let now = "SELECT extract(epoch FROM clock_timestamp())::float8 AS number";
            measured_from = measures::number(&mut ground.conn, now)?;
        }
        fill(ground, options.rate / TICKS_PER_SECOND, &number, "''")?;
        if beside == Beside::Changes {
            change(options, ground, url, tick)?;
        }
        let next = began + TICK * u32::try_from(tick + 1)?;
        ground.wait(next.saturating_duration_since(Instant::now()))?;
    }
    // Wait for the messages of the measured destinations.
    let good = format!("tenant_id >= {}", tenant(&first_good.to_string()));
    let end = Instant::now() + PATIENCE;
    let left = format!(
        "SELECT count(*)::float8 AS number FROM {} WHERE {good}",
        ground.config.table
    );
    while measures::number(&mut ground.conn, &left)? > 0.0 && Instant::now() < end {
        ground.wait(TICK)?;
    }
    for relay in relays {
        relay.shutdown(ground.config.shutdown_timeout)?;
    }
    let took = "1000 * extract(epoch FROM settled_at - created_at)";
    Ok(sql_query(format!(
        "SELECT count(*) AS delivered,
                coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY {took}), 'NaN')::float8 AS p50,
                coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY {took}), 'NaN')::float8 AS p99
           FROM {}_ledger WHERE {good} AND created_at > to_timestamp($1)",
        ground.config.table
    ))
    .bind::<Double, _>(measured_from)
    .get_result(&mut ground.conn)?)
}

/// One tick of changes: half of the changed rows are destinations in use, whose description changes. The others are
/// inserted, and deleted with the next tick.
fn change(options: &Options, ground: &mut Ground, url: &str, tick: u64) -> Result<()> {
    let changes = i64::try_from(options.changes / TICKS_PER_SECOND)?;
    let (new, tick) = (changes / 4, i64::try_from(tick)?);
    let table = &ground.config.table;
    sql_query(format!(
        "UPDATE {table}_endpoint SET description = 'tick ' || $1
          WHERE name = ANY(ARRAY(SELECT 'd' || (1 + floor(random() * $3))::bigint FROM generate_series(1, $2)))"
    ))
    .bind::<BigInt, _>(tick)
    .bind::<BigInt, _>(changes - 2 * new)
    .bind::<BigInt, _>(i64::try_from(options.paced)?)
    .execute(&mut ground.conn)?;
    sql_query(format!(
        "DELETE FROM {table}_endpoint WHERE description = 'new in tick ' || ($1 - 1)"
    ))
    .bind::<BigInt, _>(tick)
    .execute(&mut ground.conn)?;
    sql_query(format!(
        "INSERT INTO {table}_endpoint (name, url, topics, description)
         SELECT 'new-' || $1 || '-' || n, $3, '{{never.*}}', 'new in tick ' || $1 FROM generate_series(1, $2) AS n"
    ))
    .bind::<BigInt, _>(tick)
    .bind::<BigInt, _>(new)
    .bind::<Text, _>(url)
    .execute(&mut ground.conn)?;
    Ok(())
}

/// The median of at least one number; of two in the middle, the greater.
fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

pub(super) fn table(report: &Value) -> Table {
    let mut table = report::runs(
        report,
        &[
            ("run", "what", Unit::Word),
            ("delivered/s", "messages_per_second", Unit::Count),
            ("ratio to the first", "ratio", Unit::Ratio),
            ("own CPU", "own_cpu_us_per_message", Unit::Micros),
            ("p50", "p50_ms", Unit::Millis),
            ("p99", "p99_ms", Unit::Millis),
            ("p99 ratio", "p99_ratio", Unit::Ratio),
        ],
    );
    for (name, key, unit) in [
        ("Jain's fairness index", "fairness", Unit::Ratio),
        ("threads", "threads", Unit::Count),
        ("peak memory", "peak_memory_mib", Unit::Mebibytes),
    ] {
        table.add_row([name.to_owned(), report::shown(&report[key], unit)]);
    }
    table
}
