//! `diesel-outbox dead`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::ConfigError;
use diesel_outbox::admin::Selection;
use diesel_outbox::program::{self, Chosen, DeadGroup, LetterName, MessageRecord};
use serde_json::{Value, json};

use crate::act::Group;
use crate::connection::connect;
use crate::listed::Listed;
use crate::number::whole;
use crate::settings::SettingFlags;
use crate::values::{chosen, place};
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
    /// Requeue or discard them
    #[command(flatten)]
    Act(Listed<OfDead>),
}

/// The command `dead`.
#[derive(Debug)]
pub(crate) struct OfDead;

impl Group for OfDead {
    const NAME: &'static str = "dead";
}

#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// Only these ids: from `dead list` (the sequence), or SEQUENCE.MESSAGE-ID where several dead letters have a sequence
    #[arg(value_name = "ID")]
    ids: Vec<LetterName>,
    #[command(flatten)]
    chosen: Chosen,
}

impl Which {
    fn selection(&self) -> Result<Selection> {
        let sequences: Vec<i64> = self.ids.iter().map(|id| id.sequence()).collect();
        Ok(chosen(&self.chosen)?.sequences(sequences))
    }

    fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.chosen.is_empty()
    }
}

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    if let Action::Act(act) = action {
        act.which()?;
    }
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
            let filter = program::behind(which.selection()?, before);
            let limit = i64::from(*limit);
            let letters = program::dead_letters(&mut conn, &config.table, &filter, limit)?;
            if letters.is_empty() && !json {
                return output::line(none(which.is_empty() && before.is_none()));
            }
            list(&letters, limit, *json)
        }
        Action::Groups { which, limit, json } => {
            let filter = which.selection()?;
            let limit = i64::from(*limit);
            let groups = program::dead_groups(&mut conn, &config.table, &filter, limit)?;
            if groups.is_empty() && !json {
                return output::line(none(which.is_empty()));
            }
            show_groups(&groups, *json)
        }
        Action::Show { id, json } => {
            let letters: Vec<MessageRecord> = if let Ok(which) = id.parse::<LetterName>() {
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
                        let ids = several.iter().map(|letter| letter.id().to_string());
                        let each = ids.collect::<Vec<_>>().join(", ");
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
        Action::Act(act) => act.run(&mut conn, &config),
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
