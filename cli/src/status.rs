//! `diesel-outbox status`

mod watch;

use std::time::Duration;

use anyhow::Result;
use diesel::PgConnection;
use diesel_outbox::admin::{self, EndpointCounts, LaneDepth, Pause};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Overview};
use diesel_outbox::{DatabaseError, Status};
use serde_json::{Value, json};

use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::{keys, leases, output, pauses};

/// Options of `status`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Counts of large outboxes are estimates, marked with ~ (in JSON: \"estimated\"). \
    --exact counts every message, which takes seconds for millions of messages. \
    An estimate may count a few messages without a subscriber as delivered."
)]
pub(crate) struct Options {
    /// Repeat the status every SECONDS (default 2), with rates of incoming and settled messages
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = seconds
    )]
    watch: Option<Duration>,
    /// Count every message instead of estimating
    #[arg(long)]
    exact: bool,
    /// Print the status as JSON; with --watch, one line per update
    #[arg(long)]
    json: bool,
}

/// Parses the seconds between two updates.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.1..=3600.0).contains(&seconds) {
        return Err("not between 0.1 and 3600 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// The data of a status.
struct Snapshot {
    overview: Overview,
    pauses: Vec<Pause>,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    if let Some(interval) = options.watch {
        return watch::run(config, options, interval);
    }
    let mut conn = connect(&config, "status", patience(options.exact))?;
    let seen = read(&mut conn, &config, options.exact)?;
    if options.json {
        return output::json(&as_json(&seen));
    }
    output::line(text(&seen))
}

/// The statement timeout. A statement takes milliseconds, but counts of every message may take long.
fn patience(exact: bool) -> Duration {
    Duration::from_secs(if exact { 120 } else { 15 })
}

fn read(conn: &mut PgConnection, config: &Config, exact: bool) -> Result<Snapshot, DatabaseError> {
    let overview = if exact {
        program::exact_overview
    } else {
        program::overview
    };
    Ok(Snapshot {
        overview: overview(conn, &config.table)?,
        pauses: admin::pauses(conn, &config.table)?,
    })
}

/// The number of messages in a state, and whether it is an estimate.
fn count(overview: &Overview, status: Status) -> (i64, bool) {
    let row = overview.counts.iter().find(|row| row.status == status);
    row.map_or((0, false), |row| (row.count, row.is_estimate))
}

fn as_json(seen: &Snapshot) -> Value {
    let overview = &seen.overview;
    let counts: serde_json::Map<String, Value> = Status::ALL
        .iter()
        .map(|&status| (status.to_string(), count(overview, status).0.into()))
        .collect();
    let estimated: Vec<&str> = overview
        .counts
        .iter()
        .filter(|row| row.is_estimate)
        .map(|row| row.status.as_str())
        .collect();
    json!({
        "counts": counts,
        "estimated": !estimated.is_empty(),
        "estimated_counts": estimated,
        "oldest_due_seconds": overview.oldest_due_seconds,
        "lanes": overview.depths.lanes.iter().map(|lane| json!({
            "topic": lane.topic,
            "destination": lane.destination,
            "pending": lane.pending,
            "sending": lane.sending,
            "retrying": lane.retrying,
            "oldest_due_seconds": lane.oldest_due_seconds,
            "estimated": lane.is_estimate,
        })).collect::<Vec<_>>(),
        "endpoints": {
            "working": overview.depths.endpoints.working,
            "unverified": overview.depths.endpoints.unverified,
            "paused": overview.depths.endpoints.paused,
            "failing": overview.depths.endpoints.failing,
            "unread": overview.depths.endpoints.unread,
            "disabled": overview.depths.endpoints.disabled,
        },
        "feeds": overview.depths.feeds.iter().map(|feed| json!({
            "name": feed.name,
            "lag_events": feed.events,
            "lag_seconds": feed.seconds,
        })).collect::<Vec<_>>(),
        "troubles": overview.troubles.iter().map(|row| json!({
            "status": row.status,
            "topic": row.topic,
            "destination": row.destination,
            "reason": row.reason,
            "count": row.count,
            "example": row.example,
            "estimated": row.is_estimate,
        })).collect::<Vec<_>>(),
        "blocked_keys": overview.blocked_keys,
        "pauses": seen.pauses.iter().map(pauses::as_json).collect::<Vec<_>>(),
        "relays": overview.leases.iter().map(leases::as_json).collect::<Vec<_>>(),
    })
}

/// A count, with `~` before an estimate.
fn about(count: i64, is_estimate: bool) -> String {
    format!("{}{count}", if is_estimate { "~" } else { "" })
}

/// The most feeds in the text, those with most events that nobody has read; `--json` has a thousand.
const FEEDS: usize = 10;
/// The most blocked keys in the text; `--json` has a hundred.
const KEYS: usize = 10;

fn text(seen: &Snapshot) -> String {
    let overview = &seen.overview;
    let mut parts = Vec::new();
    let mut counts = output::table(&["status", "messages"]);
    for &status in Status::ALL {
        let (count, is_estimate) = count(overview, status);
        counts.add_row([status.to_string(), about(count, is_estimate)]);
    }
    parts.push(counts.to_string());
    if let Some(seconds) = overview.oldest_due_seconds {
        let age = output::age(seconds);
        parts.push(format!("oldest due message: due for {age}"));
    }
    parts.extend(rest(seen));
    parts.join("\n")
}

/// Failing destinations, problems, blocked keys, pauses and relays.
fn rest(seen: &Snapshot) -> Vec<String> {
    let overview = &seen.overview;
    let mut parts = Vec::new();
    let EndpointCounts {
        unverified,
        paused,
        failing,
        unread,
        disabled,
        ..
    } = overview.depths.endpoints;
    if unverified + paused + failing + disabled > 0 {
        parts.push(format!(
            "endpoints: {failing} failing, {paused} paused, {disabled} disabled, {unverified} unverified"
        ));
    }
    if unread > 0 {
        parts.push(format!(
            "feeds with events that nobody reads: {unread} (`diesel-outbox feed list`)"
        ));
    }
    let lags = overview.depths.feeds.iter().filter(|feed| feed.events > 0);
    let lags: Vec<[String; 3]> = lags
        .take(FEEDS)
        .map(|feed| {
            let age = output::age(feed.seconds);
            [output::name(&feed.name), feed.events.to_string(), age]
        })
        .collect();
    if !lags.is_empty() {
        let mut table = output::table(&["feed", "events not read", "for"]);
        for row in lags {
            table.add_row(row);
        }
        parts.push(table.to_string());
    }
    if !overview.troubles.is_empty() {
        let mut troubles = output::table(&[
            "status",
            "topic",
            "destination",
            "reason",
            "messages",
            "example",
        ]);
        for row in &overview.troubles {
            troubles.add_row([
                row.status.to_string(),
                output::name(&row.topic),
                output::name(&row.destination),
                row.reason.clone(),
                about(row.count, row.is_estimate),
                output::shown(row.example.as_deref().unwrap_or_default()),
            ]);
        }
        parts.push(troubles.to_string());
    }
    if !overview.blocked_keys.is_empty() {
        parts.push(keys::table(&overview.blocked_keys, KEYS).to_string());
    }
    if !seen.pauses.is_empty() {
        parts.push(pauses::table(&seen.pauses).to_string());
    }
    parts.push(leases::shown(&overview.leases));
    parts
}

/// The `most` longest lanes. A lane is the waiting messages of one topic and destination.
fn lanes(lanes: &[LaneDepth], most: usize) -> String {
    let mut longest: Vec<&LaneDepth> = lanes.iter().collect();
    longest.sort_by_key(|lane| -(lane.pending + lane.sending + lane.retrying));
    let mut table = output::table(&[
        "topic",
        "destination",
        "pending",
        "sending",
        "retrying",
        "oldest due",
    ]);
    for lane in longest.iter().take(most) {
        let age = lane.oldest_due_seconds.map(output::age);
        table.add_row([
            output::name(&lane.topic),
            output::name(&lane.destination),
            about(lane.pending, lane.is_estimate),
            about(lane.sending, lane.is_estimate),
            about(lane.retrying, lane.is_estimate),
            age.unwrap_or_default(),
        ]);
    }
    if longest.len() > most {
        let more = format!("and {} more", longest.len() - most);
        table.add_row([more.as_str(), "", "", "", "", ""]);
    }
    table.to_string()
}
