//! What is looked up of registered destinations to say where claimed messages go.

use std::collections::HashSet;
use std::sync::Arc;

use super::Claimer;
use crate::relay::database::{Answer, Database};
use crate::relay::fate::Met;
use crate::relay::pauses::disable;
use crate::relay::registered::{Customer, Registry};
use crate::relay::session::AfterRefusal;
use crate::store::relay::claim::Claimed;

/// What a filter was that takes too long.
const TOO_SLOW: &str = "its filter took too long to look at a message";

impl<D: Database> Claimer<'_, D> {
    /// Which of these messages meet which filters; and whether the destinations of some are gone still. `None`: the
    /// database did not say.
    pub(super) fn look_up(&mut self, claimed: &[Claimed]) -> Option<Met> {
        let registered = &self.shared.registered;
        let registry = registered.registry();
        // One that was put again has messages by now that it is to get.
        let is_removed = |one: &Claimed| registry.is_removed(&one.message.destination);
        if claimed.iter().any(is_removed) {
            // What fails here is told by the session, and the messages go back.
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
        // Some filter is slow, or there are many: each by itself.
        let mut met = Met::new();
        let customers: HashSet<u32> = pairs.iter().map(|(_, one)| one.id).collect();
        for id in customers {
            let of_one = pairs.iter().filter(|(_, one)| one.id == id);
            let of_one: Vec<Pair> = of_one.cloned().collect();
            match (self.ask(AfterRefusal::Reconnect, &of_one)?, of_one.first()) {
                (Some(more), _) => met.extend(more),
                (None, Some((_, customer))) => disable(&mut self.db, customer.as_seen(), TOO_SLOW)?,
                (None, None) => {}
            }
        }
        Ok(met)
    }

    /// Messages whose payloads PostgreSQL cannot look into meet no filter.
    fn leave_out_unfilterable(&mut self, pairs: &mut Vec<Pair>, claimed: &[Claimed]) -> Answer<()> {
        let asked: HashSet<i64> = pairs.iter().map(|(sequence, _)| *sequence).collect();
        let messages = claimed.iter().map(|one| &one.message);
        for message in messages.filter(|one| asked.contains(&one.sequence.0)) {
            let sequence = message.sequence.0;
            if !self.db.is_filterable(&message.payload)? {
                log::warn!(event = "payload_unfilterable", sequence = sequence, topic = message.topic; "message {sequence} ({}) matches no filter: PostgreSQL cannot read its payload as jsonb", message.topic);
                pairs.retain(|(one, _)| *one != sequence);
            }
        }
        Ok(())
    }

    /// `None`: it took too long.
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

/// A message, and a destination with a filter that may want it.
type Pair = (i64, Arc<Customer>);

/// Of the messages that name no destination.
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
