//! Finds and logs the messages that no active relay serves.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::engine::claim::sql::claim::Topic;
use crate::log;
use crate::operate::sql::depths::Depths;
use crate::status::ReasonCode;

/// How often the log repeats a line.
const AGAIN: Duration = Duration::from_secs(600);
/// The most log lines for one count. The next count logs the others.
const MOST_LINES: usize = 10;

/// The messages of one topic and named destination that no active relay serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unrouted {
    pub(super) topic: Topic,
    waiting: i64,
    /// `NO_ROUTE` or `UNKNOWN_TOPIC`.
    pub(super) code: ReasonCode,
    pub(super) why: String,
    /// What to do, as an imperative.
    pub(super) next_step: String,
}

impl Unrouted {
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

/// All topics without a relay, the most messages first.
pub(super) fn unrouted(depths: &Depths) -> Vec<Unrouted> {
    let mut all: Vec<Unrouted> = depths
        .unrouted()
        .filter_map(|lane| {
            let why = lane.unserved.as_ref()?;
            let waiting = lane.pending + lane.retrying;
            Some(Unrouted {
                topic: Topic::new(&lane.topic, &lane.destination),
                waiting,
                code: why.code(),
                why: why.to_string(),
                next_step: why.next_step(waiting),
            })
        })
        .collect();
    all.sort_by_key(|one| -one.waiting);
    all
}

/// When the log has reported each topic.
#[derive(Debug, Default)]
pub(super) struct Logged(HashMap<Topic, Instant>);

impl Logged {
    /// Logs each topic once, and again after [`AGAIN`].
    pub(super) fn log(&mut self, unrouted: &[Unrouted]) {
        self.0
            .retain(|topic, _| unrouted.iter().any(|one| one.topic == *topic));
        let is_new = |one: &&Unrouted| {
            let logged = self.0.get(&one.topic);
            logged.is_none_or(|at| at.elapsed() >= AGAIN)
        };
        let new: Vec<Unrouted> = unrouted.iter().filter(is_new).cloned().collect();
        for one in new.into_iter().take(MOST_LINES) {
            let event = match one.code {
                ReasonCode::UnknownTopic => "unknown_topic",
                _ => "no_route",
            };
            log::error!(event = event, topic = one.topic.topic, destination = one.topic.destination, messages = one.waiting; "{} without using attempts, because {}: {}", one.what(), one.why, one.next_step);
            self.0.insert(one.topic, Instant::now());
        }
    }
}
