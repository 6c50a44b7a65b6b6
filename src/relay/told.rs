//! What others tell the claimer.

use std::collections::{HashMap, HashSet};

use super::job::Job;
use crate::store::relay::claim::Topic;
use crate::store::relay::ordered::Key;

/// A message in the claimer's inbox.
pub(crate) enum Told {
    /// Messages that were claimed right behind settled ones of their keys.
    Continued(Vec<Job>),
    Returned(Returned),
    /// The rows of these leases, and of no others, are gone while messages name them.
    Vanished(Vec<i64>),
}

/// Messages that were given back, or became free: they may be due where claims have passed.
#[derive(Debug, Default)]
pub(crate) struct Returned {
    /// Of messages without an ordering key: since when the first of them can be claimed.
    pub(crate) topics: HashMap<Topic, i64>,
    pub(crate) keys: HashSet<Key>,
}

impl Returned {
    pub(super) fn new(
        topics: impl Iterator<Item = (Topic, i64)>,
        keys: impl Iterator<Item = Key>,
    ) -> Self {
        let mut returned = Self {
            keys: keys.collect(),
            ..Self::default()
        };
        for (topic, available_at) in topics {
            let first = returned.topics.entry(topic).or_insert(available_at);
            *first = available_at.min(*first);
        }
        returned
    }
}

impl Told {
    /// Whether the claimer does not wait any longer. It looks at keys at once, or waits for room for them: of what
    /// the settlers have claimed and the claimer gave back nobody tells else.
    pub(super) fn wakes(&self) -> bool {
        match self {
            Self::Returned(returned) => !returned.keys.is_empty(),
            Self::Continued(_) | Self::Vanished(_) => false,
        }
    }
}
