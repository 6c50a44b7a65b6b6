//! The present, by the clocks of this process and of the database.

use std::time::{Duration, Instant};

use super::pace::Last;
use crate::engine::claim::sql::claim::Position;

/// The present by both clocks. Only a hint: the database itself decides which messages are due and which leases have
/// expired.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    pub(super) here: Instant,
    /// PostgreSQL's microseconds (since 2000), or less: the estimate is never ahead of the database. Before all times if
    /// the database has not answered yet.
    pub(super) database: i64,
}

impl Now {
    /// `last`: the last time that the database reported, and when its answer came.
    pub(super) fn new(here: Instant, last: Option<Self>) -> Self {
        let database = last.map_or(i64::MIN, |last| {
            let age = here.saturating_duration_since(last.here);
            last.database.saturating_add(micros(age))
        });
        Self { here, database }
    }

    /// The position of messages that became available this long ago.
    pub(super) fn recently(self, age: Duration) -> Position {
        Position::of_time(self.database.saturating_sub(micros(age)))
    }

    /// What has ended now.
    pub(super) fn last(self, took: Duration) -> Last {
        Last {
            ended: self.here,
            took,
        }
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// G2: a floor is derived from this clock, and must not pass messages that the database dates later.
    #[test]
    fn the_clock_is_never_ahead_of_the_database() {
        let asked = Instant::now();
        // The answer took three seconds: the database read its clock at some moment in between.
        let came = asked + Duration::from_secs(3);
        let database = 1_000_000_000;
        let last = Now {
            here: came,
            database,
        };
        let at = |here| Now::new(here, Some(last));
        assert_eq!(at(came).database, database);
        assert_eq!(at(asked).database, database);
        let later = came + Duration::from_millis(1);
        assert_eq!(at(later).database, 1_000_001_000);
        let a_second_ago = Position::of_time(999_001_000);
        assert_eq!(at(later).recently(Duration::from_secs(1)), a_second_ago);
        assert_eq!(
            Now::new(later, None).recently(later - asked),
            Position::START
        );
    }
}
