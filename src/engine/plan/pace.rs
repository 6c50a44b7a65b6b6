//! How often something may be done: at most a part of the time, with a shortest interval.

use std::time::{Duration, Instant};

use crate::clock;

/// The pace of a repeated work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The shortest time between the end of the work and its next start.
    pub(super) interval: Duration,
    /// The work rests this many times as long as it took.
    pub(super) rest: u32,
}

/// The last time that the work was done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Last {
    pub(crate) ended: Instant,
    pub(crate) took: Duration,
}

impl Last {
    /// The work began then, and ends now.
    pub(crate) fn since(began: Instant) -> Self {
        let ended = clock::now();
        let took = ended.saturating_duration_since(began);
        Self { ended, took }
    }
}

/// The last two times that the work was done. A single slow one may have waited for something else: the shorter of both
/// counts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LastTwo {
    last: Option<Last>,
    before: Duration,
}

impl LastTwo {
    /// This time was slow, and no accident.
    pub(super) fn slow(last: Last) -> Self {
        Self {
            last: Some(last),
            before: last.took,
        }
    }

    pub(super) fn add(&mut self, last: Last) {
        self.before = self.last.map_or(Duration::ZERO, |last| last.took);
        self.last = Some(last);
    }

    /// The last time, with the shorter duration. `None`: the work was never done.
    pub(super) fn last(self) -> Option<Last> {
        let took = |last: Last| last.took.min(self.before);
        self.last.map(|last| Last {
            took: took(last),
            ..last
        })
    }
}

/// Searches take at most a twentieth of the time. If an old snapshot keeps a million dead entries in an index, a search
/// may read them all.
pub(super) const REST: u32 = 20;

impl Pace {
    /// The pace of a search that begins no sooner than this after its last end.
    pub(crate) const fn of_search(interval: Duration) -> Self {
        Self::new(interval, REST)
    }

    pub(crate) const fn new(interval: Duration, rest: u32) -> Self {
        Self { interval, rest }
    }

    /// When the work may start again.
    pub(crate) fn next(self, last: Last) -> Instant {
        last.ended + self.interval.max(self.rest * last.took)
    }

    /// Whether the work may start. `last`: `None` if it was never done.
    pub(crate) fn is_due(self, now: Instant, last: Option<Last>) -> bool {
        last.is_none_or(|last| now >= self.next(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_rests_for_its_interval_or_in_proportion_to_its_time() {
        let second = Duration::from_secs(1);
        let pace = Pace::new(second, 20);
        let ended = Instant::now();
        let last = |took| Last { ended, took };
        assert!(pace.is_due(ended, None));
        assert_eq!(pace.next(last(second / 100)), ended + second);
        assert_eq!(pace.next(last(second)), ended + 20 * second);
        assert!(!pace.is_due(ended + second, Some(last(second))));
        assert!(pace.is_due(ended + second, Some(last(Duration::ZERO))));
    }

    #[test]
    fn one_slow_time_does_not_count_and_two_do() {
        let (ended, slow, fast) = (Instant::now(), Duration::from_secs(1), Duration::ZERO);
        let mut times = LastTwo::default();
        assert!(times.last().is_none());
        let mut add = |took| {
            times.add(Last { ended, took });
            times.last().map(|last| last.took)
        };
        assert_eq!(add(slow), Some(fast));
        assert_eq!(add(slow), Some(slow));
        assert_eq!(add(fast), Some(fast));
        assert_eq!(add(slow), Some(fast));
        let no_accident = LastTwo::slow(Last { ended, took: slow });
        assert_eq!(no_accident.last().map(|last| last.took), Some(slow));
    }
}
