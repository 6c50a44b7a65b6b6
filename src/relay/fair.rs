//! Whose turn it is: those who wait share time fairly.
//!
//! The one that will have used the least time after its turn comes next. One that begins to wait starts at most its own
//! turn before the last turn, so nobody saves up time (start-time fair queueing: Goyal, Vin and Cheng, 1996). So one
//! with long turns delays another by its turns in progress, however many it waits for.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

pub(super) struct Fair<K> {
    shares: HashMap<K, Share>,
    /// Those who wait, in the order of their turns.
    waiting: BTreeSet<(Place, K)>,
    /// The time that the one with the last turn had used before.
    used: Duration,
    turns: u64,
}

/// The used time after the next turn, and the number of the last turn.
type Place = (Duration, u64);

#[derive(Clone, Copy)]
struct Share {
    used: Duration,
    last_turn: u64,
    /// How long the next turn will take. `None`: nothing waits for a turn.
    expected: Option<Duration>,
}

impl Share {
    fn place(&self) -> Option<Place> {
        Some((self.used + self.expected?, self.last_turn))
    }
}

impl<K> Default for Fair<K> {
    fn default() -> Self {
        Self {
            shares: HashMap::new(),
            waiting: BTreeSet::new(),
            used: Duration::ZERO,
            turns: 0,
        }
    }
}

impl<K: Copy + Ord + Hash> Fair<K> {
    /// Whether nobody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// One waits for a turn that is expected to take this long, unless it waits already.
    pub(super) fn wait(&mut self, one: K, expected: Duration) {
        let (used, last_turn) = (self.used, self.turns);
        let share = self.shares.entry(one).or_insert(Share {
            used,
            last_turn,
            expected: None,
        });
        if share.expected.is_none() {
            // Those who wait may be behind the last turn by as much.
            share.used = share.used.max(used.saturating_sub(expected));
            share.expected = Some(expected);
            self.waiting.extend(share.place().map(|place| (place, one)));
        }
    }

    pub(super) fn no_longer_waits(&mut self, one: K) {
        if let Some(share) = self.shares.get_mut(&one)
            && let Some(place) = share.place()
        {
            share.expected = None;
            self.waiting.remove(&(place, one));
        }
    }

    /// The one whose turn comes next. It waits no longer.
    pub(super) fn next(&mut self) -> Option<K> {
        let (_, one) = self.waiting.pop_first()?;
        let share = self.shares.get_mut(&one)?;
        self.turns += 1;
        self.used = self.used.max(share.used);
        share.last_turn = self.turns;
        share.expected = None;
        Some(one)
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
        (self.shares).retain(|_, share| share.used > used || share.expected.is_some());
    }
}
