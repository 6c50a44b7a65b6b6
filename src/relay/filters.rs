//! The thread that evaluates the filters of registered destinations.
//!
//! Filters belong to customers, and take as long as they like. So neither the claimer nor a settler waits for a filter:
//! the claimer hands messages for destinations with filters to this thread, and the thread hands them back with the
//! answers ([`Told::Filtered`]). Meanwhile the messages are in flight.
//!
//! * Tenants share the time, and the topics of a tenant take turns. A turn is one call of the database, which begins no
//!   evaluation after 200 ms. What a tenant with slow filters cannot have evaluated soon is released. See [`Shares`].
//! * An error for a message is an answer: the filter does not match.
//! * An evaluation that does not end is no answer. The message is released without an attempt, and is due again later.
//!   Until then, the filter is not evaluated for other messages either. See [`Memory`].
//! * While many messages of a topic wait here, the relay claims no more of the topic. See
//!   [`Custody`](super::custody::Custody).

mod memory;
mod shares;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};

use self::memory::{Judged, Memory};
use self::shares::Shares;
use super::database::Database;
use super::filtering::Filtering;
use super::job::{Job, Terms, is_expired};
use super::pauses::disable;
use super::registry::{Customer, Registry};
use super::settlement::{Outcomes, Settlement};
use super::shared::Shared;
use super::to::To;
use super::told::Told;
use super::verdict::{Attempt, Verdict};
use crate::clock;
use crate::config::Config;
use crate::dispatch::Failure;
use crate::hand::Hand;
use crate::status::ReasonCode;
use crate::store::brief::Tried;
use crate::store::filters::{Evaluated, Pairs};

/// The time limit of statements without a limit of their own.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(20);
/// The most pairs and bytes of one call. A call evaluates at least one pair.
const MOST_PAIRS: usize = 2000;
const MOST_BYTES: usize = 1024 * 1024;
/// The first and the longest delay of messages whose filters the database does not evaluate.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// Messages that wait for the same filter return within this time of one another.
const SPREAD: Duration = Duration::from_millis(250);

/// The reason for disabling a destination whose filter is slow.
const TOO_SLOW: &str = "the filter is too slow: evaluating it for one message took longer than 500 ms, several times in a row";
/// The reason for releasing messages of a tenant with slow filters.
const TOO_MANY: &str =
    "many messages of this tenant wait for slow filters: the filters are evaluated later";

pub(crate) struct Filters<'a, D> {
    shared: &'a Shared,
    db: D,
    inbox: Receiver<Vec<Filtering>>,
    outcomes: Outcomes,
    waiting: Shares<Filtering>,
    memory: Memory,
    /// How many calls in a row have failed.
    failures: u32,
}

/// The inbox has no more senders: the claimer has ended.
pub(super) struct Ended;

impl<'a, D: Database> Filters<'a, D> {
    pub(crate) fn new(
        shared: &'a Shared,
        inbox: Receiver<Vec<Filtering>>,
        outcomes: Outcomes,
        db: D,
    ) -> Self {
        Self {
            shared,
            db,
            inbox,
            outcomes,
            waiting: Shares::default(),
            memory: Memory::default(),
            failures: 0,
        }
    }

    /// Whether messages wait here.
    #[cfg(test)]
    pub(super) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.inbox.is_empty()
    }

    /// Evaluates filters until the claimer has ended.
    pub(crate) fn run(mut self) {
        loop {
            if self.waiting.is_empty() {
                match self.inbox.recv() {
                    Ok(new) => self.take_in(new),
                    Err(_) => return,
                }
            }
            if let Err(Ended) = self.hear() {
                self.release_all();
                return;
            }
            if self.shared.is_stopping() {
                self.release_all();
            } else if let Some(pause) = self.turn() {
                self.shared.pause(pause);
            }
        }
    }

    /// Reads the inbox.
    pub(super) fn hear(&mut self) -> Result<(), Ended> {
        loop {
            match self.inbox.try_recv() {
                Ok(new) => self.take_in(new),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Ended),
            }
        }
    }

    fn take_in(&mut self, new: Vec<Filtering>) {
        for one in new {
            let message = one.message();
            let (tenant, topic) = (message.tenant_id, message.topic.clone());
            self.waiting.push(tenant, &topic, one);
        }
    }

    /// Evaluates filters for the next topic. Returns how long to pause, if the database has failed.
    pub(super) fn turn(&mut self) -> Option<Duration> {
        let mut turn = self.waiting.begin()?;
        let registry = self.shared.registered.registry();
        let asked = self.next_call(&registry, &mut turn.waiting);
        let (messages, began) = (asked.len(), clock::now());
        let failed = self.ask(asked, &mut turn.waiting);
        let now = clock::now();
        let (too_many, wait) = self.waiting.end(turn, messages, now - began);
        let until = now + wait.clamp(FIRST_DELAY, LONGEST_DELAY);
        for one in too_many {
            self.put_off(one, TOO_MANY, until);
        }
        failed
    }

    /// The first messages that one call evaluates, with the destinations to be asked about. Messages for a filter that
    /// rests are put off.
    fn next_call(
        &mut self,
        registry: &Registry,
        waiting: &mut VecDeque<Filtering>,
    ) -> Vec<(Filtering, Vec<Arc<Customer>>)> {
        let now = clock::now();
        let (mut asked, mut pairs, mut bytes) = (Vec::new(), 0, 0);
        while let Some(one) = waiting.pop_front() {
            let customers: Vec<_> = one.unanswered(registry).cloned().collect();
            let resting = customers.iter().find_map(|customer| {
                let until = self.memory.rests_until(customer, now)?;
                Some((Arc::clone(customer), until))
            });
            if let Some((customer, until)) = resting {
                self.put_off(one, &waits_for(&customer.name), until);
                continue;
            }
            pairs += customers.len();
            bytes += one.message().payload.len();
            if !asked.is_empty() && (pairs > MOST_PAIRS || bytes > MOST_BYTES) {
                waiting.push_front(one);
                break;
            }
            asked.push((one, customers));
        }
        asked
    }

    /// Evaluates, and hands messages on whose filters are all evaluated. The others wait again.
    fn ask(
        &mut self,
        asked: Vec<(Filtering, Vec<Arc<Customer>>)>,
        waiting: &mut VecDeque<Filtering>,
    ) -> Option<Duration> {
        let of_pairs = || {
            let messages = asked.iter().enumerate();
            messages.flat_map(|(at, (_, customers))| customers.iter().map(move |one| (at, one)))
        };
        let mut places: HashMap<u32, usize> = HashMap::new();
        let mut pairs = Pairs::default();
        (pairs.payloads).extend(asked.iter().map(|(one, _)| one.message().payload.as_str()));
        for (at, customer) in of_pairs() {
            let place = *places.entry(customer.id).or_insert_with(|| {
                pairs
                    .filters
                    .push(customer.filter.as_deref().unwrap_or_default());
                pairs.filters.len() - 1
            });
            pairs.pairs.push((at, place));
        }
        let limit = self.memory.limit(of_pairs().map(|(_, customer)| customer));
        let evaluated = match pairs.pairs.is_empty() {
            true => Ok(Vec::new()),
            false => self.db.evaluate(&pairs, limit),
        };
        let evaluated = match evaluated {
            Ok(evaluated) => evaluated,
            Err(error) => {
                // The session logs the failure.
                let delay = FIRST_DELAY.saturating_mul(2_u32.saturating_pow(self.failures));
                self.failures = self.failures.saturating_add(1);
                let until = clock::now() + delay.min(LONGEST_DELAY);
                let why = format!(
                    "the database could not evaluate filters of registered destinations: {error}"
                );
                for (one, _) in asked {
                    self.put_off(one, &why, until);
                }
                return Some(self.db.after().wait);
            }
        };
        self.failures = 0;
        let of_pairs: Vec<_> = of_pairs().map(|(at, one)| (at, Arc::clone(one))).collect();
        let mut asked: Vec<_> = asked.into_iter().map(|(one, _)| (one, None)).collect();
        for ((at, customer), answer) in of_pairs.into_iter().zip(evaluated) {
            let (one, put_off) = &mut asked[at];
            match self.learn(one, &customer, answer) {
                Ok(matches) => {
                    one.answers.insert(customer.id, matches);
                }
                Err(until) => *put_off = Some((waits_for(&customer.name), until)),
            }
        }
        let registry = self.shared.registered.registry();
        let mut done = Vec::new();
        let mut again = Vec::new();
        for (one, put_off) in asked {
            match put_off {
                Some((why, until)) => self.put_off(one, &why, until),
                None if one.unanswered(&registry).next().is_none() => done.push(one),
                None => again.push(one),
            }
        }
        again
            .into_iter()
            .rev()
            .for_each(|one| waiting.push_front(one));
        if !done.is_empty() {
            self.leave(&done);
            self.shared.tell_claimer(Told::Filtered(done));
        }
        None
    }

    /// Takes in the result of an evaluation: whether the filter matches, or until when the filter rests.
    fn learn(
        &mut self,
        one: &Filtering,
        customer: &Arc<Customer>,
        answer: Evaluated,
    ) -> Result<bool, Instant> {
        let (shared, message) = (self.shared, one.message());
        let matches = match answer {
            Evaluated::Matches => true,
            Evaluated::DoesNot => false,
            Evaluated::Failed(error) => {
                shared.metrics.filter_errors.increment(1);
                let now = clock::now();
                shared
                    .filter_troubles
                    .failed(&customer.name, message, &error, now);
                false
            }
            Evaluated::Unfinished(unfinished) => {
                let now = clock::now();
                let Judged { until, is_too_slow } =
                    self.memory.unfinished(customer, message, &unfinished, now);
                shared
                    .filter_troubles
                    .waits(&customer.name, &unfinished, now);
                // A failure is logged by the session. After it, and if the row is locked, the next evaluation tries again.
                if is_too_slow {
                    let why = (Hand::Relay, TOO_SLOW);
                    let told = disable(&mut self.db, customer.as_seen(), why, None);
                    if matches!(told, Ok(Tried::Done(()))) {
                        self.memory.forget(customer);
                    }
                }
                return Err(until);
            }
        };
        self.memory.finished(customer, message);
        Ok(matches)
    }

    /// Releases a message without an attempt, to be due again after `until`.
    fn put_off(&self, one: Filtering, why: &str, until: Instant) {
        let now = clock::now();
        let verdict = match is_expired(one.message(), now) {
            true => Verdict::expired(),
            false => {
                let failure = Failure::new(ReasonCode::FilterNotEvaluated, why);
                let delay = until.saturating_duration_since(now);
                Verdict::Retry(
                    failure,
                    delay + SPREAD.mul_f64(fastrand::f64()),
                    Attempt::NotCounted,
                )
            }
        };
        self.settle(one, verdict);
    }

    /// Releases all messages.
    pub(super) fn release_all(&mut self) {
        for one in std::mem::take(&mut self.waiting).into_all() {
            self.settle(one, Verdict::Released);
        }
    }

    fn settle(&self, one: Filtering, verdict: Verdict) {
        self.leave(std::slice::from_ref(&one));
        let job = one.into_job(&self.shared.config);
        let settlement = Settlement::unsent(job, &self.shared.bulkheads, verdict);
        // Without settlers the relay has ended, and its messages are taken over when the lease expires.
        let _ = self.outcomes.send(settlement);
    }

    /// Counts messages as no longer waiting here.
    fn leave(&self, ones: &[Filtering]) {
        let messages = ones.iter().map(Filtering::message);
        self.shared.custody.leave_filters(messages);
    }
}

impl Filtering {
    /// The message as a job that is not decided.
    pub(super) fn into_job(self, config: &Config) -> Job {
        Job {
            message: self.claimed.message,
            lease: self.lease,
            to: To::Split,
            customer: None,
            registration: None,
            unsent: None,
            terms: Terms {
                on_dead: config.on_dead,
                expires_after: None,
            },
            behind: Vec::new(),
        }
    }
}

fn waits_for(name: &str) -> String {
    format!(
        "the filter of the registered destination {name} did not finish for a message: it is evaluated again later"
    )
}
