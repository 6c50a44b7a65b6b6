//! Room: how many more messages each member may have. A value, made of numbers.

use std::collections::HashMap;
use std::sync::Arc;

use super::to::To;
use crate::engine::directory::{Doors, Roster};
use crate::engine::send::limits::Limits;

/// One destination may have at most 1/`SHARE` of a batch in flight, and 1/`CLAIMED_SHARE` by claims of the messages that
/// name it: a backlog that fills the whole share takes CPU from the other destinations.
const SHARE: usize = 4;
const CLAIMED_SHARE: usize = 8;
/// Claims always leave room for this many messages per concurrent send.
const ROUNDS_OF_SENDS: usize = 4;

/// What is known of a way that has had messages.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Held {
    /// Its messages in flight.
    pub(crate) in_flight: usize,
    /// Of a member: the most messages of a claim by the time that sends take, when a message was last settled.
    pub(crate) prefetch: Option<usize>,
}

/// How many messages may be claimed for each member, at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rooms {
    /// `None`: there is no member.
    pub(crate) roster: Option<Arc<dyn Roster>>,
    pub(crate) doors: Doors,
    pub(crate) held: HashMap<To, Held>,
    pub(crate) batch: usize,
}

impl Rooms {
    /// Counts another message for the destination.
    pub(crate) fn take(&mut self, id: u32) {
        self.held.entry(To::Member(id)).or_default().in_flight += 1;
    }

    /// The room for the next claim.
    pub(crate) fn of(&self, id: u32) -> usize {
        let sends = self.limits(id).map_or(0, |limits| limits.concurrency);
        // Never so few that the destination has nothing to send while others have their turns.
        let most_claimed = (self.batch / CLAIMED_SHARE).max(1);
        let most_claimed = most_claimed.max(ROUNDS_OF_SENDS * sends);
        room_for_a_claim(self.most(id).min(most_claimed), self.in_flight(id))
    }

    /// The same for a feed.
    pub(crate) fn of_feed(&self, id: u32) -> usize {
        room_for_a_claim(self.most(id), self.in_flight(id))
    }

    /// How many more messages the destination may have in flight. A feed that is open takes what the settlers take.
    pub(crate) fn left(&self, id: u32) -> usize {
        match self.limits(id) {
            Some(limits) if limits.is_feed && self.is_open(id) => limits.batch,
            _ => self.most(id).saturating_sub(self.in_flight(id)),
        }
    }

    fn in_flight(&self, id: u32) -> usize {
        let ways = [To::Member(id), To::Feed(id)].into_iter();
        let held = ways.filter_map(|to| self.held.get(&to));
        held.map(|held| held.in_flight).sum()
    }

    fn limits(&self, id: u32) -> Option<&Limits> {
        self.roster.as_ref()?.limits(id)
    }

    /// The most messages that the destination may have in flight.
    fn most(&self, id: u32) -> usize {
        match self.limits(id) {
            None => 0,
            Some(_) if self.doors.closed.contains(&id) => 0,
            Some(_) if self.doors.probed.contains(&id) => 1,
            // Nothing waits for a sender: one batch is settled while the next is claimed.
            Some(limits) if limits.is_feed => 2 * limits.batch,
            Some(limits) => {
                let held = self.held.get(&To::Member(id));
                let known = held.and_then(|held| held.prefetch);
                known
                    .unwrap_or_else(|| limits.first_claim())
                    .clamp(1, (self.batch / SHARE).max(1))
            }
        }
    }

    pub(crate) fn is_open(&self, id: u32) -> bool {
        !self.doors.closed.contains(&id)
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
