//! Values of options that several commands have.

use std::time::SystemTime;

use anyhow::Result;
use diesel_outbox::ConfigError;
use diesel_outbox::admin::{Place, Selection};
use diesel_outbox::program::{self, Chosen, WrongChoice};

/// The messages that the options choose.
pub(crate) fn chosen(chosen: &Chosen) -> Result<Selection, ConfigError> {
    chosen.selection().map_err(of_option)
}

/// The same, of messages that wait.
pub(crate) fn waiting(chosen: &Chosen) -> Result<Selection, ConfigError> {
    chosen.of_waiting().map_err(of_option)
}

/// The error names the option.
pub(crate) fn of_option(WrongChoice { field, why }: WrongChoice) -> ConfigError {
    ConfigError::new(format!("--{field}"), why)
}

/// Parses the value of `--tenant`.
pub(crate) fn tenant(text: &str) -> Result<uuid::Uuid> {
    let why = || ConfigError::new("--tenant", format!("{text:?} is not a UUID"));
    Ok(text.parse().map_err(|_| why())?)
}

/// Parses the time of a flag: RFC 3339, or a duration as the time that long ago.
pub(crate) fn time(flag: &str, text: &str) -> Result<SystemTime, ConfigError> {
    program::parse_time(text).map_err(|why| ConfigError::new(flag, why))
}

/// Parses a place in a list, given with `flag`.
pub(crate) fn place(flag: &str, text: &str) -> Result<Place, ConfigError> {
    text.parse().map_err(|_| {
        let why = format!(
            "{text:?} is not a place: copy the place from the line \"more: {flag} …\" at the end of a list"
        );
        ConfigError::new(flag, why)
    })
}
