//! A message on its way through the evaluation of its filters.

use std::collections::HashMap;
use std::sync::Arc;

use crate::message::Message;
use crate::relay::registered::{Customer, Registry};
use crate::store::relay::claim::{Claimed, Known};
use crate::store::relay::lease::LeaseId;

/// A claimed message whose filters must be evaluated.
pub(crate) struct Filtering {
    pub(in crate::relay) claimed: Claimed,
    pub(in crate::relay) lease: LeaseId,
    /// Whether the filters match that were evaluated, by the number of their destination.
    pub(in crate::relay) answers: HashMap<u32, bool>,
}

impl Filtering {
    pub(in crate::relay) fn new(claimed: Claimed, lease: LeaseId) -> Self {
        Self {
            claimed,
            lease,
            answers: HashMap::new(),
        }
    }

    /// Whether filters decide where this message goes.
    pub(in crate::relay) fn is_for(registry: &Registry, claimed: &Claimed) -> bool {
        let message = &claimed.message;
        registry.has_filters
            && message.destination.is_empty()
            && matches!(claimed.known, Known::No)
            && registry.wanting(message).any(|one| one.filter.is_some())
    }

    pub(in crate::relay) fn message(&self) -> &Message {
        &self.claimed.message
    }

    /// The destinations whose filters are still to be evaluated.
    pub(in crate::relay) fn unanswered<'r>(
        &'r self,
        registry: &'r Registry,
    ) -> impl Iterator<Item = &'r Arc<Customer>> {
        let is_open =
            |one: &&Arc<Customer>| one.filter.is_some() && !self.answers.contains_key(&one.id);
        registry.wanting(self.message()).filter(is_open)
    }
}
