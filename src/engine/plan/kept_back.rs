//! What must not be claimed although no gate stops it, and why.

use std::collections::HashSet;

use crate::engine::claim::sql::claim::Topic;

/// The topics and destinations that are kept back, by reason. Custody owns it; the planner and the settlers read it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeptBack {
    /// Topics that an operator has paused.
    pub(crate) topics: HashSet<String>,
    /// Paused destinations that have no gate here.
    pub(crate) destinations: HashSet<String>,
    /// The database refuses to record the results of their messages.
    pub(crate) refused: HashSet<Topic>,
}

impl KeptBack {
    /// Whether messages of this topic must not be claimed.
    pub(crate) fn has(&self, topic: &Topic) -> bool {
        self.topics.contains(&topic.topic)
            || self.refused.contains(topic)
            || (!topic.destination.is_empty() && self.destinations.contains(&topic.destination))
    }

    /// The topics whose keys the settlers do not continue.
    pub(crate) fn topics(&self) -> impl Iterator<Item = &String> {
        let refused = self.refused.iter().map(|one| &one.topic);
        self.topics.iter().chain(refused)
    }

    /// Whether something may be claimed again that was kept back before.
    pub(super) fn frees(&self, before: &Self) -> bool {
        !(before.topics.is_subset(&self.topics)
            && before.destinations.is_subset(&self.destinations)
            && before.refused.is_subset(&self.refused))
    }
}
