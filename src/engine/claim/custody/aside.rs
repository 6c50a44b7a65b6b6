//! Messages put aside: the database refused their settles, or the settles of other messages of their topics.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::clock;
use crate::engine::claim::sql::claim::Topic;
use crate::engine::plan::to::To;
use crate::engine::settle::sql::settle::Claim;
use crate::log;

/// The shortest interval between two log lines about held claims.
const TELL_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct TopicsAside {
    /// By topic. Claims and not sequences, because a sequence may be used again.
    of_topics: HashMap<Topic, HashSet<Claim>>,
    /// The messages that were not yet refused individually. Their settles may succeed.
    pub(super) untried: HashSet<Claim>,
    /// The last log line about topics that are held.
    told: Option<Instant>,
}

/// A decision to stop or to resume claims of a topic.
pub(super) struct Judged {
    topic: Topic,
    is_held: bool,
    messages: usize,
    all: usize,
}

impl TopicsAside {
    /// Returns where the new ones among these messages go.
    pub(super) fn put(
        &mut self,
        topic: &Topic,
        claims: impl Iterator<Item = (Claim, To)>,
    ) -> Vec<To> {
        let of_topic = self.of_topics.entry(topic.clone()).or_default();
        let new: Vec<(Claim, To)> = claims
            .filter(|(claim, _)| of_topic.insert(*claim))
            .collect();
        self.untried.extend(new.iter().map(|(claim, _)| claim));
        new.into_iter().map(|(_, to)| to).collect()
    }

    pub(super) fn take(&mut self, topic: &Topic, claims: impl Iterator<Item = Claim>) {
        let Some(of_topic) = self.of_topics.get_mut(topic) else {
            return;
        };
        for claim in claims {
            self.untried.remove(&claim);
            of_topic.remove(&claim);
        }
        if of_topic.is_empty() {
            self.of_topics.remove(topic);
        }
    }

    pub(super) fn of_topic(&self, topic: &Topic) -> usize {
        self.of_topics.get(topic).map_or(0, HashSet::len)
    }

    pub(super) fn count(&self) -> usize {
        self.of_topics.values().map(HashSet::len).sum()
    }

    /// Stops and resumes claims of a topic, by the number of its messages that are put aside: messages whose results
    /// cannot be recorded must not be sent. `held`: the topics that are not claimed from. Returns the decision, to be
    /// logged after the lock is released.
    pub(super) fn judge(
        &mut self,
        topic: &Topic,
        held: &mut HashSet<Topic>,
        most: usize,
    ) -> Option<Judged> {
        let (messages, all) = (self.of_topic(topic), self.count());
        let was_held = held.contains(topic);
        let is_held = match was_held {
            false => messages > 0 && (messages >= most || all >= 2 * most),
            true => messages > 0 && (messages > most / 2 || all > most),
        };
        if is_held == was_held {
            return None;
        }
        match is_held {
            true => held.insert(topic.clone()),
            false => held.remove(topic),
        };
        Some(Judged {
            topic: topic.clone(),
            is_held,
            messages,
            all,
        })
    }

    /// Whether a decision is to be logged.
    pub(super) fn is_news(&mut self, judged: &Judged) -> bool {
        let is_old = |told: Instant| clock::since(told) >= TELL_INTERVAL;
        let is_news = !judged.is_held || self.told.is_none_or(is_old);
        if judged.is_held && is_news {
            self.told = Some(clock::now());
        }
        is_news
    }
}

impl Judged {
    pub(super) fn log(self) {
        let (messages, all) = (self.messages, self.all);
        let Topic { topic, destination } = self.topic;
        let to = match destination.as_str() {
            "" => String::new(),
            name => format!(" to {name}"),
        };
        if self.is_held {
            log::error!(event = "claims_held", topic = topic, destination = destination, messages = messages, all = all; "the database refuses to record the results of {messages} messages of {topic}{to}: this relay claims no more of them until the database accepts the results");
        } else {
            log::info!(event = "claims_resumed", topic = topic, destination = destination, messages = messages; "the database accepts the results of {topic}{to} again: this relay claims its messages again");
        }
    }
}
