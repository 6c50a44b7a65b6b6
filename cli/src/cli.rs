//! The command line.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};

use crate::settings::SettingFlags;
use crate::{
    check, databases, dead, drain, endpoint, feed, forget, keys, lab, leases, listen, message,
    migrate, pause, replay, resume, secret, settings, status, tail, topics,
};

/// A transactional outbox for synchronous Rust: delivers messages from PostgreSQL over HTTP.
#[derive(Debug, Parser)]
#[command(name = "diesel-outbox", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 success; 1 failure while running; 2 bad settings or usage.")]
pub struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) settings: SettingFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create the outbox, or upgrade it to this version
    Migrate(migrate::Options),
    /// Run a relay until SIGTERM or SIGINT. Exit with code 2 if it has no destination, and no OUTBOX_ENDPOINT_THREADS
    Run(databases::Options),
    /// Serve the admin page without a relay
    Admin,
    /// Deliver due messages, then exit
    Drain(drain::Options),
    /// Demonstrate deliveries with an example application, a receiver and a relay (needs a build of the source)
    Demo(lab::Options),
    /// Measure the relay on this machine (needs a build of the source)
    Bench(lab::Options),
    /// Show message counts by state, problems, pauses and relays
    Status(status::Options),
    /// List, group, show, requeue or discard dead letters
    #[command(subcommand)]
    Dead(dead::Action),
    /// Show, list, retry, cancel, reschedule or settle messages
    #[command(subcommand)]
    Message(message::Action),
    /// List blocked ordering keys, or show the messages of a key
    Keys(keys::Options),
    /// List relays and their leases
    Leases(leases::Options),
    /// List the topics that relays have served or that are declared, declare some, or forget some
    Topics(topics::Options),
    /// Enqueue delivered messages again
    Replay(replay::Options),
    /// Delete the messages, dead letters and endpoints of a tenant permanently
    Forget(forget::Options),
    /// Pause a destination or topic: its messages wait and use no attempts. Or list pauses
    #[command(subcommand)]
    Pause(pause::Action),
    /// End a pause set by an operator, a receiver or a circuit breaker
    #[command(subcommand)]
    Resume(resume::Action),
    /// Manage endpoints: webhooks of an application's customers
    #[command(subcommand)]
    Endpoint(endpoint::Action),
    /// List, show and read feeds: destinations that consumers read. Make tokens for their readers
    #[command(subcommand)]
    Feed(feed::Action),
    /// Create signing secrets, and show public keys for receivers
    #[command(subcommand, visible_alias = "key")]
    Secret(secret::Action),
    /// Receive events and print them, to try deliveries with. Verifies signatures if --secret has secrets or public keys
    Listen(listen::Options),
    /// Follow what is delivered: a line for each message that is settled, until SIGTERM or SIGINT
    Tail(tail::Options),
    /// Check settings, database and routes, and show what `run` would do
    Check(check::Options),
    /// Show all settings: flags, environment variables, defaults
    #[command(after_help = settings::page())]
    Settings,
}

/// Reads the command line. Bad usage ends the process, with exit code 2.
pub fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| named(error, std::env::args()).exit())
}

/// Names the subcommand that was given as a flag: `pause --destination` means `pause destination`. Another flag that is
/// spelt like it would be no help.
fn named(mut error: clap::Error, arguments: impl Iterator<Item = String>) -> clap::Error {
    let given = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(given))) => given.clone(),
        _ => return error,
    };
    let mut command = Cli::command();
    let mut path = Vec::new();
    for argument in arguments.skip(1) {
        if let Some(sub) = command.find_subcommand(&argument).cloned() {
            path.push(argument);
            command = sub;
        }
    }
    let name = given.trim_start_matches('-');
    if command.find_subcommand(name).is_some() {
        path.push(name.to_owned());
        let meant = ContextValue::String(path.join(" "));
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::SuggestedSubcommand, meant);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_flag_may_stand_after_the_command() {
        let cli = Cli::try_parse_from(["diesel-outbox", "run", "--batch", "7"]).expect("good");
        assert_eq!(cli.settings.get("OUTBOX_BATCH"), Some("7"));
    }
}
