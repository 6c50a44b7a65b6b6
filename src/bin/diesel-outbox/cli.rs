//! The command line: commands, and a flag for each setting.

use clap::builder::Str;
use clap::{Arg, ArgMatches, Args, FromArgMatches, Parser, Subcommand};
use diesel_outbox::config::{self, SETTINGS};
use diesel_outbox::{Config, ConfigError};

use crate::{bench, check, dead, demo, drain, file, migrate, receiver, status};

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
    /// Deliver until a signal comes
    Run,
    /// Deliver what is due, then exit
    Drain(drain::Options),
    /// Show the whole path with an application, a receiver and a relay
    Demo(demo::Options),
    /// Measure the relay on this machine
    Bench(bench::Options),
    /// How many messages are in which state, and what is wrong
    Status(status::Options),
    /// List, read, requeue or discard dead letters
    Dead(dead::Options),
    /// Check settings, database and routes, and say what `run` would do
    Check(check::Options),
    /// Answer requests with 200 (for `bench`)
    #[command(hide = true)]
    Receive(receiver::Options),
}

/// The settings that were given as flags: variable and value.
#[derive(Debug, Clone, Default)]
pub(crate) struct SettingFlags {
    given: Vec<(&'static str, String)>,
}

impl SettingFlags {
    /// Flag > environment > file > default.
    pub(crate) fn load(&self) -> Result<Config, ConfigError> {
        let variables = config::relevant_variables()?;
        let mut config = Config::default();
        let path = self
            .given
            .iter()
            .map(|(variable, value)| (*variable, value))
            .chain(
                variables
                    .iter()
                    .map(|(variable, value)| (variable.as_str(), value)),
            )
            .find(|(variable, _)| *variable == "OUTBOX_CONFIG")
            .map(|(_, path)| path);
        if let Some(path) = path {
            file::apply(path, &mut config)?;
        }
        for (variable, value) in &variables {
            config.set_variable(variable, value)?;
        }
        for (variable, value) in &self.given {
            config.set(variable, value).map_err(|error| {
                let reason = error.to_string();
                let reason = reason
                    .strip_prefix(&format!("{variable}: "))
                    .unwrap_or(&reason)
                    .to_owned();
                ConfigError::new(format!("--{} ({variable})", flag_of(variable)), reason)
            })?;
        }
        config.validate()?;
        Ok(config)
    }
}

/// `OUTBOX_SEND_TIMEOUT` is `--send-timeout`.
fn flag_of(variable: &str) -> String {
    variable
        .strip_prefix("OUTBOX_")
        .unwrap_or(variable)
        .to_lowercase()
        .replace('_', "-")
}

impl Args for SettingFlags {
    fn augment_args(command: clap::Command) -> clap::Command {
        SETTINGS.iter().fold(command, |command, setting| {
            let default = match setting.default {
                "" => String::new(),
                default => format!(" [default: {default}]"),
            };
            command.arg(
                Arg::new(setting.variable)
                    .long(Str::from(flag_of(setting.variable)))
                    .value_name(value_name(setting.variable))
                    .help(format!(
                        "{} [env: {}]{default}",
                        setting.summary, setting.variable
                    ))
                    .help_heading("Settings")
                    .global(true),
            )
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

fn value_name(variable: &str) -> &'static str {
    match variable {
        "DATABASE_URL" | "OUTBOX_URL" => "URL",
        "OUTBOX_CONFIG" => "PATH",
        "OUTBOX_TABLE" => "NAME",
        "OUTBOX_ENABLED" | "OUTBOX_CLEANER" | "OUTBOX_LEDGER_PAYLOAD" => "BOOL",
        "OUTBOX_CONCURRENCY" | "OUTBOX_BATCH" | "OUTBOX_MAX_ATTEMPTS" => "NUMBER",
        "OUTBOX_MODE" | "OUTBOX_LOG_FORMAT" => "WORD",
        "OUTBOX_BACKOFF" => "BACKOFF",
        _ => "DURATION",
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.given = SETTINGS
            .iter()
            .filter_map(|setting| {
                let value = matches.get_one::<String>(setting.variable)?;
                Some((setting.variable, value.clone()))
            })
            .collect();
        Ok(())
    }
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
        assert_eq!(cli.settings.given, [("OUTBOX_BATCH", "7".to_owned())]);
    }
}
