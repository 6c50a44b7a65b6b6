//! The cost of the admin page for the relay, and the response times of the page, with many waiting messages and many
//! dead letters.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use diesel::sql_types::{BigInt, Text};
use diesel::{RunQueryDsl, sql_query};
use serde_json::{Value, json};

use super::children::RelayProcess;
use super::delivery::Patience;
use super::ground::{Fill, Ground, payload};
use super::relay_process::Done;
use super::report::{self, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::output;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages to deliver in each run of each round
    #[arg(long, default_value_t = 200_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Backlog behind the delivered messages
    #[arg(long, default_value = "1000000", value_name = "NUMBER", value_parser = whole(0..=MOST_MESSAGES))]
    waiting: u64,
    /// Number of dead letters
    #[arg(long, default_value = "100000", value_name = "NUMBER", value_parser = whole(0..=MOST_MESSAGES))]
    dead: u64,
    /// Number of rounds; each round measures every run once
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// The interval of page loads.
const RELOAD: Duration = Duration::from_secs(1);
/// The paths that are loaded, the overview first.
const PAGES: [&str; 10] = [
    "/",
    "/dead",
    "/dead?reason=TIMEOUT&topic=dead.1",
    "/dead/-7",
    "/messages?q=dead-7",
    "/ledger",
    "/keys",
    "/relays",
    "/metrics",
    "/readyz",
];
/// The interval between two readings of the relay's counts.
const TICK: Duration = Duration::from_millis(10);

/// All rounds that load the same pages each second.
struct Run {
    name: &'static str,
    /// `None`: the relay has no admin page.
    pages: Option<&'static [&'static str]>,
    seconds: f64,
    done: Done,
}

impl Run {
    fn new(name: &'static str, pages: Option<&'static [&'static str]>) -> Self {
        Self {
            name,
            pages,
            seconds: 0.0,
            done: Done::default(),
        }
    }

    fn rate(&self) -> f64 {
        self.done.delivered as f64 / self.seconds
    }
}

/// The load times of each page, in milliseconds.
type Times = BTreeMap<&'static str, Vec<f64>>;

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    ground.fresh()?;
    ground.fill(&Fill::plain(options.waiting))?;
    kill(options.dead, ground)?;
    let mut runs = [
        Run::new("without", None),
        Run::new("the overview each second", Some(&PAGES[..1])),
        Run::new("every page each second", Some(&PAGES)),
    ];
    let mut times = Times::new();
    for round in 1..=options.rounds {
        for run in &mut runs {
            ground.say(format_args!("round {round}: {}", run.name));
            one(run, options.messages, ground, &mut times)?;
        }
    }
    let pages = times.iter().map(|(page, times)| {
        json!({
            "page": page,
            "loads": times.len(),
            "mean_ms": times.iter().sum::<f64>() / times.len() as f64,
            "max_ms": times.iter().copied().fold(0.0, f64::max),
        })
    });
    let without = runs[0].rate();
    let shown = |run: &Run| {
        json!({
            "pages": run.name,
            "messages_per_second": run.rate(),
            "ratio_to_without": run.rate() / without,
            "own_cpu_us_per_message": run.done.cpu_seconds * 1e6 / run.done.delivered as f64,
        })
    };
    Ok(json!({
        "messages": options.messages,
        "waiting": options.waiting,
        "dead": options.dead,
        "rounds": options.rounds,
        "runs": runs.iter().map(shown).collect::<Vec<_>>(),
        "pages": pages.collect::<Vec<_>>(),
    }))
}

/// Inserts dead letters with five topics and four reasons.
fn kill(dead: u64, ground: &mut Ground) -> Result<()> {
    let table = &ground.config.table;
    sql_query(format!(
        "INSERT INTO {table}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
                available_at, created_at, attempts, reason, last_error, http_status, dead_lettered_at)
         SELECT -n, gen_random_uuid(), 'dead.' || n % 5, '', $1::json, 'dead-' || n, now(), now(), 20,
                (ARRAY['SERVER_ERROR', 'CLIENT_ERROR', 'TIMEOUT', 'EXPIRED'])[1 + n % 4],
                'an error of ' || n, 500, now() - n * interval '1 second'
           FROM generate_series(1, $2) AS n"
    ))
    .bind::<Text, _>(payload(ground.payload_bytes).to_string())
    .bind::<BigInt, _>(i64::try_from(dead)?)
    .execute(&mut ground.conn)
    .context("cannot insert dead letters")?;
    Ok(())
}

fn one(run: &mut Run, messages: u64, ground: &mut Ground, times: &mut Times) -> Result<()> {
    ground.fill(&Fill::plain(messages))?;
    ground.quiet()?;
    let address = match run.pages {
        // A free port, which the relay process takes.
        Some(_) => Some(TcpListener::bind("127.0.0.1:0")?.local_addr()?),
        None => None,
    };
    let variables = address.map(|address| ("OUTBOX_ADMIN_ADDR", address.to_string()));
    let mut relay = RelayProcess::start_with(ground, variables)?;
    let mut pages = run.pages.zip(address).map(|(pages, address)| Pages {
        site: format!("http://{address}"),
        pages,
        times,
        loaded: None,
    });
    let progress = ground.progress("delivering", messages);
    let mut patience = Patience::new();
    let began = Instant::now();
    relay.begin()?;
    let done = loop {
        let done = relay.done()?;
        progress.set_position(done.delivered);
        // A relay that delivers has its page ready.
        if let Some(pages) = &mut pages
            && done.delivered > 0
        {
            pages.load_in_time()?;
        }
        if done.delivered >= messages {
            break done;
        }
        patience.look(done.delivered, done.failed, messages, &ground.config)?;
        ground.wait(TICK)?;
    };
    run.seconds += began.elapsed().as_secs_f64();
    run.done.add(done);
    progress.finish_and_clear();
    relay.finish().map(drop)
}

/// Loads pages as browsers do that are left open on each page.
struct Pages<'a> {
    site: String,
    pages: &'static [&'static str],
    times: &'a mut Times,
    loaded: Option<Instant>,
}

impl Pages<'_> {
    fn load_in_time(&mut self) -> Result<()> {
        if self.loaded.is_some_and(|at| at.elapsed() < RELOAD) {
            return Ok(());
        }
        self.loaded = Some(Instant::now());
        for page in self.pages {
            let asked = Instant::now();
            let answer = ureq::get(format!("{}{page}", self.site)).call()?;
            ensure!(
                answer.status() == 200,
                "{page} responded with {}",
                answer.status()
            );
            let body = answer.into_body().read_to_string()?;
            ensure!(!body.is_empty(), "{page} is empty");
            let millis = asked.elapsed().as_secs_f64() * 1000.0;
            self.times.entry(page).or_default().push(millis);
        }
        Ok(())
    }
}

pub(super) fn table(report: &Value) -> Table {
    let mut table = output::table(&[
        "pages",
        "delivered/s",
        "ratio to without",
        "own CPU per message",
    ]);
    for run in report["runs"].as_array().into_iter().flatten() {
        table.add_row([
            report::shown(&run["pages"], Unit::Word),
            report::shown(&run["messages_per_second"], Unit::Count),
            report::shown(&run["ratio_to_without"], Unit::Ratio),
            report::shown(&run["own_cpu_us_per_message"], Unit::Micros),
        ]);
    }
    for page in report["pages"].as_array().into_iter().flatten() {
        table.add_row([
            report::shown(&page["page"], Unit::Word),
            format!("{} loads", report::shown(&page["loads"], Unit::Count)),
            format!("mean {}", report::shown(&page["mean_ms"], Unit::Millis)),
            format!("slowest {}", report::shown(&page["max_ms"], Unit::Millis)),
        ]);
    }
    table
}
