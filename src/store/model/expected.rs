//! The model: what each message is by what has happened so far. Kept without the database's help.

mod message;
mod settles;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::store::relay::claim::{Claimed, Known, TakenOver};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::Key;

use super::promises::{Event, Events, Kept, Promise, broken, keep};
use super::system::{Job, Todo};

pub(super) use self::message::{Identity, Message, State};

/// After so many attempts a message dies.
pub(super) const MAX_ATTEMPTS: i32 = 3;

/// An entry of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settled {
    pub(super) sequence: i64,
    pub(super) is_delivered: bool,
    pub(super) attempts: i32,
    topic: &'static str,
    body: u8,
}

/// A send, in the receivers' log.
#[derive(Debug, Clone)]
struct Sent {
    sequence: i64,
    lease: i64,
    is_settled: bool,
}

#[derive(Debug, Default, Clone)]
pub(super) struct Model {
    pub(super) messages: BTreeMap<i64, Message>,
    pub(super) ledger: BTreeMap<Identity, Vec<Settled>>,
    /// Parts of split messages whose sequences were not seen yet.
    pub(super) parts: BTreeMap<Identity, Message>,
    pub(super) events: Events,
    over: BTreeSet<i64>,
    sends: Vec<Sent>,
    clock: u64,
}

impl Model {
    pub(super) fn note_if(&mut self, has_happened: bool, event: Event) {
        if has_happened {
            *self.events.entry(event).or_default() += 1;
        }
    }

    /// Now: what is committed later has a higher number.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    pub(super) fn end_lease(&mut self, lease: LeaseId) {
        self.over.insert(lease.0);
    }

    pub(super) fn is_over(&self, lease: LeaseId) -> bool {
        self.over.contains(&lease.0)
    }

    /// What this model of a standby knows becomes the truth, but for transactions that were open. What
    /// receivers have got does not come back.
    pub(super) fn fail_over(&mut self, mut standby: Self, leases: &[i64]) {
        for message in standby.messages.values_mut() {
            if matches!(message.state, State::Open(_)) {
                message.state = State::RolledBack;
            }
        }
        standby.events = std::mem::take(&mut self.events);
        standby.sends = std::mem::take(&mut self.sends);
        standby
            .sends
            .iter_mut()
            .for_each(|sent| sent.is_settled = true);
        standby.clock = self.clock + 1;
        standby.note_if(true, Event::FailedOver);
        let is_gone = |lease: &&i64| !leases.contains(lease);
        standby.over.extend(self.over.iter().filter(is_gone));
        *self = standby;
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (i64, &Message)> {
        let messages = self.messages.iter().filter(|(_, m)| m.is_live());
        messages.map(|(&sequence, message)| (sequence, message))
    }

    pub(super) fn dead(&self) -> Vec<i64> {
        let is_dead = |m: &Message| matches!(m.state, State::Dead { .. });
        let dead = self.messages.iter().filter(|(_, m)| is_dead(m));
        dead.map(|(&sequence, _)| sequence).collect()
    }

    /// The transaction, not this producer's, that holds an identity which nobody else sees.
    pub(super) fn is_taken_by_another(&self, identity: &Identity, producer: Option<usize>) -> bool {
        self.messages.values().any(|m| {
            matches!(m.state, State::Open(open) if Some(open) != producer)
                && m.identity == *identity
        })
    }

    /// The message of an identity that this producer sees.
    pub(super) fn seen_by(&self, identity: &Identity, producer: usize) -> Option<(i64, &Message)> {
        let is_seen = |m: &Message| m.is_live() || m.state == State::Open(producer);
        let mut seen = self.messages.iter();
        seen.find(|(_, m)| is_seen(m) && m.identity == *identity)
            .map(|(&sequence, message)| (sequence, message))
    }

    pub(super) fn enqueue(&mut self, sequence: i64, message: Message) -> Kept {
        keep(!self.messages.contains_key(&sequence), Promise::G1, || {
            format!("{sequence} was given twice")
        })?;
        let place = sequence;
        self.messages.insert(sequence, Message { place, ..message });
        Ok(())
    }

    /// A producer's transaction ends.
    pub(super) fn end(&mut self, producer: usize, commits: bool) {
        self.clock += 1;
        let is_held = |m: &Message| matches!(m.state, State::Held { .. });
        let is_late = |m: &Message| {
            m.state == State::Open(producer)
                && (self.messages.values())
                    .any(|o| is_held(o) && o.place > m.place && m.excludes(o))
        };
        let is_late = commits && self.messages.values().any(is_late);
        self.note_if(is_late, Event::CommittedLate);
        for message in self.messages.values_mut() {
            if message.state == State::Open(producer) {
                message.seen_since = self.clock;
                message.state = if commits {
                    State::Waiting
                } else {
                    State::RolledBack
                };
            }
        }
    }

    pub(super) fn pass_time(&mut self) {
        for message in self.messages.values_mut() {
            message.is_due |= message.is_live();
        }
    }

    /// A claim. `as_of`: when it looked.
    pub(super) fn claim(
        &mut self,
        lease: LeaseId,
        as_of: u64,
        is_keyed: bool,
        claimed: &[Claimed],
    ) -> Kept<Vec<Job>> {
        let claimed = claimed.iter();
        claimed
            .map(|one| self.claim_one(lease, as_of, is_keyed, one))
            .collect()
    }

    fn claim_one(
        &mut self,
        lease: LeaseId,
        as_of: u64,
        is_keyed: bool,
        claimed: &Claimed,
    ) -> Kept<Job> {
        let sequence = claimed.message.sequence.0;
        let Some(message) = self.messages.get(&sequence) else {
            return Err(broken(Promise::G1, format!("{sequence} is nobody's")));
        };
        let told =
            |promise, what: &str| broken(promise, format!("{lease} claimed {sequence}: {what}"));
        keep(!self.is_over(lease), Promise::G4, || {
            format!("{lease}, which is over, claimed {sequence}")
        })?;
        let taken_over = match message.state {
            State::Open(_) | State::RolledBack => {
                return Err(told(Promise::G1, "it is not committed"));
            }
            State::Waiting => TakenOver::No,
            State::Held { lease: holder, .. } if !self.over.contains(&holder) => {
                return Err(told(Promise::G3, "another relay has it"));
            }
            State::Held { .. } if message.is_abandoned || message.attempts + 1 >= MAX_ATTEMPTS => {
                TakenOver::Again
            }
            State::Held { .. } => TakenOver::Once,
            _ => return Err(told(Promise::G2, "it has ended")),
        };
        if !message.is_due {
            return Err(told(Promise::G2, "it is not due"));
        }
        if message.ordering_key.is_some() != is_keyed || !is_of(message, claimed) {
            return Err(told(Promise::G1, "it is another message"));
        }
        self.check_order(sequence, message, as_of)?;
        let known = self.known(message);
        if claimed.known != known {
            return Err(told(Promise::G3, "the ledger was not asked"));
        }
        let is_first_takeover = taken_over == TakenOver::Once;
        let attempts = message.attempts + i32::from(is_first_takeover);
        if claimed.taken_over != taken_over || claimed.message.attempts != attempts.unsigned_abs() {
            return Err(told(Promise::G6, "its attempts are wrong"));
        }
        let job = Job {
            lease,
            sequence,
            claimed_at: claimed.message.claimed_at,
            identity: message.identity.clone(),
            attempts,
            key: message.ordering_key.map(|key| Key {
                ordering_key: key.to_owned(),
                destination: message.destination().to_owned(),
            }),
            is_sent: false,
            todo: todo(message, known, taken_over),
        };
        self.note_if(taken_over != TakenOver::No, Event::TakenOver);
        self.note_if(taken_over == TakenOver::Again, Event::TakenOverAgain);
        if let Some(message) = self.messages.get_mut(&sequence) {
            message.attempts = attempts;
            message.is_abandoned |= is_first_takeover;
            message.state = State::Held {
                lease: lease.0,
                claimed_at: job.claimed_at,
            };
        }
        Ok(job)
    }

    /// A message is claimed that has its turn and is alone.
    fn check_order(&self, sequence: i64, message: &Message, as_of: u64) -> Kept {
        let others = self
            .messages
            .iter()
            .filter(|(other, _)| **other != sequence);
        for (other_sequence, other) in others {
            let stands_before = other.place < message.place;
            let is_seen = other.is_live() && other.seen_since <= as_of;
            let has_to_wait = stands_before && is_seen && message.waits_for(other);
            keep(!has_to_wait, Promise::G5, || {
                format!("{sequence} was claimed before {other_sequence}")
            })?;
            let is_in_flight =
                matches!(other.state, State::Held { lease, .. } if !self.over.contains(&lease));
            let is_excluded = is_in_flight && message.excludes(other);
            keep(!is_excluded, Promise::G5, || {
                format!("{sequence} was claimed while {other_sequence} was in flight")
            })?;
            let blocks = other.state == State::Dead { blocks_key: true };
            let is_kept_back = stands_before && blocks && message.is_kept_back_by(other);
            keep(!is_kept_back, Promise::G5, || {
                format!("{sequence} was claimed behind the dead letter {other_sequence}")
            })?;
        }
        Ok(())
    }

    fn known(&self, message: &Message) -> Known {
        let entries = self.ledger.get(&message.identity).into_iter().flatten();
        let delivered: Vec<&Settled> = entries.filter(|entry| entry.is_delivered).collect();
        let is_it = |entry: &&Settled| message.has_content(entry.topic, entry.body);
        match delivered.iter().any(is_it) {
            _ if delivered.is_empty() => Known::No,
            true => Known::Delivered,
            false => Known::OtherContent,
        }
    }

    /// A receiver gets a message. Only a relay whose lease is over may send what is settled, or what
    /// another one has sent.
    pub(super) fn send(&mut self, job: &Job) -> Kept {
        let (lease, sequence) = (job.lease, job.sequence);
        let Some(message) = self.messages.get(&sequence) else {
            return Err(broken(Promise::G1, format!("{sequence} is nobody's")));
        };
        let was_committed = !matches!(message.state, State::Open(_) | State::RolledBack);
        keep(was_committed, Promise::G1, || {
            format!("{sequence} was sent and is not committed")
        })?;
        if !self.is_over(lease) {
            let is_held =
                matches!(message.state, State::Held { lease: holder, .. } if holder == lease.0);
            keep(is_held, Promise::G3, || {
                format!("{sequence} was sent and is not held")
            })?;
            self.check_sends(sequence, message)?;
        }
        let is_again = |sent: &Sent| sent.sequence == sequence && !sent.is_settled;
        let is_again = self.sends.iter().any(is_again);
        self.note_if(is_again, Event::SentTwice);
        self.sends.push(Sent {
            sequence,
            lease: lease.0,
            is_settled: false,
        });
        Ok(())
    }

    fn check_sends(&self, sequence: i64, message: &Message) -> Kept {
        let unsettled = |sent: &&Sent| !sent.is_settled && !self.over.contains(&sent.lease);
        for sent in self.sends.iter().filter(unsettled) {
            keep(sent.sequence != sequence, Promise::G3, || {
                format!("{sequence} was sent twice by relays that live")
            })?;
            let is_in_order = self.messages[&sent.sequence].excludes(message);
            keep(!is_in_order, Promise::G5, || {
                format!("{sequence} was sent beside {} of its key", sent.sequence)
            })?;
        }
        Ok(())
    }

    /// At the end of a history every message has ended, and what is delivered was sent.
    pub(super) fn check_end(&self) -> Kept {
        for (sequence, message) in &self.messages {
            let has_ended = !message.is_live() && !matches!(message.state, State::Open(_));
            keep(has_ended, Promise::G2, || {
                format!("{sequence} never ends: {:?}", message.state)
            })?;
            let is_sent = || self.sends.iter().any(|sent| sent.sequence == *sequence);
            keep(
                message.state != State::Delivered || is_sent(),
                Promise::G2,
                || format!("{sequence} is delivered and was never sent"),
            )?;
        }
        Ok(())
    }
}

fn is_of(message: &Message, claimed: &Claimed) -> bool {
    let is_expired = |at: Instant| at <= Instant::now();
    let row = &claimed.message;
    row.topic == message.topic
        && row.payload == message.body.to_string()
        && row.destination == message.destination()
        && row.idempotency_key == message.identity.0
        && row.ordering_key.as_deref() == message.ordering_key
        && row.expires.is_some_and(is_expired) == message.is_expired
}

/// As the relay's claimer decides it.
fn todo(message: &Message, known: Known, taken_over: TakenOver) -> Todo {
    match (known, taken_over) {
        (Known::Delivered, _) => Todo::Deduplicate,
        (Known::OtherContent, _) => Todo::BuryConflict,
        (Known::No, _) if message.is_to_be_split() => Todo::Split,
        (Known::No, TakenOver::Again) => Todo::CountAbandoned,
        (Known::No, _) if message.is_expired => Todo::BuryExpired,
        (Known::No, _) => Todo::Send,
    }
}
