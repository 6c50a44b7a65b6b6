//! A message, and what it has to do with others.

use super::super::history::New;
use super::super::system::goes_to;

/// Idempotency key and destination.
pub(in crate::store::model) type Identity = (String, String);

#[derive(Debug, Clone)]
pub(in crate::store::model) struct Message {
    pub(in crate::store::model) topic: &'static str,
    pub(in crate::store::model) body: u8,
    pub(in crate::store::model) identity: Identity,
    pub(in crate::store::model) ordering_key: Option<&'static str>,
    /// In the order of its key.
    pub(in crate::store::model) place: i64,
    pub(in crate::store::model) state: State,
    pub(in crate::store::model) attempts: i32,
    /// Its last failure is that a relay died.
    pub(in crate::store::model) is_abandoned: bool,
    pub(in crate::store::model) is_due: bool,
    pub(in crate::store::model) is_expired: bool,
    /// When others could see it first, by the model's clock.
    pub(in crate::store::model) seen_since: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store::model) enum State {
    /// In this producer's open transaction.
    Open(usize),
    RolledBack,
    Waiting,
    Held {
        lease: i64,
        claimed_at: i64,
    },
    Delivered,
    Deduplicated,
    Dead {
        blocks_key: bool,
    },
    Discarded,
    Split,
}

impl Message {
    pub(in crate::store::model) fn new(new: &New, key: String, state: State) -> Self {
        Self {
            topic: new.topic,
            body: new.body,
            identity: (key, new.destination.to_owned()),
            ordering_key: new.ordering_key,
            place: 0,
            state,
            attempts: 0,
            is_abandoned: false,
            is_due: new.is_due,
            is_expired: new.is_expired,
            seen_since: 0,
        }
    }

    pub(in crate::store::model) fn is_live(&self) -> bool {
        matches!(self.state, State::Waiting | State::Held { .. })
    }

    pub(in crate::store::model) fn destination(&self) -> &str {
        &self.identity.1
    }

    pub(in crate::store::model) fn has_content(&self, topic: &str, body: u8) -> bool {
        self.topic == topic && self.body == body
    }

    pub(super) fn has_key_of(&self, other: &Self) -> bool {
        self.ordering_key.is_some() && self.ordering_key == other.ordering_key
    }

    pub(super) fn goes_to(&self) -> &str {
        goes_to(self.topic, self.destination())
    }

    /// Whether it waits for this one, where that stands before it. Messages that name no destination
    /// wait for one another, and for those before them at the destination that they go to; those that
    /// name one for all that name none, and for those that name the same.
    pub(super) fn waits_for(&self, other: &Self) -> bool {
        let names_none = other.destination().is_empty();
        self.has_key_of(other) && (names_none || other.destination() == self.goes_to())
    }

    /// Whether they may not be in flight at once: they go to one destination, or name none.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        let name_none = self.destination().is_empty() && other.destination().is_empty();
        self.has_key_of(other) && (name_none || self.goes_to() == other.goes_to())
    }

    /// By a dead letter that goes where this one goes, or that names no destination.
    pub(super) fn is_kept_back_by(&self, other: &Self) -> bool {
        let names_none = other.destination().is_empty();
        self.has_key_of(other) && (names_none || other.destination() == self.goes_to())
    }

    pub(super) fn is_to_be_split(&self) -> bool {
        self.topic == "fan" && self.destination().is_empty()
    }
}
