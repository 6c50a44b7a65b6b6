//! Values of options that several commands have.

use anyhow::Result;
use diesel_outbox::ConfigError;
use diesel_outbox::admin::Place;

/// Parses the value of `--tenant`.
pub(crate) fn tenant(text: &str) -> Result<uuid::Uuid> {
    let why = || ConfigError::new("--tenant", format!("{text:?} is not a UUID"));
    Ok(text.parse().map_err(|_| why())?)
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
