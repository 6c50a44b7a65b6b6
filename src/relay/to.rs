//! Where the messages of a topic go.

use crate::routes::{Routes, Way};

/// Where the messages of a lane go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum To {
    /// To the senders of this bulkhead.
    Bulkhead(usize),
    /// Apart: each becomes a message for each of its destinations.
    Split,
    /// Nowhere: this relay does not take them.
    Nowhere,
}

impl To {
    /// Where a message goes.
    pub(super) fn of(routes: &Routes, topic: &str, destination: &str) -> Self {
        match routes.find(topic, destination) {
            Way::To(number) => Self::Bulkhead(number),
            Way::Split(_) => Self::Split,
            Way::NoRoute | Way::UnknownDestination | Way::NotTaken => Self::Nowhere,
        }
    }
}
