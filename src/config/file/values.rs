//! Reading single values. Each function gets the whole name of the key, for its error.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use toml::Value;

use crate::config::{ConfigError, parse_duration};

/// Files with secrets are small.
const MOST_BYTES: u64 = 64 * 1024;
/// Shorter words tell nothing.
const TELLING: usize = 3;

pub(super) fn wrong_type(key: &str, value: &Value, needed: &str) -> ConfigError {
    let found = value.type_str();
    ConfigError::new(key, format!("it is of type {found}; {needed} is needed"))
}

/// Text that is not empty.
pub(super) fn text(key: &str, value: Value) -> Result<String, ConfigError> {
    match value {
        Value::String(text) if text.trim().is_empty() => Err(ConfigError::new(key, "it is empty")),
        Value::String(text) => Ok(text),
        other => Err(wrong_type(key, &other, "text")),
    }
}

/// A text or an array of texts.
pub(super) fn list(key: &str, value: Value) -> Result<Vec<String>, ConfigError> {
    match value {
        Value::Array(values) if values.is_empty() => Err(ConfigError::new(key, "it is empty")),
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
    let text = text(key, value)?;
    parse_duration(key, &text).map_err(|error| {
        let reason = unshown(error.reason(), &text, "it takes one such as 500ms or 2h");
        ConfigError::new(key, reason)
    })
}

/// A whole number that `T` has.
pub(super) fn count<T: TryFrom<i64>>(key: &str, value: Value) -> Result<T, ConfigError> {
    let Value::Integer(number) = value else {
        return Err(wrong_type(key, &value, "a whole number"));
    };
    let reason = "it is not a whole number from 1, or too large";
    T::try_from(number).map_err(|_| ConfigError::new(key, reason))
}

/// An integer or a float.
pub(super) fn number(key: &str, value: Value) -> Result<f64, ConfigError> {
    match value {
        #[allow(clippy::cast_precision_loss, reason = "ranges are far below")]
        Value::Integer(number) => Ok(number as f64),
        Value::Float(number) => Ok(number),
        other => Err(wrong_type(key, &other, "a number")),
    }
}

/// Text that `T` reads; `takes` says which.
pub(super) fn word<T>(takes: &str) -> impl FnOnce(&str, Value) -> Result<T, ConfigError>
where
    T: FromStr,
    T::Err: std::fmt::Display,
{
    move |key, value| {
        let text = text(key, value)?;
        text.parse().map_err(|error: T::Err| {
            let reason = unshown(&error.to_string(), &text, takes);
            ConfigError::new(key, reason)
        })
    }
}

pub(super) fn path(key: &str, value: Value) -> Result<PathBuf, ConfigError> {
    text(key, value).map(PathBuf::from)
}

/// Bytes as a number, or as text: `64KiB`, `1MiB`.
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
                    format!("it is not a size from 1 to {most} bytes, such as 65536 or \"64KiB\"");
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

/// The content of the file that `key` names, without the line break at its end.
pub(super) fn content(key: &str, path: &str) -> Result<String, ConfigError> {
    let bad = |reason: String| ConfigError::new(key, reason);
    // What is relative may be no path at all, but the secret itself.
    let (file, hint) = if Path::new(path).is_absolute() {
        (format!("{path:?}"), "")
    } else {
        let hint = "; a relative path begins at the working directory";
        ("the file that it names".to_owned(), hint)
    };
    let mut content = String::new();
    let read = File::open(path)
        .and_then(|opened| opened.take(MOST_BYTES + 1).read_to_string(&mut content));
    match read {
        Ok(_) if content.len() as u64 > MOST_BYTES => {
            Err(bad(format!("{file} has more than {MOST_BYTES} bytes")))
        }
        Ok(_) => Ok(content.trim_end_matches(['\r', '\n']).to_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(bad(format!("cannot read {file}: {error}{hint}")))
        }
        Err(error) => Err(bad(format!("cannot read {file}: {error}"))),
    }
}

/// The reason why `value` is refused, without the value. A reason that shows parts of it gives way
/// to what the key `takes`.
pub(super) fn unshown(reason: &str, value: &str, takes: &str) -> String {
    let reason = reason.replace(&format!("{value:?}"), "it");
    let tells = reason
        .split(|c: char| !c.is_alphanumeric())
        .any(|word| word.len() >= TELLING && value.contains(word));
    if tells {
        format!("it cannot be used: {takes}")
    } else {
        reason
    }
}
