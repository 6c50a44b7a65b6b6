//! Settings of the environment.

use super::Config;
use super::settings::{ConfigError, bad};

/// Reads the settings from the environment of this process.
///
/// ```no_run
/// let config = diesel_outbox::config::from_env()?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// # Errors
/// A [`ConfigError`] that names the variable: unknown, unparsable, or contradicting another.
pub fn from_env() -> Result<Config, ConfigError> {
    let mut config = Config::default();
    for (variable, value) in relevant_variables()? {
        config.set_variable(&variable, &value)?;
    }
    if config.config.is_some() {
        return Err(bad(
            "OUTBOX_CONFIG",
            "the library reads no file: set destinations and routes by Relay::builder, or unset it",
        ));
    }
    config.validate()?;
    Ok(config)
}

/// The variables of this process's environment that concern the outbox.
///
/// ```no_run
/// use diesel_outbox::config::{self, Config};
///
/// // As `from_env`, with a default of the application's own.
/// let mut config = Config::default();
/// config.set("OUTBOX_CONCURRENCY", "4")?;
/// for (variable, value) in config::relevant_variables()? {
///     config.set_variable(&variable, &value)?;
/// }
/// config.validate()?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// # Errors
/// A [`ConfigError`] when one of them is not UTF-8.
pub fn relevant_variables() -> Result<Vec<(String, String)>, ConfigError> {
    let mut found = Vec::new();
    for (variable, value) in std::env::vars_os() {
        let Some(variable) = variable.to_str().map(str::to_owned) else {
            continue;
        };
        if !is_relevant(&variable) {
            continue;
        }
        match value.into_string() {
            Ok(value) => found.push((variable, value)),
            Err(_) => return Err(bad(&variable, "it is not UTF-8")),
        }
    }
    let is_set = |name: &str| found.iter().any(|(variable, _)| variable == name);
    for (name, file) in [
        ("DATABASE_URL", "DATABASE_URL_FILE"),
        ("OUTBOX_LISTENER_URL", "OUTBOX_LISTENER_URL_FILE"),
        ("OUTBOX_SECRET", "OUTBOX_SECRET_FILE"),
        ("OUTBOX_ADMIN_TOKEN", "OUTBOX_ADMIN_TOKEN_FILE"),
    ] {
        if is_set(name) && is_set(file) {
            return Err(bad(file, &format!("{name} is set, too: unset one of them")));
        }
    }
    found.sort();
    Ok(found)
}

/// Clusters set `OUTBOX_SERVICE_HOST`, `OUTBOX_PORT_80_TCP` and their like for a service that is
/// called `outbox`: these are nobody's settings.
pub(super) fn is_relevant(variable: &str) -> bool {
    let service_link = variable.starts_with("OUTBOX_SERVICE_")
        || variable == "OUTBOX_PORT"
        || variable.starts_with("OUTBOX_PORT_");
    matches!(variable, "DATABASE_URL" | "DATABASE_URL_FILE")
        || (variable.starts_with("OUTBOX_") && !service_link)
}
