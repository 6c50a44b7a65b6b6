//! Messages that no relay at work serves: what is said of them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::store::operate::depths::Depths;
use crate::store::relay::claim::Topic;

/// How often the log says so again.
const AGAIN: Duration = Duration::from_secs(600);
/// Lines of one look; the next look has the others.
const MOST_LINES: usize = 10;

/// The messages of a topic that no relay at work serves, for the destination that they name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unrouted {
    pub(crate) topic: Topic,
    pub(crate) waiting: i64,
}

impl Unrouted {
    /// All, those with the most messages first.
    pub(super) fn all(depths: &Depths) -> Vec<Self> {
        let mut all: Vec<Self> = depths
            .unrouted()
            .map(|lane| Self {
                topic: Topic::new(&lane.topic, &lane.destination),
                waiting: lane.pending + lane.retrying,
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

/// Which of them the log has told of, and when.
#[derive(Debug, Default)]
pub(super) struct Told(HashMap<Topic, Instant>);

impl Told {
    /// Says so once for each, and now and then again.
    pub(super) fn tell(&mut self, unrouted: &[Unrouted]) {
        self.0
            .retain(|topic, _| unrouted.iter().any(|one| one.topic == *topic));
        let is_new = |one: &&Unrouted| {
            let told = self.0.get(&one.topic);
            told.is_none_or(|at| at.elapsed() >= AGAIN)
        };
        let new: Vec<Unrouted> = unrouted.iter().filter(is_new).cloned().collect();
        for one in new.into_iter().take(MOST_LINES) {
            log::error!(event = "no_route", topic = one.topic.topic, destination = one.topic.destination, messages = one.waiting; "{}, using no attempts, until a relay has a route or a handler", one.what());
            self.0.insert(one.topic, Instant::now());
        }
    }
}
