//! What has to hold in each history.

use std::fmt;
use std::time::Duration;

/// What a history has broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Promise {
    /// G2: what is committed is delivered, or dies.
    Lost,
    /// G3, G4: a relay sends only what it holds, from the beginning of the send to its end.
    Fence,
    /// G3: what went well is not sent again, where no process died and no connection broke.
    Doubled,
    /// G5: what comes before in its key is done, and nothing else of it is on its way.
    Order,
    /// G6: attempts are sends that failed, and takeovers.
    Attempts,
    /// What is due and has room waits no longer than this.
    Late,
    /// "Nothing is due" is said when nothing is.
    Idle,
    /// R46: registered destinations with work get as much as each other.
    Fair,
    /// Nothing is done again and again.
    Busy,
}

/// A promise that was broken, and how.
#[derive(Debug, Clone)]
pub(super) struct Fall {
    pub(super) promise: Promise,
    pub(super) at: Duration,
    pub(super) what: String,
}

impl fmt::Display for Fall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { promise, at, what } = self;
        write!(
            f,
            "{:>10.3} ms  {promise:?}: {what}",
            at.as_secs_f64() * 1e3
        )
    }
}
