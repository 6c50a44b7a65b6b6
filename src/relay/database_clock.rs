//! The database's clock, as this process knows it.

use std::time::{Duration, Instant};

/// What the database's clock showed, and when its answer came. Good for hints only: what is due, and
/// which lease is over, the database decides by itself.
#[derive(Debug)]
pub(crate) struct DatabaseClock {
    /// Microseconds, as the database counts.
    micros: i64,
    answered: Instant,
}

impl Default for DatabaseClock {
    /// One that was never asked: all times are after it.
    fn default() -> Self {
        Self {
            micros: i64::MIN,
            answered: Instant::now(),
        }
    }
}

impl DatabaseClock {
    /// It showed `micros` at `answered` or before, so that what is said to be over is.
    pub(crate) fn new(micros: i64, answered: Instant) -> Self {
        Self { micros, answered }
    }

    /// What it showed so long before now.
    pub(crate) fn before_now(&self, age: Duration) -> i64 {
        let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        self.micros
            .saturating_add(micros(self.answered.elapsed()))
            .saturating_sub(micros(age))
    }
}
