//! The patrol: a pass over the whole outbox, while other searches for messages take too long.

use std::time::{Duration, Instant};

use super::pace::{Last, Pace};
use super::ranges::Ranges;
use super::rounds::Rounds;
use super::search::{EveryOther, Finished, Search, SearchOutcome, SearchPass, WalkAgain};
use crate::engine::claim::sql::page::SearchPlace;
use crate::engine::claim::sql::search::Ask;
use crate::sql::range::Range;

/// The shortest time between two rounds.
const INTERVAL: Duration = Duration::from_secs(1);
const PACE: Pace = Pace::of_search(INTERVAL);
/// The pace after a round that has left messages: only the patrol finds them.
const QUICK: Pace = Pace::new(INTERVAL, 1);
/// How long the patrol continues after a search took too long. Other searches are tried again meanwhile.
const MEMORY: Duration = Duration::from_secs(1800);

/// Rounds over all sequences, a range at a time.
///
/// Lanes, sweeps and the walk read an index that begins with a topic or a key. If an old snapshot keeps millions of
/// dead entries in that index, one step can exceed every time limit, however often it is tried. The patrol reads the
/// primary key in ranges, so a round always makes progress.
// Why: docs/decisions.md#patrol
#[derive(Debug, Default)]
pub(super) struct Patrol {
    wanted: Option<Instant>,
    rounds: Rounds<Ranges>,
    turn: EveryOther,
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
    fn next_at(&self, now: Instant) -> Option<Instant> {
        if !self.is_wanted(now) || self.rounds.place().is_some() {
            return None;
        }
        let pace = match &self.rounds.last {
            Some(last) if last.has_left => QUICK,
            _ => PACE,
        };
        let last = self.rounds.times.last();
        Some(last.map_or(now, |last| pace.next(last)))
    }

    /// The range was read up to here. `has_left`: some messages were left for want of room.
    fn read(&mut self, now: Instant, upto: i64, took: Duration, has_left: bool) {
        let Some(ranges) = self.rounds.step(took, has_left) else {
            return;
        };
        ranges.read(upto, took);
        if ranges.next().is_none() {
            self.rounds.end(now);
        }
    }

    /// The range took too long.
    fn was_too_wide(&mut self, now: Instant, range: Range, took: Duration) {
        if range.upto - 1 <= range.after {
            // A single message: its key may have too many dead entries. Continue with the other messages.
            return self.read(now, range.upto, took, true);
        }
        if let Some(ranges) = self.rounds.step(took, false) {
            ranges.was_too_wide();
        }
    }
}

impl Search for Patrol {
    fn ask(&mut self, pass: &SearchPass) -> Option<Ask> {
        if self.next_at(pass.now).is_some_and(|at| pass.now >= at) {
            self.rounds.begin(pass.now);
        }
        let range = self.rounds.place()?.next()?;
        self.turn.is_next(pass.is_idle).then_some(Ask::Range(range))
    }

    fn learn(&mut self, finished: Finished) -> Option<WalkAgain> {
        let Last { ended: now, took } = finished.last;
        let Ask::Range(range) = finished.ask else {
            return None;
        };
        match finished.outcome {
            SearchOutcome::Done(done) => {
                let upto = match done.page.next {
                    Some(SearchPlace::After(sequence)) => sequence,
                    _ => range.upto,
                };
                let has_left = done.picked.left.iter().any(|one| one.is_open);
                let has_left = has_left || done.claims.is_cut || done.claims.of_keys.is_beaten();
                self.read(now, upto, took, has_left);
            }
            SearchOutcome::TooSlow => self.was_too_wide(now, range, took),
            SearchOutcome::Failed => {}
        }
        None
    }

    fn again_at(&self, pass: &SearchPass) -> Option<Instant> {
        self.next_at(pass.now)
    }

    /// Also if no round is wanted.
    fn is_done(&self, pass: &SearchPass) -> bool {
        !self.is_wanted(pass.now) || self.rounds.is_done_since(pass.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(patrol: &mut Patrol, now: Instant, is_idle: bool) -> Option<Range> {
        let pass = SearchPass {
            is_idle,
            ..SearchPass::at(now)
        };
        match patrol.ask(&pass)? {
            Ask::Range(range) => Some(range),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn rounds_are_made_while_they_are_wanted_and_say_what_they_have_seen() {
        let mut patrol = Patrol::default();
        let now = Instant::now();
        assert!(next(&mut patrol, now, true).is_none() && patrol.is_done(&SearchPass::at(now)));
        patrol.want(now);
        assert!(!patrol.is_done(&SearchPass::at(now)));
        let mut after = i64::MIN;
        // Every other time, alternating with claims.
        while let Some(range) = next(&mut patrol, now, false) {
            assert_eq!(range.after, after);
            assert!(next(&mut patrol, now, false).is_none());
            after = range.upto;
            patrol.read(now, range.upto, Duration::ZERO, false);
        }
        assert!(patrol.is_done(&SearchPass::at(now)), "up to {after}");
        assert_eq!(patrol.next_at(now), Some(now + INTERVAL));
        let later = now + Duration::from_millis(1);
        assert!(!patrol.is_done(&SearchPass::at(later)));
        let forgotten = now + MEMORY;
        assert!(
            next(&mut patrol, forgotten, true).is_none(),
            "the slow search is forgotten"
        );
    }

    #[test]
    fn a_single_message_that_takes_too_long_holds_no_others() {
        let mut patrol = Patrol::default();
        let now = Instant::now();
        patrol.want(now);
        let mut tries = 0;
        while let Some(range) = next(&mut patrol, now, true) {
            tries += 1;
            match range.after < 5 && range.upto >= 5 {
                true => patrol.was_too_wide(now, range, Duration::from_secs(1)),
                false => patrol.read(now, range.upto, Duration::ZERO, false),
            }
        }
        assert!((20..100).contains(&tries), "{tries}");
        assert!(!patrol.is_done(&SearchPass::at(now)));
    }
}
