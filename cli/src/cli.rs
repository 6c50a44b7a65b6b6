//! The command line.

use clap::{Parser, Subcommand};

use crate::settings::SettingFlags;
#[cfg(feature = "laboratory")]
use crate::{bench, demo, receiver};
use crate::{
    check, dead, destination, drain, forget, keys, leases, message, migrate, pause, replay, resume,
    secret, status,
};

/// A transactional outbox for synchronous Rust: delivers messages from PostgreSQL over HTTP.
#[derive(Debug, Parser)]
#[command(name = "diesel-outbox", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done; 1 failed while running; 2 bad settings or usage.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) settings: SettingFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create the outbox, or bring it up to date
    Migrate(migrate::Options),
    /// Deliver until a signal comes. Needs a route or a destination, else it ends with exit code 2
    Run,
    /// Serve the admin page without a relay
    Admin,
    /// Deliver what is due, then exit
    Drain(drain::Options),
    /// Show the whole path with an application, a receiver and a relay
    #[cfg(feature = "laboratory")]
    Demo(demo::Options),
    /// Measure the relay on this machine
    #[cfg(feature = "laboratory")]
    Bench(bench::Options),
    /// How many messages are in which state, and what is wrong
    Status(status::Options),
    /// List, group, read, requeue or discard dead letters
    Dead(dead::Options),
    /// Show a message wherever it is, with what has happened to it
    Message(message::Options),
    /// Ordering keys whose messages wait, and the messages of one
    Keys(keys::Options),
    /// The relays that are, or were, at work
    Leases(leases::Options),
    /// Enqueue delivered messages again
    Replay(replay::Options),
    /// Remove what the outbox holds of a tenant, for good
    Forget(forget::Options),
    /// Let messages of a destination or a topic wait, at no cost; or show what is paused
    Pause(pause::Options),
    /// End a pause: an operator's, a receiver's or a circuit breaker's
    Resume(resume::Options),
    /// Registered destinations: webhooks of an application's customers
    Destination(destination::Options),
    /// Make signing secrets, and show the public keys that receivers get
    #[command(visible_alias = "key")]
    Secret(secret::Options),
    /// Check settings, database and routes, and say what `run` would do
    Check(check::Options),
    /// Answer requests with 200 (for `bench`)
    #[cfg(feature = "laboratory")]
    #[command(hide = true)]
    Receive(receiver::Options),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

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
