//! Settings from environment variables.

use super::Config;
use super::settings::Setting;
use crate::config_error::ConfigError;

/// Reads the settings from the file at `OUTBOX_CONFIG`, then from the environment of this process, which wins.
///
/// ```no_run
/// let config = diesel_outbox::config::from_env()?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// # Errors
/// A [`ConfigError`] names the variable. The variable is unknown, does not parse, or contradicts another setting.
pub fn from_env() -> Result<Config, ConfigError> {
    of(&relevant_variables()?)
}

pub(super) fn of(variables: &[(String, String)]) -> Result<Config, ConfigError> {
    let mut config = Config::default();
    let path = variables.iter().find(|(name, _)| name == "OUTBOX_CONFIG");
    if let Some((_, path)) = path {
        read(&mut config, path)?;
    }
    for (variable, value) in variables {
        config.set_variable(variable, value)?;
    }
    config.validate()?;
    if let Some(unused) = unused_in_library(&config) {
        log::warn!(event = "setting_unused"; "{unused}");
    }
    Ok(config)
}

/// A setting that has no effect in an application. It is not an error: the binary's admin page may run alongside
/// the application, with the same environment.
fn unused_in_library(config: &Config) -> Option<&'static str> {
    let has_page = config.admin.addr.is_some();
    has_page.then_some(
        "OUTBOX_ADMIN_ADDR has no effect in an application: only the binary has the admin page (run diesel-outbox admin alongside the application)",
    )
}

#[cfg(feature = "file")]
fn read(config: &mut Config, path: &str) -> Result<(), ConfigError> {
    config.read_file(path)
}

#[cfg(not(feature = "file"))]
fn read(_: &mut Config, _: &str) -> Result<(), ConfigError> {
    Err(ConfigError::new(
        "OUTBOX_CONFIG",
        "this program cannot read files: it was built without the feature `file` of diesel-outbox",
    ))
}

/// The environment variables of this process that hold outbox settings.
///
/// # Errors
/// A [`ConfigError`] when a variable is not UTF-8, or a value is set both directly and by a file.
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
            Err(_) => return Err(ConfigError::new(&variable, "not UTF-8")),
        }
    }
    let is_set = |name: &str| found.iter().any(|(variable, _)| variable == name);
    for name in Setting::in_own_files().map(|setting| setting.variable) {
        let file = format!("{name}_FILE");
        if is_set(name) && is_set(&file) {
            return Err(ConfigError::new(
                &file,
                format!("{name} is also set: unset one of them"),
            ));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a variable is meant as a setting. Kubernetes sets `OUTBOX_SERVICE_HOST`, `OUTBOX_PORT_80_TCP` and similar
/// variables for a service named `outbox`: those are not settings.
pub(super) fn is_relevant(variable: &str) -> bool {
    let service_link = variable.starts_with("OUTBOX_SERVICE_")
        || variable == "OUTBOX_PORT"
        || variable.starts_with("OUTBOX_PORT_");
    matches!(variable, "DATABASE_URL" | "DATABASE_URL_FILE")
        || (variable.starts_with("OUTBOX_") && !service_link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_page_that_the_library_does_not_have_is_reported() {
        let mut config = Config::default();
        assert_eq!(unused_in_library(&config), None);
        config
            .set("OUTBOX_ADMIN_ADDR", "127.0.0.1:8687")
            .expect("an address");
        let warning = unused_in_library(&config).expect("a warning");
        assert!(warning.starts_with("OUTBOX_ADMIN_ADDR "), "{warning}");
    }
}
