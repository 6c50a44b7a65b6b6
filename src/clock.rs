//! The clock that the relay's decisions use.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The current time. A simulation sets a clock of its own.
pub(crate) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return now;
    }
    Instant::now()
}

/// The time that has passed since `at`.
pub(crate) fn since(at: Instant) -> Duration {
    now().saturating_duration_since(at)
}

/// The longest wait, a year: a later time might not fit into an `Instant`.
pub(crate) const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// The time `wait` after `at`. A wait of more than a [year](FAR) is cut: nothing that is added to a clock overflows,
/// whoever has written the number.
// Why: docs/decisions.md#numbers-from-outside
pub(crate) fn after(at: Instant, wait: Duration) -> Instant {
    at.checked_add(wait.min(FAR)).unwrap_or(at)
}

/// On Linux, `std`'s `Instant` uses the monotonic clock, which stops while the machine is suspended. The database's
/// clock continues, and so do leases. `Boottime` continues too.
#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
/// On macOS, `Monotonic` continues while the machine is suspended, unlike `std`'s clock.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// The time since the machine started, including time in suspension.
// Why: docs/decisions.md#two-clocks
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(pub(crate) Duration);

impl BootTime {
    pub(crate) fn now() -> Self {
        #[cfg(test)]
        if let Some(now) = simulated::since_boot() {
            return Self(now);
        }
        let now = clock_gettime(CLOCK);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(now.tv_nsec).unwrap_or(0);
        Self(Duration::new(seconds, nanos))
    }

    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    pub(crate) fn micros(self) -> u64 {
        u64::try_from(self.0.as_micros()).unwrap_or(u64::MAX)
    }
}

/// The clocks of a simulation, which runs in a single thread.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        static NOW: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
    }

    /// Sets this thread's clocks: the time of `std`, and the time since boot, which includes suspension.
    pub(crate) fn set(clocks: Option<(Instant, Duration)>) {
        NOW.set(clocks);
    }

    pub(super) fn now() -> Option<Instant> {
        NOW.get().map(|(now, _)| now)
    }

    pub(crate) fn since_boot() -> Option<Duration> {
        NOW.get().map(|(_, since_boot)| since_boot)
    }
}
