//! What the planner sees of others: how much they take, and what they hold.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crate::relay::doubt::Doubt;
use crate::relay::registered::Rooms;
use crate::relay::to::To;
use crate::store::relay::claim::Topic;
use crate::store::relay::lease::LeaseId;

/// How others stand, at one moment.
#[derive(Debug, Clone, Default)]
pub(in crate::relay) struct View {
    /// The lease to claim under, if there is one with time left.
    pub(in crate::relay) lease: Option<LeaseId>,
    /// The lease has so much time left that a send may begin. Otherwise it may be over for the database.
    pub(in crate::relay) may_send: bool,
    pub(in crate::relay) doubt: Option<Doubt>,
    /// One for each bulkhead.
    pub(in crate::relay) doors: Vec<Door>,
    /// For each registered destination, beside the door of all of them, which is the last one.
    pub(in crate::relay) registered: Rooms,
    /// Messages for several destinations that a claim may bring.
    pub(in crate::relay) room_to_split: usize,
    /// Messages wait for a place in some queue.
    pub(in crate::relay) is_queue_full: bool,
    /// Topics whose settles the database refuses.
    pub(in crate::relay) held: HashSet<Topic>,
    /// Where only so many messages are to be claimed.
    pub(in crate::relay) left_to_claim: Option<usize>,
    /// The number of the last question whether anything is due.
    pub(in crate::relay) question: u64,
    /// It has no answer yet.
    pub(in crate::relay) is_asked: bool,
    pub(in crate::relay) is_nothing_in_flight: bool,
}

/// What may go to a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::relay) struct Door {
    /// Messages that a claim may bring.
    pub(in crate::relay) room: usize,
    /// Messages may be sent there, as soon as there is room.
    pub(in crate::relay) is_open: bool,
    /// When it opens by itself.
    pub(in crate::relay) opens_at: Option<Instant>,
}

impl View {
    pub(super) fn room_of(&self, to: To) -> usize {
        match to {
            To::Bulkhead(number) => self.doors.get(number).map_or(0, |door| door.room),
            To::ALL_REGISTERED => self.doors.last().map_or(0, |door| door.room),
            To::Registered(id) => self.registered.of(id).min(self.room_of(To::ALL_REGISTERED)),
            To::Split => self.room_to_split,
            To::Nowhere => 0,
        }
    }

    pub(super) fn is_open(&self, to: To) -> bool {
        match to {
            To::Bulkhead(number) => self.doors.get(number).is_some_and(|door| door.is_open),
            To::Registered(id) => self.registered.is_open(id),
            To::Split => true,
            To::Nowhere => false,
        }
    }

    /// Whether the time of a pause is over that is still on.
    pub(super) fn has_pause_to_end(&self, now: Instant) -> bool {
        self.opens_at().any(|at| now >= at)
    }

    /// When destinations open by themselves.
    pub(super) fn opens_at(&self) -> impl Iterator<Item = Instant> {
        let doors = self.doors.iter().filter_map(|door| door.opens_at);
        doors.chain(self.registered.opens_at)
    }
}

/// What does not change while a relay runs.
#[derive(Debug, Clone)]
pub(in crate::relay) struct Settings {
    pub(in crate::relay) is_enabled: bool,
    pub(in crate::relay) poll_interval: Duration,
    /// What reads more than it returns gives way to claims after this long.
    pub(in crate::relay) moment: Duration,
}
