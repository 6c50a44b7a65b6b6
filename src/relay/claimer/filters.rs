//! Queries about registered destinations that decide where claimed messages go: which messages meet which filters.

use std::collections::HashSet;
use std::sync::Arc;

use super::Claimer;
use crate::relay::database::{Answer, Database};
use crate::relay::fate::Met;
use crate::relay::pauses::disable;
use crate::relay::registered::{Customer, Registry};
use crate::relay::session::AfterRefusal;
use crate::routes::Way;
use crate::store::relay::claim::Claimed;

/// The reason for disabling a destination whose filter takes too long.
const TOO_SLOW: &str = "the filter took too long to check messages";

impl<D: Database> Claimer<'_, D> {
    /// The messages and the filters that they meet. First updates the destinations if some messages name a removed one,
    /// or are for nobody: the transaction that enqueued a message may have registered its destination.
    /// `None`: a query failed.
    pub(super) fn look_up(&mut self, claimed: &[Claimed]) -> Option<Met> {
        let registered = &self.shared.registered;
        let registry = registered.registry();
        // A destination that was registered again must get the messages that wait for it.
        let is_removed = |one: &Claimed| registry.is_removed(&one.message.destination);
        let routes = &self.shared.routes;
        let is_for_nobody = |one: &Claimed| {
            let message = &one.message;
            let way = routes.find(&message.topic, &message.destination);
            way == Way::NoRoute && registry.wanting(message).next().is_none()
        };
        if claimed
            .iter()
            .any(|one| is_removed(one) || is_for_nobody(one))
        {
            // The session logs a failure here, and the messages are released.
            self.look_at_rows().ok()?;
        }
        let pairs = pairs(&registered.registry(), claimed);
        if pairs.is_empty() {
            return Some(Met::new());
        }
        self.meeting(pairs, claimed).ok()
    }

    fn meeting(&mut self, mut pairs: Vec<Pair>, claimed: &[Claimed]) -> Answer<Met> {
        let met = match self.ask(AfterRefusal::Keep, &pairs) {
            Err(error) if error.is_refusal() => {
                self.leave_out_unfilterable(&mut pairs, claimed)?;
                self.ask(AfterRefusal::Reconnect, &pairs)?
            }
            met => met?,
        };
        if let Some(met) = met {
            return Ok(met);
        }
        // A filter is slow, or there are many filters: check each destination alone.
        let mut met = Met::new();
        let customers: HashSet<u32> = pairs.iter().map(|(_, one)| one.id).collect();
        for id in customers {
            let of_one = pairs.iter().filter(|(_, one)| one.id == id);
            let of_one: Vec<Pair> = of_one.cloned().collect();
            match (self.ask(AfterRefusal::Reconnect, &of_one)?, of_one.first()) {
                (Some(more), _) => met.extend(more),
                (None, Some((_, customer))) => {
                    disable(&mut self.db, customer.as_seen(), TOO_SLOW, None)?
                }
                (None, None) => {}
            }
        }
        Ok(met)
    }

    /// Removes messages whose payloads PostgreSQL cannot read: they meet no filter.
    fn leave_out_unfilterable(&mut self, pairs: &mut Vec<Pair>, claimed: &[Claimed]) -> Answer<()> {
        let asked: HashSet<i64> = pairs.iter().map(|(sequence, _)| *sequence).collect();
        let messages = claimed.iter().map(|one| &one.message);
        for message in messages.filter(|one| asked.contains(&one.sequence.0)) {
            let sequence = message.sequence.0;
            if !self.db.is_filterable(&message.payload)? {
                log::warn!(event = "payload_unfilterable", sequence = sequence, topic = message.topic; "PostgreSQL cannot read the payload of message {} ({}) as jsonb: destinations with a filter do not get the message", message.message_id, message.topic);
                pairs.retain(|(one, _)| *one != sequence);
            }
        }
        Ok(())
    }

    /// The messages and the filters that they meet. `None`: the query took too long.
    fn ask(&mut self, after: AfterRefusal, pairs: &[Pair]) -> Answer<Option<Met>> {
        let asked: Vec<(i64, &str)> = (pairs.iter())
            .map(|(sequence, one)| (*sequence, one.name()))
            .collect();
        let places = self.db.meeting(after, &asked, self.shared.moment())?;
        Ok(places.map(|places| {
            let pair = |place: i64| {
                let (sequence, one) = pairs.get(usize::try_from(place - 1).ok()?)?;
                Some((*sequence, one.id))
            };
            places.into_iter().filter_map(pair).collect()
        }))
    }
}

/// The sequence of a message, and a destination with a filter that may match.
type Pair = (i64, Arc<Customer>);

/// The pairs to check, for messages that name no destination.
fn pairs(registry: &Registry, claimed: &[Claimed]) -> Vec<Pair> {
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
