//! `outbox.toml`: settings, destinations and routes.

use diesel_outbox::config::{SETTINGS, parse_duration};
use diesel_outbox::{Config, ConfigError, Destination, Route};
use toml::{Table, Value};

/// Reads the file at `path` into `config`.
pub(crate) fn apply(path: &str, config: &mut Config) -> Result<(), ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        ConfigError::new("OUTBOX_CONFIG", format!("cannot read {path:?}: {error}"))
    })?;
    apply_text(&text, config)
        .map_err(|error| ConfigError::new(path, error.to_string().trim_end().to_owned()))
}

fn apply_text(text: &str, config: &mut Config) -> Result<(), ConfigError> {
    let table: Table = text.parse().map_err(|error| not_toml(text, &error))?;
    for (key, value) in table {
        match (key.as_str(), value) {
            ("destinations", Value::Table(destinations)) => {
                for (name, value) in destinations {
                    config.destinations.push(destination(&name, value)?);
                }
            }
            ("routes", Value::Array(routes)) => {
                for (index, value) in routes.into_iter().enumerate() {
                    config.routes.push(route(index, value)?);
                }
            }
            ("destinations", _) => {
                return Err(ConfigError::new(
                    "destinations",
                    "write [destinations.NAME] tables",
                ));
            }
            ("routes", _) => return Err(ConfigError::new("routes", "write [[routes]] tables")),
            ("config", _) => return Err(ConfigError::new("config", "a file names no other file")),
            (_, value) => {
                let variable = variable_of(&key);
                let is_known = SETTINGS.iter().any(|setting| setting.variable == variable);
                let value = match scalar(&key, value) {
                    Err(_) if !is_known => {
                        let known = "a setting, [destinations.NAME] or [[routes]]";
                        return Err(ConfigError::new(
                            key,
                            format!("there is no such key; it takes {known}"),
                        ));
                    }
                    value => value?,
                };
                config.set(&variable, &value).map_err(|error| {
                    let reason = error.to_string();
                    let prefix = format!("{variable}: ");
                    ConfigError::new(key.clone(), reason.strip_prefix(&prefix).unwrap_or(&reason))
                })?;
            }
        }
    }
    Ok(())
}

/// Where and why, but not the line itself: it may be the one with the password.
fn not_toml(text: &str, error: &toml::de::Error) -> ConfigError {
    let at = error.span().map_or(0, |span| span.start).min(text.len());
    let line = text.as_bytes()[..at]
        .iter()
        .filter(|b| **b == b'\n')
        .count()
        + 1;
    let key = text
        .lines()
        .nth(line - 1)
        .and_then(|line| line.split_once('='))
        .map_or_else(String::new, |(key, _)| {
            format!(", at the key {}", key.trim())
        });
    ConfigError::new("not TOML", format!("line {line}{key}: {}", error.message()))
}

/// `send_timeout` is `OUTBOX_SEND_TIMEOUT`.
fn variable_of(key: &str) -> String {
    let upper = key.to_uppercase();
    let is_whole = SETTINGS.iter().any(|setting| setting.variable == upper);
    if is_whole && !upper.starts_with("OUTBOX_") {
        upper
    } else {
        format!("OUTBOX_{upper}")
    }
}

fn scalar(key: &str, value: Value) -> Result<String, ConfigError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Boolean(switch) => Ok(switch.to_string()),
        other => Err(ConfigError::new(
            key,
            format!(
                "it is of type {}; text, a number or a switch is needed",
                other.type_str()
            ),
        )),
    }
}

fn table_of(key: &str, value: Value) -> Result<Table, ConfigError> {
    match value {
        Value::Table(table) => Ok(table),
        other => Err(ConfigError::new(
            key,
            format!("it is of type {}; a table is needed", other.type_str()),
        )),
    }
}

fn destination(name: &str, value: Value) -> Result<Destination, ConfigError> {
    let at = format!("destinations.{name}");
    let mut table = table_of(&at, value)?;
    let url = table
        .remove("url")
        .ok_or_else(|| ConfigError::new(format!("{at}.url"), "it is missing"))?;
    let mut destination = Destination::new(name, &scalar(&format!("{at}.url"), url)?)?;
    if let Some(timeout) = table.remove("timeout") {
        let key = format!("{at}.timeout");
        destination.timeout = Some(parse_duration(&key, &scalar(&key, timeout)?)?);
    }
    no_more(&at, &table, "url and timeout")?;
    Ok(destination)
}

fn route(index: usize, value: Value) -> Result<Route, ConfigError> {
    let at = format!("routes[{index}]");
    let mut table = table_of(&at, value)?;
    let mut take = |key: &str| {
        let value = table
            .remove(key)
            .ok_or_else(|| ConfigError::new(format!("{at}.{key}"), "it is missing"))?;
        scalar(&format!("{at}.{key}"), value)
    };
    let route = Route::new(take("topic")?, take("to")?);
    no_more(&at, &table, "topic and to")?;
    Ok(route)
}

fn no_more(at: &str, table: &Table, known: &str) -> Result<(), ConfigError> {
    match table.keys().next() {
        None => Ok(()),
        Some(key) => Err(ConfigError::new(
            format!("{at}.{key}"),
            format!("there is no such key; this version has {known}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_destinations_and_routes_are_read() {
        let mut config = Config::default();
        apply_text(
            r#"
            database_url = "postgres://localhost/shop"
            batch = 100
            send_timeout = "1s"
            [destinations.billing]
            url = "https://billing.internal/events"
            timeout = "2s"
            [[routes]]
            topic = "order.*"
            to = "billing"
            "#,
            &mut config,
        )
        .expect("good");
        assert_eq!(config.batch, 100);
        assert_eq!(config.destinations[0].name, "billing");
        assert_eq!(config.routes, [Route::new("order.*", "billing")]);
        assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn a_line_that_is_no_toml_is_named_and_not_shown() {
        let text = "batch = 5\ndatabase_url = \"postgres://u:hunter2@db/shop\nlease = \"5s\"";
        let error = apply_text(text, &mut Config::default())
            .expect_err("no quote")
            .to_string();
        assert!(error.contains("line 2, at the key database_url"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("batch = ", "not TOML"),
            ("bacth = 5", "bacth"),
            ("batch = 1.5", "batch"),
            ("lease = \"soon\"", "lease"),
            (
                "[destinations.a]\nurll = \"http://a\"",
                "destinations.a.url",
            ),
            (
                "[destinations.a]\nurl = \"http://a\"\nsecret = \"x\"",
                "destinations.a.secret",
            ),
            ("[destinations.a]\nurl = \"a\"", "destinations.a.url"),
            ("[[routes]]\ntopic = \"a\"", "routes[0].to"),
            ("[routes]\ntopic = \"a\"", "routes"),
        ] {
            let error = apply_text(text, &mut Config::default()).expect_err(text);
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}
