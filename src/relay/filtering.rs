//! A message on its way through the evaluation of its filters.

use std::collections::HashMap;
use std::sync::Arc;

use super::registry::{Customer, Registry};
use crate::message::Message;
use crate::store::relay::claim::{Claimed, Known};
use crate::store::relay::lease::LeaseId;

/// A claimed message whose filters must be evaluated.
pub(crate) struct Filtering {
    pub(super) claimed: Claimed,
    pub(super) lease: LeaseId,
    /// Whether the filters match that were evaluated, by the number of their destination.
    pub(super) answers: HashMap<u32, bool>,
}

impl Filtering {
    pub(super) fn new(claimed: Claimed, lease: LeaseId) -> Self {
        Self {
            claimed,
            lease,
            answers: HashMap::new(),
        }
    }

    /// Whether filters decide where this message goes.
    pub(super) fn is_for(registry: &Registry, claimed: &Claimed) -> bool {
        let message = &claimed.message;
        registry.has_filters
            && message.destination.is_empty()
            && matches!(claimed.known, Known::No)
            && registry.wanting(message).any(|one| one.filter.is_some())
    }

    pub(super) fn message(&self) -> &Message {
        &self.claimed.message
    }

    /// The destinations whose filters are still to be evaluated.
    pub(super) fn unanswered<'r>(
        &'r self,
        registry: &'r Registry,
    ) -> impl Iterator<Item = &'r Arc<Customer>> {
        let is_open =
            |one: &&Arc<Customer>| one.filter.is_some() && !self.answers.contains_key(&one.id);
        registry.wanting(self.message()).filter(is_open)
    }
}
