//! `diesel-outbox message`

mod waiting;

use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::{self, MessageKey, MessageRecord};
use diesel_outbox::{Config, ReasonCode};
use serde_json::{Value, json};

use crate::output;
use crate::settings::SettingFlags;

/// Options of `message`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Show a message with its payload, at each destination, and what has happened to it
    Show {
        /// Its message id (the receiver's webhook-id), its idempotency key, or its sequence
        which: String,
        /// Show it as JSON
        #[arg(long)]
        json: bool,
    },
    /// List what waits (pending, sending, retrying), the next due first
    List(waiting::List),
    /// Cancel a message that waits: it is not sent
    Cancel(waiting::Cancel),
    /// Let a message that waits be due at another time
    Reschedule(waiting::Reschedule),
    /// Say that a message was delivered by other means, or must not be sent; also of a dead letter
    Settle(waiting::Settle),
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = admin::connect(config.database_url()?, "message", Duration::from_secs(120))?;
    admin::check_schema(&mut conn, &config.table)?;
    match &options.action {
        Action::Show { which, json } => show_message(&mut conn, &config, which, *json),
        Action::List(options) => waiting::list(&mut conn, &config, options),
        Action::Cancel(options) => waiting::cancel(&mut conn, &config, options),
        Action::Reschedule(options) => waiting::reschedule(&mut conn, &config, options),
        Action::Settle(options) => waiting::settle(&mut conn, &config, options),
    }
}

fn show_message(conn: &mut PgConnection, config: &Config, which: &str, json: bool) -> Result<()> {
    let key = MessageKey::Text(which.to_owned());
    let found = admin::message(conn, &config.table, &key)?;
    let in_part = if found.is_complete {
        ""
    } else {
        "; not everything was searched in time: its idempotency key leads to it at once"
    };
    if found.rows.is_empty() {
        bail!("{}{in_part}", unknown(which, config));
    }
    let timeline = timeline(&found.rows);
    if json {
        return output::json(&json!({
            "complete": found.is_complete,
            "records": found.rows.iter().map(as_json).collect::<Vec<_>>(),
            "timeline": timeline.iter().map(|event| json!({
                "at": event.at, "what": event.what,
            })).collect::<Vec<_>>(),
        }));
    }
    for record in &found.rows {
        show(record)?;
    }
    for event in &timeline {
        output::line(format!("{:<26}{}", event.at, output::shown(&event.what)))?;
    }
    if !found.is_complete {
        output::line(format!("there may be more{in_part}"))?;
    }
    Ok(())
}

fn unknown(which: &str, config: &Config) -> String {
    format!(
        "there is no message with the id, key or sequence {which:?} in the outbox \"{}\", and the ledger does not remember one",
        config.table
    )
}

/// A record, as programs read it.
pub(crate) fn as_json(record: &MessageRecord) -> Value {
    let mut value = json!({
        "kept_in": record.kept_in,
        "status": record.status,
        "sequence": record.sequence,
        "message_id": record.message_id.to_string(),
        "topic": record.topic,
        "destination": record.destination,
        "idempotency_key": record.idempotency_key,
        "replay_of": record.replay_of(),
        "ordering_key": record.ordering_key,
        "tenant_id": record.tenant_id.map(|id| id.to_string()),
        "attempts": record.attempts,
        "created_at": record.created_at,
        "occurred_at": record.occurred_at,
        "available_at": record.available_at,
        "expires_at": record.expires_at,
        "locked_by": record.locked_by,
        "locked_at": record.locked_at,
        "settled_at": record.settled_at,
        "reason": record.reason,
        "last_error": record.last_error,
        "http_status": record.http_status,
        "response": record.response,
        "split_from": record.split_from,
        "blocks_key": record.blocks_key,
    });
    let parsed = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| text.clone().into());
    if let Some(headers) = &record.headers {
        value["headers"] = parsed(headers);
    }
    if let Some(payload) = &record.payload {
        value["payload"] = parsed(payload);
    }
    value
}

fn show(record: &MessageRecord) -> Result<()> {
    let id = |id: Option<i64>| id.map(|id| id.to_string());
    let place = match record.kept_in.as_str() {
        "live" => "in the outbox",
        "dead" => "among the dead letters",
        _ => "in the ledger",
    };
    let destination = Some(&record.destination).filter(|name| !name.is_empty());
    let fields: [(&str, Option<String>); 21] = [
        ("status", Some(format!("{}, {place}", record.status))),
        ("sequence", Some(record.sequence.to_string())),
        ("message id", Some(record.message_id.to_string())),
        ("topic", Some(record.topic.clone())),
        ("destination", destination.cloned()),
        ("idempotency key", Some(record.idempotency_key.clone())),
        ("ordering key", record.ordering_key.clone()),
        ("tenant", record.tenant_id.map(|id| id.to_string())),
        ("attempts", Some(record.attempts.to_string())),
        ("created at", Some(record.created_at.clone())),
        ("occurred at", record.occurred_at.clone()),
        ("due at", record.available_at.clone()),
        ("expires at", record.expires_at.clone()),
        ("claimed by lease", id(record.locked_by)),
        ("settled at", record.settled_at.clone()),
        ("reason", record.reason.clone()),
        ("last error", record.last_error.clone()),
        (
            "http status",
            record.http_status.map(|status| status.to_string()),
        ),
        ("response", record.response.clone()),
        ("headers", record.headers.clone()),
        ("payload", record.payload.clone()),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            output::line(format!("{name:<18}{}", output::shown(&value)))?;
        }
    }
    output::line("")
}

/// What has happened, or will.
pub(crate) struct Event {
    /// RFC 3339.
    pub(crate) at: String,
    pub(crate) what: String,
}

/// What the records tell, in the order of time. What a retry was for before the last one is not kept.
pub(crate) fn timeline(records: &[MessageRecord]) -> Vec<Event> {
    let mut events: Vec<Event> = records
        .iter()
        // Of a dead letter the ledger says no more.
        .filter(|record| {
            let is_known = |other: &MessageRecord| {
                other.kept_in == "dead" && other.sequence == record.sequence
            };
            record.kept_in != "ledger" || !records.iter().any(is_known)
        })
        .flat_map(events)
        .collect();
    events.sort_by(|a, b| a.at.cmp(&b.at));
    events.dedup_by(|a, b| a.at == b.at && a.what == b.what);
    events
}

fn events(record: &MessageRecord) -> Vec<Event> {
    let mut events = Vec::new();
    let mut add = |at: &Option<String>, what: String| {
        if let Some(at) = at {
            let at = at.clone();
            events.push(Event { at, what });
        }
    };
    let whither = match record.destination.as_str() {
        "" => String::new(),
        destination => format!(" for {destination}"),
    };
    let attempts = match record.attempts {
        1 => "1 attempt".to_owned(),
        attempts => format!("{attempts} attempts"),
    };
    let reason = record.reason.as_deref().unwrap_or_default();
    let error = match &record.last_error {
        Some(error) => format!("{reason} ({error})"),
        None => reason.to_owned(),
    };
    let enqueued = match record.replay_of() {
        Some(_) => "replayed",
        None => "enqueued",
    };
    add(
        &Some(record.created_at.clone()),
        format!("{enqueued}{whither} as {}", record.sequence),
    );
    add(
        &record.locked_at,
        format!(
            "claimed{whither} under lease {}",
            record.locked_by.unwrap_or_default()
        ),
    );
    let is_for = |code: ReasonCode| reason == code.as_str();
    let note = record.last_error.as_deref().map(|note| format!(": {note}"));
    let note = note.unwrap_or_default();
    match record.status.as_str() {
        "delivered" if is_for(ReasonCode::ByHand) => add(
            &record.settled_at,
            format!("delivered by hand{whither} after {attempts}{note}"),
        ),
        "delivered" => add(
            &record.settled_at,
            format!("delivered{whither} after {attempts}"),
        ),
        "dead" if is_for(ReasonCode::Cancelled) => add(
            &record.settled_at,
            format!("cancelled{whither} after {attempts}{note}"),
        ),
        "dead" => add(
            &record.settled_at,
            format!("died{whither} after {attempts}: {error}"),
        ),
        "retrying" => add(
            &record.available_at,
            format!("due again{whither} after {attempts}: {error}"),
        ),
        "pending" if record.reason.is_some() => add(
            &record.available_at,
            format!("due again{whither}, it waited: {error}"),
        ),
        "pending" => add(&record.available_at, format!("due{whither}")),
        _ => {}
    }
    if record.kept_in == "live" {
        add(&record.expires_at, format!("its time is over{whither}"));
    }
    events
}
