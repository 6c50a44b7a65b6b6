//! Room: how many more messages each endpoint may have. A value, made of numbers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::gate::Room;
use super::limits::Limits;
use super::registry::Registry;
use super::serving::{ServedEndpoint, ServedEndpoints};

/// One destination may have at most 1/`SHARE` of a batch in flight, and 1/`CLAIMED_SHARE` by claims of the messages that
/// name it: a backlog that fills the whole share takes CPU from the other destinations.
const SHARE: usize = 4;
const CLAIMED_SHARE: usize = 8;
/// Claims always leave room for this many messages per concurrent send.
const ROUNDS_OF_SENDS: usize = 4;

/// What is known of an endpoint that has had messages.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Held {
    /// Its messages in flight.
    pub(super) in_flight: usize,
    /// The most messages of a claim by the time that sends take, when a message was last settled.
    pub(super) prefetch: Option<usize>,
}

/// How many messages may be claimed for each endpoint, at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rooms {
    registry: Arc<Registry>,
    held: HashMap<u32, Held>,
    /// The most messages that one destination may have in flight.
    most: usize,
    /// The same limit for claims of messages that name the destination.
    most_claimed: usize,
    /// The destinations that get no messages now.
    closed: HashSet<u32>,
    /// The destinations that get one message as a probe.
    probed: HashSet<u32>,
    /// The time at which the first closed gate opens.
    pub(super) opens_at: Option<Instant>,
}

impl Rooms {
    pub(super) fn now(
        registered: &ServedEndpoints,
        held: HashMap<u32, Held>,
        batch: usize,
    ) -> Self {
        let mut rooms = Self {
            registry: registered.registry(),
            held,
            most: (batch / SHARE).max(1),
            most_claimed: (batch / CLAIMED_SHARE).max(1),
            ..Self::default()
        };
        for ServedEndpoint { customer, bulkhead } in registered.watched().iter().map(AsRef::as_ref)
        {
            if customer.is_held() {
                rooms.closed.insert(customer.id);
                continue;
            }
            let opens = bulkhead.gate.opens_at();
            rooms.opens_at = rooms.opens_at.into_iter().chain(opens).min();
            match bulkhead.gate.room() {
                Room::Closed => drop(rooms.closed.insert(customer.id)),
                Room::One => drop(rooms.probed.insert(customer.id)),
                Room::Free => {}
            }
        }
        rooms
    }

    /// Counts another message for the destination.
    pub(super) fn take(&mut self, id: u32) {
        self.held.entry(id).or_default().in_flight += 1;
    }

    /// The room for the next claim.
    pub(super) fn of(&self, id: u32) -> usize {
        let sends = self.limits(id).map_or(0, |limits| limits.concurrency);
        // Never so few that the destination has nothing to send while others have their turns.
        let most_claimed = self.most_claimed.max(ROUNDS_OF_SENDS * sends);
        room_for_a_claim(self.most(id).min(most_claimed), self.in_flight(id))
    }

    /// How many more messages the destination may have in flight.
    pub(super) fn left(&self, id: u32) -> usize {
        self.most(id).saturating_sub(self.in_flight(id))
    }

    fn in_flight(&self, id: u32) -> usize {
        self.held.get(&id).map_or(0, |held| held.in_flight)
    }

    fn limits(&self, id: u32) -> Option<&Limits> {
        self.registry.get(id)?.limits.as_ref()
    }

    /// The most messages that the destination may have in flight.
    fn most(&self, id: u32) -> usize {
        match self.limits(id) {
            None => 0,
            Some(_) if self.closed.contains(&id) => 0,
            Some(_) if self.probed.contains(&id) => 1,
            Some(limits) => {
                let known = self.held.get(&id).and_then(|held| held.prefetch);
                known
                    .unwrap_or_else(|| limits.first_claim())
                    .clamp(1, self.most)
            }
        }
    }

    pub(super) fn is_open(&self, id: u32) -> bool {
        !self.closed.contains(&id)
    }
}

/// No room until half of the destination's share is free: a small claim costs nearly as much as a large one, and other
/// destinations wait behind it.
fn room_for_a_claim(most: usize, in_flight: usize) -> usize {
    let left = most.saturating_sub(in_flight);
    if 2 * left >= most { left } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R46: a destination with a backlog is claimed from in large claims.
    #[test]
    fn a_destination_has_room_when_half_of_its_share_is_free() {
        let rooms = |most| (0..=most).map(move |in_flight| room_for_a_claim(most, in_flight));
        assert_eq!(rooms(1).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(rooms(5).collect::<Vec<_>>(), [5, 4, 3, 0, 0, 0]);
        assert_eq!(room_for_a_claim(4, 7), 0, "the share has become smaller");
    }
}
