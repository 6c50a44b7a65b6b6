//! `diesel-outbox leases`

use std::time::Duration;

use anyhow::Result;
use diesel_outbox::program::{self, LeaseRow};
use serde_json::{Value, json};

use crate::connection::connect;
use crate::output;
use crate::settings::SettingFlags;

/// Options of `leases`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print the leases as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = connect(&config, "leases", Duration::from_secs(30))?;
    let leases = program::leases(&mut conn, &config.table)?;
    if options.json {
        return output::json(&Value::Array(leases.iter().map(as_json).collect()));
    }
    output::line(shown(&leases))
}

/// A lease as JSON.
pub(crate) fn as_json(row: &LeaseRow) -> Value {
    json!({
        "lease": row.id,
        "relay": row.relay,
        "started_seconds_ago": row.started_seconds_ago,
        "renewed_seconds_ago": row.renewed_seconds_ago,
        "seconds_left": row.seconds_left,
        "expired": row.seconds_left <= 0.0,
        "silent": row.silent,
        "stands_by": row.stands_by,
        "enabled": row.enabled,
        "destinations": row.destinations,
        "endpoints": row.endpoints,
    })
}

fn destinations(row: &LeaseRow) -> String {
    let names = output::names(&row.destinations);
    match (row.endpoints, names.is_empty()) {
        (false, _) => names,
        (true, true) => "endpoints".to_owned(),
        (true, false) => format!("{names}, endpoints"),
    }
}

/// The leases as a table, and whether no relay runs.
pub(crate) fn shown(leases: &[LeaseRow]) -> String {
    if leases.is_empty() {
        return "no relay is registered".to_owned();
    }
    let mut table = output::table(&[
        "lease",
        "relay",
        "registered",
        "renewed",
        "state",
        "destinations",
    ]);
    for row in leases {
        let state = if row.silent {
            format!("no heartbeat, expires in {:.0} s", row.seconds_left)
        } else if row.seconds_left > 0.0 {
            let claims = match (row.enabled, row.stands_by) {
                (false, _) => ", switched off (OUTBOX_ENABLED is false)",
                (true, true) => ", stands by",
                (true, false) => "",
            };
            format!("alive, {:.0} s left{claims}", row.seconds_left)
        } else {
            format!("expired {} ago", output::age(-row.seconds_left))
        };
        table.add_row([
            row.id.to_string(),
            output::shown(&row.relay),
            format!("{} ago", output::age(row.started_seconds_ago)),
            format!("{} ago", output::age(row.renewed_seconds_ago)),
            state,
            destinations(row),
        ]);
    }
    if leases.iter().any(LeaseRow::is_alive) {
        return table.to_string();
    }
    let why = match leases.iter().any(|row| row.silent) {
        true => "the heartbeats have stopped",
        false => "all leases have expired",
    };
    format!("{table}\nno relay is running: {why}")
}
