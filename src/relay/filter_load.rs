//! The number of messages that wait for their filters, and the filters that are in trouble.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::message::Message;
use crate::store::filters::Unfinished;
use crate::store::relay::claim::Topic;

/// While this many bytes of a topic wait, the relay claims no more messages of the topic.
const MOST_BYTES: usize = 8 * 1024 * 1024;
/// The limits for all topics together, as a multiple of the limits of one topic.
const TOPICS: usize = 4;
/// How long a trouble is reported.
const REMEMBERED: Duration = Duration::from_secs(600);
/// The shortest interval between two log lines about one destination.
const TELL_INTERVAL: Duration = Duration::from_secs(60);
/// The most destinations whose troubles are remembered.
const MOST_TROUBLES: usize = 1000;

/// The messages that wait for their filters. Full topics are not claimed from, so the filters of one topic fill neither
/// the memory nor the room of others.
#[derive(Debug)]
pub(crate) struct Load {
    /// The most messages of one topic.
    most: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    all: Size,
    of_topics: HashMap<String, Size>,
    full: HashSet<Topic>,
    is_full: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Size {
    count: usize,
    bytes: usize,
}

impl Size {
    /// Whether the limit is reached or, if it was reached before, more than half of it is left.
    fn is_full(self, was_full: bool, most: usize, most_bytes: usize) -> bool {
        let parts = if was_full { 2 } else { 1 };
        parts * self.count >= most || parts * self.bytes >= most_bytes
    }
}

impl Load {
    pub(crate) fn new(batch: usize) -> Self {
        Self {
            most: batch.max(2),
            waiting: Mutex::default(),
        }
    }

    /// Counts messages that begin to wait.
    pub(crate) fn enter<'m>(&self, messages: impl Iterator<Item = &'m Message>) {
        let waiting = &mut *lock(&self.waiting);
        for message in messages {
            let size = waiting.of_topics.entry(message.topic.clone()).or_default();
            for size in [size, &mut waiting.all] {
                size.count += 1;
                size.bytes += message.payload.len();
            }
        }
        self.judge(waiting);
    }

    /// Counts messages that no longer wait. Returns whether the relay may claim more than before.
    pub(crate) fn leave<'m>(&self, messages: impl Iterator<Item = &'m Message>) -> bool {
        let waiting = &mut *lock(&self.waiting);
        for message in messages {
            let size = waiting.of_topics.entry(message.topic.clone()).or_default();
            for size in [size, &mut waiting.all] {
                size.count = size.count.saturating_sub(1);
                size.bytes = size.bytes.saturating_sub(message.payload.len());
            }
        }
        let before = (waiting.full.len(), waiting.is_full);
        self.judge(waiting);
        waiting.of_topics.retain(|_, size| size.count > 0);
        (waiting.full.len(), waiting.is_full) != before
    }

    fn judge(&self, waiting: &mut Waiting) {
        for (topic, size) in &waiting.of_topics {
            let topic = Topic::new(topic, "");
            let was_full = waiting.full.contains(&topic);
            match size.is_full(was_full, self.most, MOST_BYTES) {
                true => waiting.full.insert(topic),
                false => waiting.full.remove(&topic),
            };
        }
        let (most, most_bytes) = (TOPICS * self.most, TOPICS * MOST_BYTES);
        waiting.is_full = (waiting.all).is_full(waiting.is_full, most, most_bytes);
    }

    /// The topics of which the relay claims no more messages.
    pub(crate) fn full(&self) -> HashSet<Topic> {
        lock(&self.waiting).full.clone()
    }

    /// Whether the relay claims no more messages that may have to be filtered.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.waiting).is_full
    }

    /// The number of messages that wait.
    pub(crate) fn count(&self) -> usize {
        lock(&self.waiting).all.count
    }
}

/// The filters that have failed or did not finish lately, for health and the log.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<HashMap<String, Trouble>>);

#[derive(Debug)]
struct Trouble {
    since: Instant,
    last: Instant,
    told: Option<Instant>,
    failures: u64,
    what: String,
}

impl Troubles {
    /// Records an error of a filter for a message, which therefore does not match.
    pub(super) fn failed(&self, name: &str, message: &Message, error: &str, now: Instant) {
        let (id, sequence) = (message.message_id, message.sequence.0);
        let what = format!(
            "failed for message {id} ({error}): a message for which a filter fails does not match"
        );
        if let Some(failures) = self.note(name, 1, what, now) {
            log::warn!(event = "filter_failed", destination = name, sequence = sequence, topic = message.topic, error = error, failures = failures; "the filter of the registered destination {name} failed for message {id} of {} ({error}): the destination does not get the message ({failures} failures so far)", message.topic);
        }
    }

    /// Records an evaluation that did not finish.
    pub(super) fn waits(&self, name: &str, unfinished: &Unfinished, now: Instant) {
        let seconds = unfinished.took.as_secs_f64();
        let why = match &unfinished.error {
            Some(error) => format!("did not finish ({error})"),
            None => format!("was cancelled after {seconds:.1} s"),
        };
        let what = format!("{why}: the messages wait, and use no attempts");
        if self.note(name, 0, what, now).is_some() {
            log::warn!(event = "filter_unfinished", destination = name, seconds = seconds; "the filter of the registered destination {name} {why}: its messages are released, and the filter is evaluated again later");
        }
    }

    /// Returns the number of failures so far, if the trouble is to be logged.
    fn note(&self, name: &str, failures: u64, what: String, now: Instant) -> Option<u64> {
        let mut troubles = lock(&self.0);
        troubles.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        if troubles.len() >= MOST_TROUBLES && !troubles.contains_key(name) {
            return None;
        }
        let one = troubles.entry(name.to_owned()).or_insert_with(|| Trouble {
            since: now,
            last: now,
            told: None,
            failures: 0,
            what: String::new(),
        });
        one.last = now;
        one.failures += failures;
        one.what = what;
        let is_due =
            (one.told).is_none_or(|told| now.saturating_duration_since(told) >= TELL_INTERVAL);
        is_due.then(|| {
            one.told = Some(now);
            one.failures
        })
    }

    /// The trouble that began first, and the number of destinations in trouble.
    pub(crate) fn first(&self, now: Instant) -> Option<(String, usize)> {
        let mut troubles = lock(&self.0);
        troubles.retain(|_, one| now.saturating_duration_since(one.last) < REMEMBERED);
        let (name, first) = troubles.iter().min_by_key(|(_, one)| one.since)?;
        let what = format!(
            "the filter of the registered destination {name} {}",
            first.what
        );
        Some((what, troubles.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::planner::tests::claimed;

    /// R50: the messages of one topic take no room from others.
    #[test]
    fn a_topic_is_full_until_half_of_its_messages_have_left() {
        let load = Load::new(4);
        let messages: Vec<Message> = (1..=4).map(|n| *claimed(n, "a", None).message).collect();
        load.enter(messages[..3].iter());
        assert!(load.full().is_empty());
        load.enter(messages[3..].iter());
        assert_eq!(load.full(), [Topic::new("a", "")].into());
        assert!(!load.is_full(), "other topics have room");
        assert!(!load.leave(messages[..1].iter()));
        assert!(!load.leave(messages[1..2].iter()), "half is left");
        assert!(load.leave(messages[2..3].iter()));
        assert!(load.full().is_empty());
        assert_eq!(load.count(), 1);
    }
}
