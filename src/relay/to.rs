//! Where messages go.

use crate::routes::{Routes, Way};
use crate::store::relay::claim::Topic;

/// Where a message goes, or those of a lane.
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
    /// Where the messages of a topic go.
    pub(super) fn of(routes: &Routes, Topic { topic, destination }: &Topic) -> Self {
        routes.find(topic, destination).into()
    }
}

impl From<Way<'_>> for To {
    fn from(way: Way<'_>) -> Self {
        match way {
            Way::To(number) => Self::Bulkhead(number),
            Way::Split(_) => Self::Split,
            Way::NoRoute | Way::UnknownDestination | Way::NotTaken => Self::Nowhere,
        }
    }
}
