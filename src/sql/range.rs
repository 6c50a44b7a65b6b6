//! A range of the outbox.

/// A range of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// The lower bound, exclusive.
    pub(crate) after: i64,
    /// The upper bound, inclusive.
    pub(crate) upto: i64,
}

impl Range {
    pub(crate) const ALL: Self = Self {
        after: i64::MIN,
        upto: i64::MAX,
    };

    pub(crate) fn has(self, sequence: i64) -> bool {
        self.after < sequence && sequence <= self.upto
    }
}
