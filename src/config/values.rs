//! Readers for single values of `outbox.toml` and of the column `policy`. Each function takes the full name of the key,
//! for errors.

use std::fmt::Display;
use std::time::Duration;

use serde_json::Value;

use super::ConfigError;

/// The shortest word of an error that could reveal a part of a secret.
const TELLING: usize = 3;

pub(super) fn wrong_type(key: &str, value: &Value, needed: &str) -> ConfigError {
    let found = type_of(value);
    ConfigError::new(key, format!("expected {needed}, found {found}"))
}

/// The type of a value, in the words of TOML.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "float",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "table",
    }
}

/// Text that is not empty.
pub(super) fn text(key: &str, value: Value) -> Result<String, ConfigError> {
    match value {
        Value::String(text) if text.trim().is_empty() => {
            Err(ConfigError::new(key, "must not be empty"))
        }
        Value::String(text) => Ok(text),
        other => Err(wrong_type(key, &other, "text")),
    }
}

pub(super) fn duration(key: &str, value: Value) -> Result<Duration, ConfigError> {
    parsed(
        "expected a duration such as 500ms or 2h",
        super::text::duration,
    )(key, value)
}

/// A whole number in the range of `T`.
pub(super) fn count<T: TryFrom<i64>>(key: &str, value: Value) -> Result<T, ConfigError> {
    let Value::Number(number) = value else {
        return Err(wrong_type(key, &value, "a whole number"));
    };
    if number.is_f64() {
        return Err(wrong_type(key, &Value::Number(number), "a whole number"));
    }
    let reason = "must be a whole number from 1, and not too large";
    let number = number.as_i64().and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| ConfigError::new(key, reason))
}

/// An integer or a float.
pub(super) fn number(key: &str, value: Value) -> Result<f64, ConfigError> {
    value
        .as_f64()
        .ok_or_else(|| wrong_type(key, &value, "a number"))
}

/// Text that `parse` reads. `takes` describes the expected text. An error does not show the text.
pub(super) fn parsed<T, E: Display>(
    takes: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> impl FnOnce(&str, Value) -> Result<T, ConfigError> {
    move |key, value| {
        if !value.is_string() {
            let reason = format!("{takes}, in quotes, found {}", type_of(&value));
            return Err(ConfigError::new(key, reason));
        }
        let text = text(key, value)?;
        parse(&text).map_err(|error| unshown(key, &error.to_string(), &text, takes))
    }
}

/// The error of `key`, without the refused text. If the reason shows a part of the text, the error says what the key
/// `takes` instead.
pub(super) fn unshown(key: &str, reason: &str, text: &str, takes: &str) -> ConfigError {
    let reason = reason.replace(&format!("{text:?}"), "it");
    let tells = reason
        .split(|c: char| !c.is_alphanumeric())
        .any(|word| word.len() >= TELLING && text.contains(word));
    let reason = match tells {
        true => format!("invalid value: {takes}"),
        false => reason,
    };
    ConfigError::new(key, reason)
}
