//! A table of the file, whose keys are known. An error names a key in full.

use toml::{Table, Value};

use super::values::wrong_type;
use crate::config::ConfigError;

/// A longer key, and one that begins as secrets do, is not shown.
const LONGEST_SHOWN: usize = 64;
const SECRETS: [&str; 2] = ["whsec_", "whsk_"];

/// A table, and where in the file it stands. What is read is taken out.
pub(super) struct Section {
    at: String,
    table: Table,
}

impl Section {
    /// An error unless `value` is a table with no other keys than `known`.
    pub(super) fn new(at: String, value: Value, known: &[&str]) -> Result<Self, ConfigError> {
        let section = Self::open(at, value)?;
        let mut keys = section.table.keys();
        match keys.find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(unknown_key(&section.at, key, key, known)),
            None => Ok(section),
        }
    }

    /// A table whose keys are the user's own.
    pub(super) fn open(at: String, value: Value) -> Result<Self, ConfigError> {
        match value {
            Value::Table(table) => Ok(Self { at, table }),
            other => Err(wrong_type(&at, &other, "a table")),
        }
    }

    /// The whole name of a key.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// What `read` makes of the key's value, where the key is there.
    pub(super) fn take<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&str, Value) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        let value = self.table.remove(name);
        value.map(|value| read(&self.key(name), value)).transpose()
    }

    /// Sets `field` to what [`take`](Self::take) gives.
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

    /// As [`take`](Self::take), and an error where the key is not there.
    pub(super) fn required<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&str, Value) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        self.take(name, read)?
            .ok_or_else(|| ConfigError::new(self.key(name), "it is missing"))
    }

    /// An error where two keys that exclude each other are there.
    pub(super) fn one_of(&self, key: &str, other: &str) -> Result<(), ConfigError> {
        if self.table.contains_key(key) && self.table.contains_key(other) {
            return Err(both(&self.key(key), other));
        }
        Ok(())
    }

    /// The keys and values of [`open`](Self::open), each key with its whole name.
    pub(super) fn entries(self) -> impl Iterator<Item = (String, String, Value)> {
        let at = self.at;
        self.table.into_iter().map(move |(name, value)| {
            let key = format!("{at}.{}", shown(&name));
            (key, name, value)
        })
    }
}

/// Two keys that exclude each other are there.
pub(super) fn both(key: &str, other: &str) -> ConfigError {
    ConfigError::new(key, format!("{other} is there, too: leave one of them out"))
}

/// `name`, a key of the table `at`, is none of the `known` ones. The nearest to `word` is told.
pub(super) fn unknown_key(at: &str, name: &str, word: &str, known: &[&str]) -> ConfigError {
    let name = shown(name);
    let key = match at {
        "" => name,
        at => format!("{at}.{name}"),
    };
    ConfigError::unknown_key(key, word, known)
}

/// A key or a name that the user has chosen, as TOML writes it.
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
