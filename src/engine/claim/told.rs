//! The messages that other threads send to the claimer.

use crate::engine::plan::Report;
use crate::engine::send::job::Job;

/// An entry in the claimer's inbox.
pub(crate) enum Told {
    /// Messages that a settler claimed while it settled the previous message of their key.
    Continued(Vec<Job>),
    /// For the planner.
    Report(Report),
}

impl Told {
    /// Whether the entry wakes the claimer. Returned keys do: the claimer checks them at once, or waits for room.
    /// Nothing else would report messages that a settler has claimed and the claimer has released, or messages whose
    /// lease is gone.
    pub(super) fn wakes(&self) -> bool {
        match self {
            Self::Report(Report::Returned(returned)) => !returned.keys.is_empty(),
            Self::Report(Report::Vanished(leases)) => !leases.is_empty(),
            Self::Continued(_) | Self::Report(_) => false,
        }
    }
}
