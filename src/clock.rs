//! The time, as decisions take it.

use std::time::{Duration, Instant};

/// Now: by the system's clock or, in a simulation, by its own.
pub(crate) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return now;
    }
    Instant::now()
}

/// How long ago that was.
pub(crate) fn since(at: Instant) -> Duration {
    now().saturating_duration_since(at)
}

/// The clocks of a simulation, which runs in one thread.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        static NOW: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
    }

    /// From now on these are this thread's clocks: `std`'s, and the time since the start of the machine, while it
    /// was suspended, too.
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
