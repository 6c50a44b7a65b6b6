//! `diesel-outbox status`

use std::time::Duration;

use anyhow::Result;
use diesel_outbox::Status;
use diesel_outbox::admin::{self, Overview, Pause};
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
        "pauses": pauses.iter().map(pauses::as_json).collect::<Vec<_>>(),
        "relays": overview.leases.iter().map(|row| json!({
            "lease": row.id,
            "relay": row.relay,
            "renewed_seconds_ago": row.renewed_seconds_ago,
            "seconds_left": row.seconds_left,
            "expired": row.seconds_left <= 0.0,
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
    if !pauses.is_empty() {
        output::line(pauses::table(pauses))?;
    }
    if overview.leases.is_empty() {
        return output::line("no relay is registered");
    }
    let mut leases = output::table(&["lease", "relay", "renewed", "state"]);
    for row in &overview.leases {
        let state = if row.seconds_left > 0.0 {
            format!("alive, {:.0} s left", row.seconds_left)
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
