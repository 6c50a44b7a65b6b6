//! Where the messages of each topic go.

use std::sync::Arc;

use uuid::Uuid;

use crate::relay::registry::Registry;
use crate::relay::to::To;
use crate::routes::Routes;
use crate::store::relay::claim::Topic;
use crate::store::relay::page::Free;

#[derive(Debug)]
pub(super) struct Directory<'a> {
    routes: &'a Routes,
    pub(super) registry: Arc<Registry>,
    /// The names of the bulkheads, by number.
    names: Vec<&'a str>,
}

impl<'a> Directory<'a> {
    pub(super) fn new(routes: &'a Routes, names: Vec<&'a str>) -> Self {
        Self {
            routes,
            registry: Arc::default(),
            names,
        }
    }

    pub(super) fn way(&self, topic: &Topic) -> To {
        To::of(self.routes, &self.registry, topic)
    }

    /// The tenant of an endpoint, if it has one.
    pub(super) fn tenant(&self, to: To) -> Option<Uuid> {
        match to {
            To::Registered(id) => self.registry.get(id)?.tenant_id,
            To::Bulkhead(_) | To::Split | To::Nowhere => None,
        }
    }

    /// Whether the message is left to other relays.
    pub(super) fn leaves(&self, free: &Free) -> bool {
        let namesakes = self.registry.namesakes.as_ref();
        namesakes.is_some_and(|one| one.leave(&free.destination, free.registration))
    }

    /// The name of the destination of a topic's messages; empty if the messages are fanned out or go nowhere.
    pub(super) fn goes_to(&self, topic: &Topic) -> String {
        match self.way(topic) {
            To::Bulkhead(number) => self.names[number].to_owned(),
            To::Registered(_) => topic.destination.clone(),
            To::Split | To::Nowhere => String::new(),
        }
    }
}
