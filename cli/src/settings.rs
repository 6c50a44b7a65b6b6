//! A flag for each setting, and the precedence of flags, environment and file.

use clap::builder::Str;
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use diesel_outbox::ConfigError;
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, SETTINGS};

/// The settings given as flags: variable and value.
#[derive(Debug, Clone, Default)]
pub struct SettingFlags {
    given: Vec<(&'static str, String)>,
}

impl SettingFlags {
    /// The value of the flag for this variable.
    pub fn get(&self, variable: &str) -> Option<&str> {
        self.given
            .iter()
            .find(|(given, _)| *given == variable)
            .map(|(_, value)| value.as_str())
    }

    /// Without the flags that a command takes for itself.
    pub(crate) fn without(&self, is_taken: impl Fn(&str) -> bool) -> Self {
        let mut rest = self.clone();
        rest.given.retain(|(variable, _)| !is_taken(variable));
        rest
    }

    /// Loads the settings. Precedence: flag > environment > file > default.
    ///
    /// # Errors
    ///
    /// A setting cannot be read, or contradicts another.
    pub fn load(&self) -> Result<Config, ConfigError> {
        let variables = program::relevant_variables()?;
        let mut config = Config::default();
        let in_environment = variables
            .iter()
            .find(|(variable, _)| variable == "OUTBOX_CONFIG")
            .map(|(_, value)| value.as_str());
        let path = self.get("OUTBOX_CONFIG").or(in_environment);
        if let Some(path) = path {
            config.read_file(path)?;
        }
        for (variable, value) in &variables {
            program::set_variable(&mut config, variable, value)?;
        }
        for (variable, value) in &self.given {
            config.set(variable, value).map_err(|error| {
                let key = format!("--{} ({variable})", flag_of(variable));
                ConfigError::new(key, error.reason())
            })?;
        }
        config.validate()?;
        Ok(config)
    }
}

/// The flag of a variable: `OUTBOX_SEND_TIMEOUT` has `--send-timeout`.
fn flag_of(variable: &str) -> String {
    variable
        .strip_prefix("OUTBOX_")
        .unwrap_or(variable)
        .to_lowercase()
        .replace('_', "-")
}

/// All settings: flag, variable, what it does, default.
pub fn page() -> String {
    let mut page = String::from(
        "Every command takes every setting: as a flag, as an environment variable, or as a key of outbox.toml (the variable \
         without OUTBOX_, in lower case). A flag wins over the environment, the environment over the file.\n",
    );
    for setting in SETTINGS {
        let (flag, value) = (flag_of(setting.variable), setting.value_name());
        page += &format!("\n  --{flag} {value}\n      env: {}\n", setting.variable);
        if !setting.default.is_empty() {
            page += &format!("      default: {}\n", setting.default);
        }
        page += &format!("      {}\n", setting.summary);
    }
    page
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
                    .value_name(setting.value_name())
                    // The setting refuses negative numbers, and says what it accepts.
                    .allow_negative_numbers(true)
                    .help(format!(
                        "{} [env: {}]{default}",
                        setting.summary, setting.variable
                    ))
                    .help_heading("Settings (`diesel-outbox help settings` shows all)")
                    .hide(!matches!(
                        setting.variable,
                        "DATABASE_URL" | "OUTBOX_CONFIG" | "OUTBOX_TABLE" | "OUTBOX_URL"
                    ))
                    .global(true),
            )
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
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
