//! What settings are called where they are set in code: errors name what a programmer has written.

use super::RelayBuilder;
use crate::config::{ConfigError, SETTINGS, Setting};

impl RelayBuilder {
    /// The error in the words of whoever set the values: of those that came from the environment the
    /// variables, of the others the builder's methods.
    pub(super) fn in_words_of_code(error: &ConfigError, in_code: &InCode) -> ConfigError {
        let mut reason = error.reason().to_owned();
        let mut settings: Vec<&Setting> = SETTINGS.iter().filter(|one| in_code.has(one)).collect();
        // Longer names first: one may begin with another.
        settings.sort_by_key(|setting| std::cmp::Reverse(setting.variable.len()));
        for setting in &settings {
            reason = reason.replace(setting.variable, &setting.name_in_code());
        }
        let of_error = settings
            .iter()
            .find(|setting| setting.variable == error.key());
        let key = of_error.map_or_else(|| error.key().to_owned(), |one| one.name_in_code());
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

    fn has(&self, setting: &Setting) -> bool {
        match self {
            Self::All => true,
            Self::Some(variables) => variables.contains(&setting.variable),
        }
    }
}
