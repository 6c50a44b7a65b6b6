//! Changes of many messages: count, ask, change with a progress bar, tell.

use anyhow::{Result, bail};
use diesel_outbox::admin::{Bulk, Bulked, Note};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::confirm::confirmed;
use crate::number::whole;
use crate::signed::Signed;
use crate::{output, signals};

/// How fast, or only how many.
#[derive(Debug, clap::Args)]
pub(crate) struct Pace {
    /// Most messages in a second
    #[arg(long, value_name = "NUMBER", value_parser = whole(1..=1_000_000_u32))]
    rate: Option<u32>,
    /// Only count the messages
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The options of a change of many messages.
#[derive(Debug, clap::Args)]
pub(crate) struct How {
    #[command(flatten)]
    pub(crate) pace: Pace,
    /// Skip the confirmation
    #[arg(long)]
    pub(crate) yes: bool,
    #[command(flatten)]
    pub(crate) signed: Signed,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A change of many messages, in words: `retry` and `retried`, `7 messages waiting in the outbox "outbox"`.
pub(crate) struct Words<'a> {
    pub(crate) verb: &'a str,
    pub(crate) done: &'a str,
    /// Which messages: `for acme`.
    pub(crate) which: &'a str,
}

/// Counts the messages, asks, and changes them. `act` carries the change out, or counts.
pub(crate) fn carry_out(
    how: &How,
    words: &Words<'_>,
    mut act: impl FnMut(Bulk<'_>) -> Result<Bulked>,
) -> Result<()> {
    let Words { verb, done, which } = words;
    let note = how.signed.note();
    let found = act(Bulk::new(&note).dry_run())?;
    if how.pace.dry_run || found.changed == 0 {
        return tell(how, words, &found, &Bulked::default(), false);
    }
    let question = format!("{verb} {} {which}?", output::messages(found.changed));
    let hint = format!("{verb} asks for confirmation: without a terminal, give --yes");
    if !how.yes && !confirmed(&question, &hint)? {
        bail!("nothing was {done}");
    }
    let (changed, is_stopped) = perform(found.changed, &how.pace, &note, TO_CONTINUE, act)?;
    tell(how, words, &found, &changed, is_stopped)?;
    if is_stopped {
        bail!("stopped by a signal; {TO_CONTINUE}");
    }
    Ok(())
}

/// How a change continues that was stopped.
pub(crate) const TO_CONTINUE: &str = "to continue, repeat the command";

/// Changes the messages with a progress bar, at the rate of the options. Returns the totals, and whether a signal has
/// stopped the change.
pub(crate) fn perform<T>(
    messages: u64,
    pace: &Pace,
    note: &Note,
    to_continue: &str,
    mut act: impl FnMut(Bulk<'_>) -> Result<T>,
) -> Result<(T, bool)> {
    let signals = signals::channel()?;
    let bar = ProgressBar::new(messages);
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {pos}/{len} {per_sec} {eta}",
    )?);
    let bulk = Bulk::new(note).rate(pace.rate).progress(|so_far| {
        bar.set_position(so_far.changed + so_far.skipped);
        signals.is_empty()
    });
    let changed = act(bulk);
    bar.finish_and_clear();
    match changed {
        Ok(changed) => Ok((changed, !signals.is_empty())),
        Err(error) => bail!("{error:#}; {to_continue}"),
    }
}

fn tell(
    how: &How,
    Words { done, which, .. }: &Words<'_>,
    found: &Bulked,
    changed: &Bulked,
    is_stopped: bool,
) -> Result<()> {
    if how.json {
        return output::json(&json!({
            "matched": found.changed,
            "changed": changed.changed,
            "skipped": changed.skipped,
            "without_payload": found.without_payload,
            "stopped": is_stopped,
        }));
    }
    if found.without_payload > 0 {
        output::line(format!(
            "not sent: {}, of which the ledger has no payload (OUTBOX_LEDGER_PAYLOAD)",
            output::messages(found.without_payload)
        ))?;
    }
    if how.pace.dry_run {
        return output::line(format!(
            "{} {which} would be {done}",
            output::messages(found.changed)
        ));
    }
    let skipped = match changed.skipped {
        0 => String::new(),
        skipped => format!(
            "; {skipped} unchanged: their idempotency keys are in the outbox again, or another operator was faster"
        ),
    };
    let why = if found.changed == 0 {
        ": none matches"
    } else {
        ""
    };
    output::line(format!(
        "{done} {} {which}{why}{skipped}",
        output::messages(changed.changed)
    ))
}
