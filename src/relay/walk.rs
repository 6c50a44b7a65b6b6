//! The walk over all ordering keys, which finds the messages that come first.

use std::time::{Duration, Instant};

use super::lanes::SWEEP_SHARE;
use crate::store::ordered::Key;

/// Keys of one step: a few milliseconds of the database's time.
pub(super) const STEP: usize = 500;
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
#[derive(Debug, Default)]
pub(super) struct Walk {
    round: Option<Round>,
    last: Option<Last>,
}

/// The last round that came to its end.
#[derive(Debug)]
struct Last {
    began: Instant,
    ended: Instant,
    /// All steps together.
    took: Duration,
    /// It has passed over something for want of room.
    has_left: bool,
}

#[derive(Debug)]
struct Round {
    from: Key,
    began: Instant,
    took: Duration,
    has_left: bool,
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
    pub(super) fn from(&mut self, is_idle: bool, is_asked: Option<Instant>) -> Option<Key> {
        let is_wanted = is_idle && is_asked.is_some_and(|since| !self.is_done_since(since));
        if self.round.is_none() && (is_wanted || self.is_due(is_idle)) {
            self.round = Some(Round {
                from: Key::default(),
                began: Instant::now(),
                took: Duration::ZERO,
                has_left: false,
            });
        }
        self.round.as_ref().map(|round| round.from.clone())
    }

    fn is_due(&self, is_idle: bool) -> bool {
        self.last.as_ref().is_none_or(|last| {
            let age = last.ended.elapsed();
            let is_time = is_idle || last.has_left || age >= INTERVAL;
            is_time && age >= SWEEP_SHARE * last.took
        })
    }

    /// Learns where a step ended, and whether it passed over something for want of room.
    pub(super) fn learn(&mut self, step: Step, took: Duration, has_left: bool) {
        let Some(round) = &mut self.round else {
            return;
        };
        round.took += took;
        round.has_left |= has_left;
        match step {
            Step::At(key) => round.from = key,
            Step::End => {
                self.last = Some(Last {
                    began: round.began,
                    ended: Instant::now(),
                    took: round.took,
                    has_left: round.has_left,
                });
                self.round = None;
            }
        }
    }

    /// Whether a round is under way that has not seen all keys.
    pub(super) fn is_under_way(&self) -> bool {
        self.round.is_some()
    }

    /// Whether a round that began after `since` has seen all keys and passed over nothing.
    pub(super) fn is_done_since(&self, since: Instant) -> bool {
        let is_after = |last: &Last| last.began >= since && !last.has_left;
        self.last.as_ref().is_some_and(is_after)
    }

    /// Any key may be free: a round begins as soon as it can.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }
}
