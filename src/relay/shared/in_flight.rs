//! What is claimed and not settled: counted, by lease, and put aside.

use std::collections::HashSet;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::Shared;
use crate::relay::stats::add;
use crate::store::lease::LeaseId;

impl Shared {
    /// Counts messages that were claimed.
    pub(in crate::relay) fn count_claimed(&self, count: usize) {
        add(&self.stats.claimed, count);
        self.metrics.claimed.increment(count as u64);
        self.progress.moved();
    }

    /// `count` messages were claimed under a lease.
    pub(crate) fn began(&self, lease: LeaseId, count: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held.entry(lease).or_default() += count;
        self.in_flight.fetch_add(count, Ordering::AcqRel);
    }

    /// The settles of these messages are refused: they wait, and nothing waits for them.
    pub(crate) fn put_aside(&self, sequences: impl Iterator<Item = i64>) {
        let mut aside = self.aside.lock().unwrap_or_else(PoisonError::into_inner);
        let before = aside.len();
        aside.extend(sequences);
        self.in_flight
            .fetch_sub(aside.len() - before, Ordering::AcqRel);
        drop(aside);
        self.ring();
    }

    /// Of what was put aside, these are tried again.
    pub(crate) fn take_up_aside(&self, sequences: impl Iterator<Item = i64>) {
        let again: HashSet<i64> = sequences.collect();
        let mut aside = self.aside.lock().unwrap_or_else(PoisonError::into_inner);
        let before = aside.len();
        aside.retain(|sequence| !again.contains(sequence));
        self.in_flight
            .fetch_add(before - aside.len(), Ordering::AcqRel);
    }

    /// The messages that are put aside, if nothing else is in flight.
    pub(crate) fn only_aside(&self) -> Option<Vec<i64>> {
        let aside = self.aside.lock().unwrap_or_else(PoisonError::into_inner);
        (self.in_flight.load(Ordering::Acquire) == 0).then(|| aside.clone())
    }

    /// Messages claimed and not settled.
    pub(crate) fn unsettled(&self) -> usize {
        let aside = self.aside.lock().unwrap_or_else(PoisonError::into_inner);
        self.in_flight.load(Ordering::Acquire) + aside.len()
    }

    /// Whether messages that were claimed under this lease are still on their way here.
    pub(crate) fn holds_under(&self, lease: LeaseId) -> bool {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.contains_key(&lease)
    }

    /// `count` messages of a lease are settled, released or lost to another relay.
    pub(crate) fn finished(&self, lease: LeaseId, count: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left) = held.get_mut(&lease) {
            *left = left.saturating_sub(count);
            if *left == 0 {
                held.remove(&lease);
            }
        }
        drop(held);
        let before = self.in_flight.fetch_sub(count, Ordering::AcqRel);
        let is_waited_for =
            || self.idle.is_asked() || self.ring_when_settled.load(Ordering::SeqCst);
        if (before == count && is_waited_for()) || self.is_room_wanted() {
            self.ring();
        }
    }
}
