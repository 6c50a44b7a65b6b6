//! Acts on one endpoint: each that the library lists is a subcommand.

use anyhow::{Result, bail};
use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};
use diesel::PgConnection;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::Endpoints;
use diesel_outbox::program::{ENDPOINT_ACTS, EndpointAct, EndpointPreview};
use serde_json::json;

use super::missing;
use crate::act::named_act;
use crate::confirm::confirmed;
use crate::output;
use crate::signed::Who;

/// Options of each act.
#[derive(Debug, clap::Args)]
struct Options {
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

/// An act, with its options.
#[derive(Debug)]
pub(crate) struct OfEndpoint {
    act: &'static EndpointAct,
    options: Options,
}

impl FromArgMatches for OfEndpoint {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let find = |name: &str| ENDPOINT_ACTS.iter().copied().find(|act| act.name == name);
        let (act, options) = named_act(matches, find)?;
        let options = Options::from_arg_matches(options)?;
        Ok(Self { act, options })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for OfEndpoint {
    fn augment_subcommands(command: Command) -> Command {
        let one = |act: &&EndpointAct| {
            // After the options, whose type has words of its own.
            let command = Options::augment_args(Command::new(act.name));
            let command = command.about(act.about).after_help(act.undo);
            command.mut_arg("yes", |yes| yes.hide(!act.ends))
        };
        command.subcommands(ENDPOINT_ACTS.iter().map(one))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        ENDPOINT_ACTS.iter().any(|act| act.name == name)
    }
}

impl OfEndpoint {
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
            let ends = format!(
                "{} {} {}",
                found.waiting_in_words(),
                found.becomes,
                act.undo
            );
            let question = format!("{} {}? {ends}", act.name, output::shown(name));
            let hint = format!(
                "endpoint {} asks for confirmation: without a terminal, give --yes",
                act.name
            );
            if !confirmed(&question, &hint)? {
                bail!("nothing was {}: {ends}", act.done);
            }
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
