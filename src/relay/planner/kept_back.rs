//! What an operator has paused and has no gate, and what the database refuses.

use std::collections::HashSet;

use crate::store::relay::claim::Topic;

/// What is kept back and has no gate.
#[derive(Debug, Default)]
pub(in crate::relay) struct KeptBack {
    pub(in crate::relay) topics: HashSet<String>,
    /// Destinations that the settings do not have.
    pub(in crate::relay) destinations: HashSet<String>,
    /// Those whose settles the database refuses.
    pub(in crate::relay) held: HashSet<Topic>,
}

impl KeptBack {
    pub(super) fn has(&self, topic: &Topic) -> bool {
        self.topics.contains(&topic.topic)
            || self.held.contains(topic)
            || (!topic.destination.is_empty() && self.destinations.contains(&topic.destination))
    }
}
