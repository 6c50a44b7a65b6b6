//! Where the messages of each topic go.

use std::sync::Arc;

use uuid::Uuid;

use super::to::To;
use crate::engine::claim::sql::claim::Topic;
use crate::engine::claim::sql::page::Free;
use crate::engine::directory::Roster;

#[derive(Debug)]
pub(crate) struct PlanDirectory<'a> {
    pub(super) roster: Arc<dyn Roster>,
    /// The names of the bulkheads, by number.
    pub(super) names: Vec<&'a str>,
}

impl PlanDirectory<'_> {
    /// The tenant of a member, if it has one.
    pub(super) fn tenant(&self, to: To) -> Option<Uuid> {
        match to {
            To::Member(id) | To::Feed(id) => self.roster.tenant(id),
            To::Bulkhead(_) | To::Split | To::Nowhere => None,
        }
    }

    /// Whether the message is left to other relays.
    pub(super) fn leaves(&self, free: &Free) -> bool {
        let namesakes = self.roster.namesakes();
        namesakes.is_some_and(|one| one.leave(&free.destination, free.registration))
    }

    /// The name of the destination of a topic's messages; empty if the messages are fanned out or go nowhere.
    pub(crate) fn goes_to(&self, topic: &Topic) -> String {
        match self.roster.way(topic) {
            To::Bulkhead(number) => self.names[number].to_owned(),
            To::Member(_) | To::Feed(_) => topic.destination.clone(),
            To::Split | To::Nowhere => String::new(),
        }
    }
}
