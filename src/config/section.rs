//! A table of `outbox.toml`, or the object of the column `policy`. Errors show the full name of a key.

use serde_json::{Map, Value};

use super::ConfigError;
use super::values::wrong_type;

/// Longer keys are not shown, and neither are keys with the prefix of a secret.
const LONGEST_SHOWN: usize = 64;
const SECRETS: [&str; 2] = ["whsec_", "whsk_"];

/// A table and its path in the file. Reading a key removes the key.
pub(super) struct Section {
    at: String,
    table: Map<String, Value>,
}

impl Section {
    /// A table whose keys are all `known`. Any other value is an error.
    pub(super) fn new(at: String, value: Value, known: &[&str]) -> Result<Self, ConfigError> {
        Self::open(at, value)?.only(known)
    }

    /// The table, whose remaining keys must be `known`.
    pub(super) fn only(self, known: &[&str]) -> Result<Self, ConfigError> {
        let mut keys = self.table.keys();
        match keys.find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(unknown_key(&self.at, key, key, known)),
            None => Ok(self),
        }
    }

    /// A table whose keys the user chooses.
    pub(super) fn open(at: String, value: Value) -> Result<Self, ConfigError> {
        match value {
            Value::Object(table) => Ok(Self { at, table }),
            other => Err(wrong_type(&at, &other, "a table")),
        }
    }

    /// The full name of a key.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// Removes a key and reads its value. `None`: the key is not set.
    pub(super) fn take<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&str, Value) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        let value = self.table.remove(name);
        value.map(|value| read(&self.key(name), value)).transpose()
    }

    /// Sets `field` to the value of a key, if the key is set.
    pub(super) fn set<T>(
        &mut self,
        name: &str,
        field: &mut T,
        read: impl FnOnce(&str, Value) -> Result<T, ConfigError>,
    ) -> Result<(), ConfigError> {
        if let Some(value) = self.take(name, read)? {
            *field = value;
        }
        Ok(())
    }

    /// As [`take`](Self::take), but a missing key is an error.
    pub(super) fn required<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&str, Value) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        self.take(name, read)?
            .ok_or_else(|| ConfigError::new(self.key(name), "missing"))
    }

    /// Returns an error if both of two exclusive keys are set.
    #[cfg(feature = "file")]
    pub(super) fn one_of(&self, key: &str, other: &str) -> Result<(), ConfigError> {
        if self.table.contains_key(key) && self.table.contains_key(other) {
            return Err(both(&self.key(key), other));
        }
        Ok(())
    }

    /// The full name, name and value of each key, for [`open`](Self::open).
    pub(super) fn entries(self) -> impl Iterator<Item = (String, String, Value)> {
        let at = self.at;
        self.table.into_iter().map(move |(name, value)| {
            let key = format!("{at}.{}", shown(&name));
            (key, name, value)
        })
    }
}

/// The error of two exclusive keys that are both set.
#[cfg(feature = "file")]
pub(super) fn both(key: &str, other: &str) -> ConfigError {
    ConfigError::new(key, format!("{other} is also set: remove one of them"))
}

/// The error of an unknown key `name` in the table `at`. Suggests the `known` key that is closest to `word`.
pub(super) fn unknown_key(at: &str, name: &str, word: &str, known: &[&str]) -> ConfigError {
    let name = shown(name);
    let key = match at {
        "" => name,
        at => format!("{at}.{name}"),
    };
    ConfigError::unknown_key(key, word, known)
}

/// A key or a name that the user chose, in TOML syntax.
pub(super) fn shown(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.len() > LONGEST_SHOWN || SECRETS.iter().any(|prefix| name.contains(prefix)) {
        format!("(a key of {} bytes)", name.len())
    } else if !name.is_empty() && name.chars().all(is_bare) {
        name.to_owned()
    } else {
        format!("{name:?}")
    }
}
