//! Changes of many messages: their options, and a progress bar.

use anyhow::{Result, bail};
use diesel_outbox::admin::{Bulk, Note};
use indicatif::{ProgressBar, ProgressStyle};

use crate::number::whole;
use crate::signals;
use crate::signed::Signed;

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
