//! What a sender thread does with the outcome of a send.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bulkhead::Bulkhead;
use super::gate::Pass;
use super::job::Job;
use super::verdict::Verdict;
use crate::dispatch::Outcome;
use crate::engine::host::shared::Shared;
use crate::engine::observe::metrics::{Dispatches, OfDestination};
use crate::engine::observe::spans::Spans;
use crate::engine::settle::settlement::{Outcomes, Settlement};
use crate::message::Message;

/// Reports the outcome of sends: to metrics, observers, the gate and the settlers.
pub(crate) struct Desk<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) bulkhead: &'a Bulkhead,
    pub(super) metrics: &'a OfDestination,
    /// Of this thread alone.
    dispatches: &'a RefCell<Dispatches>,
    pub(super) outcomes: &'a Outcomes,
}

/// A message that is being sent.
pub(super) struct Begun {
    pub(super) job: Job,
    pub(super) pass: Pass,
    pub(super) spans: Spans,
    pub(super) began: Instant,
}

impl<'a> Desk<'a> {
    pub(crate) fn new(
        shared: &'a Arc<Shared>,
        bulkhead: &'a Bulkhead,
        dispatches: &'a RefCell<Dispatches>,
        outcomes: &'a Outcomes,
    ) -> Self {
        Self {
            shared,
            bulkhead,
            metrics: &shared.metrics.destinations[bulkhead.number],
            dispatches,
            outcomes,
        }
    }

    /// Reports the end of a send. Returns the settlement, and how long the send took.
    pub(super) fn ended(&self, begun: Begun, outcome: Outcome) -> (Settlement, Duration) {
        let took = begun.began.elapsed();
        self.bulkhead.gate.guard(|| {
            self.learn(took);
            self.tell_sent(&begun.job.message, &outcome, took);
            begun.spans.end(std::slice::from_ref(&outcome));
            self.record(&begun.pass, &outcome);
        });
        (self.concluded(begun.job, outcome, took), took)
    }

    pub(super) fn learn(&self, took: Duration) {
        self.bulkhead.learn(took);
        self.metrics.send_seconds.record(took.as_secs_f64());
    }

    pub(super) fn tell_sent(&self, message: &Message, outcome: &Outcome, took: Duration) {
        (self.dispatches.borrow_mut()).sent(&message.topic, outcome, took);
        let (observers, name) = (&self.shared.observers, &self.bulkhead.name);
        observers.tell(message, |one| one.sent(message, name, outcome, took));
    }

    pub(super) fn record(&self, pass: &Pass, outcome: &Outcome) {
        if self.bulkhead.gate.record(pass, outcome) {
            // The claimer records the change of the gate in the table.
            self.shared.signals.doorbell.ring();
        }
    }

    pub(super) fn concluded(&self, job: Job, outcome: Outcome, took: Duration) -> Settlement {
        let (attempts, retries) = (job.message.attempts, &self.bulkhead.limits.retries);
        let gate = &self.bulkhead.gate;
        let verdict = gate.guard(|| Verdict::of_outcome(outcome, attempts, retries));
        let verdict = verdict.unwrap_or(Verdict::Released);
        Settlement::new(job, &self.shared.bulkheads, verdict, took)
    }

    /// The settlement of a message that is not sent.
    pub(super) fn settlement(&self, job: Job, verdict: Verdict) -> Settlement {
        Settlement::unsent(job, &self.shared.bulkheads, verdict)
    }
}
