//! Acts on one endpoint: each that the library lists is a subcommand.

use anyhow::Result;
use clap::Command;
use diesel::PgConnection;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::Endpoints;
use diesel_outbox::program::{ENDPOINT_ACTS, EndpointAct, EndpointPreview};
use serde_json::json;

use super::missing;
use crate::confirm::ask;
use crate::listed::{List, Listed};
use crate::output;
use crate::signed::Who;

/// The acts that the library lists.
pub(crate) struct Changes;

/// Options of each act.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Name of the endpoint
    name: String,
    /// Only say what the act would do
    #[arg(long)]
    dry_run: bool,
    /// Skip the confirmation
    #[arg(long)]
    yes: bool,
    /// Reason for the change, recorded with it
    #[arg(
        long,
        visible_alias = "reason",
        value_name = "TEXT",
        default_value = ""
    )]
    why: String,
    #[command(flatten)]
    who: Who,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl List for Changes {
    type Act = &'static EndpointAct;
    type Options = Options;

    fn acts() -> impl Iterator<Item = Self::Act> {
        ENDPOINT_ACTS.iter().copied()
    }

    fn name(act: Self::Act) -> &'static str {
        act.name
    }

    fn describe(act: Self::Act, command: Command) -> Command {
        let command = command.about(act.about).after_help(act.undo);
        command.mut_arg("yes", |yes| yes.hide(!act.ends))
    }
}

impl Listed<Changes> {
    /// Says what the act would do, asks if messages end, and performs it.
    pub(super) fn run(
        &self,
        conn: &mut PgConnection,
        endpoints: Endpoints<'_>,
        config: &Config,
    ) -> Result<()> {
        let (act, options) = (self.act, &self.options);
        let name = options.name.as_str();
        let Some(found) = act.preview(conn, endpoints, name, config)? else {
            return missing(name);
        };
        if options.dry_run {
            return self.tell(&found);
        }
        if act.ends && !options.yes {
            let waiting = found.waiting_in_words();
            let becomes = format!("{waiting} {} {}", found.becomes, act.undo);
            let question = format!("{} {}", act.name, output::shown(name));
            ask(&format!("endpoint {}", act.name), &question, &becomes)?;
        }
        let note = options.who.note(&options.why);
        match act.perform(conn, endpoints, name, &note)? {
            true => self.tell(&found),
            false => missing(name),
        }
    }

    /// Prints what was done, or would be.
    fn tell(&self, found: &EndpointPreview) -> Result<()> {
        let (act, options) = (self.act, &self.options);
        if options.json {
            return output::json(&json!({
                "done": !options.dry_run,
                "waiting": found.waiting,
                "becomes": found.becomes,
                "undo": act.undo,
            }));
        }
        let is = if options.dry_run { "would be" } else { "is" };
        let (name, waiting) = (output::shown(&options.name), found.waiting_in_words());
        output::line(format!(
            "{name} {is} {}. {waiting} {}",
            act.done, found.becomes
        ))?;
        match options.dry_run {
            true => output::line(act.undo),
            false => Ok(()),
        }
    }
}
