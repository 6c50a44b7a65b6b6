//! The state of each destination of a running relay.

use crate::engine::host::RelayHandle;
use crate::engine::observe::monitor::in_flight_of;
use crate::engine::send::bulkhead::Bulkhead;

/// The current state of one destination of a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestinationState {
    /// The name of the destination. Empty for the application's own dispatcher.
    pub name: String,
    /// The threads that send to the destination.
    pub threads: usize,
    /// The threads that are sending now.
    pub busy: usize,
    /// The claimed messages that wait for a thread.
    pub queued: usize,
    /// The messages for the destination that this relay has claimed and not yet settled.
    pub in_flight: usize,
    /// `flowing`, `trying` (one test send before all others), `paused`, `breaker_open`, or `held`: this relay cannot send,
    /// for a reason of its own.
    pub state: &'static str,
}

/// The state of each destination and each group of handlers. The entry with an empty name is the application's own
/// dispatcher.
pub fn destinations(relay: &RelayHandle) -> Vec<DestinationState> {
    let shared = relay.shared();
    let state = |bulkhead: &Bulkhead| DestinationState {
        name: bulkhead.name.to_string(),
        threads: bulkhead.limits.concurrency,
        busy: shared.threads.busy(bulkhead.number),
        queued: bulkhead.jobs.len(),
        in_flight: in_flight_of(&shared, bulkhead),
        state: bulkhead.gate.standing().as_str(),
    };
    shared.in_use().map(state).collect()
}

/// Why this relay cannot send to a destination, for a reason of its own: this machine lacks something, or the proxy fails.
/// The destination's messages wait, and use no attempts. Also for one that is registered. `None`: no such reason.
pub fn held(relay: &RelayHandle, name: &str) -> Option<String> {
    let shared = relay.shared();
    let own = shared.bulkheads.iter().find(|one| *one.name == *name);
    match own {
        Some(bulkhead) => Some(bulkhead.gate.trouble()?.what),
        None => {
            let mut of_members = shared.directory.troubles().into_iter();
            Some(of_members.find(|(one, _)| **one == *name)?.1.what)
        }
    }
}
