//! The `diesel-outbox` binary: a standalone relay, and the commands for operators.

mod admin;
#[cfg(feature = "laboratory")]
mod bench;
mod check;
mod cli;
mod confirm;
mod dead;
#[cfg(feature = "laboratory")]
mod demo;
mod descriptors;
mod destination;
mod drain;
mod forget;
mod keys;
mod leases;
mod logging;
#[cfg(test)]
mod manual;
mod message;
mod migrate;
mod number;
mod output;
mod pause;
mod pauses;
#[cfg(feature = "laboratory")]
mod receiver;
mod replay;
mod resume;
mod run;
mod secret;
mod settings;
mod signals;
mod signed;
mod status;
mod topics;

use std::process::ExitCode;

use clap::Parser;
use diesel_outbox::{BadBackoff, BadName, ConfigError, StartError, UnknownWord};

use crate::cli::{Cli, Command};

/// Failed while running.
const FAILED: u8 = 1;
/// Bad settings or usage. clap exits with the same code.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("diesel-outbox: {}", with_advice(&error));
            ExitCode::from(if is_usage(&error) { USAGE } else { FAILED })
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let settings = &cli.settings;
    match cli.command {
        Command::Migrate(options) => migrate::run(&options, settings),
        Command::Run => run::run(settings),
        Command::Admin => admin::run(settings),
        Command::Drain(options) => drain::run(&options, settings),
        #[cfg(feature = "laboratory")]
        Command::Demo(options) => demo::run(&options, settings),
        #[cfg(feature = "laboratory")]
        Command::Bench(options) => bench::run(&options, settings),
        Command::Status(options) => status::run(&options, settings),
        Command::Dead(action) => dead::run(&action, settings),
        Command::Message(action) => message::run(&action, settings),
        Command::Keys(options) => keys::run(&options, settings),
        Command::Leases(options) => leases::run(&options, settings),
        Command::Topics(options) => topics::run(&options, settings),
        Command::Replay(options) => replay::run(&options, settings),
        Command::Forget(options) => forget::run(&options, settings),
        Command::Pause(action) => pause::run(&action, settings),
        Command::Destination(action) => destination::run(&action, settings),
        Command::Resume(action) => resume::run(&action, settings),
        Command::Secret(action) => secret::run(&action, settings),
        Command::Check(options) => check::run(&options, settings),
        #[cfg(feature = "laboratory")]
        Command::Receive(options) => receiver::run(&options),
    }
}

/// The reader of the output closed the pipe, as `head` does: no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The error text, with advice if the database role lacks a right. Messages of a server in another language get no
/// advice.
fn with_advice(error: &anyhow::Error) -> String {
    let what = error.chain().find_map(|cause| {
        let text = cause.to_string();
        text.strip_prefix("permission denied for ")
            .map(str::to_owned)
    });
    let advice = match what.as_deref().and_then(|what| what.split(' ').next()) {
        None => "",
        Some("database") => ": the role needs CREATE on this database",
        Some("schema") => {
            ": the role needs USAGE on this schema, and CREATE to create an outbox in it"
        }
        Some(_) => {
            "; `diesel-outbox migrate --print --roles` prints the rights of each role, `diesel-outbox check` the rights that a relay lacks"
        }
    };
    format!("{error:#}{advice}")
}

fn is_usage(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<ConfigError>()
            || cause.is::<BadName>()
            || cause.is::<BadBackoff>()
            || cause.is::<UnknownWord>()
            || matches!(cause.downcast_ref(), Some(StartError::Config(_)))
    })
}
