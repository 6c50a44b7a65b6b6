//! The validity of the relay's lease, on this process's clock.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::config::Config;
use crate::store::relay::lease::LeaseId;

/// On Linux, `std`'s `Instant` uses the monotonic clock, which stops while the machine is suspended. The database's
/// clock continues, and so do leases. `Boottime` continues too.
#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
/// On macOS, `Monotonic` continues while the machine is suspended, unlike `std`'s clock.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// The time since the machine started, including time in suspension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(Duration);

impl BootTime {
    pub(crate) fn now() -> Self {
        #[cfg(test)]
        if let Some(now) = crate::clock::simulated::since_boot() {
            return Self(now);
        }
        let now = clock_gettime(CLOCK);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(now.tv_nsec).unwrap_or(0);
        Self(Duration::new(seconds, nanos))
    }

    pub(super) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    fn micros_after(self, duration: Duration) -> u64 {
        let micros = self.0.saturating_add(duration).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX)
    }
}

/// The lease as this process last saw it, on its own clock, which never goes back.
///
/// A send may begin until the end of the lease minus the longest send. Every send then ends before another relay can
/// take its message over. Other relays may end the lease earlier, but not sooner than `takeover_after`, so a
/// check of the lease is valid for at most `takeover_after`.
pub(crate) struct LeaseClock {
    lease: Duration,
    longest_send: Duration,
    takeover_after: Duration,
    /// The id of the lease; 0: no lease.
    id: AtomicI64,
    /// In microseconds of [`BootTime`].
    valid_until: AtomicU64,
}

impl LeaseClock {
    pub(crate) fn of(config: &Config) -> Self {
        Self::new(config.lease, config.longest_send(), config.takeover_after())
    }

    /// `takeover_after` is `None` if only expiry ends the lease.
    pub(super) fn new(
        lease: Duration,
        longest_send: Duration,
        takeover_after: Option<Duration>,
    ) -> Self {
        Self {
            lease,
            longest_send,
            takeover_after: takeover_after.unwrap_or(lease),
            id: AtomicI64::new(0),
            valid_until: AtomicU64::new(0),
        }
    }

    /// A lease was registered by a statement that began at `asked`.
    pub(crate) fn registered(&self, id: LeaseId, asked: BootTime) {
        // The order matters: no reader sees the new id with the old lease's time. A new lease is only registered after
        // the old lease is lost.
        self.good_for(asked, self.lease);
        self.id.store(id.0, Ordering::Release);
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
        let good_for = left.min(self.takeover_after);
        let valid_for = good_for.saturating_sub(self.longest_send);
        self.valid_until
            .store(asked.micros_after(valid_for), Ordering::Release);
    }

    /// Whether this is the relay's lease, valid or not.
    pub(crate) fn is(&self, id: LeaseId) -> bool {
        self.id.load(Ordering::Acquire) == id.0
    }

    /// Forgets the lease. `false`: the relay's lease was already another one.
    pub(crate) fn lost(&self, id: LeaseId) -> bool {
        self.id
            .compare_exchange(id.0, 0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// The lease to claim under, if it is valid.
    pub(crate) fn current(&self) -> Option<LeaseId> {
        let id = LeaseId(self.id.load(Ordering::Acquire));
        (id.0 != 0 && self.may_send(id)).then_some(id)
    }

    /// For how long sends may still begin without another renewal.
    pub(crate) fn left(&self) -> Duration {
        if self.current().is_none() {
            return Duration::ZERO;
        }
        let until = self.valid_until.load(Ordering::Acquire);
        Duration::from_micros(until.saturating_sub(BootTime::now().micros_after(Duration::ZERO)))
    }

    /// Whether a send of a message that was claimed under `id` may begin now.
    pub(crate) fn may_send(&self, id: LeaseId) -> bool {
        self.may_send_at(id, BootTime::now())
    }

    fn may_send_at(&self, id: LeaseId, now: BootTime) -> bool {
        self.is(id) && now.micros_after(Duration::ZERO) < self.valid_until.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R14.
    #[test]
    fn no_send_begins_when_the_rest_of_the_lease_is_too_short_for_it() {
        let clock = LeaseClock::new(Duration::from_secs(10), Duration::from_secs(4), None);
        assert_eq!(clock.current(), None);
        let (mine, others) = (LeaseId(1), LeaseId(2));
        let at = |millis: u64| BootTime(Duration::from_millis(100_000 + millis));
        clock.registered(mine, at(0));
        assert!(clock.may_send_at(mine, at(5_999)));
        assert!(!clock.may_send_at(mine, at(6_000)));
        assert!(!clock.may_send_at(others, at(0)));
        // The next renewal began two seconds later. The time of its response does not matter.
        clock.renewed(mine, at(2_000));
        assert!(clock.may_send_at(mine, at(7_999)));
        assert!(!clock.may_send_at(mine, at(8_000)));
        assert!(!clock.lost(others), "another relay's lease");
        assert!(clock.may_send_at(mine, at(7_999)));
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
        let clock = LeaseClock::new(60 * second, 2 * second, Some(7 * second));
        let at = |millis: u64| BootTime(Duration::from_millis(100_000 + millis));
        let mine = LeaseId(1);
        clock.registered(mine, at(0));
        assert!(clock.may_send_at(mine, at(4_999)));
        assert!(!clock.may_send_at(mine, at(5_000)));
        clock.seen(mine, at(4_000), 50 * second);
        assert!(clock.may_send_at(mine, at(8_999)));
        clock.seen(mine, at(5_000), 3 * second);
        assert!(clock.may_send_at(mine, at(5_999)));
        assert!(
            !clock.may_send_at(mine, at(6_000)),
            "another relay is ending the lease"
        );
        clock.renewed(mine, at(5_500));
        assert!(clock.may_send_at(mine, at(10_499)));
        assert!(!clock.may_send_at(mine, at(10_500)));
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
        let clock = LeaseClock::new(Duration::from_secs(60), Duration::from_secs(1), None);
        clock.registered(LeaseId(7), BootTime::now());
        assert_eq!(clock.current(), Some(LeaseId(7)));
        assert!(clock.left() > Duration::from_secs(50));
        assert!(clock.lost(LeaseId(7)));
        assert_eq!((clock.current(), clock.left()), (None, Duration::ZERO));
    }
}
