//! Where the relay hands messages to.

use crate::engine::serves::routes::Way;

/// Where a message goes, or every message of a lane (the waiting messages of one topic and destination).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum To {
    /// To the senders of this bulkhead.
    Bulkhead(usize),
    /// To this member, by the senders that all members share.
    Member(u32),
    /// Into the feed of this member: without senders.
    Feed(u32),
    /// To no single destination: each message is decided when it is claimed. The message becomes one message for each
    /// of its destinations, goes to its only destination, is settled as delivered if no destination wants it, or is
    /// dead-lettered.
    Split,
    /// Nowhere: this relay does not take the message.
    Nowhere,
}

/// What shares room: all members are one group, and so are their feeds; every other way is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Group {
    Only(To),
    Members,
    Feeds,
}

impl To {
    pub(super) fn group(self) -> Group {
        match self {
            Self::Member(_) => Group::Members,
            Self::Feed(_) => Group::Feeds,
            to => Group::Only(to),
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
