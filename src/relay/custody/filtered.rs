//! The messages that wait for their filters.

use std::collections::{HashMap, HashSet};

use crate::message::Message;
use crate::store::relay::claim::Topic;

/// While this many bytes of a topic wait, the relay claims no more messages of the topic.
const MOST_BYTES: usize = 8 * 1024 * 1024;
/// The limits for all topics together, as a multiple of the limits of one topic.
const TOPICS: usize = 4;

/// The messages that wait for their filters. Full topics are not claimed from, so the filters of one topic fill neither
/// the memory nor the room of others.
#[derive(Debug)]
pub(super) struct Filtered {
    /// The most messages of one topic.
    most: usize,
    all: Size,
    of_topics: HashMap<String, Size>,
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

impl Filtered {
    pub(super) fn new(batch: usize) -> Self {
        Self {
            most: batch.max(2),
            all: Size::default(),
            of_topics: HashMap::new(),
            is_full: false,
        }
    }

    /// Counts messages that begin to wait. `full`: the full topics.
    pub(super) fn enter<'m>(
        &mut self,
        messages: impl Iterator<Item = &'m Message>,
        full: &mut HashSet<Topic>,
    ) {
        for message in messages {
            let size = self.of_topics.entry(message.topic.clone()).or_default();
            for size in [size, &mut self.all] {
                size.count += 1;
                size.bytes += message.payload.len();
            }
        }
        self.judge(full);
    }

    /// Counts messages that no longer wait. Returns whether the relay may claim more than before.
    pub(super) fn leave<'m>(
        &mut self,
        messages: impl Iterator<Item = &'m Message>,
        full: &mut HashSet<Topic>,
    ) -> bool {
        for message in messages {
            let size = self.of_topics.entry(message.topic.clone()).or_default();
            for size in [size, &mut self.all] {
                size.count = size.count.saturating_sub(1);
                size.bytes = size.bytes.saturating_sub(message.payload.len());
            }
        }
        let before = (full.len(), self.is_full);
        self.judge(full);
        self.of_topics.retain(|_, size| size.count > 0);
        (full.len(), self.is_full) != before
    }

    /// Decides which topics are full.
    fn judge(&mut self, full: &mut HashSet<Topic>) {
        for (topic, size) in &self.of_topics {
            let topic = Topic::new(topic, "");
            let was_full = full.contains(&topic);
            match size.is_full(was_full, self.most, MOST_BYTES) {
                true => full.insert(topic),
                false => full.remove(&topic),
            };
        }
        let (most, most_bytes) = (TOPICS * self.most, TOPICS * MOST_BYTES);
        self.is_full = self.all.is_full(self.is_full, most, most_bytes);
    }

    /// Whether the relay claims no more messages that may have to be filtered.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::planner::tests::claimed;

    /// R50: the messages of one topic take no room from others.
    #[test]
    fn a_topic_is_full_until_half_of_its_messages_have_left() {
        let (mut filtered, mut full) = (Filtered::new(4), HashSet::new());
        let messages: Vec<Message> = (1..=4).map(|n| *claimed(n, "a", None).message).collect();
        filtered.enter(messages[..3].iter(), &mut full);
        assert!(full.is_empty());
        filtered.enter(messages[3..].iter(), &mut full);
        assert_eq!(full, [Topic::new("a", "")].into());
        assert!(!filtered.is_full(), "other topics have room");
        assert!(!filtered.leave(messages[..1].iter(), &mut full));
        assert!(
            !filtered.leave(messages[1..2].iter(), &mut full),
            "half is left"
        );
        assert!(filtered.leave(messages[2..3].iter(), &mut full));
        assert!(full.is_empty());
    }
}
