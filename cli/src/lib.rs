//! The parts of the program `diesel-outbox`: a standalone relay, and the commands for operators.
//!
//! What is public here is for the project's own laboratory, and may change with any version. Applications use the
//! crate `diesel-outbox`.

mod act;
pub mod admin;
mod bulk;
mod check;
pub mod cli;
mod confirm;
mod connection;
mod databases;
mod dead;
mod descriptors;
mod drain;
mod endpoint;
pub mod exit;
mod feed;
mod forget;
mod keys;
mod lab;
mod leases;
mod listed;
mod listen;
pub mod logging;
mod message;
mod migrate;
pub mod number;
pub mod output;
mod pause;
mod pauses;
mod replay;
mod resume;
mod run;
mod secret;
pub mod settings;
pub mod signals;
mod signed;
mod status;
mod tail;
pub mod threads;
mod topics;
mod values;

use std::process::ExitCode;

use crate::cli::{Cli, Command};

/// Runs the command that the arguments of this process name.
pub fn main() -> ExitCode {
    exit::code("diesel-outbox", run(cli::parse()))
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let settings = &cli.settings;
    match cli.command {
        Command::Migrate(options) => migrate::run(&options, settings),
        Command::Run(options) => match &options.databases {
            Some(file) => databases::run(file, &options, settings),
            None => run::run(settings),
        },
        Command::Admin => admin::run(settings),
        Command::Drain(options) => drain::run(&options, settings),
        Command::Demo(_) | Command::Bench(_) => lab::run(),
        Command::Status(options) => status::run(&options, settings),
        Command::Dead(action) => dead::run(&action, settings),
        Command::Message(action) => message::run(&action, settings),
        Command::Keys(options) => keys::run(&options, settings),
        Command::Leases(options) => leases::run(&options, settings),
        Command::Topics(options) => topics::run(&options, settings),
        Command::Replay(options) => replay::run(&options, settings),
        Command::Feed(action) => feed::run(&action, settings),
        Command::Forget(options) => forget::run(&options, settings),
        Command::Pause(action) => pause::run(&action, settings),
        Command::Endpoint(action) => endpoint::run(&action, settings),
        Command::Resume(action) => resume::run(&action, settings),
        Command::Secret(action) => secret::run(&action, settings),
        Command::Listen(options) => listen::run(options, settings),
        Command::Tail(options) => tail::run(&options, settings),
        Command::Check(options) => check::run(&options, settings),
        Command::Settings => output::line(settings::page()),
    }
}
