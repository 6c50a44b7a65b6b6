//! Readers for single values. Each function takes the full name of the key, for errors.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use toml::Value;

use crate::config::ConfigError;

/// The shortest word of an error that could reveal a part of a secret.
const TELLING: usize = 3;

pub(super) fn wrong_type(key: &str, value: &Value, needed: &str) -> ConfigError {
    let found = value.type_str();
    ConfigError::new(key, format!("expected {needed}, found {found}"))
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

/// Text or an array of texts.
pub(super) fn list(key: &str, value: Value) -> Result<Vec<String>, ConfigError> {
    match value {
        Value::Array(values) if values.is_empty() => {
            Err(ConfigError::new(key, "must not be empty"))
        }
        Value::Array(values) => values
            .into_iter()
            .enumerate()
            .map(|(index, value)| text(&format!("{key}[{index}]"), value))
            .collect(),
        Value::String(_) => Ok(vec![text(key, value)?]),
        other => Err(wrong_type(key, &other, "text or an array of texts")),
    }
}

pub(super) fn switch(key: &str, value: Value) -> Result<bool, ConfigError> {
    match value {
        Value::Boolean(switch) => Ok(switch),
        other => Err(wrong_type(key, &other, "true or false")),
    }
}

pub(super) fn duration(key: &str, value: Value) -> Result<Duration, ConfigError> {
    parsed(
        "expected a duration such as 500ms or 2h",
        crate::config::text::duration,
    )(key, value)
}

/// A whole number in the range of `T`.
pub(super) fn count<T: TryFrom<i64>>(key: &str, value: Value) -> Result<T, ConfigError> {
    let Value::Integer(number) = value else {
        return Err(wrong_type(key, &value, "a whole number"));
    };
    let reason = "must be a whole number from 1, and not too large";
    T::try_from(number).map_err(|_| ConfigError::new(key, reason))
}

/// An integer or a float.
pub(super) fn number(key: &str, value: Value) -> Result<f64, ConfigError> {
    match value {
        #[allow(
            clippy::cast_precision_loss,
            reason = "the allowed ranges are far below the limit"
        )]
        Value::Integer(number) => Ok(number as f64),
        Value::Float(number) => Ok(number),
        other => Err(wrong_type(key, &other, "a number")),
    }
}

/// Text that `parse` reads. `takes` describes the expected text. An error does not show the text.
pub(super) fn parsed<T, E: Display>(
    takes: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> impl FnOnce(&str, Value) -> Result<T, ConfigError> {
    move |key, value| {
        if !value.is_str() {
            let reason = format!("{takes}, in quotes, found {}", value.type_str());
            return Err(ConfigError::new(key, reason));
        }
        let text = text(key, value)?;
        parse(&text).map_err(|error| unshown(key, &error.to_string(), &text, takes))
    }
}

/// Text of a type with `FromStr`, such as a mode or a backoff.
pub(super) fn word<T: FromStr<Err: Display>>(
    takes: &str,
) -> impl FnOnce(&str, Value) -> Result<T, ConfigError> {
    parsed(takes, str::parse)
}

pub(super) fn path(key: &str, value: Value) -> Result<PathBuf, ConfigError> {
    text(key, value).map(PathBuf::from)
}

/// A size in bytes, as a number or as text: `64KiB`, `1MiB`.
pub(super) fn bytes(most: usize) -> impl FnOnce(&str, Value) -> Result<usize, ConfigError> {
    move |key, value| {
        let bytes = match &value {
            Value::Integer(number) => usize::try_from(*number).ok(),
            Value::String(text) => parse_bytes(text),
            other => return Err(wrong_type(key, other, "a number of bytes")),
        };
        bytes
            .filter(|bytes| (1..=most).contains(bytes))
            .ok_or_else(|| {
                let reason =
                    format!("must be a size from 1 to {most} bytes, such as 65536 or \"64KiB\"");
                ConfigError::new(key, reason)
            })
    }
}

fn parse_bytes(text: &str) -> Option<usize> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("B", 1)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)))?;
    number.trim().parse::<usize>().ok()?.checked_mul(unit)
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

/// The content of the file that `key` names.
pub(super) fn content(key: &str, value: Value) -> Result<String, ConfigError> {
    let path = text(key, value)?;
    crate::config::text::content(&path).map_err(ConfigError::at(key))
}
