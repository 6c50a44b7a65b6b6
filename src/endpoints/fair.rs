//! Whose turn it is: those who wait share time fairly.
//!
//! The one that will have used the least time after its turn comes next. One that begins to wait starts at most its own
//! turn before the last turn, so nobody saves up time (start-time fair queueing: Goyal, Vin and Cheng, 1996). So one
//! with long turns delays another by its turns in progress, however many it waits for.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

pub(super) struct Fair<K, T> {
    shares: HashMap<K, Share<T>>,
    /// Those who wait, in the order of their turns.
    waiting: BTreeSet<(FairPlace, K)>,
    /// The time that the one with the last turn had used before.
    used: Duration,
    turns: u64,
}

/// The used time after the next turn, and the number of the last turn.
type FairPlace = (Duration, u64);

struct Share<T> {
    used: Duration,
    last_turn: u64,
    /// What waits for turns, one after the other, with the time that each turn is expected to take.
    queue: VecDeque<(T, Duration)>,
}

impl<T> Share<T> {
    fn place(&self) -> Option<FairPlace> {
        let (_, expected) = self.queue.front()?;
        Some((self.used + *expected, self.last_turn))
    }
}

impl<K, T> Default for Fair<K, T> {
    fn default() -> Self {
        Self {
            shares: HashMap::new(),
            waiting: BTreeSet::new(),
            used: Duration::ZERO,
            turns: 0,
        }
    }
}

impl<K: Copy + Ord + Hash, T> Fair<K, T> {
    /// Whether nobody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// One waits for a turn that is expected to take this long, after its other turns.
    pub(super) fn wait(&mut self, one: K, what: T, expected: Duration) {
        let (used, last_turn) = (self.used, self.turns);
        let share = self.shares.entry(one).or_insert_with(|| Share {
            used,
            last_turn,
            queue: VecDeque::new(),
        });
        let is_first = share.queue.is_empty();
        share.queue.push_back((what, expected));
        if is_first {
            // Those who wait may be behind the last turn by as much.
            share.used = share.used.max(used.saturating_sub(expected));
            self.waiting.extend(share.place().map(|place| (place, one)));
        }
    }

    /// One no longer waits for these turns, which are returned.
    pub(super) fn take(&mut self, one: K, is_taken: impl Fn(&T) -> bool) -> Vec<T> {
        let Some(share) = self.shares.get_mut(&one) else {
            return Vec::new();
        };
        if let Some(place) = share.place() {
            self.waiting.remove(&(place, one));
        }
        let queue = std::mem::take(&mut share.queue).into_iter();
        let (taken, left) = queue.partition::<VecDeque<_>, _>(|(what, _)| is_taken(what));
        share.queue = left;
        self.waiting.extend(share.place().map(|place| (place, one)));
        taken.into_iter().map(|(what, _)| what).collect()
    }

    /// The next turn, and whose it is.
    pub(super) fn next(&mut self) -> Option<(K, T)> {
        let (_, one) = self.waiting.pop_first()?;
        let share = self.shares.get_mut(&one)?;
        let (what, _) = share.queue.pop_front()?;
        self.turns += 1;
        self.used = self.used.max(share.used);
        share.last_turn = self.turns;
        if let Some((_, expected)) = share.queue.front() {
            share.used = share.used.max(self.used.saturating_sub(*expected));
        }
        self.waiting.extend(share.place().map(|place| (place, one)));
        Some((one, what))
    }

    /// Charges one for a turn. What it was `charged` for the turn before is returned.
    pub(super) fn charge(&mut self, one: K, took: Duration, charged: Duration) {
        let Some(share) = self.shares.get_mut(&one) else {
            return;
        };
        let before = share.place();
        share.used = (share.used + took).saturating_sub(charged);
        if let Some((before, place)) = before.zip(share.place()) {
            self.waiting.remove(&(before, one));
            self.waiting.insert((place, one));
        }
    }

    /// Forgets those whose share would be the same if they were new.
    pub(super) fn tidy(&mut self) {
        let used = self.used;
        (self.shares).retain(|_, share| share.used > used || !share.queue.is_empty());
    }
}
