//! Waiting messages: `message list`, `retry`, `cancel`, `reschedule` and `settle`.

use std::collections::BTreeMap;
use std::time::SystemTime;

use anyhow::{Result, bail};
use clap::builder::NonEmptyStringValueParser;
use diesel::PgConnection;
use diesel_outbox::admin::{self, Bulk, Bulked, Verdict, WaitReason, WaitingFilter};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, KeptIn, MessageKey, MessageRecord, Searched, parse_duration};
use diesel_outbox::{
    Answer, Changed, ConfigError, DatabaseError, Due, MessageRef, Part, PartState, Status,
};
use serde_json::{Value, json};

use super::with_waits;
use crate::number::whole;
use crate::signed::{Signed, SignedWithWhy};
use crate::{bulk, output, values};

/// The waiting messages of which `retry` says what holds them.
const SOME_WAITING: i64 = 1_000;

/// Options of `message list`.
#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Only this topic; patterns are not allowed
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    topic: Option<String>,
    /// Only messages that name this destination, not those that a route sends there
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Only this tenant (a UUID)
    #[arg(long, value_name = "ID")]
    tenant: Option<String>,
    /// Only this ordering key
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    key: Option<String>,
    /// Only this state: pending, sending or retrying
    #[arg(long, alias = "state")]
    status: Option<String>,
    /// Maximum number of messages
    #[arg(long, default_value_t = 100, value_name = "NUMBER", allow_negative_numbers = true, value_parser = whole(1..=u32::MAX))]
    limit: u32,
    /// Continue the previous page, which ended with this value
    #[arg(long, value_name = "PLACE")]
    after: Option<String>,
    /// Print the messages as JSON
    #[arg(long)]
    json: bool,
}

/// Selects a message.
#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// Idempotency key, message id or sequence
    which: String,
    /// Only the part of the message for this destination
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Options of `message retry` and `message cancel`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Without WHICH, give at least one filter; --since 9999d selects all. Each transaction changes 1,000 \
    messages. After Ctrl-C or an outage, the same command continues. Messages in flight are left unchanged."
)]
pub(crate) struct OneOrMany {
    /// Idempotency key, message id or sequence of one message
    #[arg(conflicts_with_all = ["topic", "tenant", "key", "since", "until", "rate", "dry_run"])]
    which: Option<String>,
    /// Only messages that name this destination, not those that a route sends there. With WHICH: only the part of the
    /// message for this destination
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Only this topic; patterns are not allowed
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    topic: Option<String>,
    /// Only this tenant (a UUID)
    #[arg(long, value_name = "ID")]
    tenant: Option<String>,
    /// Only this ordering key
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    key: Option<String>,
    /// Only messages enqueued since this time: 2026-11-21T10:00:00Z, or 2h for two hours ago
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only messages enqueued before this time
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    #[command(flatten)]
    how: bulk::How,
}

impl OneOrMany {
    /// The one message, if one is meant.
    fn one(&self) -> Option<Which> {
        Some(Which {
            which: self.which.clone()?,
            destination: self.destination.clone(),
            json: self.how.json,
        })
    }

    fn filter(&self, verb: &str) -> Result<WaitingFilter> {
        let texts = [&self.destination, &self.topic, &self.tenant, &self.key];
        let times = [&self.since, &self.until];
        if texts.into_iter().chain(times).all(Option::is_none) {
            let why = "give a message, --destination, --topic, --tenant, --key, --since or --until; --since 9999d selects all";
            return Err(ConfigError::new(format!("message {verb}"), why).into());
        }
        let (since, until) = bulk::span(("--since", self.since.as_deref()), self.until.as_deref())?;
        Ok(WaitingFilter::default()
            .destination(self.destination.clone())
            .topic(self.topic.clone())
            .tenant_id(self.tenant.as_deref().map(values::tenant).transpose()?)
            .ordering_key(self.key.clone())
            .since(since)
            .until(until))
    }
}

/// Options of `message reschedule`.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false, args = ["now", "in", "at"])]
pub(crate) struct Reschedule {
    #[command(flatten)]
    which: Which,
    /// Make the message due at once
    #[arg(long)]
    now: bool,
    /// Make the message due after this time, such as 2h
    #[arg(long = "in", id = "in", value_name = "DURATION")]
    delay: Option<String>,
    /// Make the message due at this time, such as 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME")]
    at: Option<String>,
    #[command(flatten)]
    signed: Signed,
}

/// Options of `message settle`.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false, args = ["delivered", "never"])]
pub(crate) struct Settle {
    #[command(flatten)]
    which: Which,
    /// Record that the message was delivered by other means
    #[arg(long)]
    delivered: bool,
    /// Record that the message must not be sent
    #[arg(long)]
    never: bool,
    #[command(flatten)]
    signed: SignedWithWhy,
}

impl Which {
    fn named(&self) -> MessageRef {
        let which = MessageRef::from(MessageKey::Text(self.which.clone()));
        match &self.destination {
            Some(destination) => which.at(destination),
            None => which,
        }
    }
}

pub(super) fn list(conn: &mut PgConnection, config: &Config, options: &List) -> Result<()> {
    let after = options.after.as_deref();
    let after = after.map(|text| values::place("--after", text));
    let filter = WaitingFilter::default()
        .topic(options.topic.clone())
        .destination(options.destination.clone())
        .tenant_id(options.tenant.as_deref().map(values::tenant).transpose()?)
        .ordering_key(options.key.clone())
        .status(options.status.as_deref().map(status).transpose()?);
    let filter = program::waiting_after(filter, after.transpose()?);
    let limit = i64::from(options.limit);
    let found = program::waiting(conn, &config.table, &filter, limit)?;
    let waits = program::wait_reasons_of(conn, &config.table, &found.rows)?;
    let is_full = i64::try_from(found.rows.len()).is_ok_and(|number| number >= limit);
    let next = found.rows.last().filter(|_| is_full);
    let next = next.map(|last| last.place().to_string());
    if options.json {
        return output::json(&json!({
            "complete": found.is_complete,
            "messages": with_waits(&found.rows, &waits),
            "next": next,
        }));
    }
    show_list(&found, &waits)?;
    match next {
        Some(place) => output::line(format!("more: --after {place}")),
        None => Ok(()),
    }
}

fn status(word: &str) -> Result<Status, ConfigError> {
    let status = word.parse().ok();
    let waits = |status: &Status| !status.is_final();
    status.filter(waits).ok_or_else(|| {
        let why = format!(
            "{word:?} is not pending, sending or retrying, the states of waiting messages; for dead letters, see `dead list`"
        );
        ConfigError::new("--status", why)
    })
}

fn show_list(found: &Searched<MessageRecord>, waits: &[Option<WaitReason>]) -> Result<()> {
    if !found.is_complete {
        return output::line(
            "the search stopped after 2 s, because few messages match: filter by topic, destination or key",
        );
    }
    if found.rows.is_empty() {
        return output::line("no waiting messages match");
    }
    let mut table = output::table(&[
        "id",
        "topic",
        "destination",
        "status",
        "attempts",
        "due at",
        "key",
        "waits",
        "last error",
    ]);
    for (row, waits) in found.rows.iter().zip(waits) {
        let waits = waits.as_ref().map(WaitReason::to_string);
        let shown = |text: &Option<String>| output::shown(text.as_deref().unwrap_or_default());
        table.add_row([
            row.sequence.to_string(),
            output::shown(&row.topic),
            output::shown(&row.destination),
            row.status.to_string(),
            row.attempts.to_string(),
            shown(&row.available_at),
            shown(&row.ordering_key),
            shown(&waits),
            shown(&row.last_error),
        ]);
    }
    output::line(table)
}

pub(super) fn retry(conn: &mut PgConnection, config: &Config, options: &OneOrMany) -> Result<()> {
    let Some(one) = options.one() else {
        let filter = options.filter("retry")?;
        all(config, options, ("retry", "retried"), |bulk| {
            admin::retry_all(conn, &config.table, &filter, bulk)
        })?;
        if !options.how.json && !options.how.pace.dry_run {
            rest_waits(conn, config, &filter)?;
        }
        return name_routed(conn, config, options);
    };
    let changed = admin::retry(
        conn,
        &config.table,
        &one.named(),
        &options.how.signed.note(),
    )?;
    tell(config, &one, &changed, "retried")?;
    match one.json {
        true => Ok(()),
        false => still_waits(conn, config, &changed),
    }
}

pub(super) fn cancel(conn: &mut PgConnection, config: &Config, options: &OneOrMany) -> Result<()> {
    let Some(one) = options.one() else {
        let filter = options.filter("cancel")?;
        all(config, options, ("cancel", "cancelled"), |bulk| {
            admin::cancel_all(conn, &config.table, &filter, bulk)
        })?;
        return name_routed(conn, config, options);
    };
    let changed = admin::cancel(
        conn,
        &config.table,
        &one.named(),
        &options.how.signed.note(),
    )?;
    tell(config, &one, &changed, "cancelled")
}

/// Changes all messages that match.
fn all(
    config: &Config,
    options: &OneOrMany,
    (verb, done): (&str, &str),
    mut act: impl FnMut(Bulk<'_>) -> Result<Bulked, DatabaseError>,
) -> Result<()> {
    let which = format!("waiting in the outbox {}", config.table);
    let words = bulk::Words {
        verb,
        done,
        which: &which,
    };
    bulk::carry_out(&options.how, &words, |bulk| Ok(act(bulk)?))
}

/// Names the topics of messages that a route sends to the destination: they name no destination, so they were not
/// selected.
fn name_routed(conn: &mut PgConnection, config: &Config, options: &OneOrMany) -> Result<()> {
    let (Some(destination), None) = (&options.destination, &options.topic) else {
        return Ok(());
    };
    let topics = program::routed_topics(conn, &config.table, destination)?;
    if !topics.is_empty() {
        let each: Vec<String> = topics.iter().map(|one| format!("--topic {one}")).collect();
        let shown = output::shown(&each.join(", or "));
        eprintln!(
            "diesel-outbox: messages that a route sends to {destination:?} name no destination, and are not selected: select them by topic, with {shown}"
        );
    }
    Ok(())
}

pub(super) fn reschedule(
    conn: &mut PgConnection,
    config: &Config,
    options: &Reschedule,
) -> Result<()> {
    let due = match (&options.delay, &options.at) {
        (Some(delay), _) => Due::After(parse_duration("--in", delay)?),
        (None, Some(at)) => Due::At(time(at)?),
        (None, None) => Due::Now,
    };
    let (which, note) = (options.which.named(), options.signed.note());
    let changed = admin::reschedule(conn, &config.table, &which, due, &note)?;
    tell(config, &options.which, &changed, "rescheduled")?;
    if options.which.json {
        return Ok(());
    }
    still_waits(conn, config, &changed)
}

/// Says why rescheduled messages are not sent at once, if something else than their time holds them up.
fn still_waits(conn: &mut PgConnection, config: &Config, changed: &Changed) -> Result<()> {
    for part in changed
        .parts
        .iter()
        .filter(|part| part.state == PartState::Done)
    {
        let key = MessageKey::Sequence(part.sequence.0);
        let mut found = program::message(conn, &config.table, &key)?.rows;
        found.retain(|record| record.sequence == part.sequence && record.kept_in == KeptIn::Live);
        for reason in program::wait_reasons_of(conn, &config.table, &found)?
            .into_iter()
            .flatten()
        {
            let is_expected = matches!(
                reason,
                WaitReason::NotDue { .. } | WaitReason::NoRoom { .. } | WaitReason::Sending { .. }
            );
            if !is_expected {
                output::line(format!("{} still waits: {reason}", part.sequence))?;
            }
        }
    }
    Ok(())
}

/// Says what holds the messages that still wait: a retried message is due, and may be held by something else.
fn rest_waits(conn: &mut PgConnection, config: &Config, filter: &WaitingFilter) -> Result<()> {
    let found = program::waiting(conn, &config.table, filter, SOME_WAITING)?;
    let reasons = program::wait_reasons_of(conn, &config.table, &found.rows)?;
    let mut held: BTreeMap<String, u64> = BTreeMap::new();
    for reason in reasons.into_iter().flatten() {
        let text = match reason {
            WaitReason::NotDue { .. } | WaitReason::NoRoom { .. } | WaitReason::Sending { .. } => {
                continue;
            }
            WaitReason::BehindKey { .. } => "behind an earlier message of its key".to_owned(),
            other => other.to_string(),
        };
        *held.entry(text).or_default() += 1;
    }
    let is_full = i64::try_from(found.rows.len()).is_ok_and(|rows| rows >= SOME_WAITING);
    let some = match is_full || !found.is_complete {
        true => "at least ",
        false => "",
    };
    for (reason, count) in held {
        let many = output::messages(count);
        output::line(format!(
            "still waiting: {some}{many}, {}",
            output::shown(&reason)
        ))?;
    }
    Ok(())
}

fn time(text: &str) -> Result<SystemTime> {
    let time = humantime::parse_rfc3339_weak(text);
    time.map_err(|_| {
        let why = format!("{text:?} is not a time such as 2026-01-31T12:00:00Z");
        ConfigError::new("--at", why).into()
    })
}

pub(super) fn settle(conn: &mut PgConnection, config: &Config, options: &Settle) -> Result<()> {
    let (verdict, done) = match options.delivered {
        true => (Verdict::Delivered, "settled as delivered"),
        false => (Verdict::NotToBeSent, "settled as cancelled"),
    };
    let note = options.signed.note();
    let which = options.which.named();
    let changed = admin::settle(conn, &config.table, &which, verdict, &note)?;
    tell(config, &options.which, &changed, done)
}

/// Prints the result of each part. Fails unless the whole message was changed.
fn tell(config: &Config, which: &Which, changed: &Changed, done: &str) -> Result<()> {
    let answer = changed.answer();
    if which.json {
        output::json(&json!({
            "answer": word(answer),
            "complete": changed.is_complete,
            "parts": changed.parts.iter().map(part_json).collect::<Vec<_>>(),
        }))?;
    } else {
        for part in &changed.parts {
            let destination = match part.destination.as_str() {
                "" => String::new(),
                name => format!(" for {}", output::shown(name)),
            };
            output::line(format!(
                "{}{destination}: {}",
                part.sequence,
                said(part.state, done)
            ))?;
        }
    }
    let name = output::shown(&which.which);
    match answer {
        Answer::Done => Ok(()),
        Answer::Cancelled if done.ends_with("cancelled") => Ok(()),
        Answer::Unknown if !changed.is_complete => {
            bail!("{name}: nothing was found within 2 s: search by idempotency key, which is fast")
        }
        Answer::Unknown => bail!("{}", super::unknown(&which.which, config)),
        Answer::Ambiguous => bail!(
            "{name}: not {done}: several messages have this sequence: give the message id or the key (`message show {name}` shows them)"
        ),
        Answer::Partly => bail!("{name}: not {done} for every destination"),
        Answer::InFlight => bail!("{name}: not {done}: the message is in flight"),
        Answer::Delivered => bail!("{name}: not {done}: the message was already delivered"),
        Answer::Dead => {
            bail!("{name}: not {done}: the message is a dead letter (see `message settle`)")
        }
        _ => bail!("{name}: not {done}: the message was already cancelled"),
    }
}

fn said(state: PartState, done: &str) -> &str {
    match state {
        PartState::Done => done,
        PartState::InFlight => "unchanged: in flight",
        PartState::Delivered => "unchanged: already delivered",
        PartState::Cancelled => "unchanged: already cancelled",
        _ => "unchanged: dead letter",
    }
}

fn part_json(part: &Part) -> Value {
    let state = match part.state {
        PartState::Done => "done",
        PartState::InFlight => "in_flight",
        PartState::Delivered => "delivered",
        PartState::Cancelled => "cancelled",
        _ => "dead",
    };
    json!({ "sequence": part.sequence.0, "destination": part.destination, "state": state })
}

fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Done => "done",
        Answer::Partly => "partly",
        Answer::InFlight => "in_flight",
        Answer::Delivered => "delivered",
        Answer::Cancelled => "cancelled",
        Answer::Dead => "dead",
        Answer::Ambiguous => "ambiguous",
        _ => "unknown",
    }
}
