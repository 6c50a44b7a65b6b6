//! The walk over all ordering keys, which finds the first message of each key.

use std::time::{Duration, Instant};

use super::pace::{Last, LastTwo, Pace};
use super::rounds::Rounds;
use super::search::{EveryOther, Finished, Search, SearchOutcome, SearchPass, WalkAgain};
use crate::engine::claim::sql::page::SearchPlace;
use crate::engine::claim::sql::search::Ask;
use crate::engine::keys::sql::ordered::Key;

/// The pace of rounds while there is other work: settled keys continue without the walk.
const PACE: Pace = Pace::of_search(Duration::from_secs(1));
/// The pace of rounds while there is no other work, or after a round that has left messages.
const QUICK: Pace = Pace::of_search(Duration::ZERO);

/// During a walk over many keys, lanes are claimed from at least this often: a relay that is awake gets no
/// notifications.
const GLANCE: Duration = Duration::from_millis(20);

/// Rounds over all keys, a page at a time.
///
/// Most keyed messages never need the walk: the next claim of a lane finds a new message, and the settle of a message
/// claims the next message of its key. The walk finds the rest: keys with a backlog when the relay starts, retries, and
/// messages that were committed late, released, or left by a crashed relay. A round reads one message of each key, so
/// its cost does not grow with the backlog of a key.
#[derive(Debug, Default)]
pub(super) struct Walk {
    rounds: Rounds<Key>,
    turn: EveryOther,
    /// When the lanes were last asked again.
    glanced: Option<Instant>,
}

impl Walk {
    fn is_due(&self, now: Instant, is_idle: bool) -> bool {
        let Some(last) = &self.rounds.last else {
            return true;
        };
        let pace = match is_idle || last.has_left {
            true => QUICK,
            false => PACE,
        };
        pace.is_due(now, self.rounds.times.last())
    }

    /// Requests another round, as soon as one may begin.
    pub(super) fn want_round(&mut self) {
        let current = self.rounds.in_flight.as_mut().map(|(_, round)| round);
        if let Some(round) = current.or(self.rounds.last.as_mut()) {
            round.has_left = true;
        }
    }

    /// Whether a round is unfinished.
    pub(super) fn is_in_round(&self) -> bool {
        self.rounds.place().is_some()
    }

    /// Whether the lanes are to be asked again meanwhile.
    pub(super) fn is_glance_due(&mut self, now: Instant) -> bool {
        let glanced = *self.glanced.get_or_insert(now);
        let is_due = now.saturating_duration_since(glanced) >= GLANCE;
        if is_due {
            self.glanced = Some(now);
        }
        is_due
    }

    /// Any key may be free: a new round begins at once.
    pub(super) fn restart(&mut self) {
        self.rounds = Rounds::default();
    }

    /// A page was read up to this key; `None`: to the end. `has_left`: messages were left for want of room.
    fn read(&mut self, now: Instant, upto: Option<Key>, took: Duration, has_left: bool) {
        let place = self.rounds.step(took, has_left);
        match (upto, place) {
            (Some(key), Some(place)) => *place = key,
            (Some(_), None) => {}
            (None, _) => self.rounds.end(now),
        }
    }
}

impl Search for Walk {
    fn ask(&mut self, pass: &SearchPass) -> Option<Ask> {
        let has_turn = self.turn.is_next(pass.is_idle);
        if !has_turn || !pass.has_keyed {
            return None;
        }
        let is_wanted = pass.is_idle && pass.is_asked && !self.rounds.is_done_since(pass.since);
        if !self.is_in_round() && (is_wanted || self.is_due(pass.now, pass.is_idle)) {
            self.rounds.begin(pass.now);
        }
        self.rounds.place().cloned().map(Ask::Walk)
    }

    fn learn(&mut self, finished: Finished) -> Option<WalkAgain> {
        let Last { ended: now, took } = finished.last;
        match finished.outcome {
            SearchOutcome::Done(done) if done.claims.of_keys.is_beaten() => {}
            SearchOutcome::Done(done) => {
                let left = done.picked.left;
                let has_left = left.iter().any(|one| !one.has_room && one.is_open);
                // The page ends at the first message whose destination had no room left.
                let mut beyond = left.into_iter().filter(|one| one.has_room);
                let upto = beyond.find_map(|one| one.key).or(match done.page.next {
                    Some(SearchPlace::Key(key)) => Some(key),
                    _ => None,
                });
                self.read(now, upto, took, has_left);
            }
            // The page would take as long again: this round ends, and the next begins when it may.
            SearchOutcome::TooSlow => {
                self.read(now, None, took, false);
                self.rounds.times = LastTwo::slow(finished.last);
            }
            SearchOutcome::Failed => {}
        }
        None
    }

    /// A round that could have begun before the look had no room, and waiting does not make room.
    fn again_at(&self, pass: &SearchPass) -> Option<Instant> {
        let is_owed = !self.is_in_round() && pass.has_keyed;
        let last = self.rounds.last.as_ref().filter(|_| is_owed)?;
        let at = PACE.next(self.rounds.times.last()?);
        (last.began < pass.since && at >= pass.since).then_some(at)
    }

    fn is_done(&self, pass: &SearchPass) -> bool {
        !pass.has_keyed || self.rounds.is_done_since(pass.since)
    }
}

#[cfg(test)]
mod tests {
    use super::super::pace::REST;
    use super::*;

    /// G5: the relay must not sleep when the round may begin.
    #[test]
    fn a_round_that_has_to_wait_for_its_time_is_owed_until_one_was_made() {
        let mut walk = Walk::default();
        let asked = Instant::now();
        let first = walk.ask(&SearchPass::at(asked));
        assert!(first.is_some(), "the first round begins at once");
        let ended = asked + Duration::from_secs(1);
        let slow = Last {
            ended,
            took: Duration::from_secs(1),
        };
        walk.rounds.times.add(slow);
        walk.read(ended, None, Duration::from_secs(1), false);
        assert_eq!(walk.again_at(&SearchPass::at(asked)), None);
        let asked = ended + Duration::from_millis(1);
        assert!(
            walk.ask(&SearchPass::at(asked)).is_none(),
            "the second round must wait"
        );
        let at = walk
            .again_at(&SearchPass::at(asked))
            .expect("a round is owed");
        assert_eq!(at, ended + REST * Duration::from_secs(1));
        assert!(
            walk.ask(&SearchPass::at(at)).is_some(),
            "the round may begin"
        );
        walk.rounds.in_flight = None;
        let later = at + Duration::from_millis(1);
        assert_eq!(
            walk.again_at(&SearchPass::at(later)),
            None,
            "there was no room for the round"
        );
    }
}
