//! The walk over all ordering keys, which finds the messages that come first.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::lanes::SWEEP_SHARE;
use super::rounds::{Round, Rounds};
use crate::relay::to::To;
use crate::store::relay::ordered::Key;

/// Keys of one step: a few milliseconds of the database's time.
pub(in crate::relay) const STEP: usize = 500;
/// Freed keys that are kept in mind. More than these are left to a round.
const MOST_FREED: usize = 20 * STEP;
/// After a round that found something, the next one begins no sooner than this: a key that goes on
/// does so without the walk.
const INTERVAL: Duration = Duration::from_secs(1);

/// Rounds over all keys, a step at a time.
///
/// Most keyed messages never need it: a new one is found where its lane goes on, and the next one of a
/// key is claimed when the one before it is settled. What it finds are keys with a backlog when the
/// relay starts, retries, messages that were committed late, given back or left by a dead relay, and
/// keys that were freed otherwise. It reads one message of each key, so its cost does not grow with
/// what waits behind them.
///
/// Keys of which the relay knows that they were freed are looked at before, by themselves: a round takes
/// long where there are many keys, and would never end if it began anew for each of them.
#[derive(Debug, Default)]
pub(super) struct Walk {
    rounds: Rounds<Key>,
    /// To be looked at.
    freed: VecDeque<Key>,
    /// Freed, too, but there was no room for them, or the destination is closed.
    waiting: HashMap<Key, To>,
    /// The freed ones had the last turn.
    was_at_freed: bool,
}

/// Where a step ended.
#[derive(Debug)]
pub(super) enum Step {
    /// At this key, which is to be looked at again.
    At(Key),
    /// Behind the last key.
    End,
}

impl Walk {
    /// Where the next step begins, if one is to be made now. `is_idle`: nothing else is to be done.
    /// `is_asked`: somebody wants to know whether nothing is left, since this time.
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

    /// When a round may begin that none has taken the place of since then: nobody else tells of what only a
    /// round finds. One that could have begun by then had no room, and no time makes room.
    pub(super) fn owed_at(&self, since: Instant) -> Option<Instant> {
        let is_owed = |last: &&Round| self.rounds.place().is_none() && last.began < since;
        let last = self.rounds.last.as_ref().filter(is_owed)?;
        let at = last.ended + INTERVAL.max(SWEEP_SHARE * last.took);
        (at >= since).then_some(at)
    }

    /// Learns where a step ended, and whether it passed over something for want of room.
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

    /// There was no room for these freed ones.
    pub(super) fn wait_with(&mut self, keys: impl IntoIterator<Item = (To, Key)>) {
        self.waiting
            .extend(keys.into_iter().map(|(to, key)| (key, to)));
    }

    /// Freed ones come again where there is room now.
    pub(super) fn wait_is_over(&mut self, is_room: impl Fn(To) -> bool) {
        let come = self.waiting.extract_if(|_, to| is_room(*to));
        self.freed.extend(come.map(|(key, _)| key));
    }

    /// Freed keys to be looked at, every other time. No key twice: its message would be claimed twice.
    pub(super) fn next_freed(&mut self) -> Option<Vec<Key>> {
        self.was_at_freed = !self.was_at_freed && !self.freed.is_empty();
        if !self.was_at_freed {
            return None;
        }
        let next: HashSet<Key> = self.freed.drain(..self.freed.len().min(STEP)).collect();
        Some(next.into_iter().collect())
    }

    /// Whether some of these keys can be looked at.
    pub(super) fn has_freed(&self, is_room: impl Fn(To) -> bool) -> bool {
        !self.freed.is_empty() || self.waiting.values().any(|to| is_room(*to))
    }

    /// Another round begins as soon as it may.
    pub(super) fn want_round(&mut self) {
        if let Some(round) = self.rounds.latest() {
            round.has_left = true;
        }
    }

    /// Whether a round is under way that has not seen all keys, or there are freed ones whose destination is open.
    pub(super) fn is_under_way(&self, is_open: impl Fn(To) -> bool) -> bool {
        let mut waiting = self.waiting.values();
        self.rounds.place().is_some() || !self.freed.is_empty() || waiting.any(|to| is_open(*to))
    }

    /// Whether a round that began after `since` has seen all keys and passed over nothing.
    pub(super) fn is_done_since(&self, since: Instant) -> bool {
        self.rounds.is_done_since(since)
    }

    /// Any key may be free: a round begins as soon as it can.
    pub(super) fn restart(&mut self) {
        self.rounds = Rounds::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// G5: it must not sleep through the time at which the round may begin.
    #[test]
    fn a_round_that_has_to_wait_for_its_time_is_owed_until_one_was_made() {
        let mut walk = Walk::default();
        let asked = Instant::now();
        let first = walk.from(asked, true, None);
        assert!(first.is_some(), "the first is made at once");
        let ended = asked + Duration::from_secs(1);
        walk.learn(ended, Step::End, Duration::from_secs(1), false);
        assert_eq!(walk.owed_at(asked), None);
        let asked = ended + Duration::from_millis(1);
        assert!(walk.from(asked, true, None).is_none(), "it has to wait");
        let at = walk.owed_at(asked).expect("it is owed");
        assert_eq!(at, ended + SWEEP_SHARE * Duration::from_secs(1));
        assert!(walk.from(at, true, None).is_some(), "its time has come");
        walk.rounds.under_way = None;
        let later = at + Duration::from_millis(1);
        assert_eq!(walk.owed_at(later), None, "there was no room for it");
    }
}
