//! The pace of searches.

use std::time::Duration;

use crate::relay::pace::Pace;

/// Searches take at most a twentieth of the time. If an old snapshot keeps a million dead entries in an index, a search
/// may read them all.
pub(super) const REST: u32 = 20;

/// The pace of a search that begins no sooner than this after its last end.
pub(super) const fn pace(interval: Duration) -> Pace {
    Pace {
        interval,
        rest: REST,
    }
}
