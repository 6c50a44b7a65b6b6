//! How claims are shared between topics.

use std::collections::HashMap;

use super::pauses::KeptBack;
use crate::routes::{Routes, Way};
use crate::store::claim::{Claimed, Lane, Topic};

/// Lanes in one claim. With more of them than this they take turns.
pub(crate) const MOST_LANES: usize = 64;

/// Where the messages of a lane go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum To {
    /// To the senders of this bulkhead.
    Bulkhead(usize),
    /// Apart: each becomes a message for each of its destinations.
    Split,
}

/// The topics with live messages, each with the destination that its messages name or with none,
/// and what is known of them.
///
/// A look asks every lane until it has no more. A busy lane (it gave all it was asked for) shares
/// the room of its bulkhead with the other busy ones; quiet lanes come first and get a small place
/// each, so that a message of theirs never waits behind another topic's backlog.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    lanes: Vec<Known>,
    kept_back: KeptBack,
    turn: usize,
}

#[derive(Debug)]
struct Known {
    topic: Topic,
    to: To,
    is_quiet: bool,
    /// It had nothing more in this look.
    is_done: bool,
}

impl Lanes {
    /// Takes over the topics that were found. New ones count as busy, and are to be asked.
    pub(crate) fn set_topics(&mut self, topics: Vec<Topic>, routes: &Routes, nowhere: usize) {
        let known: HashMap<Topic, (bool, bool)> = self
            .lanes
            .drain(..)
            .map(|lane| (lane.topic, (lane.is_quiet, lane.is_done)))
            .collect();
        self.lanes = topics
            .into_iter()
            .map(|topic| (known.get(&topic).copied().unwrap_or_default(), topic))
            .map(|((is_quiet, is_done), topic)| Known {
                to: match routes.find(&topic.topic, &topic.destination) {
                    Way::To(number) => To::Bulkhead(number),
                    Way::Split(_) => To::Split,
                    Way::NoRoute | Way::UnknownDestination => To::Bulkhead(nowhere),
                },
                is_quiet,
                is_done,
                topic,
            })
            .collect();
    }

    /// What nobody is to be asked for.
    pub(super) fn keep_back(&mut self, kept_back: KeptBack) {
        self.kept_back = kept_back;
    }

    /// Every lane may have something again.
    pub(crate) fn begin_look(&mut self) {
        for lane in &mut self.lanes {
            lane.is_done = false;
        }
    }

    /// Shares room out, as much as `room_of` says: for a bulkhead, or for messages to be split. Tells
    /// of each lane where it leads.
    /// Nothing where no lane is left to be asked. The lanes of a bulkhead may together ask for a
    /// quarter more than its room, and for one message each.
    pub(crate) fn allot(&mut self, room_of: impl Fn(To) -> usize) -> Vec<(Lane, To)> {
        let count = self.lanes.len();
        if count == 0 {
            return Vec::new();
        }
        // Few lanes: another one is first each time. Many: the next ones have their turn.
        let step = if count > MOST_LANES { MOST_LANES } else { 1 };
        self.turn = (self.turn + step) % count;
        let in_turn = (0..count).map(|n| &self.lanes[(self.turn + n) % count]);
        let (left, done): (Vec<&Known>, Vec<&Known>) = in_turn
            .filter(|lane| !self.kept_back.has(&lane.topic))
            .filter(|lane| room_of(lane.to) > 0)
            .partition(|lane| !lane.is_done);
        if left.is_empty() {
            return Vec::new();
        }
        // No more lanes than there is room for: each gives one message at least.
        let mut lanes_of: HashMap<To, usize> = HashMap::new();
        let (quiet, busy): (Vec<&Known>, Vec<&Known>) = left
            .into_iter()
            .chain(done)
            .filter(|lane| {
                let lanes = lanes_of.entry(lane.to).or_default();
                *lanes += 1;
                *lanes <= room_of(lane.to)
            })
            .take(MOST_LANES)
            .partition(|lane| lane.is_quiet);
        let mut shares: HashMap<To, (usize, usize)> = HashMap::new();
        for lane in &quiet {
            shares.entry(lane.to).or_default().0 += 1;
        }
        for lane in &busy {
            shares.entry(lane.to).or_default().1 += 1;
        }
        let lane = |known: &Known, room: usize| {
            let lane = Lane {
                topic: known.topic.clone(),
                room: room.max(1),
            };
            (lane, known.to)
        };
        let quiet = quiet.into_iter().map(|known| {
            let (quiet, _) = shares[&known.to];
            lane(known, room_of(known.to) / 4 / quiet.max(1))
        });
        let busy = busy.into_iter().map(|known| {
            let (_, busy) = shares[&known.to];
            lane(known, room_of(known.to) / busy.max(1))
        });
        quiet.chain(busy).collect()
    }

    /// Learns from a claim which of the lanes that it asked have more. `is_cut`: the claim had a
    /// limit of its own, so that the last ones may not have been heard.
    pub(crate) fn learn(&mut self, asked: &[Lane], claimed: &[Claimed], is_cut: bool) {
        let mut counts: HashMap<(&str, &str), usize> = HashMap::with_capacity(asked.len());
        for one in claimed {
            let message = &one.message;
            *counts
                .entry((&message.topic, &message.destination))
                .or_default() += 1;
        }
        let rooms: HashMap<&Topic, usize> =
            asked.iter().map(|lane| (&lane.topic, lane.room)).collect();
        for lane in &mut self.lanes {
            let Some(room) = rooms.get(&lane.topic) else {
                continue;
            };
            let key = (lane.topic.topic.as_str(), lane.topic.destination.as_str());
            let is_full = counts.get(&key).copied().unwrap_or_default() >= *room;
            lane.is_done = !is_full && !is_cut;
            if is_full || !is_cut {
                lane.is_quiet = !is_full;
            }
        }
    }

    /// Whether some lane is left to be asked whose messages are not kept back: `is_open` says so
    /// for a bulkhead.
    pub(crate) fn is_anything_left(&self, is_open: impl Fn(To) -> bool) -> bool {
        self.lanes
            .iter()
            .any(|lane| !lane.is_done && is_open(lane.to) && !self.kept_back.has(&lane.topic))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::config::{Config, Destination, Route};

    fn topic(topic: &str) -> Topic {
        Topic {
            topic: topic.to_owned(),
            destination: String::new(),
        }
    }

    /// All topics go to one bulkhead.
    fn lanes(topics: &[&str], quiet: &[&str]) -> Lanes {
        let config = Config {
            url: Some("http://a".parse().expect("a URL")),
            ..Config::default()
        };
        let mut lanes = Lanes::default();
        let topics = topics.iter().map(|&t| topic(t)).collect();
        lanes.set_topics(topics, &Routes::new(&config), 1);
        for lane in &mut lanes.lanes {
            lane.is_quiet = quiet.contains(&lane.topic.topic.as_str());
        }
        lanes
    }

    fn lane(name: &str, room: usize) -> (Lane, To) {
        let lane = Lane {
            topic: topic(name),
            room,
        };
        (lane, To::Bulkhead(0))
    }

    #[test]
    fn one_busy_topic_gets_all_the_room() {
        assert_eq!(lanes(&["a"], &[]).allot(|_| 500), [lane("a", 500)]);
    }

    #[test]
    fn busy_topics_share_the_room_and_quiet_ones_come_first() {
        let allotted = lanes(&["a", "b", "c"], &["b"]).allot(|_| 400);
        assert_eq!(allotted[0], lane("b", 100));
        assert!(allotted[1..].iter().all(|(lane, _)| lane.room == 200));
    }

    #[test]
    fn every_one_of_many_topics_is_asked() {
        let names: Vec<String> = (0..200).map(|n| format!("t{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut lanes = lanes(&names, &[]);
        let mut seen = HashSet::new();
        loop {
            let (asked, _): (Vec<Lane>, Vec<To>) = lanes.allot(|_| 10).into_iter().unzip();
            if asked.is_empty() {
                break;
            }
            assert!(asked.len() <= MOST_LANES);
            lanes.learn(&asked, &[], false);
            seen.extend(asked.into_iter().map(|lane| lane.topic));
        }
        assert_eq!(seen.len(), names.len());
    }

    #[test]
    fn a_bulkhead_without_room_and_a_paused_topic_are_not_asked() {
        let mut config = Config::default();
        for name in ["a", "b"] {
            config
                .destinations
                .push(Destination::new(name, "http://a").expect("a URL"));
            config.routes.push(Route::new(name, name));
        }
        config.routes.push(Route::to_each("both", ["a", "b"]));
        let mut lanes = Lanes::default();
        let topics = ["a", "b", "both", "neither"].map(topic).to_vec();
        lanes.set_topics(topics, &Routes::new(&config), 2);
        lanes.keep_back(KeptBack {
            topics: HashSet::from(["b".to_owned()]),
            ..KeptBack::default()
        });
        let asked = lanes.allot(|to| if to == To::Bulkhead(0) { 0 } else { 10 });
        let mut asked: Vec<(&str, To)> = asked
            .iter()
            .map(|(lane, to)| (lane.topic.topic.as_str(), *to))
            .collect();
        asked.sort_by_key(|(topic, _)| *topic);
        assert_eq!(asked, [("both", To::Split), ("neither", To::Bulkhead(2))]);
        assert!(lanes.is_anything_left(|_| true));
    }
}
