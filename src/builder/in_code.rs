//! The names of settings in errors: a setting made in code is named by its builder method, not by its variable.

use super::RelayBuilder;
use crate::config::{ConfigError, SETTINGS, Setting};

impl RelayBuilder {
    /// Rewrites the error: settings from the environment keep their variable names, settings made in code get the
    /// names of the builder's methods.
    pub(super) fn in_words_of_code(error: &ConfigError, in_code: &InCode) -> ConfigError {
        let mut reason = error.reason().to_owned();
        let mut settings: Vec<&Setting> = SETTINGS.iter().filter(|one| in_code.has(one)).collect();
        // Longest first, because one name may be the beginning of another.
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

/// The settings that were made in code.
#[derive(Debug, Clone)]
pub(super) enum InCode {
    /// All settings: the builder started with the defaults.
    All,
    /// The settings of these variables. The rest comes from a `Config` that the application has read.
    Some(Vec<&'static str>),
}

impl InCode {
    /// Records that a builder method set this variable.
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
