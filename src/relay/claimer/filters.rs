//! Which messages the filters of registered destinations let through.

use std::collections::HashSet;
use std::sync::Arc;

use super::Claimer;
use crate::relay::database::{Answer, Database};
use crate::relay::fate::Met;
use crate::relay::pauses::disable;
use crate::relay::registered::{Customer, Registry};
use crate::store::relay::claim::Claimed;

/// What a filter was that takes too long.
const TOO_SLOW: &str = "its filter took too long to look at a message";

impl<D: Database> Claimer<'_, D> {
    /// Which of these messages meet which filters. `None`: the database did not say.
    pub(super) fn met_filters(&mut self, claimed: &[Claimed]) -> Option<Met> {
        let registry = self.shared.registered.registry();
        let pairs = pairs(&registry, claimed);
        if pairs.is_empty() {
            return Some(Met::new());
        }
        // What fails here is told by the session, and the messages go back.
        self.meeting(&pairs).ok()
    }

    fn meeting(&mut self, pairs: &[(i64, Arc<Customer>)]) -> Answer<Met> {
        if let Some(met) = self.ask(pairs)? {
            return Ok(met);
        }
        // Some filter is slow, or there are many: each by itself.
        let mut met = Met::new();
        let customers: HashSet<u32> = pairs.iter().map(|(_, one)| one.id).collect();
        for id in customers {
            let of_one = pairs.iter().filter(|(_, one)| one.id == id);
            let of_one: Vec<(i64, Arc<Customer>)> = of_one.cloned().collect();
            match (self.ask(&of_one)?, of_one.first()) {
                (Some(more), _) => met.extend(more),
                (None, Some((_, customer))) => disable(&mut self.db, customer.name(), TOO_SLOW)?,
                (None, None) => {}
            }
        }
        Ok(met)
    }

    /// `None`: it took too long.
    fn ask(&mut self, pairs: &[(i64, Arc<Customer>)]) -> Answer<Option<Met>> {
        let asked: Vec<(i64, &str)> = (pairs.iter())
            .map(|(sequence, one)| (*sequence, one.name()))
            .collect();
        let places = self.db.meeting(&asked, self.shared.moment())?;
        Ok(places.map(|places| {
            let pair = |place: i64| {
                let (sequence, one) = pairs.get(usize::try_from(place - 1).ok()?)?;
                Some((*sequence, one.id))
            };
            places.into_iter().filter_map(pair).collect()
        }))
    }
}

/// Messages that name no destination, and those with filters that may want them.
fn pairs(registry: &Registry, claimed: &[Claimed]) -> Vec<(i64, Arc<Customer>)> {
    let mut pairs = Vec::new();
    if !registry.has_filters {
        return pairs;
    }
    let messages = claimed.iter().map(|one| &one.message);
    for message in messages.filter(|one| one.destination.is_empty()) {
        let filtering = registry.wanting(message).filter(|one| one.has_filter);
        pairs.extend(filtering.map(|one| (message.sequence.0, Arc::clone(one))));
    }
    pairs
}
