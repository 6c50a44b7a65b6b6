//! `diesel-outbox message`

mod expunge;
mod waiting;

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::WaitReason;
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, HistoryEntry, KeptIn, MessageKey, MessageRecord};
use diesel_outbox::{ReasonCode, Status};
use diesel_outbox_pages::message::{self, APPLICATION, REPLAYED, for_destination};
use serde_json::{Value, json};

use crate::act::{self, Group};
use crate::connection::connect;
use crate::listed::Listed;
use crate::output;
use crate::settings::SettingFlags;

/// The actions of `message`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Show a message at each destination, with its payload and history
    Show {
        /// Message id (the id of the event at the receiver), idempotency key or sequence
        which: String,
        /// Print the message as JSON
        #[arg(long)]
        json: bool,
    },
    /// List waiting messages (pending, sending, retrying), next due first
    List(waiting::List),
    /// Retry or cancel them
    #[command(flatten)]
    Act(Listed<OfMessage>),
    Reschedule(waiting::Reschedule),
    Settle(waiting::Settle),
    /// Remove the content of messages wherever it is (payload, headers, responses, errors): of one, of an ordering key, or
    /// of a subject
    Expunge(expunge::Expunge),
}

/// The command `message`.
#[derive(Debug)]
pub(crate) struct OfMessage;

impl Group for OfMessage {
    const NAME: &'static str = "message";
}

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    if let Action::Act(act) = action {
        act.which()?;
    }
    let config = settings.load()?;
    let mut conn = connect(&config, "message", Duration::from_secs(120))?;
    match action {
        Action::Show { which, json } => show_message(&mut conn, &config, which, *json),
        Action::List(options) => waiting::list(&mut conn, &config, options),
        Action::Act(act) => act.run(&mut conn, &config),
        Action::Reschedule(options) => waiting::reschedule(&mut conn, &config, options),
        Action::Settle(options) => waiting::settle(&mut conn, &config, options),
        Action::Expunge(options) => expunge::run(&mut conn, &config, options),
    }
}

fn show_message(conn: &mut PgConnection, config: &Config, which: &str, json: bool) -> Result<()> {
    let key = MessageKey::Text(which.to_owned());
    let found = program::message(conn, &config.table, &key)?;
    let in_part = if found.is_complete {
        ""
    } else {
        "; the search timed out: search by idempotency key, which is fast"
    };
    let history = program::history_of(conn, &config.table, which, &found.rows)?;
    if found.rows.is_empty() && history.is_empty() {
        bail!("{}{in_part}", act::unknown(which, config));
    }
    let waits = program::wait_reasons_of(conn, &config.table, &found.rows)?;
    let timeline = timeline(&found.rows, &history);
    if json {
        return output::json(&json!({
            "complete": found.is_complete,
            "records": with_waits(&found.rows, &waits),
            "timeline": timeline.iter().map(|event| json!({
                "at": event.at, "what": event.what,
            })).collect::<Vec<_>>(),
        }));
    }
    for (record, waits) in found.rows.iter().zip(&waits) {
        // The dead letter has all that its ledger entry has.
        if !message::is_said_by_a_dead_letter(record, &found.rows) {
            show(record, waits.as_ref())?;
        }
    }
    for event in &timeline {
        output::line(format!("{:<26}{}", event.at, output::shown(&event.what)))?;
    }
    let several = several(which, &found.rows);
    if several > 1 {
        output::line(format!(
            "{several} messages have the sequence {which}, which was used again: refer to one of them by its message id"
        ))?;
    }
    if !found.is_complete {
        output::line(format!("there may be more{in_part}"))?;
    }
    Ok(())
}

/// How many messages have this sequence.
fn several(which: &str, records: &[MessageRecord]) -> usize {
    let of_it = records
        .iter()
        .filter(|record| which.trim().parse() == Ok(record.sequence.0));
    let ids: HashSet<uuid::Uuid> = of_it.map(|record| record.message_id).collect();
    ids.len()
}

/// Records as JSON, each with the reason why it waits, in words and as one word.
fn with_waits(records: &[MessageRecord], waits: &[Option<WaitReason>]) -> Vec<Value> {
    let all = records.iter().zip(waits);
    all.map(|(record, waits)| {
        let mut value = as_json(record);
        value["waits"] = waits.as_ref().map(WaitReason::to_string).into();
        value["wait_reason"] = waits.as_ref().map(WaitReason::as_str).into();
        value
    })
    .collect()
}

/// A record as JSON.
pub(crate) fn as_json(record: &MessageRecord) -> Value {
    let mut value = json!({
        "kept_in": record.kept_in.as_str(),
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

fn show(record: &MessageRecord, waits: Option<&WaitReason>) -> Result<()> {
    let id = |id: Option<i64>| id.map(|id| id.to_string());
    let place = match record.kept_in {
        KeptIn::Live => "in the outbox",
        KeptIn::Dead => "among the dead letters",
        KeptIn::Ledger => "in the ledger",
    };
    let destination = Some(&record.destination).filter(|name| !name.is_empty());
    let fields: [(&str, Option<String>); 22] = [
        ("status", Some(format!("{}, {place}", record.status))),
        ("waits", waits.map(WaitReason::to_string)),
        ("sequence", Some(record.sequence.to_string())),
        ("message id", Some(record.message_id.to_string())),
        ("topic", Some(record.topic.clone())),
        ("destination", destination.cloned()),
        ("idempotency key", key_of(record)),
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

/// The idempotency key, if the message has one of its own.
fn key_of(record: &MessageRecord) -> Option<String> {
    let key = record.idempotency_key.clone();
    (key != record.message_id.to_string()).then_some(key)
}

/// An event of the timeline, past or future.
pub(crate) struct Event {
    /// RFC 3339.
    pub(crate) at: String,
    pub(crate) what: String,
}

/// The events of the records and of the history, ordered by time.
pub(crate) fn timeline(records: &[MessageRecord], history: &[HistoryEntry]) -> Vec<Event> {
    // History comes first, and the sort is stable: a failed attempt precedes its end, even at the same time.
    let of_history = |entry: &HistoryEntry| Event {
        at: entry.happened_at.clone(),
        what: message::sentence(entry),
    };
    let records = records
        .iter()
        .filter(|one| !message::is_said_by_a_dead_letter(one, records));
    let mut events: Vec<Event> = history.iter().map(of_history).collect();
    events.extend(records.flat_map(|record| {
        let begin = (!message::is_said_to_be_replayed(record, history)).then(|| enqueued(record));
        begin.into_iter().chain(self::events(record))
    }));
    events.sort_by(|a, b| a.at.cmp(&b.at));
    events.dedup_by(|a, b| a.at == b.at && a.what == b.what);
    events
}

fn enqueued(record: &MessageRecord) -> Event {
    let enqueued = match record.replay_of() {
        Some(_) => REPLAYED,
        None => "enqueued",
    };
    let to = for_destination(&record.destination);
    Event {
        at: record.created_at.clone(),
        what: format!("{enqueued}{to} as {}", record.sequence),
    }
}

fn events(record: &MessageRecord) -> Vec<Event> {
    let mut events = Vec::new();
    let mut add = |at: &Option<String>, what: String| {
        if let Some(at) = at {
            let at = at.clone();
            events.push(Event { at, what });
        }
    };
    let to = for_destination(&record.destination);
    let attempts = match record.attempts {
        1 => "1 attempt".to_owned(),
        attempts => format!("{attempts} attempts"),
    };
    let reason = record.reason.as_deref().unwrap_or_default();
    let error = match &record.last_error {
        Some(error) => format!("{reason} ({error})"),
        None => reason.to_owned(),
    };
    add(
        &record.locked_at,
        format!(
            "claimed{to} under lease {}",
            record.locked_by.unwrap_or_default()
        ),
    );
    let is_for = |code: ReasonCode| reason == code.as_str();
    let note = match record.last_error.as_deref() {
        Some(note) => format!(": {note}"),
        None => format!(", by {APPLICATION}"),
    };
    match record.status {
        Status::Delivered if is_for(ReasonCode::ByHand) => add(
            &record.settled_at,
            format!("delivered by hand{to} after {attempts}{note}"),
        ),
        Status::Delivered => add(
            &record.settled_at,
            format!("delivered{to} after {attempts}"),
        ),
        Status::NoSubscriber => add(
            &record.settled_at,
            "settled without a send: no destination wants it".to_owned(),
        ),
        Status::Dead if is_for(ReasonCode::Cancelled) => add(
            &record.settled_at,
            format!("cancelled{to} after {attempts}{note}"),
        ),
        Status::Dead => add(
            &record.settled_at,
            format!("dead-lettered{to} after {attempts}: {error}"),
        ),
        Status::Retrying => add(
            &record.available_at,
            format!("due again{to} after {attempts}: {error}"),
        ),
        Status::Pending if record.reason.is_some() => add(
            &record.available_at,
            format!("due again{to} after waiting: {error}"),
        ),
        Status::Pending => add(&record.available_at, format!("due{to}")),
        _ => {}
    }
    if record.kept_in == KeptIn::Live {
        add(&record.expires_at, format!("expires{to}"));
    }
    events
}
