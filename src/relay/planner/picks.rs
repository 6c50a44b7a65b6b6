//! Choosing which of the found messages to claim.

use std::collections::HashMap;

use super::Planner;
use super::view::View;
use crate::relay::to::To;
use crate::store::relay::claim::Topic;
use crate::store::relay::ordered::{Candidate, Head, Key};
use crate::store::relay::patrol::Free;

/// The first messages of keys, chosen for a claim.
#[derive(Debug, Default)]
pub(in crate::relay) struct Picked {
    pub(in crate::relay) candidates: Vec<Candidate>,
    /// The keys of the candidates, in the same order.
    pub(super) keys: Vec<Key>,
    /// Skipped: the destination has no room or is closed.
    pub(super) waiting: Vec<(To, Key)>,
    /// Whether some messages were skipped for want of room.
    pub(super) has_left: bool,
    /// Keys after the place where the choice stopped.
    pub(super) beyond: Vec<Key>,
}

/// The free messages of a range, chosen for a claim.
#[derive(Debug, Default)]
pub(in crate::relay) struct PickedFree {
    pub(in crate::relay) plain: Vec<i64>,
    pub(in crate::relay) keyed: Vec<Candidate>,
    /// Whether some messages were left for want of room.
    pub(in crate::relay) has_left: bool,
}

impl Planner<'_> {
    /// Chooses the messages for which there is room, and stops when a destination has no room left.
    pub(in crate::relay) fn pick(&self, heads: Vec<Head>, view: &View) -> Picked {
        let mut picked = Picked::default();
        let mut taken: HashMap<To, usize> = HashMap::new();
        let most = view.left_to_claim.unwrap_or(usize::MAX);
        let mut heads = heads.into_iter();
        while let Some(head) = heads.next() {
            let to = self.way(&head.topic);
            if self.lanes.kept_back().has(&head.topic) {
                continue;
            }
            let room = view.room_of(to);
            let count = taken.entry(to).or_default();
            if room == 0 {
                picked.has_left |= view.is_open(to);
                picked.waiting.push((to, head.key));
            } else if *count >= room || picked.candidates.len() >= most {
                picked.beyond.push(head.key);
                picked.beyond.extend(heads.map(|head| head.key));
                break;
            } else {
                *count += 1;
                picked.keys.push(head.key);
                let goes_to = self.goes_to(&head.topic);
                picked.candidates.push(candidate(head.sequence, goes_to));
            }
        }
        picked
    }

    /// Chooses the messages for which there is room.
    pub(in crate::relay) fn pick_free(&self, found: &[Free], view: &View) -> PickedFree {
        let mut picked = PickedFree::default();
        let mut taken: HashMap<To, usize> = HashMap::new();
        let most = view.left_to_claim.unwrap_or(usize::MAX);
        for free in found {
            let stream = free.found().stream;
            if self.lanes.kept_back().has(&stream.topic) {
                continue;
            }
            let to = self.way(&stream.topic);
            let count = taken.entry(to).or_default();
            if *count >= view.room_of(to) || picked.plain.len() + picked.keyed.len() >= most {
                picked.has_left |= view.is_open(to);
                continue;
            }
            *count += 1;
            match stream.is_keyed {
                false => picked.plain.push(free.sequence),
                true => {
                    let goes_to = self.goes_to(&stream.topic);
                    picked.keyed.push(candidate(free.sequence, goes_to));
                }
            }
        }
        picked
    }

    /// The name of the destination of a topic's messages; empty if the messages are fanned out or go nowhere.
    pub(in crate::relay) fn goes_to(&self, topic: &Topic) -> String {
        match self.way(topic) {
            To::Bulkhead(number) => self.destinations[number].to_owned(),
            To::Registered(_) => topic.destination.clone(),
            To::Split | To::Nowhere => String::new(),
        }
    }

    pub(super) fn way(&self, topic: &Topic) -> To {
        To::of(self.routes, &self.registry, topic)
    }
}

fn candidate(sequence: i64, goes_to: String) -> Candidate {
    Candidate { sequence, goes_to }
}
