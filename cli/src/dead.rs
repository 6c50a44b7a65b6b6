//! `diesel-outbox dead`

use std::time::Duration;

use anyhow::{Result, bail};
use clap::builder::NonEmptyStringValueParser;
use diesel::PgConnection;
use diesel_outbox::admin::{self, Bulked, DeadFilter, LetterId};
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, Change, DeadGroup, MessageRecord};
use diesel_outbox::{ConfigError, ReasonCode};
use serde_json::{Value, json};

use crate::bulk::{self, Pace, TO_CONTINUE};
use crate::confirm::confirmed;
use crate::connection::connect;
use crate::number::whole;
use crate::settings::SettingFlags;
use crate::signed::Signed;
use crate::values::{place, tenant};
use crate::{message, output};

/// The actions of `dead`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List dead letters, latest first
    List {
        #[command(flatten)]
        which: Which,
        /// Maximum number of dead letters
        #[arg(long, default_value_t = 100, value_name = "NUMBER", allow_negative_numbers = true, value_parser = whole(1..=u32::MAX))]
        limit: u32,
        /// Continue the previous page, which ended with this value
        #[arg(long, value_name = "PLACE")]
        before: Option<String>,
        /// Print the dead letters as JSON
        #[arg(long)]
        json: bool,
    },
    /// Count dead letters by reason, topic and destination, most frequent first
    Groups {
        #[command(flatten)]
        which: Which,
        /// Maximum number of groups
        #[arg(long, default_value_t = 100, value_name = "NUMBER", allow_negative_numbers = true, value_parser = whole(1..=u32::MAX))]
        limit: u32,
        /// Print the groups as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a dead letter with its payload
    Show {
        /// Id from `dead list` (the sequence), or message id (the id of the event at the receiver), or both:
        /// SEQUENCE.MESSAGE-ID
        id: String,
        /// Print the dead letter as JSON
        #[arg(long)]
        json: bool,
    },
    /// Requeue dead letters: due at once, attempts reset
    Requeue {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        all: All,
    },
    /// Delete dead letters permanently
    Discard {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        all: All,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// Only these ids: from `dead list` (the sequence), or SEQUENCE.MESSAGE-ID where several dead letters have a sequence
    #[arg(value_name = "ID", value_parser = id)]
    ids: Vec<Id>,
    /// Only this topic; patterns are not allowed
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    topic: Option<String>,
    /// Only this reason, such as SERVER_ERROR
    #[arg(long)]
    reason: Option<String>,
    /// Only this destination
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Only this tenant (a UUID)
    #[arg(long, value_name = "ID")]
    tenant: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct All {
    /// Select all dead letters; asks for confirmation
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    pace: Pace,
    /// Skip the confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    signed: Signed,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// What a person calls a dead letter. A sequence may be used again, so it may name several.
#[derive(Debug, Clone, Copy)]
enum Id {
    Sequence(i64),
    Letter(LetterId),
}

impl Id {
    fn sequence(self) -> i64 {
        match self {
            Self::Sequence(sequence) => sequence,
            Self::Letter(letter) => letter.sequence.0,
        }
    }

    fn is_of(self, letter: LetterId) -> bool {
        match self {
            Self::Sequence(sequence) => letter.sequence.0 == sequence,
            Self::Letter(one) => letter == one,
        }
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sequence(sequence) => sequence.fmt(f),
            Self::Letter(letter) => letter.fmt(f),
        }
    }
}

/// Parses an id from `dead list`.
fn id(text: &str) -> Result<Id, &'static str> {
    let why = "not an id: `diesel-outbox dead list` shows the ids, which are whole numbers";
    let sequence = text.parse().map(Id::Sequence);
    sequence
        .or_else(|_| text.parse().map(Id::Letter))
        .map_err(|_| why)
}

/// Several dead letters with one sequence, as a person can name each.
fn each_of(letters: &[LetterId]) -> String {
    let each = letters.iter().map(ToString::to_string);
    each.collect::<Vec<_>>().join(", ")
}

fn reason_code(word: &str) -> Result<ReasonCode> {
    let known = || {
        let names: Vec<&str> = ReasonCode::ALL.iter().map(|code| code.as_str()).collect();
        let reason = format!(
            "{word:?} is not a reason: expected one of {}",
            names.join(", ")
        );
        ConfigError::new("--reason", reason)
    };
    Ok(word.to_uppercase().parse().map_err(|_| known())?)
}

impl Which {
    fn filter(&self) -> Result<DeadFilter> {
        let reason = match &self.reason {
            Some(reason) => Some(reason_code(reason)?),
            None => None,
        };
        let sequences: Vec<i64> = self.ids.iter().map(|id| id.sequence()).collect();
        Ok(DeadFilter::default()
            .sequences(sequences)
            .topic(self.topic.clone())
            .reason(reason)
            .destination(self.destination.clone())
            .tenant_id(self.tenant.as_deref().map(tenant).transpose()?))
    }

    fn is_empty(&self) -> bool {
        self.ids.is_empty()
            && self.topic.is_none()
            && self.reason.is_none()
            && self.destination.is_none()
            && self.tenant.is_none()
    }
}

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = connect(&config, "dead", Duration::from_secs(120))?;
    match action {
        Action::List {
            which,
            limit,
            before,
            json,
        } => {
            let before = before.as_deref().map(|text| place("--before", text));
            let before = before.transpose()?;
            let filter = program::dead_before(which.filter()?, before);
            let limit = i64::from(*limit);
            let letters = program::dead_letters(&mut conn, &config.table, &filter, limit)?;
            if letters.is_empty() && !json {
                return output::line(none(which.is_empty() && before.is_none()));
            }
            list(&letters, limit, *json)
        }
        Action::Groups { which, limit, json } => {
            let filter = which.filter()?;
            let limit = i64::from(*limit);
            let groups = program::dead_groups(&mut conn, &config.table, &filter, limit)?;
            if groups.is_empty() && !json {
                return output::line(none(which.is_empty()));
            }
            show_groups(&groups, *json)
        }
        Action::Show { id, json } => {
            let letters: Vec<MessageRecord> = if let Ok(which) = self::id(id) {
                let at = program::dead_letters_at(&mut conn, &config.table, which.sequence())?;
                at.into_iter()
                    .filter(|letter| which.is_of(letter.id()))
                    .collect()
            } else if let Ok(message_id) = id.parse() {
                program::dead_letters_of(&mut conn, &config.table, message_id)?
            } else {
                let why = format!(
                    "{id:?} is not an id: give an id from `diesel-outbox dead list`, or a message id (a UUID)"
                );
                return Err(ConfigError::new("dead show", why).into());
            };
            match letters.as_slice() {
                [letter] => show(letter, *json),
                [] => bail!(
                    "there is no dead letter with the id {id} in the outbox \"{}\"",
                    config.table
                ),
                several => {
                    let first = several[0].message_id;
                    if several.iter().any(|letter| letter.message_id != first) {
                        for letter in several {
                            show(letter, *json)?;
                            output::line("")?;
                        }
                        let ids: Vec<LetterId> = several.iter().map(MessageRecord::id).collect();
                        let each = each_of(&ids);
                        return output::line(format!(
                            "several dead letters have the id {id}: {each}"
                        ));
                    }
                    let each = several
                        .iter()
                        .map(|l| format!("dead show {} ({})", l.sequence, l.destination));
                    let each = output::shown(&each.collect::<Vec<_>>().join(", "));
                    bail!("the message is dead for several destinations: run one of {each}")
                }
            }
        }
        Action::Requeue { which, all } => change(&mut conn, &config, which, all, Change::Requeue),
        Action::Discard { which, all } => change(&mut conn, &config, which, all, Change::Discard),
    }
}

fn none(is_of_all: bool) -> &'static str {
    match is_of_all {
        true => "no dead letters",
        false => "no dead letter matches",
    }
}

fn as_json(letter: &MessageRecord) -> Value {
    let mut value = message::as_json(letter);
    value["id"] = json!(letter.sequence);
    value["dead_lettered_at"] = json!(letter.settled_at);
    value["place"] = letter.place().to_string().into();
    value
}

fn list(letters: &[MessageRecord], limit: i64, as_json_array: bool) -> Result<()> {
    if as_json_array {
        return output::json(&Value::Array(letters.iter().map(as_json).collect()));
    }
    let mut table = output::table(&[
        "id",
        "topic",
        "destination",
        "reason",
        "attempts",
        "dead since",
        "last error",
    ]);
    for letter in letters {
        table.add_row([
            letter.sequence.to_string(),
            output::name(&letter.topic),
            output::name(&letter.destination),
            letter.reason.clone().unwrap_or_default(),
            letter.attempts.to_string(),
            letter.settled_at.clone().unwrap_or_default(),
            output::shown(letter.last_error.as_deref().unwrap_or_default()),
        ]);
    }
    output::line(table)?;
    let is_full = i64::try_from(letters.len()).is_ok_and(|number| number >= limit);
    match letters.last() {
        Some(last) if is_full => output::line(format!("more: --before {}", last.place())),
        _ => Ok(()),
    }
}

fn show_groups(groups: &[DeadGroup], as_json_array: bool) -> Result<()> {
    if as_json_array {
        return output::json(&groups);
    }
    let mut table = output::table(&[
        "dead letters",
        "reason",
        "topic",
        "destination",
        "oldest",
        "latest",
        "example",
    ]);
    for group in groups {
        let error = group.example_error.as_deref().unwrap_or_default();
        table.add_row([
            group.count.to_string(),
            group.reason.clone(),
            output::name(&group.topic),
            output::name(&group.destination),
            group.oldest_dead_lettered_at.clone(),
            group.latest_dead_lettered_at.clone(),
            output::shown(&format!("{}: {error}", group.example_sequence)),
        ]);
    }
    output::line(table)
}

fn show(letter: &MessageRecord, as_json_object: bool) -> Result<()> {
    if as_json_object {
        return output::json(&as_json(letter));
    }
    let optional = |text: &Option<String>| output::shown(text.as_deref().unwrap_or("-"));
    let status = letter
        .http_status
        .map_or("-".to_owned(), |status| status.to_string());
    for (name, value) in [
        ("id", letter.sequence.to_string()),
        ("message id", letter.message_id.to_string()),
        ("topic", output::shown(&letter.topic)),
        ("destination", output::shown(&letter.destination)),
        ("idempotency key", output::shown(&letter.idempotency_key)),
        ("ordering key", optional(&letter.ordering_key)),
        (
            "tenant",
            letter.tenant_id.map_or("-".to_owned(), |id| id.to_string()),
        ),
        ("reason", optional(&letter.reason)),
        ("last error", optional(&letter.last_error)),
        ("http status", status),
        ("response", optional(&letter.response)),
        ("attempts", letter.attempts.to_string()),
        ("created at", letter.created_at.clone()),
        ("occurred at", optional(&letter.occurred_at)),
        ("dead since", optional(&letter.settled_at)),
        ("headers", optional(&letter.headers)),
        ("payload", optional(&letter.payload)),
    ] {
        output::line(format!("{name:<16}{value}"))?;
    }
    Ok(())
}

fn change(
    conn: &mut PgConnection,
    config: &Config,
    which: &Which,
    all: &All,
    change: Change,
) -> Result<()> {
    let (verb, ending) = match change {
        Change::Requeue => ("requeue", "requeued"),
        Change::Discard => ("discard", "discarded"),
    };
    if which.is_empty() && !all.all {
        return Err(ConfigError::new(
            format!("dead {verb}"),
            "give ids, --topic, --reason, --destination or --tenant, or give --all",
        )
        .into());
    }
    if !which.is_empty() && all.all {
        return Err(ConfigError::new(
            "--all",
            "cannot be combined with ids, --topic, --reason, --destination or --tenant",
        )
        .into());
    }
    let mut found = admin::matching_dead_letters(conn, &config.table, &which.filter()?)?;
    if !which.ids.is_empty() {
        found.retain(|letter| which.ids.iter().any(|id| id.is_of(*letter)));
    }
    let of = |id: &Id| -> Vec<LetterId> {
        let of_it = found.iter().filter(|letter| id.is_of(**letter));
        of_it.copied().collect()
    };
    if let Some(id) = which.ids.iter().find(|id| of(id).len() > 1) {
        bail!(
            "cannot {verb}: several dead letters have the id {id}: give one of {}; nothing was changed",
            each_of(&of(id))
        );
    }
    let missing: Vec<String> = which
        .ids
        .iter()
        .filter(|id| of(id).is_empty())
        .map(ToString::to_string)
        .collect();
    if !missing.is_empty() {
        bail!(
            "cannot {verb}: there is no dead letter with the id {}; nothing was changed",
            missing.join(", ")
        );
    }
    if all.pace.dry_run {
        if all.json {
            return output::json(&json!({ "matched": found.len(), "changed": 0 }));
        }
        let letters = output::dead_letters(found.len());
        return output::line(format!("{letters} would be {ending}"));
    }
    let question = format!(
        "{verb} all {} of the outbox {}?",
        output::dead_letters(found.len()),
        config.table
    );
    if all.all
        && !all.yes
        && !found.is_empty()
        && !confirmed(
            &question,
            "--all asks for confirmation: without a terminal, give --yes, too",
        )?
    {
        bail!("nothing was changed");
    }
    let note = all.signed.note();
    let (done, is_stopped) =
        bulk::perform(found.len() as u64, &all.pace, &note, TO_CONTINUE, |bulk| {
            Ok(program::change_dead_letters(
                conn,
                &config.table,
                &found,
                change,
                bulk,
            )?)
        })?;
    if all.json {
        output::json(&json!({ "matched": found.len(), "changed": done.changed }))?;
    } else {
        tell(conn, config, which, &found, (ending, &done))?;
    }
    if is_stopped {
        bail!("stopped by a signal; {TO_CONTINUE}");
    }
    Ok(())
}

fn tell(
    conn: &mut PgConnection,
    config: &Config,
    which: &Which,
    found: &[LetterId],
    (ending, done): (&str, &Bulked),
) -> Result<()> {
    let changed = done.changed;
    if done.skipped > 0 {
        return output::line(format!(
            "{ending} {changed}; {} unchanged: their idempotency keys are in the outbox again, or another operator was faster",
            done.skipped
        ));
    }
    let why = match &which.topic {
        Some(topic) if found.is_empty() => not_dead(conn, config, topic)?,
        None if found.is_empty() && !which.is_empty() => ": no dead letter matches".to_owned(),
        _ => String::new(),
    };
    output::line(format!("{ending} {changed}{why}"))
}

/// Why no dead letter of a topic was found. A topic that is found nowhere is probably misspelt.
fn not_dead(conn: &mut PgConnection, config: &Config, topic: &str) -> Result<String> {
    let filter = DeadFilter::default().topic(topic.to_owned());
    let topic = output::shown(topic);
    if !program::dead_letters(conn, &config.table, &filter, 1)?.is_empty() {
        return Ok(format!(
            ": no dead letter of the topic {topic} matches the other filters"
        ));
    }
    let live = program::topics(conn, &config.table)?;
    if live.iter().any(|one| one.topic == topic) {
        return Ok(format!(": no dead letter has the topic {topic}"));
    }
    let advice = match topic.contains('*') {
        true => "give one topic, because patterns are not allowed",
        false => "check the spelling",
    };
    Ok(format!(
        ": no dead letter and no message in the outbox has the topic {topic}: {advice}"
    ))
}
