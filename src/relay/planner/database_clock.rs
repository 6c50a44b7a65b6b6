//! An estimate of the database's clock.

use std::time::{Duration, Instant};

/// The last time that the database reported, and when its answer came. Only a hint: the database itself decides
/// which messages are due and which leases have expired.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DatabaseClock(Option<Answer>);

#[derive(Debug, Clone, Copy)]
struct Answer {
    /// PostgreSQL's microseconds (since 2000).
    micros: i64,
    came: Instant,
}

impl DatabaseClock {
    /// The clock showed `micros` at `answered` or before. So the estimate is never ahead of the database.
    pub(super) fn new(micros: i64, answered: Instant) -> Self {
        Self(Some(Answer {
            micros,
            came: answered,
        }))
    }

    /// The estimate for the moment `age` before `now`; before all times if the database has not answered yet.
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

    /// G2: a floor is derived from this clock, and must not pass messages that the database dates later.
    #[test]
    fn the_clock_is_never_ahead_of_the_database() {
        let asked = Instant::now();
        // The answer took three seconds: the database read its clock at some moment in between.
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
