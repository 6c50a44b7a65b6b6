//! Waiting messages: `message list`, `retry`, `cancel`, `reschedule` and `settle`.

use anyhow::Result;
use diesel::PgConnection;
use diesel_outbox::admin::{Note, WaitReason};
use diesel_outbox::config::Config;
use diesel_outbox::program::{
    self, Chosen, KeptIn, MessageAct, MessageKey, MessageRecord, RESCHEDULE, SETTLE, Searched,
    WrongChoice,
};
use diesel_outbox::{Changed, MessageRef, PartState};
use serde_json::json;

use super::with_waits;
use crate::number::whole;
use crate::signed::{Signed, SignedWithWhy};
use crate::{act, output, values};

/// Options of `message list`.
#[derive(Debug, clap::Args)]
pub(crate) struct List {
    #[command(flatten)]
    chosen: Chosen,
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

/// Options of `message reschedule`.
#[derive(Debug, clap::Args)]
#[command(about = RESCHEDULE.about, after_help = format!("{} {}", RESCHEDULE.becomes, RESCHEDULE.undo))]
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
#[command(about = SETTLE.about, after_help = format!("{} {}", SETTLE.becomes, SETTLE.undo))]
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
    let selection = program::behind(values::waiting(&options.chosen)?, after.transpose()?);
    let limit = i64::from(options.limit);
    let found = program::waiting(conn, &config.table, &selection, limit)?;
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

pub(super) fn reschedule(
    conn: &mut PgConnection,
    config: &Config,
    options: &Reschedule,
) -> Result<()> {
    let act = MessageAct::reschedule(options.delay.as_deref(), options.at.as_deref());
    let changed = change(conn, config, &options.which, act, &options.signed.note())?;
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

pub(super) fn settle(conn: &mut PgConnection, config: &Config, options: &Settle) -> Result<()> {
    let verdict = if options.delivered {
        "delivered"
    } else {
        "never"
    };
    let act = MessageAct::settle(verdict, &options.signed.why);
    change(conn, config, &options.which, act, &options.signed.note())?;
    Ok(())
}

/// Changes the message, and prints the result of each part. Fails unless the whole message was changed.
fn change(
    conn: &mut PgConnection,
    config: &Config,
    which: &Which,
    act: Result<MessageAct, WrongChoice>,
    note: &Note,
) -> Result<Changed> {
    let act = act.map_err(values::of_option)?;
    let changed = act.perform(conn, &config.table, &which.named(), note)?;
    if which.json {
        output::json(&json!({
            "answer": changed.answer().as_str(),
            "complete": changed.is_complete,
            "parts": changed.parts.iter().map(act::part_json).collect::<Vec<_>>(),
        }))?;
    } else {
        for part in &changed.parts {
            output::line(act::of_part(part, act.done()))?;
        }
    }
    act::whole(act.done(), config, &which.which, &changed)?;
    Ok(changed)
}
