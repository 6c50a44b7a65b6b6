//! Acts on many messages: each act that the library lists is a subcommand of its group.

use anyhow::{Result, bail};
use clap::Command;
use diesel::PgConnection;
use diesel_outbox::admin::Selection;
use diesel_outbox::config::Config;
use diesel_outbox::program::{
    self, ACTS, ActError, Choice, Chosen, ManyAct, Performed, Preview, Words, WrongChoice,
};
use diesel_outbox::{Answer, Changed, ConfigError, Part, PartState};
use serde_json::{Value, json};

use crate::bulk::{How, TO_CONTINUE, perform};
use crate::confirm::ask;
use crate::listed::{List, Listed};
use crate::output;
use crate::values::of_option;

/// A command with acts as subcommands.
pub(crate) trait Group: 'static {
    /// Its name.
    const NAME: &'static str;
}

/// Beside what the act says of itself.
const OF_EACH: &str = "Without an id, give at least one condition, or --all. Each transaction changes at most 1,000 messages. \
    After Ctrl-C or an outage, the same command continues. Messages in flight are left unchanged.";

/// Options of each act.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    #[command(flatten)]
    chosen: Chosen,
    /// Choose all of them
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    how: How,
}

impl<G: Group> List for G {
    type Act = &'static dyn ManyAct;
    type Options = Options;

    fn acts() -> impl Iterator<Item = Self::Act> {
        let acts = ACTS.iter().copied();
        acts.filter(|act| act.words().group == G::NAME)
    }

    fn name(act: Self::Act) -> &'static str {
        act.words().name
    }

    fn describe(act: Self::Act, command: Command) -> Command {
        let words = act.words();
        let after = format!("{} {}\n\n{OF_EACH}", words.becomes, words.undo);
        let command = command.about(words.about).after_help(after);
        command.mut_arg("ids", |ids| ids.help(words.ids))
    }
}

impl<G: Group> Listed<G> {
    /// The messages that are chosen.
    pub(crate) fn which(&self) -> Result<Choice, ConfigError> {
        let Options {
            ids, chosen, all, ..
        } = &self.options;
        let which = Choice::new(self.act, ids.clone(), chosen, *all);
        which.map_err(|wrong| named(self.act.words(), wrong))
    }

    /// Counts the messages, asks, changes them with a progress bar, and says what was done.
    pub(crate) fn run(&self, conn: &mut PgConnection, config: &Config) -> Result<()> {
        let (act, options, table) = (self.act, &self.options, &config.table);
        let how = &options.how;
        let which = self.which()?;
        let preview = act.preview(conn, table, &which).map_err(not_done(act))?;
        // What is named by its id is changed, or it is said why not.
        if how.pace.dry_run || (preview.count == 0 && !which.is_by_id()) {
            return self.tell(conn, config, &which, &preview, None);
        }
        let (which, preview) = self.confirmed(conn, config, which, preview)?;
        let note = how.signed.note();
        let (done, is_stopped) = perform(preview.count, &how.pace, &note, TO_CONTINUE, |bulk| {
            (act.perform(conn, table, &which, bulk)).map_err(not_done(act))
        })?;
        self.tell(conn, config, &which, &preview, Some((&done, is_stopped)))?;
        if is_stopped {
            bail!("stopped by a signal; {TO_CONTINUE}");
        }
        if which.is_by_id() && done.parts.is_empty() && done.bulked.skipped > 0 {
            bail!("not all of them were {}", act.words().done);
        }
        for (id, changed) in &done.parts {
            whole(act.words().done, config, id, changed)?;
        }
        Ok(())
    }

    /// Asks, and asks again if more match meanwhile. What is named by its id was chosen by hand.
    fn confirmed(
        &self,
        conn: &mut PgConnection,
        config: &Config,
        which: Choice,
        preview: Preview,
    ) -> Result<(Choice, Preview)> {
        if which.is_by_id() {
            return Ok((which, preview));
        }
        let which = which.counted_at(preview.counted_at);
        if self.options.how.yes {
            return Ok((which, preview));
        }
        let mut preview = preview;
        loop {
            self.ask(&which, &preview)?;
            let now = self.act.preview(conn, &config.table, &which);
            let now = now.map_err(not_done(self.act))?;
            if now.count <= preview.count {
                return Ok((which, preview));
            }
            eprintln!("diesel-outbox: more match meanwhile");
            preview = now;
        }
    }

    fn ask(&self, which: &Choice, preview: &Preview) -> Result<()> {
        let words = self.act.words();
        let command = format!("{} {}", words.group, words.name);
        let count = words.counted(preview.count);
        let question = format!("{} {count} ({which}){}", words.name, first(preview));
        ask(
            &command,
            &question,
            &format!("{} {}", words.becomes, words.undo),
        )
    }

    /// Prints what was done, or would be.
    fn tell(
        &self,
        conn: &mut PgConnection,
        config: &Config,
        which: &Choice,
        preview: &Preview,
        done: Option<(&Performed, bool)>,
    ) -> Result<()> {
        let (words, how) = (self.act.words(), &self.options.how);
        if how.json {
            return output::json(&as_json(words, preview, done));
        }
        for leaves in &preview.leaves {
            output::line(output::shown(leaves))?;
        }
        let Some((done, is_stopped)) = done else {
            let count = words.counted(preview.count);
            if how.pace.dry_run {
                output::line(format!("{count} would be {}{}", words.done, first(preview)))?;
                return output::line(format!("{} {}", words.becomes, words.undo));
            }
            let none = self.none(conn, config)?;
            return output::line(format!("{} {count}{none}", words.done));
        };
        for part in done.parts.iter().flat_map(|(_, changed)| &changed.parts) {
            output::line(of_part(part, words.done))?;
        }
        if done.parts.is_empty() {
            let changed = words.counted(done.bulked.changed);
            let skipped = match done.bulked.skipped {
                0 => String::new(),
                skipped => format!(
                    "; {skipped} unchanged: they are gone, their idempotency keys are in the outbox again, or another operator was faster"
                ),
            };
            let left = match left(preview, (done, is_stopped)) {
                0 => String::new(),
                left => format!("; {left} are left"),
            };
            output::line(format!("{} {changed}{skipped}{left}", words.done))?;
        }
        let held = self.act.still_held(conn, &config.table, which);
        let held = held.map_err(not_done(self.act))?;
        let some = match held.is_complete {
            true => "",
            false => "at least ",
        };
        for (reason, count) in held.reasons {
            let messages = output::messages(count);
            let reason = output::shown(&reason);
            output::line(format!("still waiting: {some}{messages}, {reason}"))?;
        }
        Ok(())
    }

    /// Why nothing was found. A topic that is found nowhere is probably misspelt.
    fn none(&self, conn: &mut PgConnection, config: &Config) -> Result<String> {
        let Some(topic) = self
            .options
            .chosen
            .topic()
            .filter(|topic| !topic.contains('*'))
        else {
            return Ok(": none matches".to_owned());
        };
        let letters = Selection::default().topic(topic.to_owned());
        let is_known = !program::dead_letters(conn, &config.table, &letters, 1)?.is_empty()
            || (program::topics(conn, &config.table)?.iter()).any(|live| live.topic == topic);
        Ok(match is_known {
            true => ": none matches".to_owned(),
            false => format!(
                ": no dead letter and no message in the outbox has the topic {}: check the spelling",
                output::shown(topic)
            ),
        })
    }
}

/// The messages that a signal has left.
fn left(preview: &Preview, (done, is_stopped): (&Performed, bool)) -> u64 {
    let ended = done.bulked.changed + done.bulked.skipped;
    match is_stopped {
        true => preview.count.saturating_sub(ended),
        false => 0,
    }
}

fn as_json(words: &Words, preview: &Preview, done: Option<(&Performed, bool)>) -> Value {
    let performed = done.map(|(done, _)| done.clone()).unwrap_or_default();
    json!({
        "matched": preview.count,
        "changed": performed.bulked.changed,
        "skipped": performed.bulked.skipped,
        "left": done.map_or(0, |done| left(preview, done)),
        "stopped": done.is_some_and(|(_, is_stopped)| is_stopped),
        "leaves": preview.leaves,
        "becomes": words.becomes,
        "undo": words.undo,
        "messages": performed.parts.iter().map(of_one).collect::<Vec<_>>(),
    })
}

/// The first message of a preview, in words.
fn first(preview: &Preview) -> String {
    match &preview.first {
        Some(first) if preview.count > 1 => format!(
            ", the first: {} {}",
            first.sequence,
            output::shown(&first.topic)
        ),
        _ => String::new(),
    }
}

fn named(words: &Words, wrong: WrongChoice) -> ConfigError {
    match wrong.field {
        "all" | "ids" => ConfigError::new(
            format!("{} {}", words.group, words.name),
            wrong.why.replace("choose all", "give --all"),
        ),
        _ => of_option(wrong),
    }
}

fn not_done(act: &dyn ManyAct) -> impl Fn(ActError) -> anyhow::Error {
    let name = act.words().name;
    move |error| match error {
        ActError::Unknown(why) => anyhow::anyhow!("cannot {name}: {why}; nothing was changed"),
        error => error.into(),
    }
}

fn of_one((id, changed): &(String, Changed)) -> Value {
    json!({
        "id": id,
        "answer": changed.answer().as_str(),
        "complete": changed.is_complete,
        "parts": changed.parts.iter().map(part_json).collect::<Vec<_>>(),
    })
}

/// What became of a part of a message.
pub(crate) fn of_part(part: &Part, done: &str) -> String {
    let destination = match part.destination.as_str() {
        "" => String::new(),
        name => format!(" for {}", output::shown(name)),
    };
    let said = match part.state {
        PartState::Done => done,
        PartState::InFlight => "unchanged: in flight",
        PartState::Delivered => "unchanged: already delivered",
        PartState::Cancelled => "unchanged: already cancelled",
        _ => "unchanged: dead letter",
    };
    format!("{}{destination}: {said}", part.sequence)
}

pub(crate) fn part_json(part: &Part) -> Value {
    let state = match part.state {
        PartState::Done => "done",
        PartState::InFlight => "in_flight",
        PartState::Delivered => "delivered",
        PartState::Cancelled => "cancelled",
        _ => "dead",
    };
    json!({ "sequence": part.sequence.0, "destination": part.destination, "state": state })
}

/// Fails unless the whole message was changed.
pub(crate) fn whole(done: &str, config: &Config, id: &str, changed: &Changed) -> Result<()> {
    let name = output::shown(id);
    match changed.answer() {
        Answer::Done => Ok(()),
        Answer::Cancelled if done.ends_with("cancelled") => Ok(()),
        Answer::Unknown if !changed.is_complete => {
            bail!("{name}: nothing was found within 2 s: search by idempotency key, which is fast")
        }
        Answer::Unknown => bail!("{}", unknown(id, config)),
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

pub(crate) fn unknown(which: &str, config: &Config) -> String {
    format!(
        "there is no message with the id, key or sequence {which:?} in the outbox \"{}\" or its ledger",
        config.table
    )
}
