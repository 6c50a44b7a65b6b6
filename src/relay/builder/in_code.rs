//! What settings are called where they are set in code: errors name what a programmer has written.

use super::RelayBuilder;
use crate::config::{ConfigError, SETTINGS};

/// Settings that the builder has a method for, other than by their own names.
const RENAMED: &[(&str, &str)] = &[
    ("DATABASE_URL", "Relay::builder"),
    ("OUTBOX_TABLE", "RelayBuilder::outbox"),
];
/// Settings that the builder has a method for.
const METHODS: &[&str] = &[
    "url",
    "concurrency",
    "batch",
    "poll_interval",
    "lease",
    "send_timeout",
    "max_attempts",
    "backoff",
    "retention",
    "inbox_retention",
    "enabled",
    "listener_url",
];

impl RelayBuilder {
    /// The error in the words of whoever set the values: of those that came from the environment the
    /// variables, of the others the builder's methods.
    pub(super) fn in_words_of_code(error: &ConfigError, in_code: &InCode) -> ConfigError {
        let mut reason = error.reason().to_owned();
        // Longer names first: one may begin with another.
        let mut variables: Vec<&str> = SETTINGS.iter().map(|setting| setting.variable).collect();
        variables.sort_by_key(|variable| std::cmp::Reverse(variable.len()));
        for variable in variables.into_iter().filter(|one| in_code.has(one)) {
            reason = reason.replace(variable, &name_in_code(variable));
        }
        let key = match in_code.has(error.key()) {
            true => name_in_code(error.key()),
            false => error.key().to_owned(),
        };
        ConfigError::new(key, reason)
    }
}

/// Which settings were made in code.
#[derive(Debug, Clone)]
pub(super) enum InCode {
    /// All: the builder began with the defaults.
    All,
    /// These variables' settings: the rest is of a `Config` that the application has read.
    Some(Vec<&'static str>),
}

impl InCode {
    /// A method of the builder sets this.
    pub(super) fn add(&mut self, variable: &'static str) {
        if let Self::Some(variables) = self {
            variables.push(variable);
        }
    }

    fn has(&self, variable: &str) -> bool {
        match self {
            Self::All => SETTINGS.iter().any(|one| one.variable == variable),
            Self::Some(variables) => variables.contains(&variable),
        }
    }
}

fn name_in_code(variable: &str) -> String {
    if let Some((_, name)) = RENAMED.iter().find(|(renamed, _)| *renamed == variable) {
        return (*name).to_owned();
    }
    let field = variable.trim_start_matches("OUTBOX_").to_lowercase();
    match METHODS.contains(&field.as_str()) {
        true => format!("RelayBuilder::{field}"),
        false => format!("Config::{field}"),
    }
}
