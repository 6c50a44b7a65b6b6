//! The clock that the relay's decisions use.

use std::time::{Duration, Instant};

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
