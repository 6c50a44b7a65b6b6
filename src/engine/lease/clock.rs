//! The validity of the relay's lease, on this process's clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::sql::lease::LeaseId;
use crate::clock::BootTime;
use crate::delivery::SHORTEST_SEEN;
use crate::dispatch::fence::Fence;
use crate::engine::host::settings::{Sends, Settings};

/// The longest time for which sends begin without another look at the lease.
const MOST_UNSEEN: Duration = Duration::from_secs(5);
/// A relay that has not seen its lease for this time closes the connections of the sends that still run.
pub(crate) const CLOSES_AFTER: Duration = Duration::from_secs(8);
/// The longest time that closing the connections takes.
const GRACE: Duration = Duration::from_millis(500);
/// The lease as this process last saw it, on its own clock, which never goes back.
///
/// A send may begin for a twelfth of the lease (at most 5 s) without another look at the lease. A send that still runs
/// 8 s after the last look is closed ([`Fence`]), however long its timeout is. Every send has then ended before another
/// relay can take its message over: other relays may end the lease earlier than it expires, but not sooner than
/// `takeover_after` after the relay's session has ended. A lease below 12 s ends only by its expiry.
// Why: docs/decisions.md#session-gone
pub(crate) struct LeaseClock {
    lease: Duration,
    /// How long running sends stay open after a look at the lease.
    open_for: Duration,
    /// The end of `open_for` in which no send begins.
    last: Duration,
    grace: Duration,
    takeover_after: Option<Duration>,
    /// Until when sends may begin. In microseconds of [`BootTime`].
    valid_until: AtomicU64,
    fence: Arc<Fence>,
}

impl LeaseClock {
    /// Sends of an application's own dispatcher cannot be closed, and take the longest timeout.
    pub(crate) fn of(settings: &Settings) -> Self {
        let Sends { longest, can_close } = settings.sends;
        Self::new(settings.lease, longest, can_close)
    }

    pub(super) fn new(lease: Duration, longest_send: Duration, can_close: bool) -> Self {
        let unseen = MOST_UNSEEN.min(lease / 12);
        let grace = GRACE.min(unseen);
        let most = match can_close {
            true => CLOSES_AFTER.min(lease / 2 - grace),
            false => Duration::MAX,
        };
        let open_for = unseen.saturating_add(longest_send).min(most);
        let takeover_after = open_for.saturating_add(grace);
        let is_early = lease >= SHORTEST_SEEN && takeover_after <= lease / 2;
        Self {
            lease,
            open_for: if is_early { open_for } else { lease },
            last: match is_early {
                true => open_for - unseen,
                false => longest_send.min(lease / 2),
            },
            grace,
            takeover_after: is_early.then_some(takeover_after),
            valid_until: AtomicU64::new(0),
            fence: Arc::default(),
        }
    }

    /// Of a relay that does not know that its lease may end early.
    #[cfg(test)]
    pub(crate) fn outliving_its_session(mut self) -> Self {
        (self.open_for, self.last) = (self.lease, Duration::ZERO);
        self
    }

    /// How soon another relay may take over after the session of this relay has ended. `None`: only after the expiry.
    pub(crate) fn takeover_after(&self) -> Option<Duration> {
        self.takeover_after
    }

    /// How long a relay without messages may leave its lease unseen: so that a message that then comes is sent at once.
    // Why: docs/decisions.md#an-idle-relay
    pub(super) fn quiet_for(&self) -> Duration {
        MOST_UNSEEN.min(self.lease / 12) * 3 / 5
    }

    /// When running sends are closed.
    pub(crate) fn fence(&self) -> &Arc<Fence> {
        &self.fence
    }

    /// A lease was registered by a statement that began at `asked`.
    pub(crate) fn registered(&self, id: LeaseId, asked: BootTime) {
        // The order matters: no reader sees the new id with the old lease's time. A new lease is only registered after
        // the old lease is lost.
        self.good_for(asked, self.lease);
        self.fence.lease.store(id.0, Ordering::Release);
    }

    /// The lease was renewed by a statement that began at `asked`. Ignored if the lease was lost meanwhile.
    pub(crate) fn renewed(&self, id: LeaseId, asked: BootTime) {
        self.seen(id, asked, self.lease);
    }

    /// A statement that began at `asked` has seen that `left` of the lease remains. Ignored if the lease was lost
    /// meanwhile.
    pub(crate) fn seen(&self, id: LeaseId, asked: BootTime, left: Duration) {
        if self.is(id) {
            self.good_for(asked, left);
        }
    }

    fn good_for(&self, asked: BootTime, left: Duration) {
        let open_for = left.saturating_sub(self.grace).min(self.open_for);
        self.fence.set(asked.after(open_for));
        let valid_for = open_for.saturating_sub(self.last);
        self.valid_until
            .store(asked.after(valid_for).micros(), Ordering::Release);
    }

    /// Whether this is the relay's lease, valid or not.
    pub(crate) fn is(&self, id: LeaseId) -> bool {
        self.fence.lease.load(Ordering::Acquire) == id.0
    }

    /// Forgets the lease. `false`: the relay's lease was already another one.
    pub(crate) fn lost(&self, id: LeaseId) -> bool {
        self.fence
            .lease
            .compare_exchange(id.0, 0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// The lease to claim under, if it is valid.
    pub(crate) fn current(&self) -> Option<LeaseId> {
        let id = LeaseId(self.fence.lease.load(Ordering::Acquire));
        (id.0 != 0 && self.may_send(id)).then_some(id)
    }

    /// For how long sends may still begin without another renewal.
    pub(crate) fn left(&self) -> Duration {
        if self.current().is_none() {
            return Duration::ZERO;
        }
        let until = self.valid_until.load(Ordering::Acquire);
        Duration::from_micros(until.saturating_sub(BootTime::now().micros()))
    }

    /// Whether a send of a message that was claimed under `id` may begin now.
    pub(crate) fn may_send(&self, id: LeaseId) -> bool {
        self.may_send_at(id, BootTime::now())
    }

    fn may_send_at(&self, id: LeaseId, now: BootTime) -> bool {
        self.is(id) && now.micros() < self.valid_until.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R14.
    #[test]
    fn no_send_begins_when_the_rest_of_the_lease_is_too_short_for_it() {
        let clock = LeaseClock::new(Duration::from_secs(6), Duration::from_millis(1_500), true);
        assert_eq!(clock.current(), None);
        let (mine, others) = (LeaseId(1), LeaseId(2));
        let at = |millis: u64| BootTime(Duration::from_millis(100_000 + millis));
        clock.registered(mine, at(0));
        assert!(clock.may_send_at(mine, at(3_999)));
        assert!(!clock.may_send_at(mine, at(4_000)));
        assert!(!clock.may_send_at(others, at(0)));
        // The next renewal began two seconds later. The time of its response does not matter.
        clock.renewed(mine, at(2_000));
        assert!(clock.may_send_at(mine, at(5_999)));
        assert!(!clock.may_send_at(mine, at(6_000)));
        assert!(!clock.lost(others), "another relay's lease");
        assert!(clock.may_send_at(mine, at(5_999)));
        assert!(clock.lost(mine));
        clock.renewed(mine, at(2_000));
        assert!(
            !clock.may_send_at(mine, at(2_000)),
            "a lost lease stays lost"
        );
        assert!(!clock.lost(mine), "a lease is lost once");
    }

    /// R14: other relays may have ended the lease earlier meanwhile.
    #[test]
    fn a_check_of_the_lease_is_valid_until_others_could_have_ended_it() {
        let second = Duration::from_secs(1);
        let clock = LeaseClock::new(60 * second, 2 * second, true);
        let at = |millis: u64| BootTime(Duration::from_millis(100_000 + millis));
        let mine = LeaseId(1);
        clock.registered(mine, at(0));
        assert!(clock.may_send_at(mine, at(4_999)));
        assert!(!clock.may_send_at(mine, at(5_000)));
        clock.seen(mine, at(4_000), 50 * second);
        assert!(clock.may_send_at(mine, at(8_999)));
        clock.seen(mine, at(5_000), Duration::from_millis(3_500));
        assert!(clock.may_send_at(mine, at(5_999)));
        assert!(
            !clock.may_send_at(mine, at(6_000)),
            "another relay is ending the lease"
        );
        clock.renewed(mine, at(5_500));
        assert!(clock.may_send_at(mine, at(10_499)));
        assert!(!clock.may_send_at(mine, at(10_500)));
    }

    /// R14: however long the timeouts are, all sends have ended before another relay takes over.
    #[test]
    fn running_sends_are_closed_before_a_takeover() {
        let second = Duration::from_secs(1);
        let mine = LeaseId(1);
        let at = |seconds: u32| BootTime(Duration::from_secs(1_000) + seconds * second);
        for (lease, timeout, begins, closes, takeover) in [
            (60.0, 2.5, 5.0, 7.5, Some(8.0)),
            (60.0, 30.0, 5.0, 8.0, Some(8.5)),
            (60.0, 300.0, 5.0, 8.0, Some(8.5)),
            (12.0, 300.0, 1.0, 5.5, Some(6.0)),
            (600.0, 300.0, 5.0, 8.0, Some(8.5)),
            // Only the expiry ends it.
            (6.0, 300.0, 2.5, 5.5, None),
        ] {
            let [lease, timeout, begins, closes] =
                [lease, timeout, begins, closes].map(Duration::from_secs_f64);
            let clock = LeaseClock::new(lease, timeout, true);
            clock.registered(mine, at(0));
            let tick = Duration::from_millis(1);
            assert!(
                clock.may_send_at(mine, at(0).after(begins - tick)),
                "{lease:?}"
            );
            assert!(!clock.may_send_at(mine, at(0).after(begins)), "{lease:?}");
            assert_eq!(clock.fence().left_at(mine.0, at(0)), closes);
            let takeover = takeover.map(Duration::from_secs_f64);
            assert_eq!(clock.takeover_after(), takeover);
        }
        let own = LeaseClock::new(60 * second, 40 * second, false);
        assert_eq!(own.takeover_after(), None, "its sends cannot be closed");
        let clock = LeaseClock::new(60 * second, 300 * second, true);
        clock.registered(mine, at(0));
        assert!(clock.lost(mine));
        clock.registered(LeaseId(2), at(1));
        let left = |lease| clock.fence().left_at(lease, at(1));
        assert!(left(1).is_zero(), "a send of the lost lease");
        assert_eq!(left(2), 8 * second);
    }

    /// R14: time in suspension counts, as it does in the kernel's uptime.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_clock_counts_as_the_uptime_does() {
        let uptime = std::fs::read_to_string("/proc/uptime").expect("the uptime on Linux");
        let first = uptime.split(' ').next().expect("a number");
        let seconds: f64 = first.parse().expect("seconds");
        let now = BootTime::now().0.as_secs_f64();
        assert!((seconds - 0.1..seconds + 30.0).contains(&now), "{now}");
    }

    #[test]
    fn a_new_lease_is_current_until_it_is_lost() {
        let clock = LeaseClock::new(Duration::from_secs(60), Duration::from_secs(1), true);
        clock.registered(LeaseId(7), BootTime::now());
        assert_eq!(clock.current(), Some(LeaseId(7)));
        assert!(clock.left() > Duration::from_secs(4));
        assert!(clock.lost(LeaseId(7)));
        assert_eq!((clock.current(), clock.left()), (None, Duration::ZERO));
    }
}
