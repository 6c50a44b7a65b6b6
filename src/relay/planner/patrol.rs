//! The patrol: a pass over the whole outbox, while other searches for messages take too long.

use std::time::{Duration, Instant};

use super::lanes::SWEEP_SHARE;
use super::ranges::Ranges;
use super::rounds::{Round, Rounds};
use crate::store::range::Range;

/// The most free messages of one step.
pub(in crate::relay) const STEP: usize = 500;
/// The shortest time between two rounds.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long the patrol continues after a search took too long. Other searches are tried again meanwhile.
const MEMORY: Duration = Duration::from_secs(1800);

/// Rounds over all sequences, a range at a time.
///
/// Lanes, sweeps and the walk read an index that begins with a topic or a key. If an old snapshot keeps millions of
/// dead entries in that index, one step can exceed every time limit, however often it is tried. The patrol reads the
/// primary key in ranges, so a round always makes progress.
#[derive(Debug, Default)]
pub(super) struct Patrol {
    wanted: Option<Instant>,
    rounds: Rounds<Ranges>,
    had_last_turn: bool,
}

impl Patrol {
    /// Another search took too long.
    pub(super) fn want(&mut self, now: Instant) {
        self.wanted = Some(now);
    }

    fn is_wanted(&self, now: Instant) -> bool {
        self.wanted
            .is_some_and(|at| now.saturating_duration_since(at) < MEMORY)
    }

    /// When the next round begins, if another round is wanted.
    pub(super) fn next_at(&self, now: Instant) -> Option<Instant> {
        if !self.is_wanted(now) || self.rounds.place().is_some() {
            return None;
        }
        let after = |last: &Round| {
            // Only the patrol finds the messages for which there was no room.
            let share = if last.has_left { 1 } else { SWEEP_SHARE };
            last.ended + INTERVAL.max(share * last.took)
        };
        Some(self.rounds.last.as_ref().map_or(now, after))
    }

    /// The range to read now; every other time only, if there is other work.
    pub(super) fn next(&mut self, now: Instant, is_idle: bool) -> Option<Range> {
        if self.next_at(now).is_some_and(|at| now >= at) {
            self.rounds.begin(now, Ranges::new());
        }
        let range = self.rounds.place()?.next();
        self.had_last_turn = is_idle || !self.had_last_turn;
        range.filter(|_| self.had_last_turn)
    }

    /// The range was read up to here. `has_left`: some messages were left for want of room.
    pub(super) fn read(&mut self, now: Instant, upto: i64, took: Duration, has_left: bool) {
        let Some(ranges) = self.rounds.step(took, has_left) else {
            return;
        };
        ranges.read(upto, took);
        if ranges.next().is_none() {
            self.rounds.end(now);
        }
    }

    /// The range took too long.
    pub(super) fn was_too_wide(&mut self, now: Instant, range: Range, took: Duration) {
        self.want(now);
        if range.upto - 1 <= range.after {
            // A single message: its key may have too many dead entries. Continue with the other messages.
            return self.read(now, range.upto, took, true);
        }
        if let Some(ranges) = self.rounds.step(took, false) {
            ranges.was_too_wide();
        }
    }

    /// Whether no round is wanted, or a round that began since then has left nothing.
    pub(super) fn is_done_since(&self, now: Instant, since: Instant) -> bool {
        !self.is_wanted(now) || self.rounds.is_done_since(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_made_while_they_are_wanted_and_say_what_they_have_seen() {
        let mut patrol = Patrol::default();
        let now = Instant::now();
        assert!(patrol.next(now, true).is_none() && patrol.is_done_since(now, now));
        patrol.want(now);
        assert!(!patrol.is_done_since(now, now));
        let mut after = i64::MIN;
        // Every other time, alternating with claims.
        while let Some(range) = patrol.next(now, false) {
            assert_eq!(range.after, after);
            assert!(patrol.next(now, false).is_none());
            after = range.upto;
            patrol.read(now, range.upto, Duration::ZERO, false);
        }
        assert!(patrol.is_done_since(now, now), "up to {after}");
        assert_eq!(patrol.next_at(now), Some(now + INTERVAL));
        let later = now + Duration::from_millis(1);
        assert!(!patrol.is_done_since(later, later));
        let forgotten = now + MEMORY;
        assert!(
            patrol.next(forgotten, true).is_none(),
            "the slow search is forgotten"
        );
    }

    #[test]
    fn a_single_message_that_takes_too_long_holds_no_others() {
        let mut patrol = Patrol::default();
        let now = Instant::now();
        patrol.want(now);
        let mut tries = 0;
        while let Some(range) = patrol.next(now, true) {
            tries += 1;
            match range.after < 5 && range.upto >= 5 {
                true => patrol.was_too_wide(now, range, Duration::from_secs(1)),
                false => patrol.read(now, range.upto, Duration::ZERO, false),
            }
        }
        assert!((20..100).contains(&tries), "{tries}");
        assert!(!patrol.is_done_since(now, now));
    }
}
