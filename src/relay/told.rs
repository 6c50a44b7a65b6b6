//! What others tell the claimer.

use crate::store::relay::claim::Claimed;
use crate::store::relay::lease::LeaseId;

/// A message in the claimer's inbox.
pub(crate) enum Told {
    Continued(Continued),
    /// The rows of these leases, and of no others, are gone while messages name them.
    Vanished(Vec<i64>),
}

/// Messages that were claimed right behind settled ones of their keys.
pub(crate) struct Continued {
    pub(crate) claimed: Vec<Claimed>,
    pub(crate) lease: LeaseId,
}
