//! Where claimed messages go: to a sender, or straight to the settler.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Claimer;
use crate::dispatch::Failure;
use crate::message::Message;
use crate::relay::settlement::{Settlement, Verdict};
use crate::relay::shared::Job;
use crate::relay::stats::add;
use crate::relay::to::To;
use crate::relay::told::Continued;
use crate::routes::Way;
use crate::status::ReasonCode;
use crate::store::relay::claim::{Claimed, Known, TakenOver};
use crate::store::relay::lease::LeaseId;

/// Who has claimed a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// The claimer, where there is room.
    Claimer,
    /// A settler, which does not know whether there is.
    Settler,
}

impl Claimer<'_> {
    pub(super) fn hand_over_all(&mut self, claimed: Vec<Claimed>, lease: LeaseId) {
        self.hand_over_from(By::Claimer, claimed, lease);
    }

    pub(super) fn hand_over_continued(&mut self, Continued { claimed, lease }: Continued) {
        self.hand_over_from(By::Settler, claimed, lease);
    }

    fn hand_over_from(&mut self, by: By, mut claimed: Vec<Claimed>, lease: LeaseId) {
        self.planner.knows(&claimed, lease);
        let is_taken_over = |c: &&Claimed| c.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count();
        if taken_over > 0 {
            add(&self.shared.stats.taken_over, taken_over);
            self.shared.metrics.taken_over.increment(taken_over as u64);
            log::warn!(event = "takeover", messages = taken_over; "messages were taken over from a relay that died or lost its lease");
        }
        claimed.sort_unstable_by_key(|c| c.message.sequence);
        let mut seen = vec![(0, 0); self.intakes.len()];
        let mut seen_to_split = (0, 0);
        for one in claimed {
            let Message {
                topic, destination, ..
            } = &one.message;
            let to = To::of(&self.shared.routes, topic, destination);
            let seen = match to {
                To::Bulkhead(number) => Some(&mut seen[number]),
                To::Split => Some(&mut seen_to_split),
                To::Nowhere => None,
            };
            if let Some((count, bytes)) = seen {
                *count += 1;
                *bytes += one.message.bytes();
            }
            self.hand_over(by, one, to, lease);
        }
        for (intake, (count, bytes)) in self.intakes.iter_mut().zip(seen) {
            intake.payloads.learn(count, bytes);
        }
        let (count, bytes) = seen_to_split;
        self.split_payloads.learn(count, bytes);
    }

    /// To a sender, or straight to the settler where nothing has to be sent.
    fn hand_over(&mut self, by: By, claimed: Claimed, to: To, lease: LeaseId) {
        let Claimed {
            mut message,
            known,
            taken_over,
            ..
        } = claimed;
        if taken_over != TakenOver::No {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "a message was taken over from a relay that died");
        }
        let bulkhead = self.shared.bulkhead_of(to);
        let intake = &mut self.intakes[bulkhead.number];
        bulkhead.in_flight.fetch_add(1, Ordering::Relaxed);
        let abandoned = || {
            let error = "the relay that had claimed it died or lost its lease";
            Failure::new(ReasonCode::Abandoned, error)
        };
        let verdict = if known == Known::Delivered {
            Verdict::Deduplicated
        } else if known == Known::OtherContent {
            let error = "the key was delivered before, with another topic or payload";
            Verdict::Dead(Failure::new(ReasonCode::IdempotencyConflict, error), 0)
        } else if to == To::Nowhere {
            // It was behind another one of its key, or was claimed because its time is over.
            let is_expired = message.expires.is_some_and(|end| Instant::now() >= end);
            match is_expired {
                true => Verdict::expired(),
                false => Verdict::Released,
            }
        } else if to == To::Split {
            Verdict::Split(self.destinations_of(&message))
        } else if taken_over == TakenOver::Again {
            Verdict::of_failure(abandoned(), message.attempts, &bulkhead.retries)
        } else if taken_over == TakenOver::Once && message.attempts >= bulkhead.retries.max_attempts
        {
            // The takeover was the last attempt that its destination allows.
            Verdict::Dead(abandoned(), 0)
        } else if by == By::Settler && !intake.has_place(bulkhead) {
            self.planner.had_no_place(&message.topic, to);
            Verdict::Released
        } else {
            intake.put(Job { message, lease });
            return;
        };
        bulkhead.unload(&mut message);
        let settlement = Settlement::unsent(message, lease, bulkhead, verdict);
        let _ = self.outcomes.send(settlement);
    }

    fn destinations_of(&self, message: &Message) -> Vec<String> {
        match self
            .shared
            .routes
            .find(&message.topic, &message.destination)
        {
            Way::Split(numbers) => numbers
                .iter()
                .map(|number| self.shared.bulkheads[*number].name.to_string())
                .collect(),
            Way::To(_) | Way::NoRoute | Way::UnknownDestination | Way::NotTaken => Vec::new(),
        }
    }
}
