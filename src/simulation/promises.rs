//! The promises that must hold in each history.

use std::fmt;
use std::time::Duration;

/// A promise of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Promise {
    /// G2: a committed message is delivered or dead-lettered.
    Lost,
    /// G3, G4: a relay holds a message from the beginning of the send to its end.
    Fence,
    /// G3: a delivered message is not sent again, unless a process died or a connection broke.
    Doubled,
    /// G5: when a message is sent, the earlier messages of its key are done, and no other message of its key is in
    /// flight.
    Order,
    /// R61: of a run, messages are sent again only from its beginning.
    Repeats,
    /// G6: attempts are failed sends and takeovers.
    Attempts,
    /// A message that was taken over for the first time is sent, if its destination allows another attempt.
    Takeover,
    /// A due message that has room is claimed in time.
    Late,
    /// The relay reports that nothing is due only if that is true.
    Idle,
    /// R50: a message that is addressed to a registration of a name reaches no other registration.
    Address,
    /// R50: a message that is sent again has the id, headers and time of the first send.
    Again,
    /// R46: endpoints with waiting messages are served equally.
    Fair,
    /// R50: a relay disables no destination for a reason of its own, and claims nothing that only others serve.
    Others,
    /// A message of one tenant is not sent to a destination of another.
    Tenant,
    /// No message is sent to a destination before its endpoint has shown that it wants messages.
    Verified,
    /// A message reaches each endpoint that wants it, and no other.
    Recipients,
    /// R54: a message waits for as long as operators are told why, and no longer.
    Reasons,
    /// R73: a reader of a feed gets each event once, in the order of the positions and without a gap.
    Gap,
    /// R73: a reader is told that its cursor does not continue only if that is so.
    Cursor,
    /// No thread runs in a busy loop.
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
