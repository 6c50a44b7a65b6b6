//! What settles and operators change.

use std::collections::BTreeSet;

use super::super::promises::{Event, event_of};
use super::super::system::{FAN, Job, Settle, Verdict};
use super::{Identity, Message, Model, Settled, State};
use crate::status::ReasonCode;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Claim;

impl Model {
    /// A settle. Returns what it has to change: what its lease holds by the claim that it is about.
    pub(in crate::store::model) fn settle(&mut self, settle: &Settle) -> Vec<i64> {
        self.clock += 1;
        let held = |job: &&Job| {
            self.messages.get(&job.sequence).is_some_and(|message| {
                message.state
                    == State::Held {
                        lease: job.lease.0,
                        claimed_at: job.claimed_at,
                    }
            })
        };
        let changed: Vec<i64> = settle
            .jobs
            .iter()
            .filter(held)
            .map(|j| j.sequence)
            .collect();
        for &sequence in &changed {
            self.settle_one(sequence, settle.verdict);
        }
        for sent in &mut self.sends {
            sent.is_settled |= sent.lease == settle.lease.0 && changed.contains(&sent.sequence);
        }
        changed
    }

    fn settle_one(&mut self, sequence: i64, verdict: Verdict) {
        let Some(mut message) = self.messages.remove(&sequence) else {
            return;
        };
        self.note_if(true, event_of(verdict));
        match verdict {
            Verdict::Delivered => {
                message.state = State::Delivered;
                self.record(sequence, &message, true, message.attempts + 1);
            }
            Verdict::Deduplicated => message.state = State::Deduplicated,
            Verdict::Retry {
                code,
                counted,
                is_due_again,
            } => {
                message.state = State::Waiting;
                message.attempts += counted;
                message.is_abandoned = code == ReasonCode::Abandoned;
                message.is_due = is_due_again;
            }
            Verdict::Dead {
                counted,
                blocks_key,
                ..
            } => self.bury(sequence, &mut message, counted, blocks_key),
            Verdict::Split => self.split(sequence, &mut message),
            Verdict::Released => message.state = State::Waiting,
        }
        self.messages.insert(sequence, message);
    }

    fn bury(&mut self, sequence: i64, message: &mut Message, counted: i32, blocks_key: bool) {
        message.attempts += counted;
        message.state = State::Dead {
            blocks_key: blocks_key && message.ordering_key.is_some(),
        };
        self.record(sequence, message, false, message.attempts);
    }

    /// Nothing that was written before is changed.
    fn record(&mut self, sequence: i64, message: &Message, is_delivered: bool, attempts: i32) {
        let settled = Settled {
            sequence,
            is_delivered,
            attempts,
            topic: message.topic,
            body: message.body,
        };
        let entries = self.ledger.entry(message.identity.clone());
        entries.or_default().push(settled);
    }

    fn split(&mut self, sequence: i64, message: &mut Message) {
        let mut parts = Vec::new();
        for destination in FAN {
            let identity = (message.identity.0.clone(), destination.to_owned());
            let there = self.messages.values();
            let there = there
                .filter(|m| m.is_live())
                .find(|m| m.identity == identity);
            match there {
                Some(other) if !other.has_content(message.topic, message.body) => {
                    self.bury(sequence, message, 0, false);
                    self.note_if(true, Event::SplitInConflict);
                    return;
                }
                Some(_) => {}
                None => parts.push(identity),
            }
        }
        message.state = State::Split;
        for identity in parts {
            let part = Message {
                identity: identity.clone(),
                state: State::Waiting,
                attempts: 0,
                is_abandoned: false,
                seen_since: self.clock,
                ..message.clone()
            };
            self.parts.insert(identity, part);
        }
    }

    /// Gives back what a lease holds, but for `known`.
    pub(in crate::store::model) fn release_unknown(&mut self, lease: LeaseId, known: &[Claim]) {
        for (sequence, message) in &mut self.messages {
            let State::Held {
                lease: holder,
                claimed_at: at,
            } = message.state
            else {
                continue;
            };
            let claim = Claim {
                sequence: *sequence,
                at,
            };
            if holder == lease.0 && !known.contains(&claim) {
                message.state = State::Waiting;
            }
        }
    }

    /// Puts dead letters back, where their identity is free.
    pub(in crate::store::model) fn requeue(&mut self, sequences: &[i64]) {
        self.clock += 1;
        let mut taken: BTreeSet<Identity> = self.live().map(|(_, m)| m.identity.clone()).collect();
        for sequence in sequences {
            let Some(message) = self.messages.get_mut(sequence) else {
                continue;
            };
            if !taken.insert(message.identity.clone()) {
                continue;
            }
            message.state = State::Waiting;
            message.attempts = 0;
            message.is_abandoned = false;
            message.is_due = true;
            message.is_expired = false;
            message.seen_since = self.clock;
            *self.events.entry(Event::Requeued).or_default() += 1;
        }
    }

    pub(in crate::store::model) fn discard(&mut self, sequences: &[i64]) {
        for sequence in sequences {
            if let Some(message) = self.messages.get_mut(sequence) {
                message.state = State::Discarded;
                *self.events.entry(Event::Discarded).or_default() += 1;
            }
        }
    }
}
