//! The planner's view of the other threads: how much room they have, and what they hold.

use std::time::{Duration, Instant};

use super::room::Rooms;
use super::to::{Group, To};
use crate::engine::claim::custody::InCustody;
use crate::engine::lease::sql::lease::LeaseId;

/// The state of the other threads at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    pub(crate) custody: InCustody,
    /// The lease to claim under, if this relay has one with time left.
    pub(crate) lease: Option<LeaseId>,
    /// Whether the lease has enough time left to begin a send. Otherwise the database may already count it as expired.
    pub(crate) may_send: bool,
    /// One door for each bulkhead, by number.
    pub(crate) doors: Vec<Door>,
    /// The room of each member. The last door is the shared room of all of them.
    pub(crate) rooms: Rooms,
    /// The most messages for several destinations that a claim may take.
    pub(crate) room_to_split: usize,
    /// How many messages for feeds of members a claim may return.
    pub(crate) room_of_feeds: usize,
    /// Whether messages wait for room in some queue.
    pub(crate) is_queue_full: bool,
    /// How many more messages may be claimed, if there is a limit.
    pub(crate) left_to_claim: Option<usize>,
}

/// What may be claimed for a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Door {
    /// The most messages that a claim may take.
    pub(crate) room: usize,
    /// Whether messages may be sent as soon as there is room.
    pub(crate) is_open: bool,
    /// When the pause expires.
    pub(crate) opens_at: Option<Instant>,
}

impl View {
    /// The shared room of a group.
    pub(super) fn room(&self, group: Group) -> usize {
        match group {
            Group::Only(to) => self.room_of(to),
            Group::Members => self.doors.last().map_or(0, |door| door.room),
            Group::Feeds => self.room_of_feeds,
        }
    }

    pub(super) fn room_of(&self, to: To) -> usize {
        match to {
            To::Bulkhead(number) => self.doors.get(number).map_or(0, |door| door.room),
            To::Member(id) => self.rooms.of(id).min(self.room(Group::Members)),
            To::Feed(id) => self.rooms.of_feed(id).min(self.room_of_feeds),
            To::Split => self.room_to_split,
            To::Nowhere => 0,
        }
    }

    pub(super) fn is_open(&self, to: To) -> bool {
        match to {
            To::Bulkhead(number) => self.doors.get(number).is_some_and(|door| door.is_open),
            To::Member(id) | To::Feed(id) => self.rooms.is_open(id),
            To::Split => true,
            To::Nowhere => false,
        }
    }

    /// Whether the time of some pause has passed, and its gate is not open yet.
    pub(super) fn has_pause_to_end(&self, now: Instant) -> bool {
        self.opens_at().any(|at| now >= at)
    }

    /// When pauses of destinations expire.
    pub(super) fn opens_at(&self) -> impl Iterator<Item = Instant> {
        let doors = self.doors.iter().filter_map(|door| door.opens_at);
        doors.chain(self.rooms.doors.opens_at)
    }
}

/// When the planner works, and for how long.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    pub(crate) is_enabled: bool,
    pub(crate) poll_interval: Duration,
    /// The time limit for queries that read more than they return, so that claims are not held up.
    pub(crate) moment: Duration,
}
