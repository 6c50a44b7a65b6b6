//! Where messages go.

use crate::routes::Way;

/// Where a message goes, or those of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum To {
    /// To the senders of this bulkhead.
    Bulkhead(usize),
    /// To this registered destination, by the senders of all of them.
    Registered(u32),
    /// To no sender: of each it is decided what is written down. It becomes a message for each of its destinations,
    /// goes to the only one, is delivered to nobody, or dies.
    Split,
    /// Nowhere: this relay does not take them.
    Nowhere,
}

impl To {
    /// All registered destinations together: none of them has this number.
    pub(super) const ALL_REGISTERED: Self = Self::Registered(0);

    /// Those that share room.
    pub(super) fn group(self) -> Self {
        match self {
            Self::Registered(_) => Self::ALL_REGISTERED,
            to => to,
        }
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
