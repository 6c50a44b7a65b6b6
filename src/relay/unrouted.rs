//! Reports messages that no active relay serves.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::log;
use crate::store::operate::depths::Depths;
use crate::store::relay::claim::Topic;
use crate::store::relay::served::Unserved;

/// How often the log repeats a line.
const AGAIN: Duration = Duration::from_secs(600);
/// The most log lines for one count. The next count logs the others.
const MOST_LINES: usize = 10;

/// The messages of one topic and named destination that no active relay serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unrouted {
    pub(crate) topic: Topic,
    pub(crate) waiting: i64,
    pub(crate) why: Unserved,
}

impl Unrouted {
    /// All topics without a relay, the most messages first.
    pub(super) fn all(depths: &Depths) -> Vec<Self> {
        let mut all: Vec<Self> = depths
            .unrouted()
            .filter_map(|lane| {
                Some(Self {
                    topic: Topic::new(&lane.topic, &lane.destination),
                    waiting: lane.pending + lane.retrying,
                    why: lane.unserved.clone()?,
                })
            })
            .collect();
        all.sort_by_key(|one| -one.waiting);
        all
    }

    /// `no relay serves the topic order.paid: 7 messages wait`
    pub(super) fn what(&self) -> String {
        let Topic { topic, destination } = &self.topic;
        let to = match destination.as_str() {
            "" => String::new(),
            name => format!(" for the destination {name:?}"),
        };
        let messages = match self.waiting {
            1 => "1 message waits".to_owned(),
            count => format!("{count} messages wait"),
        };
        format!("no relay serves the topic {topic:?}{to}: {messages}")
    }
}

/// The topics that the log has reported, and when.
#[derive(Debug, Default)]
pub(super) struct Told(HashMap<Topic, Instant>);

impl Told {
    /// Logs each topic once, and again after [`AGAIN`].
    pub(super) fn tell(&mut self, unrouted: &[Unrouted]) {
        self.0
            .retain(|topic, _| unrouted.iter().any(|one| one.topic == *topic));
        let is_new = |one: &&Unrouted| {
            let told = self.0.get(&one.topic);
            told.is_none_or(|at| at.elapsed() >= AGAIN)
        };
        let new: Vec<Unrouted> = unrouted.iter().filter(is_new).cloned().collect();
        for one in new.into_iter().take(MOST_LINES) {
            log::error!(event = "no_route", topic = one.topic.topic, destination = one.topic.destination, messages = one.waiting; "{} without using attempts, because {}: {}", one.what(), one.why, one.why.next_step());
            self.0.insert(one.topic, Instant::now());
        }
    }
}
