//! The database's clock, as this process knows it.

use std::time::{Duration, Instant};

/// What the database's clock showed, and when its answer came. Good for hints only: what is due, and
/// which lease is over, the database decides by itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DatabaseClock(Option<Answer>);

#[derive(Debug, Clone, Copy)]
struct Answer {
    /// Microseconds, as the database counts.
    micros: i64,
    came: Instant,
}

impl DatabaseClock {
    /// It showed `micros` at `answered` or before, so that what is said to be over is.
    pub(super) fn new(micros: i64, answered: Instant) -> Self {
        Self(Some(Answer {
            micros,
            came: answered,
        }))
    }

    /// What it showed so long before `now`. One that was never asked is before all times.
    pub(super) fn before(&self, now: Instant, age: Duration) -> i64 {
        let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        self.0.map_or(i64::MIN, |answer| {
            answer
                .micros
                .saturating_add(micros(now.saturating_duration_since(answer.came)))
                .saturating_sub(micros(age))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// G2: a claim goes on behind this place, and never passes what the database counts as later.
    #[test]
    fn the_clock_is_never_ahead_of_the_database() {
        let asked = Instant::now();
        // The answer was on its way for three seconds: the database showed it at some time of these.
        let answered = asked + Duration::from_secs(3);
        let clock = DatabaseClock::new(1_000_000_000, answered);
        assert_eq!(clock.before(answered, Duration::ZERO), 1_000_000_000);
        assert_eq!(clock.before(asked, Duration::ZERO), 1_000_000_000);
        let later = answered + Duration::from_millis(1);
        assert_eq!(clock.before(later, Duration::ZERO), 1_000_001_000);
        assert_eq!(clock.before(later, Duration::from_secs(1)), 999_001_000);
        let never = DatabaseClock::default();
        assert_eq!(never.before(later, Duration::ZERO), i64::MIN);
    }
}
