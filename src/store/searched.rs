//! A search that ends in time.

use std::time::{Duration, Instant};

/// How long a search may take. What is found by an index takes milliseconds; this is for the rest.
const BUDGET: Duration = Duration::from_secs(2);

/// What a search has found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Searched<T> {
    /// What was found.
    pub rows: Vec<T>,
    /// Everything was looked at. `false`: the search took too long and was ended; there may be more.
    pub is_complete: bool,
}

/// When a search has to end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub(super) fn new() -> Self {
        Self(Instant::now() + BUDGET)
    }

    /// What is left, `most` at most. `None`: nothing is.
    pub(super) fn left(self, most: Duration) -> Option<Duration> {
        let left = self.0.saturating_duration_since(Instant::now()).min(most);
        (left > Duration::from_millis(1)).then_some(left)
    }
}

/// For the whole of what is left.
pub(super) const ALL: Duration = BUDGET;
