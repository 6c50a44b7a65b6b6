//! Readers for values that only `outbox.toml` has.

use std::path::PathBuf;

use serde_json::Value;

use crate::config::ConfigError;
use crate::config::values::{text, wrong_type};

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
        Value::Bool(switch) => Ok(switch),
        other => Err(wrong_type(key, &other, "true or false")),
    }
}

pub(super) fn path(key: &str, value: Value) -> Result<PathBuf, ConfigError> {
    text(key, value).map(PathBuf::from)
}

/// A size in bytes, as a number or as text: `64KiB`, `1MiB`.
pub(super) fn bytes(most: usize) -> impl FnOnce(&str, Value) -> Result<usize, ConfigError> {
    move |key, value| {
        let bytes = match &value {
            Value::Number(number) if !number.is_f64() => number
                .as_u64()
                .and_then(|number| usize::try_from(number).ok()),
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

/// The content of the file that `key` names.
pub(super) fn content(key: &str, value: Value) -> Result<String, ConfigError> {
    let path = text(key, value)?;
    crate::config::text::content(&path).map_err(ConfigError::at(key))
}
