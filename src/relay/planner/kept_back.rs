//! Messages that must not be claimed although no gate stops them: paused by an operator, or refused by the database.

use std::collections::HashSet;

use crate::store::relay::claim::Topic;

/// The topics and destinations that are kept back without a gate.
#[derive(Debug, Clone, Default)]
pub(in crate::relay) struct KeptBack {
    pub(in crate::relay) topics: HashSet<String>,
    /// Paused destinations that are not in the settings.
    pub(in crate::relay) destinations: HashSet<String>,
    /// Topics whose settles the database refuses, and topics with many messages that wait for their filters.
    pub(in crate::relay) held: HashSet<Topic>,
}

impl KeptBack {
    pub(super) fn has(&self, topic: &Topic) -> bool {
        self.topics.contains(&topic.topic)
            || self.held.contains(topic)
            || (!topic.destination.is_empty() && self.destinations.contains(&topic.destination))
    }
}
