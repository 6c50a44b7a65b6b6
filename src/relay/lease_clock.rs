//! How long a lease is good for, as this process sees it.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::store::lease::LeaseId;

/// The lease as this process sees it, on its own monotonic clock.
///
/// Sending is allowed until the last good renewal + lease - the longest send: then a send that
/// begins now is over before another relay can take its message.
pub(crate) struct LeaseClock {
    origin: Instant,
    /// How long a renewal is good for.
    valid_for: Duration,
    /// 0: none.
    id: AtomicI64,
    /// Microseconds after `origin`.
    valid_until: AtomicU64,
}

impl LeaseClock {
    pub(crate) fn new(lease: Duration, longest_send: Duration) -> Self {
        Self {
            origin: Instant::now(),
            valid_for: lease.saturating_sub(longest_send),
            id: AtomicI64::new(0),
            valid_until: AtomicU64::new(0),
        }
    }

    fn micros(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.origin);
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }

    /// A lease was registered or renewed by a statement that began at `asked`.
    pub(crate) fn renewed(&self, id: LeaseId, asked: Instant) {
        // In this order nobody sees the new id with an old time that is later than its own: a
        // new lease is only registered when the time of the old one is over or taken back.
        self.valid_until
            .store(self.micros(asked + self.valid_for), Ordering::Release);
        self.id.store(id.0, Ordering::Release);
    }

    /// Whether this is the lease, with time left or without.
    pub(crate) fn is(&self, id: LeaseId) -> bool {
        self.id.load(Ordering::Acquire) == id.0
    }

    /// The lease is gone.
    pub(crate) fn lost(&self) {
        self.id.store(0, Ordering::Release);
        self.valid_until.store(0, Ordering::Release);
    }

    /// The lease to claim under, if there is one with time left.
    pub(crate) fn current(&self) -> Option<LeaseId> {
        let id = LeaseId(self.id.load(Ordering::Acquire));
        (id.0 != 0 && self.may_send(id)).then_some(id)
    }

    /// How long sends may begin without another renewal.
    pub(crate) fn left(&self) -> Duration {
        let until = self.valid_until.load(Ordering::Acquire);
        Duration::from_micros(until.saturating_sub(self.micros(Instant::now())))
    }

    /// Whether a send of a message that was claimed under `id` may begin now.
    pub(crate) fn may_send(&self, id: LeaseId) -> bool {
        self.id.load(Ordering::Acquire) == id.0
            && self.micros(Instant::now()) < self.valid_until.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_send_begins_when_the_rest_of_the_lease_is_too_short_for_it() {
        let clock = LeaseClock::new(Duration::from_secs(10), Duration::from_secs(4));
        assert_eq!(clock.current(), None);
        let now = Instant::now();
        clock.renewed(LeaseId(1), now);
        assert!(clock.may_send(LeaseId(1)));
        assert!(!clock.may_send(LeaseId(2)));
        clock.renewed(
            LeaseId(1),
            now.checked_sub(Duration::from_secs(7)).unwrap_or(now),
        );
        // Where the machine booted less than seven seconds ago there is no such time.
        if now.checked_sub(Duration::from_secs(7)).is_some() {
            assert!(!clock.may_send(LeaseId(1)) || clock.micros(now) < 7_000_000);
        }
        clock.lost();
        assert_eq!(clock.current(), None);
    }
}
