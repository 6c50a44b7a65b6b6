//! `message expunge`

use anyhow::{Result, bail};
use clap::builder::NonEmptyStringValueParser;
use diesel::PgConnection;
use diesel_outbox::admin::{self, Bulk, Expunged, Subject};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, MessageKey};
use serde_json::json;
use uuid::Uuid;

use crate::bulk::{Pace, TO_CONTINUE, perform};
use crate::confirm;
use crate::signed::SignedWithWhy;
use crate::{output, values};

/// Options of `message expunge`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Payload, headers, responses and errors of the messages are removed from the ledger and the history of \
    attempts. Waiting messages are cancelled, and dead letters are discarded. Which message was settled, when, where and \
    with which result remains. What receivers got, logs and backups stay as they are. Each transaction changes 1,000 \
    messages. After Ctrl-C or an outage, the same command continues. Run the command as the owner of the outbox."
)]
#[group(required = true, multiple = false, args = ["id", "key", "subject"])]
pub(crate) struct Expunge {
    /// Message id (the id of the event at the receiver)
    #[arg(conflicts_with_all = ["topic", "tenant", "rate"])]
    id: Option<Uuid>,
    /// All messages with this ordering key
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    key: Option<String>,
    /// All messages with this header ce-subject. The ledger has headers only with payloads (OUTBOX_LEDGER_PAYLOAD):
    /// entries without are not found
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    subject: Option<String>,
    /// Only this topic; patterns are not allowed
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    topic: Option<String>,
    /// Only this tenant (a UUID)
    #[arg(long, value_name = "ID")]
    tenant: Option<String>,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    signed: SignedWithWhy,
    /// Skip the confirmation
    #[arg(long)]
    yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(conn: &mut PgConnection, config: &Config, options: &Expunge) -> Result<()> {
    match (options.id, &options.key, &options.subject) {
        (Some(id), ..) => one(conn, config, options, id),
        (None, Some(key), _) => all(conn, config, options, Subject::key(key)),
        (None, None, subject) => {
            let subject = subject.as_deref().unwrap_or_default();
            all(conn, config, options, Subject::ce_subject(subject))
        }
    }
}

fn one(conn: &mut PgConnection, config: &Config, options: &Expunge, id: Uuid) -> Result<()> {
    if options.pace.dry_run {
        let (count, note) = (Subject::message(id), options.signed.note());
        let bulk = Bulk::new(&note).dry_run();
        let found = admin::expunge_all(conn, &config.table, &count, bulk)?;
        let key = MessageKey::Id(id);
        if found.is_unknown() && program::message(conn, &config.table, &key)?.rows.is_empty() {
            bail!("{}", crate::act::unknown(&id.to_string(), config));
        }
        return preview(options, &found);
    }
    ask(options, &format!("the message {id}"), config)?;
    let done = admin::expunge(conn, &config.table, id, &options.signed.note())?;
    if options.json {
        output::json(&as_json(&done))?;
    }
    if done.is_unknown() {
        bail!("{}", crate::act::unknown(&id.to_string(), config));
    }
    tell(options, &done)?;
    if !done.left.is_empty() {
        bail!(
            "parts of the message are in flight: run the same command again once they are settled"
        );
    }
    Ok(())
}

fn all(
    conn: &mut PgConnection,
    config: &Config,
    options: &Expunge,
    subject: Subject,
) -> Result<()> {
    let subject = subject
        .topic(options.topic.clone())
        .tenant_id(options.tenant.as_deref().map(values::tenant).transpose()?);
    let note = options.signed.note();
    let mut act = |bulk: Bulk<'_>| admin::expunge_all(conn, &config.table, &subject, bulk);
    let found = act(Bulk::new(&note).dry_run())?;
    if options.pace.dry_run {
        return preview(options, &found);
    }
    if !found.is_unknown() {
        ask(options, &rows(&found), config)?;
    }
    let number = found.cancelled + found.discarded + found.ledger_entries + found.feed_events;
    let (done, is_stopped) = perform(number, &options.pace, &note, TO_CONTINUE, |bulk| {
        Ok(act(bulk)?)
    })?;
    if options.json {
        output::json(&as_json(&done))?;
    }
    tell(options, &done)?;
    if !done.left.is_empty() {
        let ids = done.left.iter().map(Uuid::to_string);
        eprintln!(
            "in flight, run `message expunge ID` for each once it is settled: {}",
            ids.collect::<Vec<_>>().join(" ")
        );
    }
    if is_stopped {
        bail!("stopped by a signal; {TO_CONTINUE}");
    }
    if !done.left.is_empty() {
        bail!("{} remained", output::messages(done.left.len()));
    }
    Ok(())
}

fn rows(found: &Expunged) -> String {
    [
        output::counted(found.cancelled, "waiting message", "waiting messages"),
        output::dead_letters(found.discarded),
        output::counted(found.ledger_entries, "ledger entry", "ledger entries"),
        output::counted(found.feed_events, "event of feeds", "events of feeds"),
    ]
    .join(", ")
}

/// The answer of a dry run.
fn preview(options: &Expunge, found: &Expunged) -> Result<()> {
    match options.json {
        true => output::json(&as_json(found)),
        false => output::line(format!("{} would lose their content", rows(found))),
    }
}

/// Asks before the content of `what` is removed.
fn ask(options: &Expunge, what: &str, config: &Config) -> Result<()> {
    let question = format!(
        "remove the content of {what} from the outbox {}",
        config.table
    );
    match options.yes {
        true => Ok(()),
        false => confirm::ask("message expunge", &question, "It cannot be undone."),
    }
}

fn as_json(done: &Expunged) -> serde_json::Value {
    json!({
        "cancelled": done.cancelled,
        "discarded": done.discarded,
        "ledger_entries": done.ledger_entries,
        "attempts": done.attempts,
        "feed_events": done.feed_events,
        "left": done.left,
    })
}

fn tell(options: &Expunge, done: &Expunged) -> Result<()> {
    if options.json {
        return Ok(());
    }
    output::line(format!(
        "cancelled {}, discarded {}, blanked {}, {} and {}",
        output::counted(done.cancelled, "waiting message", "waiting messages"),
        output::dead_letters(done.discarded),
        output::counted(done.ledger_entries, "ledger entry", "ledger entries"),
        output::counted(done.attempts, "attempt", "attempts"),
        output::counted(done.feed_events, "event of feeds", "events of feeds"),
    ))
}
