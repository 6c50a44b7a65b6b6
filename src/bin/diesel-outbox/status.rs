//! `diesel-outbox status`

use std::time::Duration;

use anyhow::Result;
use diesel_outbox::Status;
use diesel_outbox::admin::{self, BlockedKey, Overview, Pause};
use serde_json::json;

use crate::settings::SettingFlags;
use crate::{output, pauses};

/// Options of `status`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Show it as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = admin::connect(config.database_url()?, "status", Duration::from_secs(120))?;
    admin::check_schema(&mut conn, &config.table)?;
    let overview = admin::overview(&mut conn, &config.table)?;
    let pauses = admin::pauses(&mut conn, &config.table)?;
    if options.json {
        return output::json(&as_json(&overview, &pauses));
    }
    show(&overview, &pauses)
}

fn count(overview: &Overview, status: Status) -> i64 {
    overview
        .counts
        .iter()
        .find(|row| row.status == status.as_str())
        .map_or(0, |row| row.count)
}

fn as_json(overview: &Overview, pauses: &[Pause]) -> serde_json::Value {
    let counts: serde_json::Map<String, serde_json::Value> = Status::ALL
        .into_iter()
        .map(|status| (status.to_string(), count(overview, status).into()))
        .collect();
    json!({
        "counts": counts,
        "oldest_due_seconds": overview.oldest_due_seconds,
        "troubles": overview.troubles.iter().map(|row| json!({
            "status": row.status,
            "topic": row.topic,
            "reason": row.reason,
            "count": row.count,
            "example": row.example,
        })).collect::<Vec<_>>(),
        "blocked_keys": overview.blocked_keys.iter().map(|row| json!({
            "ordering_key": row.ordering_key,
            "destination": row.destination,
            "sequence": row.sequence,
            "status": row.status,
            "reason": row.reason,
            "seconds_left": row.seconds_left,
            "waiting": row.waiting,
        })).collect::<Vec<_>>(),
        "pauses": pauses.iter().map(pauses::as_json).collect::<Vec<_>>(),
        "relays": overview.leases.iter().map(|row| json!({
            "lease": row.id,
            "relay": row.relay,
            "renewed_seconds_ago": row.renewed_seconds_ago,
            "seconds_left": row.seconds_left,
            "expired": row.seconds_left <= 0.0,
            "stands_by": row.stands_by,
        })).collect::<Vec<_>>(),
    })
}

fn show(overview: &Overview, pauses: &[Pause]) -> Result<()> {
    let mut counts = output::table(&["status", "messages"]);
    for status in Status::ALL {
        counts.add_row([status.to_string(), count(overview, status).to_string()]);
    }
    output::line(counts)?;
    if let Some(seconds) = overview.oldest_due_seconds {
        output::line(format!("oldest due message: due for {seconds:.1} s"))?;
    }
    if !overview.troubles.is_empty() {
        let mut troubles = output::table(&["status", "topic", "reason", "messages", "for example"]);
        for row in &overview.troubles {
            troubles.add_row([
                row.status.clone(),
                output::shown(&row.topic),
                row.reason.clone(),
                row.count.to_string(),
                output::shown(row.example.as_deref().unwrap_or_default()),
            ]);
        }
        output::line(troubles)?;
    }
    if !overview.blocked_keys.is_empty() {
        output::line(blocked_keys(&overview.blocked_keys))?;
    }
    if !pauses.is_empty() {
        output::line(pauses::table(pauses))?;
    }
    if overview.leases.is_empty() {
        return output::line("no relay is registered");
    }
    let mut leases = output::table(&["lease", "relay", "renewed", "state"]);
    for row in &overview.leases {
        let state = if row.seconds_left > 0.0 {
            let stands_by = if row.stands_by { ", stands by" } else { "" };
            format!("alive, {:.0} s left{stands_by}", row.seconds_left)
        } else {
            format!("expired {:.0} s ago", -row.seconds_left)
        };
        leases.add_row([
            row.id.to_string(),
            output::shown(&row.relay),
            format!("{:.0} s ago", row.renewed_seconds_ago),
            state,
        ]);
    }
    output::line(leases)
}

/// Keys shown; `--json` has a hundred.
const KEYS: usize = 10;

fn blocked_keys(keys: &[BlockedKey]) -> comfy_table::Table {
    let mut table = output::table(&[
        "blocked key",
        "destination",
        "waiting",
        "for message",
        "it is",
    ]);
    for key in keys.iter().take(KEYS) {
        let reason = key.reason.as_deref().unwrap_or_default();
        let when = match key.seconds_left {
            Some(seconds) => format!("due in {seconds:.0} s"),
            None if key.status == "dead" => "requeue or discard it".to_owned(),
            None => "due never".to_owned(),
        };
        table.add_row([
            output::shown(&key.ordering_key),
            output::shown(&key.destination),
            key.waiting.to_string(),
            key.sequence.to_string(),
            format!("{} {reason}, {when}", key.status),
        ]);
    }
    if keys.len() > KEYS {
        let more = keys.len() - KEYS;
        table.add_row([
            format!("and {more} more, at least"),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
        ]);
    }
    table
}
