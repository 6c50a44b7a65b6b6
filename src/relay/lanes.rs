//! How a claim's room is shared between topics.

use std::collections::{HashMap, HashSet};

use crate::store::claim::{Claimed, Lane};

/// Lanes in one claim. With more topics than this they take turns.
const MOST_LANES: usize = 64;

/// The topics with live messages, and which of them gave all they were asked for.
///
/// A busy topic (it filled its lane last time) shares the room with the other busy ones; quiet
/// topics come first and get a small place each, so that a message of theirs never waits behind
/// another topic's backlog, and room is not kept free for topics that have nothing.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    topics: Vec<String>,
    quiet: HashSet<String>,
    turn: usize,
}

impl Lanes {
    /// Takes over the topics that were found. New ones count as busy.
    pub(crate) fn set_topics(&mut self, topics: Vec<String>) {
        let found: HashSet<&str> = topics.iter().map(String::as_str).collect();
        self.quiet.retain(|topic| found.contains(topic.as_str()));
        self.topics = topics;
    }

    /// Shares `room` out. Together the lanes may ask for more: the claim stops at the room.
    pub(crate) fn allot(&mut self, room: usize) -> Vec<Lane> {
        let count = self.topics.len();
        if count == 0 || room == 0 {
            return Vec::new();
        }
        // Few topics: another one is first each time. Many: the next ones have their turn.
        let step = if count > MOST_LANES { MOST_LANES } else { 1 };
        self.turn = (self.turn + step) % count;
        let turn: Vec<&String> = (0..count.min(MOST_LANES))
            .map(|n| &self.topics[(self.turn + n) % count])
            .collect();
        let (quiet, busy): (Vec<&String>, Vec<&String>) = turn
            .into_iter()
            .partition(|topic| self.quiet.contains(*topic));
        let quiet_room = (room / 4 / quiet.len().max(1)).max(1);
        let busy_room = room.div_ceil(busy.len().max(1));
        let lane = |topic: &String, room| Lane {
            topic: topic.clone(),
            room,
        };
        let quiet = quiet.into_iter().map(|topic| lane(topic, quiet_room));
        let busy = busy.into_iter().map(|topic| lane(topic, busy_room));
        quiet.chain(busy).collect()
    }

    /// Learns from a claim which lanes are busy.
    pub(crate) fn learn(&mut self, lanes: &[Lane], claimed: &[Claimed], room: usize) -> Given {
        let mut counts: HashMap<&str, usize> = HashMap::with_capacity(lanes.len());
        for one in claimed {
            *counts.entry(&one.message.topic).or_default() += 1;
        }
        // Where the room ended before the lanes did, the last ones were not heard.
        let was_cut = claimed.len() >= room;
        let mut given = Given::LessThanAsked;
        for lane in lanes {
            let count = counts.get(lane.topic.as_str()).copied().unwrap_or_default();
            if count >= lane.room {
                given = Given::AllThatWasAsked;
                self.quiet.remove(&lane.topic);
            } else if !was_cut {
                self.quiet.insert(lane.topic.clone());
            }
        }
        if was_cut {
            Given::AllThatWasAsked
        } else {
            given
        }
    }

    /// Whether a claim of these lanes has looked at all topics.
    pub(crate) fn are_all(&self, lanes: &[Lane]) -> bool {
        lanes.len() == self.topics.len()
    }
}

/// Whether some lane of a claim may have more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// A lane, or the claim, was full.
    AllThatWasAsked,
    /// Every lane came to its end.
    LessThanAsked,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(topics: &[&str], quiet: &[&str]) -> Lanes {
        let mut lanes = Lanes::default();
        lanes.set_topics(topics.iter().map(|&t| t.to_owned()).collect());
        lanes.quiet = quiet.iter().map(|&t| t.to_owned()).collect();
        lanes
    }

    #[test]
    fn one_busy_topic_gets_all_the_room() {
        let allotted = lanes(&["a"], &[]).allot(500);
        assert_eq!(
            allotted,
            [Lane {
                topic: "a".to_owned(),
                room: 500
            }]
        );
    }

    #[test]
    fn busy_topics_share_the_room_and_quiet_ones_come_first() {
        let allotted = lanes(&["a", "b", "c"], &["b"]).allot(400);
        assert_eq!(
            allotted[0],
            Lane {
                topic: "b".to_owned(),
                room: 100
            }
        );
        assert!(allotted[1..].iter().all(|lane| lane.room == 200));
    }

    #[test]
    fn every_one_of_many_topics_has_its_turn() {
        let topics: Vec<String> = (0..200).map(|n| format!("t{n}")).collect();
        let mut lanes = Lanes::default();
        lanes.set_topics(topics.clone());
        let mut seen = HashSet::new();
        for _ in 0..topics.len().div_ceil(MOST_LANES) {
            seen.extend(lanes.allot(10).into_iter().map(|lane| lane.topic));
        }
        assert_eq!(seen.len(), topics.len());
    }
}
