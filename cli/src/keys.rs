//! `diesel-outbox keys`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::Status;
use diesel_outbox::program::{self, BlockedKey, LeaseRow, MessageRecord};
use serde_json::Value;

use crate::connection::connect;
use crate::number::whole;
use crate::settings::SettingFlags;
use crate::{message, output};

/// Options of `keys`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    list: List,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// List ordering keys blocked by a retry, a delayed message, a dead letter, a pause or a missing relay
    List(List),
    /// Show the live messages and dead letters of a key, in order
    Show {
        /// Ordering key
        key: String,
        #[command(flatten)]
        list: List,
    },
}

#[derive(Debug, clap::Args)]
struct List {
    /// Maximum number of rows
    #[arg(long, default_value_t = 100, value_name = "NUMBER", allow_negative_numbers = true, value_parser = whole(1..=u32::MAX))]
    limit: u32,
    /// Print the rows as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = connect(&config, "keys", Duration::from_secs(120))?;
    match &options.action {
        Some(Action::Show { key, list }) => {
            let limit = i64::from(list.limit);
            let records = program::key_messages(&mut conn, &config.table, key, limit)?;
            let leases = program::leases(&mut conn, &config.table)?;
            if list.json {
                let record = |record: &MessageRecord| {
                    let mut value = message::as_json(record);
                    value["lease_expired"] = is_silent(record, &leases).into();
                    value
                };
                return output::json(&Value::Array(records.iter().map(record).collect()));
            }
            if records.is_empty() {
                bail!(
                    "the key {key:?} has no live messages and no dead letters in the outbox \"{}\"",
                    config.table
                );
            }
            output::line(messages(&records, &leases))
        }
        None | Some(Action::List(_)) => {
            let list = match &options.action {
                Some(Action::List(list)) => list,
                _ => &options.list,
            };
            let keys = program::blocked_keys(&mut conn, &config.table, i64::from(list.limit))?;
            if list.json {
                return output::json(&keys);
            }
            if keys.is_empty() {
                return output::line("no keys are blocked");
            }
            output::line(table(&keys, keys.len()))
        }
    }
}

/// A table of the first `most` keys.
pub(crate) fn table(keys: &[BlockedKey], most: usize) -> comfy_table::Table {
    let mut table = output::table(&[
        "blocked key",
        "destination",
        "waiting",
        "blocked by sequence",
        "state",
    ]);
    for key in keys.iter().take(most) {
        let reason = key.reason.as_deref().unwrap_or_default();
        let when = match (key.seconds_left, &key.waits) {
            (_, Some(waits)) => output::shown(waits),
            (Some(seconds), None) => format!("due in {seconds:.0} s"),
            (None, None) if key.status == Status::Dead => "requeue or discard it".to_owned(),
            (None, None) => "never due".to_owned(),
        };
        let state = match reason {
            "" => format!("{}, {when}", key.status),
            reason => format!("{} {reason}, {when}", key.status),
        };
        let more = if key.waiting_is_capped { "+" } else { "" };
        table.add_row([
            output::name(&key.ordering_key),
            output::name(&key.destination),
            format!("{}{more}", key.waiting),
            key.sequence.to_string(),
            state,
        ]);
    }
    if keys.len() > most {
        let more = format!("and at least {} more", keys.len() - most);
        table.add_row([more.as_str(), "", "", "", ""]);
    }
    table
}

/// Whether the message is claimed under an expired lease. It waits for a takeover.
fn is_silent(record: &MessageRecord, leases: &[LeaseRow]) -> bool {
    let is_alive = |id| {
        let mut leases = leases.iter();
        leases.any(|lease| lease.id == id && lease.seconds_left > 0.0)
    };
    record.locked_by.is_some_and(|id| !is_alive(id))
}

fn messages(records: &[MessageRecord], leases: &[LeaseRow]) -> comfy_table::Table {
    let mut table = output::table(&[
        "sequence",
        "topic",
        "destination",
        "status",
        "attempts",
        "created at",
        "due at",
        "reason",
    ]);
    for record in records {
        let holds = match record.blocks_key {
            true => ", blocks the key",
            false if is_silent(record, leases) => ", lease expired",
            false => "",
        };
        table.add_row([
            record.sequence.to_string(),
            output::name(&record.topic),
            output::name(&record.destination),
            format!("{}{holds}", record.status),
            record.attempts.to_string(),
            record.created_at.clone(),
            record.available_at.clone().unwrap_or_default(),
            output::shown(record.reason.as_deref().unwrap_or_default()),
        ]);
    }
    table
}
