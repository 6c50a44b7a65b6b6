//! Runs: messages of one key that are claimed together, sent one after the other by one sender, and settled together.
//!
//! A message is a run of length one. With a `key_run` above 1, more due messages of its key are claimed behind it, and
//! each is sent after the success of the one before. The first that is not delivered ends the run: the delivered ones
//! are settled by one statement, so that a repeat begins at the beginning of the run, and the rest are released.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::vec::IntoIter;

use super::bulkhead::Bulkhead;
use super::gate::Room;
use super::job::Job;
use super::verdict::Verdict;
use crate::engine::claim::sql::claim::{Claimed, Longest, Runs, Topic};
use crate::engine::directory::Roster;
use crate::engine::host::shared::Shared;
use crate::engine::keys::sql::ordered::Key;
use crate::engine::plan::room::Rooms;
use crate::engine::plan::to::To;
use crate::engine::settle::settlement::Settlement;
use crate::message::Message;

/// How far the runs of a claim go.
pub(crate) struct KeyRuns<'a> {
    shared: &'a Shared,
    roster: Arc<dyn Roster>,
    rooms: Rooms,
    /// The topics of which no message is claimed.
    closed: Vec<String>,
}

impl Shared {
    /// How far the runs of the next claim go. `None`: no destination has runs.
    pub(crate) fn runs(&self) -> Option<KeyRuns<'_>> {
        let roster = self.directory.roster();
        let has_runs = roster.has_runs() || self.bulkheads.iter().any(|one| one.limits.key_run > 1);
        (has_runs && self.limit.is_none()).then(|| KeyRuns {
            shared: self,
            rooms: self.rooms(),
            closed: self.closed_topics(),
            roster,
        })
    }

    /// The topics of which settlers claim no message.
    pub(crate) fn closed_topics(&self) -> Vec<String> {
        let (policy, kept_back) = (self.policy(), self.custody.kept_back());
        let closed = policy.not_taken.iter().chain(&policy.full);
        closed.chain(kept_back.topics()).cloned().collect()
    }
}

impl KeyRuns<'_> {
    fn goes_to(&self, message: &Message, topic: &str) -> To {
        let topic = Topic::new(topic, &message.destination);
        self.roster.way(&topic)
    }

    /// How far each of this many runs of a destination goes: they share its room, for which those in flight count.
    fn longest_at(&self, to: To, runs: usize) -> Longest {
        let Some(bulkhead) = to.bulkhead(&self.shared.bulkheads) else {
            return Longest::default();
        };
        let (key_run, room) = match to {
            To::Member(id) => {
                let limits = self.roster.limits(id);
                (limits.map_or(1, |one| one.key_run), self.rooms.left(id))
            }
            _ if bulkhead.gate.room() != Room::Free => (1, 0),
            _ => {
                // As in a queue: a batch is sent while the next one is claimed.
                let in_flight = self.shared.custody.of_way(to);
                let room = (2 * bulkhead.prefetch()).saturating_sub(in_flight);
                (bulkhead.limits.key_run, room)
            }
        };
        Longest {
            messages: key_run
                .saturating_sub(1)
                .min(room.saturating_sub(runs) / runs),
            bytes: bulkhead.free_bytes().min(bulkhead.request_bytes()),
        }
    }
}

impl Runs for KeyRuns<'_> {
    fn longest(&self, first: &[Claimed]) -> Vec<Longest> {
        let way = |one: &Claimed| self.goes_to(&one.message, &one.message.topic);
        let ways: Vec<To> = first.iter().map(way).collect();
        let mut counts: HashMap<To, usize> = HashMap::new();
        for to in &ways {
            *counts.entry(*to).or_default() += 1;
        }
        let of_ways = counts.into_iter();
        let of_ways = of_ways.map(|(to, count)| (to, self.longest_at(to, count)));
        let of_ways: HashMap<To, Longest> = of_ways.collect();
        ways.iter().map(|to| of_ways[to]).collect()
    }

    fn goes_along(&self, first: &Message, topic: &str) -> bool {
        !self.closed.iter().any(|closed| closed == topic)
            && self.goes_to(first, topic) == self.goes_to(first, &first.topic)
    }
}

/// Puts messages behind the first of their keys. A run ends before a message that does not go where the first one goes.
pub(crate) fn joined(mut first: Vec<Job>, behind: Vec<Job>) -> Vec<Job> {
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

/// A send that has ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) went_well: bool,
    pub(crate) took: Duration,
    /// The number of messages of a run that were sent.
    pub(crate) messages: u32,
}

impl Sent {
    /// This send, and another one after it.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            went_well: other.went_well,
            took: self.took + other.took,
            messages: self.messages + other.messages,
        }
    }

    /// The mean time of a message.
    pub(crate) fn mean(self) -> Duration {
        self.took / self.messages.max(1)
    }
}

/// A run that is being sent.
pub(crate) struct Run {
    left: IntoIter<Job>,
    /// The results so far.
    settled: Option<Settlement>,
}

impl Run {
    /// Returns the first message, and the run of those behind it.
    pub(crate) fn begin(mut first: Job) -> (Job, Self) {
        let run = Self {
            left: std::mem::take(&mut first.behind).into_iter(),
            settled: None,
        };
        (first, run)
    }

    /// Takes the result of a message. Returns the message to be sent next. If the message was not delivered, the run
    /// has ended, and the rest is released.
    pub(crate) fn next(&mut self, settlement: Settlement, bulkheads: &[Bulkhead]) -> Option<Job> {
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

    /// Whether a message of the run has a result.
    pub(super) fn is_begun(&self) -> bool {
        self.settled.is_some()
    }

    /// The results, when the run has ended.
    pub(crate) fn settlement(self) -> Option<Settlement> {
        self.settled
    }

    /// Continues whatever the result is.
    #[cfg(test)]
    pub(crate) fn continue_past(&mut self, settlement: Settlement) -> Option<Job> {
        self.add(settlement);
        self.left.next()
    }

    /// The sequences of the delivered messages.
    #[cfg(test)]
    pub(crate) fn delivered(&self) -> Vec<i64> {
        let settled = self.settled.iter().flat_map(Settlement::each);
        let delivered = settled.filter(|one| one.is_delivered());
        delivered.map(Settlement::sequence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::batch::Gathered;
    use super::super::job::Terms;
    use super::super::verdict::Attempt;
    use super::*;
    use crate::builder::Dispatchers;
    use crate::config::{Config, Destination, RequestBatch, Route};
    use crate::dispatch::{Failure, Response};
    use crate::engine::lease::sql::lease::LeaseId;
    use crate::engine::plan::tests::claimed;
    use crate::engine::settle::settlement::Kind;
    use crate::status::ReasonCode;

    fn bulkheads() -> Vec<Bulkhead> {
        let mut config = Config::default();
        let destination = Destination::new("a", "http://a").expect("a URL");
        config.destinations.push(destination);
        config.routes.push(Route::new("a", "a"));
        Bulkhead::all(&config, Dispatchers::idle(&config)).0
    }

    fn job(bulkheads: &[Bulkhead], sequence: i64, to: To) -> Job {
        let message = claimed(sequence, "a", Some("k")).message;
        bulkheads[0].load(&message);
        Job::new(message, LeaseId(1), to, Terms::default())
    }

    /// R73: a message of a run that is not for the feed, or has expired, is no event of it, nor are those behind it, which
    /// must not come before it.
    #[test]
    fn a_run_for_a_feed_ends_before_a_message_that_is_not_for_it() {
        let bulkheads = bulkheads();
        let stored = |sequence| Job {
            unsent: Some(Verdict::Stored),
            ..job(&bulkheads, sequence, To::Member(1))
        };
        let expired = Job {
            unsent: Some(Verdict::expired()),
            ..stored(3)
        };
        let of_none = Job {
            unsent: Some(Verdict::NoSubscriber),
            ..job(&bulkheads, 3, To::Split)
        };
        for third in [expired, of_none] {
            let behind = vec![stored(2), third, stored(4)];
            let run = joined(vec![stored(1)], behind).remove(0);
            let run = Settlement::unsent(run, &bulkheads, Verdict::Stored);
            let kinds: Vec<Kind> = run.each().map(Settlement::kind).collect();
            let expected = [Kind::Stored, Kind::Stored, Kind::Released, Kind::Released];
            assert_eq!(kinds, expected);
        }
    }

    /// A run of the messages 1 to `count`.
    fn run(bulkheads: &[Bulkhead], count: i64) -> Job {
        let job = |sequence| job(bulkheads, sequence, To::Bulkhead(0));
        let mut jobs = joined(vec![job(1)], (2..=count).map(job).collect());
        assert_eq!(jobs.len(), 1);
        jobs.remove(0)
    }

    fn sequences<'a>(of: impl Iterator<Item = &'a Settlement>) -> Vec<i64> {
        of.map(Settlement::sequence).collect()
    }

    /// R61: the delivered messages are one settlement, and each of the others is settled after it.
    #[test]
    fn a_run_ends_with_the_first_message_that_is_not_delivered() {
        let bulkheads = bulkheads();
        let (first, mut run) = Run::begin(run(&bulkheads, 5));
        let mut next = Some(first);
        while let Some(job) = next {
            let verdict = match job.message.sequence.0 {
                3 => {
                    let failure = Failure::new(ReasonCode::Timeout, "no");
                    Verdict::Retry(failure, Duration::ZERO, Attempt::Counted)
                }
                _ => Verdict::Delivered(Response::default()),
            };
            next = run.next(Settlement::unsent(job, &bulkheads, verdict), &bulkheads);
        }
        let parts: Vec<Settlement> = run.settlement().expect("results").apart().collect();
        let each: Vec<Vec<i64>> = parts.iter().map(|one| sequences(one.each())).collect();
        assert_eq!(each, [vec![1, 2], vec![3], vec![4], vec![5]]);
        let is_released = |one: &Settlement| one.kind() == Kind::Released;
        assert!(parts[2..].iter().all(is_released) && !is_released(&parts[1]));
        let is_followed: Vec<bool> = parts.iter().map(|one| one.is_followed).collect();
        assert_eq!(is_followed, [true, true, true, false]);
    }

    /// R61: a message that is settled without a send says nothing about those behind it.
    #[test]
    fn the_rest_of_a_run_that_is_not_sent_is_released() {
        let bulkheads = bulkheads();
        let unsent = Settlement::unsent(run(&bulkheads, 3), &bulkheads, Verdict::Deduplicated(1));
        let kinds: Vec<Kind> = unsent.apart().map(|one| one.kind()).collect();
        assert_eq!(kinds, [Kind::Deduplicated, Kind::Released, Kind::Released]);
    }

    /// R61: the destination of the key may have changed between two claims.
    #[test]
    fn a_message_that_goes_elsewhere_is_not_sent_in_a_run() {
        let bulkheads = bulkheads();
        let to = |sequence, to| job(&bulkheads, sequence, to);
        let behind = vec![
            to(2, To::Bulkhead(0)),
            to(3, To::Nowhere),
            to(4, To::Bulkhead(0)),
        ];
        let jobs = joined(vec![to(1, To::Bulkhead(0))], behind);
        let unsent: Vec<bool> = jobs[0].each().map(|one| one.unsent.is_some()).collect();
        assert_eq!(unsent, [false, false, true, false]);
        // Without its first message, a run is not sent at all.
        let jobs = joined(Vec::new(), vec![to(2, To::Bulkhead(0))]);
        assert!(matches!(jobs[0].unsent, Some(Verdict::Released)));
    }

    /// R61: a run is one request, so a request without space for it is sent first.
    #[test]
    fn a_request_takes_only_a_run_that_fits_as_a_whole() {
        let bulkheads = bulkheads();
        let limits = RequestBatch {
            size: 4,
            ..RequestBatch::default()
        };
        let mut gathered = Gathered::default();
        assert!(
            gathered.fits(&run(&bulkheads, 6), limits),
            "nothing is smaller"
        );
        gathered.add(run(&bulkheads, 2));
        assert!(!gathered.is_full(limits));
        assert!(gathered.fits(&run(&bulkheads, 2), limits));
        assert!(!gathered.fits(&run(&bulkheads, 3), limits));
        gathered.add(run(&bulkheads, 2));
        assert!(gathered.is_full(limits));
    }
}
