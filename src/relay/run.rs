//! Runs: messages of one key that are claimed together, sent one after the other by one sender, and settled together.
//!
//! A message is a run of length one. With a `key_run` above 1, more due messages of its key are claimed behind it, and
//! each is sent after the success of the one before. The first that is not delivered ends the run: the delivered ones
//! are settled by one statement, so that a repeat begins at the beginning of the run, and the rest are released.

use std::collections::HashMap;
use std::sync::Arc;
use std::vec::IntoIter;

use super::bulkhead::Bulkhead;
use super::gate::Room;
use super::job::Job;
use super::registry::Registry;
use super::room::Rooms;
use super::settlement::Settlement;
use super::shared::Shared;
use super::to::To;
use super::verdict::Verdict;
use crate::message::Message;
use crate::store::relay::claim::{Claimed, Longest, Runs, Topic};
use crate::store::relay::ordered::Key;

/// How far the runs of a claim go.
pub(super) struct KeyRuns<'a> {
    shared: &'a Shared,
    registry: Arc<Registry>,
    rooms: Rooms,
    /// The topics of which no message is claimed.
    closed: Vec<String>,
}

impl Shared {
    /// How far the runs of the next claim go. `None`: no destination has runs.
    pub(super) fn runs(&self) -> Option<KeyRuns<'_>> {
        let registry = self.registered.registry();
        let has_runs = registry.has_runs || self.bulkheads.iter().any(|one| one.key_run > 1);
        (has_runs && self.limit.is_none()).then(|| KeyRuns {
            shared: self,
            rooms: self.rooms(),
            closed: self.closed_topics(),
            registry,
        })
    }

    /// The topics of which settlers claim no message.
    pub(super) fn closed_topics(&self) -> Vec<String> {
        let (policy, kept_back) = (self.policy(), self.custody.kept_back());
        let closed = policy.not_taken.iter().chain(&policy.full);
        closed.chain(kept_back.topics()).cloned().collect()
    }
}

impl KeyRuns<'_> {
    fn goes_to(&self, message: &Message, topic: &str) -> To {
        let topic = Topic::new(topic, &message.destination);
        To::of(&self.shared.routes, &self.registry, &topic)
    }

    /// The longest run of a destination, and how many messages there is room for, those in flight included.
    fn longest_at(&self, to: To) -> (Longest, usize) {
        let Some(bulkhead) = to.bulkhead(&self.shared.bulkheads) else {
            return (Longest::default(), 0);
        };
        let (key_run, room) = match to {
            To::Registered(id) => (self.registry.key_run(id), self.rooms.left(id)),
            _ if bulkhead.gate.room() != Room::Free => (1, 0),
            _ => {
                // As in a queue: a batch is sent while the next one is claimed.
                let in_flight = self.shared.custody.of_bulkhead(bulkhead.number);
                (
                    bulkhead.key_run,
                    (2 * bulkhead.prefetch()).saturating_sub(in_flight),
                )
            }
        };
        let longest = Longest {
            messages: key_run.saturating_sub(1),
            bytes: bulkhead.free_bytes().min(bulkhead.request_bytes()),
        };
        (longest, room)
    }
}

impl Runs for KeyRuns<'_> {
    fn longest(&self, first: &[Claimed]) -> Vec<Longest> {
        let ways = first
            .iter()
            .map(|one| self.goes_to(&one.message, &one.message.topic));
        let ways: Vec<To> = ways.collect();
        let mut counts: HashMap<To, usize> = HashMap::new();
        ways.iter()
            .for_each(|to| *counts.entry(*to).or_default() += 1);
        // The runs of a destination share its room.
        let of_ways = counts.into_iter().map(|(to, count)| {
            let (longest, room) = self.longest_at(to);
            let messages = longest.messages.min(room.saturating_sub(count) / count);
            (
                to,
                Longest {
                    messages,
                    ..longest
                },
            )
        });
        let of_ways: HashMap<To, Longest> = of_ways.collect();
        ways.iter().map(|to| of_ways[to]).collect()
    }

    fn goes_along(&self, first: &Message, topic: &str) -> bool {
        !self.closed.iter().any(|closed| closed == topic)
            && self.goes_to(first, topic) == self.goes_to(first, &first.topic)
    }
}

/// Puts messages behind the first of their keys. A run ends before a message that does not go where the first one goes.
pub(super) fn joined(mut first: Vec<Job>, behind: Vec<Job>) -> Vec<Job> {
    if behind.is_empty() {
        return first;
    }
    let keys = first.iter().zip(0..);
    let keys = keys.filter_map(|(job, at)| Some((Key::of(&job.message)?, at)));
    let keys: HashMap<Key, usize> = keys.collect();
    let mut without_first = Vec::new();
    for mut job in behind {
        let run = Key::of(&job.message).and_then(|key| first.get_mut(*keys.get(&key)?));
        let goes_along = run.as_ref().is_some_and(|run| run.to == job.to);
        if !goes_along {
            job.unsent = Some(Verdict::Released);
        }
        match run {
            Some(run) => run.behind.push(job),
            None => without_first.push(job),
        }
    }
    first.extend(without_first);
    first
}

/// A run that is being sent.
pub(super) struct Run {
    left: IntoIter<Job>,
    /// The results so far.
    settled: Option<Settlement>,
}

impl Run {
    /// Returns the first message, and the run of those behind it.
    pub(super) fn begin(mut first: Job) -> (Job, Self) {
        let run = Self {
            left: std::mem::take(&mut first.behind).into_iter(),
            settled: None,
        };
        (first, run)
    }

    /// Takes the result of a message. Returns the message to be sent next. If the message was not delivered, the run
    /// has ended, and the rest is released.
    pub(super) fn next(&mut self, settlement: Settlement, bulkheads: &[Bulkhead]) -> Option<Job> {
        let continues = settlement.is_delivered();
        self.add(settlement);
        if !continues {
            while let Some(job) = self.left.next() {
                self.add(Settlement::unsent(job, bulkheads, Verdict::Released));
            }
        }
        self.left.next()
    }

    fn add(&mut self, settlement: Settlement) {
        match &mut self.settled {
            None => self.settled = Some(settlement),
            Some(first) => first.behind.push(settlement),
        }
    }

    /// The results, when the run has ended.
    pub(super) fn settlement(self) -> Option<Settlement> {
        self.settled
    }

    /// Continues whatever the result is.
    #[cfg(test)]
    pub(super) fn continue_past(&mut self, settlement: Settlement) -> Option<Job> {
        self.add(settlement);
        self.left.next()
    }

    /// The sequences of the delivered messages.
    #[cfg(test)]
    pub(super) fn delivered(&self) -> Vec<i64> {
        let settled = self.settled.iter().flat_map(Settlement::each);
        let delivered = settled.filter(|one| one.is_delivered());
        delivered.map(Settlement::sequence).collect()
    }
}
