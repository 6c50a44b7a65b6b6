//! Acts that send an endpoint many messages: each that the library lists is a subcommand.

use anyhow::{Result, bail};
use clap::Command;
use diesel::PgConnection;
use diesel_outbox::admin::{Bulk, Bulked};
use diesel_outbox::endpoints::Endpoints;
use diesel_outbox::program::{SENDING_ACTS, SendingAct, SentMessages};
use serde_json::json;

use super::missing;
use crate::bulk::{How, TO_CONTINUE, perform};
use crate::confirm::ask;
use crate::listed::{List, Listed};
use crate::output;
use crate::values::of_option;

/// The acts that the library lists.
pub(crate) struct Sends;

/// Options of each act.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Name of the endpoint
    name: String,
    /// Messages since this time: 2026-11-21T10:00:00Z, or 2h for two hours ago
    #[arg(long, value_name = "TIME")]
    since: String,
    #[arg(long)]
    missing: bool,
    #[command(flatten)]
    how: How,
}

impl List for Sends {
    type Act = &'static SendingAct;
    type Options = Options;

    fn acts() -> impl Iterator<Item = Self::Act> {
        SENDING_ACTS.iter().copied()
    }

    fn name(act: Self::Act) -> &'static str {
        act.name
    }

    fn describe(act: Self::Act, command: Command) -> Command {
        let command = command.about(act.about).after_help(becomes());
        command.mut_arg("missing", |missing| match act.missing {
            Some(help) => missing.help(help),
            None => missing.hide(true),
        })
    }
}

fn becomes() -> String {
    format!("{} {}", SendingAct::BECOMES, SendingAct::UNDO)
}

impl Listed<Sends> {
    /// Counts the messages, asks, sends them with a progress bar, and says what was done.
    pub(super) fn run(&self, conn: &mut PgConnection, endpoints: Endpoints<'_>) -> Result<()> {
        let (act, Options { name, how, .. }) = (self.act, &self.options);
        let sending = act.read(&self.options.since, self.options.missing);
        let sending = sending.map_err(of_option)?;
        let note = how.signed.note();
        let count = Bulk::new(&note).dry_run();
        let Some(found) = act.perform(conn, endpoints, name, sending, count)? else {
            return missing(name);
        };
        if how.pace.dry_run || found.messages.changed == 0 {
            return self.tell(&found, &Bulked::default(), false);
        }
        if !how.yes {
            let messages = output::messages(found.messages.changed);
            let question = format!("{} {messages} for {}", act.name, output::shown(name));
            ask(&format!("endpoint {}", act.name), &question, &becomes())?;
        }
        let (sent, is_stopped) = perform(
            found.messages.changed,
            &how.pace,
            &note,
            TO_CONTINUE,
            |bulk| Ok(act.perform(conn, endpoints, name, sending, bulk)?),
        )?;
        let Some(sent) = sent else {
            return missing(name);
        };
        self.tell(&found, &sent.messages, is_stopped)?;
        match is_stopped {
            true => bail!("stopped by a signal; {TO_CONTINUE}"),
            false => Ok(()),
        }
    }

    /// Prints what was sent, or would be.
    fn tell(&self, found: &SentMessages, sent: &Bulked, is_stopped: bool) -> Result<()> {
        let Options { name, how, .. } = &self.options;
        if how.json {
            return output::json(&json!({
                "matched": found.messages.changed,
                "changed": sent.changed,
                "skipped": sent.skipped,
                "without_payload": found.messages.without_payload,
                "stopped": is_stopped,
                "leaves": found.leaves(name),
                "becomes": SendingAct::BECOMES,
                "undo": SendingAct::UNDO,
            }));
        }
        let to = output::shown(name);
        let messages = |count| format!("{} for {to}", output::messages(count));
        if how.pace.dry_run {
            output::line(format!(
                "{} would be enqueued",
                messages(found.messages.changed)
            ))?;
            output::line(becomes())?;
        } else {
            let more = match (found.messages.changed, sent.skipped) {
                (0, _) => ": none matches".to_owned(),
                (_, 0) => String::new(),
                (_, skipped) => format!(
                    "; {skipped} unchanged: their idempotency keys are in the outbox again, or another operator was faster"
                ),
            };
            output::line(format!("enqueued {}{more}", messages(sent.changed)))?;
        }
        for leaves in found.leaves(name) {
            output::line(output::shown(&leaves))?;
        }
        Ok(())
    }
}
