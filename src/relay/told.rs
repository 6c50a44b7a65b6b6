//! The messages that other threads send to the claimer.

use std::collections::{HashMap, HashSet};

use super::filtering::Filtering;
use super::job::Job;
use crate::store::relay::claim::Topic;
use crate::store::relay::ordered::Key;

/// An entry in the claimer's inbox.
pub(crate) enum Told {
    /// Messages that a settler claimed while it settled the previous message of their key.
    Continued(Vec<Job>),
    /// Messages whose filters are evaluated.
    Filtered(Vec<Filtering>),
    Returned(Returned),
    /// All leases whose rows are gone while messages still name them.
    Vanished(Vec<i64>),
}

/// Messages that were released or became free. They may be due at index positions that claims have already passed.
#[derive(Debug, Default)]
pub(crate) struct Returned {
    /// For messages without an ordering key: the earliest time from which a message of the topic can be claimed.
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
    /// Whether the entry wakes the claimer. Returned keys do: the claimer checks them at once, or waits for room.
    /// Nothing else would report messages that a settler has claimed and the claimer has released, or messages whose
    /// lease is gone.
    pub(super) fn wakes(&self) -> bool {
        match self {
            Self::Returned(returned) => !returned.keys.is_empty(),
            Self::Vanished(leases) => !leases.is_empty(),
            Self::Continued(_) | Self::Filtered(_) => false,
        }
    }
}
