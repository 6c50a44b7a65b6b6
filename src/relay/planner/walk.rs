//! The walk over all ordering keys, which finds the first message of each key.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::lanes::SWEEP_SHARE;
use super::rounds::{Round, Rounds};
use crate::relay::to::To;
use crate::store::relay::ordered::Key;

/// The most keys of one step: a few milliseconds of the database's time.
pub(in crate::relay) const STEP: usize = 500;
/// The most freed keys that are remembered. If there are more, a round finds them.
const MOST_FREED: usize = 20 * STEP;
/// The shortest time between rounds while there is other work: settled keys continue without the walk.
const INTERVAL: Duration = Duration::from_secs(1);

/// Rounds over all keys, a step at a time.
///
/// Most keyed messages never need the walk: the next claim of a lane finds a new message, and the settle of a message
/// claims the next message of its key. The walk finds the rest: keys with a backlog when the relay starts, retries, and
/// messages that were committed late, released, or left by a crashed relay. A round reads one message of each key, so
/// its cost does not grow with the backlog of a key.
///
/// Keys that are known to be freed are queried first, by name. With many keys, a round takes long, and would never end
/// if each freed key began a new round.
#[derive(Debug, Default)]
pub(super) struct Walk {
    rounds: Rounds<Key>,
    /// Freed keys to query.
    freed: VecDeque<Key>,
    /// Freed keys whose destination has no room or is closed.
    waiting: HashMap<Key, To>,
    /// Whether freed keys had the last turn.
    was_at_freed: bool,
}

/// Where a step ended.
#[derive(Debug)]
pub(super) enum Step {
    /// At this key, which must be read again.
    At(Key),
    /// After the last key.
    End,
}

impl Walk {
    /// Where the next step begins, if a step is due. `is_idle`: there is no other work. `is_asked`: a caller asks
    /// whether nothing is left, since this time.
    pub(super) fn from(
        &mut self,
        now: Instant,
        is_idle: bool,
        is_asked: Option<Instant>,
    ) -> Option<Key> {
        let is_wanted = is_idle && is_asked.is_some_and(|since| !self.is_done_since(since));
        if self.rounds.place().is_none() && (is_wanted || self.is_due(now, is_idle)) {
            self.rounds.begin(now, Key::default());
        }
        self.rounds.place().cloned()
    }

    fn is_due(&self, now: Instant, is_idle: bool) -> bool {
        self.rounds.last.as_ref().is_none_or(|last| {
            let age = now.saturating_duration_since(last.ended);
            let is_time = is_idle || last.has_left || age >= INTERVAL;
            is_time && age >= SWEEP_SHARE * last.took
        })
    }

    /// When the next round may begin, if no round has begun since then. No notification announces the messages that
    /// only a round finds. A round that could have begun before `since` had no room, and waiting does not make room.
    pub(super) fn owed_at(&self, since: Instant) -> Option<Instant> {
        let is_owed = |last: &&Round| self.rounds.place().is_none() && last.began < since;
        let last = self.rounds.last.as_ref().filter(is_owed)?;
        let at = last.ended + INTERVAL.max(SWEEP_SHARE * last.took);
        (at >= since).then_some(at)
    }

    /// Learns where a step ended, and whether it skipped messages for want of room.
    pub(super) fn learn(&mut self, now: Instant, step: Step, took: Duration, has_left: bool) {
        let from = self.rounds.step(took, has_left);
        match (step, from) {
            (Step::At(key), Some(from)) => *from = key,
            (Step::At(_), None) => {}
            (Step::End, _) => self.rounds.end(now),
        }
    }

    /// These keys were freed.
    pub(super) fn freed(&mut self, keys: impl IntoIterator<Item = Key>) {
        self.freed.extend(keys);
        if self.freed.len() + self.waiting.len() > MOST_FREED {
            self.freed.clear();
            self.waiting.clear();
            self.want_round();
        }
    }

    /// These freed keys must wait for room.
    pub(super) fn wait_with(&mut self, keys: impl IntoIterator<Item = (To, Key)>) {
        self.waiting
            .extend(keys.into_iter().map(|(to, key)| (key, to)));
    }

    /// Queries waiting keys again if there is room now.
    pub(super) fn wait_is_over(&mut self, is_room: impl Fn(To) -> bool) {
        let come = self.waiting.extract_if(|_, to| is_room(*to));
        self.freed.extend(come.map(|(key, _)| key));
    }

    /// The freed keys to query now, every other time. Each key appears once: its message must not be claimed twice.
    pub(super) fn next_freed(&mut self) -> Option<Vec<Key>> {
        self.was_at_freed = !self.was_at_freed && !self.freed.is_empty();
        if !self.was_at_freed {
            return None;
        }
        let next: HashSet<Key> = self.freed.drain(..self.freed.len().min(STEP)).collect();
        Some(next.into_iter().collect())
    }

    /// Whether some freed keys can be queried now.
    pub(super) fn has_freed(&self, is_room: impl Fn(To) -> bool) -> bool {
        !self.freed.is_empty() || self.waiting.values().any(|to| is_room(*to))
    }

    /// Requests another round, as soon as one may begin.
    pub(super) fn want_round(&mut self) {
        if let Some(round) = self.rounds.latest() {
            round.has_left = true;
        }
    }

    /// Whether a round is unfinished, or a freed key has an open destination.
    pub(super) fn is_under_way(&self, is_open: impl Fn(To) -> bool) -> bool {
        let mut waiting = self.waiting.values();
        self.rounds.place().is_some() || !self.freed.is_empty() || waiting.any(|to| is_open(*to))
    }

    /// Whether a round that began after `since` has read all keys and skipped none.
    pub(super) fn is_done_since(&self, since: Instant) -> bool {
        self.rounds.is_done_since(since)
    }

    /// Any key may be free: a new round begins at once.
    pub(super) fn restart(&mut self) {
        self.rounds = Rounds::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// G5: the relay must not sleep when the round may begin.
    #[test]
    fn a_round_that_has_to_wait_for_its_time_is_owed_until_one_was_made() {
        let mut walk = Walk::default();
        let asked = Instant::now();
        let first = walk.from(asked, true, None);
        assert!(first.is_some(), "the first round begins at once");
        let ended = asked + Duration::from_secs(1);
        walk.learn(ended, Step::End, Duration::from_secs(1), false);
        assert_eq!(walk.owed_at(asked), None);
        let asked = ended + Duration::from_millis(1);
        assert!(
            walk.from(asked, true, None).is_none(),
            "the second round must wait"
        );
        let at = walk.owed_at(asked).expect("a round is owed");
        assert_eq!(at, ended + SWEEP_SHARE * Duration::from_secs(1));
        assert!(walk.from(at, true, None).is_some(), "the round may begin");
        walk.rounds.under_way = None;
        let later = at + Duration::from_millis(1);
        assert_eq!(walk.owed_at(later), None, "there was no room for the round");
    }
}
