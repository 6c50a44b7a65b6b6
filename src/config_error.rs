//! The error of an invalid setting.

/// An invalid setting: its name, and the reason.
///
/// ```
/// use diesel_outbox::ConfigError;
/// use diesel_outbox::config::Config;
///
/// let mut config = Config::default();
/// if let Err(error) = config.set("OUTBOX_LEES", "30s") {
///     assert_eq!(error.key(), "OUTBOX_LEES");
///     assert_eq!(error.reason(), "unknown setting: did you mean OUTBOX_LEASE?");
/// }
///
/// // Applications can use the error for their own settings.
/// let error = ConfigError::new("shop.currency", "must not be empty");
/// assert_eq!(error.to_string(), "shop.currency: must not be empty");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct ConfigError {
    key: String,
    reason: String,
}

impl ConfigError {
    /// An error of the setting `key`, with the reason.
    pub fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            reason: reason.into(),
        }
    }

    /// Turns a reason into an error of `key`.
    pub(crate) fn at(key: impl Into<String>) -> impl FnOnce(String) -> Self {
        |reason| Self::new(key, reason)
    }

    /// An error of `key`, whose last part `word` is unknown. The reason names the closest `known` word or, if no word
    /// is close, all of them.
    pub(crate) fn unknown_key(key: impl Into<String>, word: &str, known: &[&str]) -> Self {
        let reason = match nearest(word, known.iter().copied()) {
            Some(other) => format!("unknown key: did you mean {other}?"),
            None => format!("unknown key: known keys are {}", known.join(", ")),
        };
        Self::new(key, reason)
    }

    /// The name of the setting.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Why the setting is invalid.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// The known word that the writer probably meant.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        // A much longer word is close to no known word, and comparing it would be slow.
        .filter(|other| word.len() <= other.len() + 3)
        .map(|other| (edits(word, other), other))
        .min()
        .filter(|(edits, other)| *edits <= (other.len() / 2).min(3))
        .map(|(_, other)| other)
}

/// The Levenshtein distance between a word and the nearest word that a pattern matches, in which a star stands for any
/// bytes. Of long ones, only the beginning is compared.
pub(crate) fn edits(word: &str, pattern: &str) -> usize {
    const MOST: usize = 100;
    let word = &word.as_bytes()[..word.len().min(MOST)];
    let mut row: Vec<usize> = (0..=word.len()).collect();
    for b in pattern.bytes().take(MOST) {
        let mut corner = row[0];
        let is_star = b == b'*';
        row[0] += usize::from(!is_star);
        for (at, a) in word.iter().enumerate() {
            let above = row[at + 1];
            let replaced = corner + usize::from(*a != b);
            row[at + 1] = match is_star {
                true => above.min(row[at]),
                false => replaced.min(above + 1).min(row[at] + 1),
            };
            corner = above;
        }
    }
    row[word.len()]
}
