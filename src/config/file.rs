//! `outbox.toml`: settings, destinations and routes.
//!
//! An error names the key and the expected values. It never shows the value, which may be a secret in the wrong
//! place.

mod destination;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod tests;
mod values;

use std::path::Path;

use serde_json::Value;

use self::values::{content, list, switch};
use super::section::{Section, both, unknown_key};
use super::settings::{SettingKind, SettingPlace};
use super::text::within;
use super::values::{count, text, unshown, wrong_type};
use super::{Config, ConfigError, Route, SETTINGS, Setting};

const DESTINATIONS: &str = "destinations";
const ROUTES: &str = "routes";
const ROUTE_KEYS: &[&str] = &["topic", "to"];

impl Config {
    /// Reads an `outbox.toml`: settings, destinations and routes. Other settings have their defaults. Requires the
    /// feature `file`, which is on by default.
    ///
    /// This function ignores the environment. [`from_env`](super::from_env) reads the file at `OUTBOX_CONFIG`, then the
    /// environment, which wins, like the binary.
    ///
    /// ```
    /// use diesel_outbox::config::Config;
    ///
    /// let path = std::env::temp_dir().join(format!("outbox-{}.toml", std::process::id()));
    /// std::fs::write(
    ///     &path,
    ///     r#"
    ///     send_timeout = "1s"
    ///
    ///     [destinations.billing]
    ///     url = "https://billing.internal/events"
    ///
    ///     [[routes]]
    ///     topic = "order.*"
    ///     to = "billing"
    ///     "#,
    /// )?;
    /// let config = Config::from_file(&path)?;
    /// assert_eq!(config.destinations[0].name, "billing");
    /// assert_eq!(config.send_timeout.as_secs(), 1);
    /// // let relay = diesel_outbox::Relay::from_config(config).start()?;
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A [`ConfigError`] names the file and the key, and never shows the value. The key is unknown, or the value does
    /// not parse or contradicts another setting.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        config.read_file(path)?;
        config.validate()?;
        Ok(config)
    }

    /// Reads an `outbox.toml` into these settings: settings are replaced, destinations and routes are added. Call
    /// [`validate`](Self::validate) at the end.
    ///
    /// ```no_run
    /// use diesel_outbox::config::Config;
    ///
    /// // With the application's own default.
    /// let mut config = Config::default();
    /// config.set("OUTBOX_CONCURRENCY", "4")?;
    /// config.read_file("outbox.toml")?;
    /// config.validate()?;
    /// # Ok::<(), diesel_outbox::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file), except contradictions, which [`validate`](Self::validate) finds.
    pub fn read_file(&mut self, path: impl AsRef<Path>) -> Result<(), ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| {
            ConfigError::new("OUTBOX_CONFIG", format!("cannot read {path:?}: {error}"))
        })?;
        apply_text(&text, self)
            .map_err(|error| ConfigError::new(path.to_string_lossy(), error.to_string()))
    }
}

fn apply_text(text: &str, config: &mut Config) -> Result<(), ConfigError> {
    let table: toml::Table = text.parse().map_err(|error| not_toml(text, &error))?;
    let not_json = |error: serde_json::Error| ConfigError::new("not TOML", error.to_string());
    let table = serde_json::to_value(table).map_err(not_json)?;
    let Value::Object(table) = table else {
        return Err(ConfigError::new("not TOML", "expected keys and values"));
    };
    for key in Setting::in_own_files().map(key_of) {
        let of_file = format!("{key}_file");
        if table.contains_key(&key) && table.contains_key(&of_file) {
            return Err(both(&of_file, &key));
        }
    }
    for (key, value) in table {
        match key.as_str() {
            DESTINATIONS => destinations(value, config)?,
            ROUTES => routes(value, config)?,
            _ => setting(&key, value, config)?,
        }
    }
    Ok(())
}

/// Says where and why, but does not show the line: the line may hold a password.
fn not_toml(text: &str, error: &toml::de::Error) -> ConfigError {
    let at = error.span().map_or(0, |span| span.start).min(text.len());
    let before = &text.as_bytes()[..at];
    let line = before.iter().filter(|b| **b == b'\n').count() + 1;
    let key = text
        .lines()
        .nth(line - 1)
        .and_then(|line| line.split_once('='))
        .map(|(key, _)| key.trim())
        // Inside a multi-line string the line may hold anything: only known keys are shown.
        .filter(|key| keys().iter().any(|known| known == key) || destination::keys().contains(key))
        .map_or_else(String::new, |key| format!(", at the key {key}"));
    ConfigError::new("not TOML", format!("line {line}{key}: {}", error.message()))
}

fn destinations(value: Value, config: &mut Config) -> Result<(), ConfigError> {
    let Value::Object(destinations) = value else {
        let reason = "expected [destinations.NAME] tables";
        return Err(ConfigError::new(DESTINATIONS, reason));
    };
    for (name, value) in destinations {
        match destination::read(&name, value)? {
            destination::Read::Sent(one) => config.destinations.push(*one),
            destination::Read::Feed(one) => config.feeds.push(one),
        }
    }
    Ok(())
}

fn routes(value: Value, config: &mut Config) -> Result<(), ConfigError> {
    let Value::Array(routes) = value else {
        return Err(ConfigError::new(ROUTES, "expected [[routes]] tables"));
    };
    for (index, value) in routes.into_iter().enumerate() {
        let mut section = Section::new(format!("{ROUTES}[{index}]"), value, ROUTE_KEYS)?;
        let topic = section.required("topic", text)?;
        let to = section.required("to", list)?;
        config.routes.push(Route::to_each(topic, to));
    }
    Ok(())
}

/// Reads one of [`SETTINGS`], directly or from the file with its value.
fn setting(key: &str, value: Value, config: &mut Config) -> Result<(), ConfigError> {
    let of_file = key.strip_suffix("_file").and_then(setting_of);
    if let Some(setting) = of_file.filter(|setting| setting.place == SettingPlace::OwnFile) {
        return set(config, setting, key, &content(key, value)?);
    }
    let Some(setting) = setting_of(key) else {
        let lower = key.to_lowercase();
        let word = lower.strip_prefix("outbox_").unwrap_or(&lower);
        let known = keys();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        return Err(unknown_key("", key, word, &known));
    };
    if setting.place == SettingPlace::NoFile {
        return Err(ConfigError::new(
            key,
            "only allowed outside of the file: a file cannot name another outbox.toml",
        ));
    }
    match (setting.kind, value) {
        (_, Value::String(text)) => set(config, setting, key, &text)?,
        (SettingKind::Switch(field), value) => *field(config) = switch(key, value)?,
        (SettingKind::SwitchOr(..), Value::Bool(is)) => set(config, setting, key, &is.to_string())?,
        (SettingKind::Count(range, _, set), value) => {
            let number: i64 = count(key, value)?;
            let number = within(number, Some(number), range);
            set(config, number.map_err(ConfigError::at(key))?);
        }
        (SettingKind::Words(..), value) => set(config, setting, key, &list(key, value)?.join(" "))?,
        (SettingKind::Time(..) | SettingKind::Text(..) | SettingKind::SwitchOr(..), other) => {
            return Err(wrong_type(key, &other, "text"));
        }
    }
    Ok(())
}

fn set(config: &mut Config, setting: &Setting, key: &str, text: &str) -> Result<(), ConfigError> {
    setting
        .set(config, text)
        .map_err(|reason| unshown(key, &reason, text, setting.summary))
}

/// `OUTBOX_SEND_TIMEOUT` is `send_timeout`.
fn key_of(setting: &Setting) -> String {
    let variable = setting.variable;
    variable
        .strip_prefix("OUTBOX_")
        .unwrap_or(variable)
        .to_lowercase()
}

fn setting_of(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| key_of(setting) == key)
}

/// All top-level keys, including the tables.
fn keys() -> Vec<String> {
    let settings = SETTINGS
        .iter()
        .filter(|setting| setting.place != SettingPlace::NoFile);
    let of_files = Setting::in_own_files().map(|setting| format!("{}_file", key_of(setting)));
    let tables = [DESTINATIONS, ROUTES].map(str::to_owned);
    settings.map(key_of).chain(of_files).chain(tables).collect()
}
