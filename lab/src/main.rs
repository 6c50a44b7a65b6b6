//! The program `outbox-lab` demonstrates and measures the outbox, and writes the manual pages of `diesel-outbox`.
//!
//! `diesel-outbox demo` and `diesel-outbox bench` run this program, which is in the same folder after a build.

mod bench;
mod demo;
mod manual;
mod receiver;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use diesel_outbox_cli::exit;
use diesel_outbox_cli::settings::SettingFlags;

/// Demonstrates and measures diesel-outbox.
#[derive(Debug, Parser)]
#[command(name = "outbox-lab", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 success; 1 failure while running; 2 bad settings or usage.")]
struct Lab {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    settings: SettingFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Demonstrate deliveries with an example application, a receiver and a relay
    Demo(demo::Options),
    /// Measure the relay on this machine
    Bench(bench::Options),
    /// Write the manual pages and shell completions of diesel-outbox into a folder
    Manual(manual::Options),
    /// Respond to every request with one status (for `bench`)
    #[command(hide = true)]
    Receive(receiver::Options),
}

fn main() -> ExitCode {
    let Lab { command, settings } = Lab::parse();
    let result = match command {
        Command::Demo(options) => demo::run(&options, &settings),
        Command::Bench(options) => bench::run(&options, &settings),
        Command::Manual(options) => manual::run(&options),
        Command::Receive(options) => receiver::run(&options),
    };
    exit::code("outbox-lab", result)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Lab::command().debug_assert();
    }
}
