//! Where claimed messages go: to a sender, or straight to the settler.

use std::sync::atomic::Ordering;

use super::Claimer;
use crate::clock;
use crate::message::Message;
use crate::relay::bulkhead::Job;
use crate::relay::database::Database;
use crate::relay::fate::{Fate, parts};
use crate::relay::settlement::{Settlement, Verdict};
use crate::relay::to::To;
use crate::relay::told::Continued;
use crate::store::relay::claim::{Claimed, TakenOver};
use crate::store::relay::lease::LeaseId;

/// Who has claimed a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// The claimer, where there is room.
    Claimer,
    /// A settler, which does not know whether there is.
    Settler,
}

impl<D: Database> Claimer<'_, D> {
    pub(super) fn hand_over_all(&mut self, claimed: Vec<Claimed>, lease: LeaseId) {
        self.hand_over_from(By::Claimer, claimed, lease);
    }

    pub(super) fn hand_over_continued(&mut self, Continued { claimed, lease }: Continued) {
        self.hand_over_from(By::Settler, claimed, lease);
    }

    fn hand_over_from(&mut self, by: By, mut claimed: Vec<Claimed>, lease: LeaseId) {
        self.planner.knows(&claimed, lease);
        let is_taken_over = |c: &&Claimed| c.taken_over != TakenOver::No;
        let taken_over = claimed.iter().filter(is_taken_over).count() as u64;
        if taken_over > 0 {
            self.shared.count(|stats| stats.taken_over += taken_over);
            self.shared.metrics.taken_over.increment(taken_over);
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
        let shared = self.shared;
        let bulkhead = shared.bulkhead_of(to);
        bulkhead.in_flight.fetch_add(1, Ordering::Relaxed);
        let parts = || parts(&shared.routes, &shared.bulkheads, &claimed.message);
        let fate = Fate::of(&claimed, to, &bulkhead.retries, parts, clock::now());
        let mut message = claimed.message;
        if claimed.taken_over != TakenOver::No {
            log::debug!(event = "taken_over", sequence = message.sequence.0, topic = message.topic, attempts = message.attempts; "a message was taken over from a relay that died");
        }
        let intake = &mut self.intakes[bulkhead.number];
        let verdict = match fate {
            Fate::Send if by == By::Settler && !intake.has_place(bulkhead) => {
                self.planner.had_no_place(&message.topic, to);
                Verdict::Released
            }
            Fate::Send => return intake.put(Job { message, lease }),
            Fate::Settle(verdict) => verdict,
        };
        bulkhead.unload(&mut message);
        let settlement = Settlement::unsent(message, lease, bulkhead, verdict);
        let _ = self.outcomes.send(settlement);
    }
}
