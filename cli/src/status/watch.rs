//! `diesel-outbox status --watch`

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Activity, Connection, Rates};
use diesel_outbox::{DatabaseError, Status, admin};
use serde_json::{Value, json};

use super::{Options, Snapshot, about, as_json, count, lanes, patience, read, rest};
use crate::{output, signals};

/// The most lanes shown.
const LANES: usize = 15;

/// The form of the output.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Each update overwrites the one before.
    Terminal,
    /// Updates follow each other.
    Plain,
    /// One line per update.
    Json,
}

/// One update, with the rates since the update before.
struct Tick {
    at: String,
    seen: Snapshot,
    activity: Activity,
    rates: Option<Rates>,
}

/// Shows the status until a signal arrives, which is a success. Reports a lost database, and reconnects.
pub(super) fn run(config: Config, options: &Options, interval: Duration) -> Result<()> {
    let form = match options.json {
        true => Form::Json,
        false if std::io::stdout().is_terminal() => Form::Terminal,
        false => Form::Plain,
    };
    let exact = options.exact;
    signals::or_until_signal(move || follow(&config, exact, form, interval))
}

fn follow(config: &Config, exact: bool, form: Form, interval: Duration) -> Result<()> {
    // A missing outbox, for example, never gets further.
    let mut first = open(config, exact)?;
    first.run(|conn| admin::check_schema(conn, &config.table))?;
    let mut conn = Some(first);
    let mut last: Option<Activity> = None;
    if form == Form::Terminal {
        draw("\x1b[2J")?;
    }
    loop {
        match tick(&mut conn, config, exact, last) {
            Ok(tick) => {
                last = Some(tick.activity);
                show(&tick, config, form, interval)?;
            }
            Err(error) => {
                // The next update opens another connection.
                conn = None;
                show_error(&error, form, interval)?;
            }
        }
        std::thread::sleep(interval);
    }
}

fn open(config: &Config, exact: bool) -> Result<Connection, DatabaseError> {
    let url = config
        .database_url()
        .map_err(|error| DatabaseError::Connect(error.to_string()))?;
    Connection::open(url, "status", patience(exact))
}

fn tick(
    conn: &mut Option<Connection>,
    config: &Config,
    exact: bool,
    last: Option<Activity>,
) -> Result<Tick, DatabaseError> {
    let conn = match conn {
        Some(conn) => conn,
        None => conn.insert(open(config, exact)?),
    };
    conn.run(|conn| {
        let seen = read(conn, config, exact)?;
        let activity = program::activity(conn, &config.table)?;
        Ok(Tick {
            at: now(),
            seen,
            rates: last.and_then(|last| activity.since(&last)),
            activity,
        })
    })
}

fn now() -> String {
    humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string()
}

fn show(tick: &Tick, config: &Config, form: Form, interval: Duration) -> Result<()> {
    match form {
        Form::Json => {
            let mut value = as_json(&tick.seen);
            value["at"] = tick.at.clone().into();
            value["rates"] = tick.rates.map_or(Value::Null, |rates| {
                json!({
                    "enqueued_per_second": rates.enqueued,
                    "settled_per_second": rates.settled,
                    "dead_lettered_per_second": rates.dead_lettered,
                })
            });
            output::line(value)
        }
        Form::Plain => output::line(text(tick, config) + "\n"),
        Form::Terminal => over(&text(tick, config), interval),
    }
}

fn show_error(error: &DatabaseError, form: Form, interval: Duration) -> Result<()> {
    let said = format!("cannot read the outbox, trying again: {}", one_line(error));
    match form {
        Form::Json => output::line(json!({ "at": now(), "error": error.to_string() })),
        Form::Plain => output::line(format!("{} {said}", now())),
        Form::Terminal => over(&format!("{}\n{said}", now()), interval),
    }
}

fn one_line(error: &DatabaseError) -> String {
    output::shown(&error.to_string())
}

fn text(tick: &Tick, config: &Config) -> String {
    let overview = &tick.seen.overview;
    let rates = match tick.rates {
        Some(rates) => format!(
            "in {}/s, out {}/s, dead {}/s",
            rate(rates.enqueued),
            rate(rates.settled),
            rate(rates.dead_lettered)
        ),
        None => "in -, out -, dead - (rates come with the next update)".to_owned(),
    };
    let counts: Vec<String> = Status::ALL
        .iter()
        .map(|&status| {
            let (count, is_estimate) = count(overview, status);
            format!("{status} {}", about(count, is_estimate))
        })
        .collect();
    let oldest = match overview.oldest_due_seconds {
        Some(seconds) => format!("oldest due message: due for {}", output::age(seconds)),
        None => "nothing is due".to_owned(),
    };
    let mut parts = vec![
        format!("outbox {} at {}", config.table, tick.at),
        rates,
        counts.join(", "),
        oldest,
    ];
    if !overview.depths.lanes.is_empty() {
        parts.push(lanes(&overview.depths.lanes, LANES));
    }
    parts.extend(rest(&tick.seen));
    parts.join("\n")
}

fn rate(rate: f64) -> String {
    if rate > 0.0 && rate < 10.0 {
        return format!("{rate:.1}");
    }
    output::grouped(rate)
}

/// Overwrites the screen without flicker, and clears the rest of each line and of the screen.
fn over(text: &str, interval: Duration) -> Result<()> {
    let mut screen = String::from("\x1b[H");
    for line in text.lines() {
        screen.push_str(line);
        screen.push_str("\x1b[K\n");
    }
    screen.push_str(&format!(
        "every {:.1} s; Ctrl-C to stop\x1b[K\n\x1b[J",
        interval.as_secs_f64()
    ));
    draw(&screen)
}

fn draw(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}
