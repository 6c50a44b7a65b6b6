//! Searches with a time limit.

use std::time::{Duration, Instant};

/// The time limit of a search. A search by an index takes milliseconds; the limit is for all others.
const BUDGET: Duration = Duration::from_secs(2);

/// The result of a search.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Searched<T> {
    /// The rows that were found.
    pub rows: Vec<T>,
    /// Whether the search covered everything. `false`: the search took too long (over 2 s) and was stopped, so there
    /// may be more rows.
    pub is_complete: bool,
}

/// When a search must end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SearchDeadline(Instant);

impl SearchDeadline {
    pub(crate) fn new() -> Self {
        Self(Instant::now() + BUDGET)
    }

    /// The time left, at most `most`. `None`: no time is left.
    pub(crate) fn left(self, most: Duration) -> Option<Duration> {
        let left = self.0.saturating_duration_since(Instant::now()).min(most);
        (left > Duration::from_millis(1)).then_some(left)
    }
}

/// As an argument of [`Deadline::left`]: all the time left.
pub(crate) const ALL: Duration = BUDGET;
