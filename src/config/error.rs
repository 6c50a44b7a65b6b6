//! The error of a setting that cannot be used.

/// A setting that cannot be used, by its name.
///
/// ```
/// use diesel_outbox::{Config, ConfigError};
///
/// let mut config = Config::default();
/// if let Err(error) = config.set("OUTBOX_LEES", "30s") {
///     assert_eq!(error.key(), "OUTBOX_LEES");
///     assert_eq!(error.reason(), "there is no such setting; OUTBOX_LEASE is one");
/// }
///
/// // An application's own settings can fail in the same way.
/// let error = ConfigError::new("shop.currency", "it is empty");
/// assert_eq!(error.to_string(), "shop.currency: it is empty");
/// let error = ConfigError::unknown_key("shop.curency", "curency", &["currency", "name"]);
/// assert_eq!(error.reason(), "there is no such key; currency is one");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct ConfigError {
    key: String,
    reason: String,
}

impl ConfigError {
    /// An error of the setting `key`.
    pub fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            reason: reason.into(),
        }
    }

    /// Makes the error of `key` from its reason.
    pub(super) fn at(key: impl Into<String>) -> impl FnOnce(String) -> Self {
        |reason| Self::new(key, reason)
    }

    /// An error of `key`, whose last part `word` is none of the `known` words. It tells the nearest
    /// of them or, where none is near, all.
    pub fn unknown_key(key: impl Into<String>, word: &str, known: &[&str]) -> Self {
        let reason = match nearest(word, known.iter().copied()) {
            Some(other) => format!("there is no such key; {other} is one"),
            None => format!("there is no such key; there are {}", known.join(", ")),
        };
        Self::new(key, reason)
    }

    /// The setting's name.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What is wrong with it.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// The word that was probably meant.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        // What is much longer is near to none, and would take its time.
        .filter(|other| word.len() <= other.len() + 3)
        .map(|other| (edits(word, other), other))
        .min()
        .filter(|(edits, other)| *edits <= (other.len() / 2).min(3))
        .map(|(_, other)| other)
}

/// Levenshtein's distance.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
