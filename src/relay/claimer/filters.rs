//! Which claimed messages need an answer of filters, or of the table of registered destinations, before the relay knows
//! where they go.

use super::Claimer;
use super::hand_over::By;
use crate::relay::database::Database;
use crate::relay::fate::{Met, Unasked};
use crate::relay::filtering::Filtering;
use crate::relay::planner::Report;
use crate::routes::Way;
use crate::store::brief::Tried;
use crate::store::relay::claim::{Batch, Claimed};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::namesakes::OF_ROUTE;

impl<D: Database> Claimer<'_, D> {
    /// Updates the destinations if the claim has seen registrations that this relay does not know, or if some messages
    /// name a removed destination or are for nobody.
    pub(super) fn look_up(&mut self, batch: &Batch) -> Result<Met, Unasked> {
        let registry = self.shared.registered.registry();
        let is_outdated = !self.shared.registered.has_read(batch.registrations);
        let is_affected = |one: &Claimed| is_outdated && one.message.destination.is_empty();
        // A destination that was registered again must get the messages that wait for it.
        let is_removed = |one: &Claimed| {
            let (message, named) = (&one.message, registry.named(&one.message.destination));
            let is_gone = match named {
                Some(named) => named.is_another(message),
                None => message.registration.is_some(),
            };
            let is_unsure = registry.is_removed(&message.destination) || is_gone;
            is_unsure && message.registration != Some(OF_ROUTE)
        };
        let routes = &self.shared.routes;
        let has_no_subscriber = |one: &Claimed| {
            let message = &one.message;
            let way = routes.find(&message.topic, &message.destination);
            way == Way::NoRoute && registry.wanting(message).next().is_none()
        };
        let is_unsure =
            |one: &Claimed| is_affected(one) || is_removed(one) || has_no_subscriber(one);
        let mut all = batch.claimed.iter().chain(&batch.behind);
        if all.any(is_unsure) {
            // The session logs a failure, and the messages are released.
            let named = (batch.claimed.iter().chain(&batch.behind))
                .map(|one| one.message.destination.as_str());
            let waiting = self.without_destination(named);
            let looked = self.look_at_rows(&waiting).map_err(|_| Unasked::Released)?;
            if looked == Tried::Locked {
                return Err(Unasked::Locked);
            }
        }
        Ok(Met::new())
    }

    /// Hands messages to the thread that evaluates filters.
    pub(super) fn filter(&mut self, claimed: Vec<Claimed>, lease: LeaseId) {
        if claimed.is_empty() {
            return;
        }
        self.shared.took_to_filter(&claimed, lease);
        let bytes = claimed.iter().map(|one| one.message.bytes()).sum();
        self.split_payloads.learn(claimed.len(), bytes);
        for one in &claimed {
            self.planner.hear(Report::Claimed(one.message.sequence.0));
        }
        let filtering = claimed
            .into_iter()
            .map(|claimed| Filtering::new(claimed, lease));
        self.evaluate(filtering.collect());
    }

    fn evaluate(&self, filtering: Vec<Filtering>) {
        // Without that thread the relay has ended, and its messages are taken over when the lease expires.
        let _ = self.to_filter.send(filtering);
    }

    /// Sends messages on whose filters are evaluated. Filters that have appeared meanwhile are evaluated first.
    pub(super) fn filtered(&mut self, filtered: Vec<Filtering>) {
        let registry = self.shared.registered.registry();
        let is_done = |one: &Filtering| one.unanswered(&registry).next().is_none();
        let (done, again): (Vec<_>, Vec<_>) = filtered.into_iter().partition(is_done);
        if !again.is_empty() {
            let messages = again.iter().map(Filtering::message);
            self.shared.custody.wait_for_filters(messages);
            self.evaluate(again);
        }
        let jobs = self.shared.filtered(done);
        self.hand_over(By::Claimer, jobs);
    }
}
