//! A part of the outbox.

/// Sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// All of them are greater.
    pub(crate) after: i64,
    /// None of them is.
    pub(crate) upto: i64,
}

impl Range {
    pub(crate) const ALL: Self = Self {
        after: i64::MIN,
        upto: i64::MAX,
    };
}
