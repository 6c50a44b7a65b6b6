//! Batched mode: a request with several messages. Which messages it takes, and what its response means for each.

use std::sync::Mutex;
use std::time::Instant;

use super::SenderThread;
use super::bulkhead::{Bulkhead, REQUEST_BYTES};
use super::gate::Pass;
use super::job::Job;
use super::run::Run;
use super::verdict::Verdict;
use crate::config::RequestBatch;
use crate::dispatch::{Dispatcher, Failure, Outcome, caught};
use crate::engine::observe::spans::Spans;
use crate::engine::plan::to::To;
use crate::engine::settle::settlement::{NobodyListens, Settlement};
use crate::lock::lock;
use crate::message::Message;
use crate::status::ReasonCode;

/// The messages gathered for a request.
#[derive(Default)]
pub(crate) struct Gathered {
    /// The messages of the request.
    pub(crate) together: Vec<Job>,
    /// Messages that were attempted before. Each is sent alone, so that a message that the receiver cannot take does not
    /// hold up others.
    pub(crate) alone: Vec<Job>,
    count: usize,
    bytes: usize,
}

impl Gathered {
    /// Whether the request has space for the messages of a run.
    pub(crate) fn fits(&self, job: &Job, limits: RequestBatch) -> bool {
        let is_one = job.behind.is_empty() || self.count == 0;
        is_one || self.count + job.len() <= limits.size && self.bytes + job.bytes() <= REQUEST_BYTES
    }

    pub(crate) fn add(&mut self, job: Job) {
        self.bytes += job.messages().map(|one| one.payload.len()).sum::<usize>();
        self.count += job.len();
        match job.message.attempts {
            0 => self.together.push(job),
            _ => self.alone.push(job),
        }
    }

    pub(crate) fn is_full(&self, limits: RequestBatch) -> bool {
        self.count >= limits.size || self.bytes >= REQUEST_BYTES
    }
}

impl SenderThread<'_> {
    pub(super) fn send_batched(
        &self,
        dispatcher: &dyn Dispatcher,
        limits: RequestBatch,
        gathering: &Mutex<()>,
    ) -> Result<(), NobodyListens> {
        let mut left = None;
        loop {
            let turn = lock(gathering);
            let Some(first) = left.take().or_else(|| self.desk.bulkhead.jobs.recv().ok()) else {
                return Ok(());
            };
            let gathered;
            (gathered, left) = self.gather(first, limits);
            drop(turn);
            self.ring_for_room();
            self.send_together(dispatcher, gathered.together)?;
            for job in gathered.alone {
                self.send_alone(Run::begin(job))?;
            }
        }
    }

    /// Gathers messages until the request is full or its time has passed. Also returns a run that is left for the next
    /// request.
    fn gather(&self, first: Job, limits: RequestBatch) -> (Gathered, Option<Job>) {
        let until = Instant::now() + limits.linger;
        let mut gathered = Gathered::default();
        let mut next = Some(first);
        while let Some(job) = next {
            if !gathered.fits(&job, limits) {
                return (gathered, Some(job));
            }
            gathered.add(job);
            next = match gathered.is_full(limits) {
                true => None,
                false => self.desk.bulkhead.jobs.recv_deadline(until).ok(),
            };
        }
        (gathered, None)
    }

    /// Sends several runs by one request.
    fn send_together(
        &self,
        dispatcher: &dyn Dispatcher,
        mut jobs: Vec<Job>,
    ) -> Result<(), NobodyListens> {
        let (desk, gate) = (&self.desk, &self.desk.bulkhead.gate);
        let is_wanted = || jobs.iter().any(|job| self.may_send(job.lease));
        let Some(pass) = gate.guard(|| gate.admit(is_wanted)).flatten() else {
            let released = |job| desk.outcomes.send(desk.settlement(job, Verdict::Released));
            return jobs.into_iter().try_for_each(released);
        };
        let sending = self.begin(jobs.iter().map(Job::len).sum());
        let each = jobs.iter().flat_map(Job::messages);
        each.for_each(|message| self.tell_sending(message));
        let began = Instant::now();
        let mut alone = self.take_unsent(&mut jobs, began)?;
        let (settled, left) = match jobs.is_empty() {
            true => {
                gate.return_pass(&pass);
                Default::default()
            }
            false => self.request(dispatcher, jobs, &pass, began),
        };
        drop(sending);
        for settlement in settled {
            desk.outcomes.send(settlement)?;
        }
        alone.extend(left);
        alone.into_iter().try_for_each(|run| self.send_alone(run))
    }

    /// Settles the messages that must not be sent any more. Returns the runs with such a message: a run that ends early is
    /// not one request.
    fn take_unsent(
        &self,
        jobs: &mut Vec<Job>,
        now: Instant,
    ) -> Result<Vec<(Job, Run)>, NobodyListens> {
        let mut alone = Vec::new();
        for job in std::mem::take(jobs) {
            let unsent = |job: &Job| job.unsent.clone().or_else(|| self.unsent(job, now));
            let unsent = job.each().find_map(unsent);
            match unsent {
                None => jobs.push(job),
                Some(verdict) if job.behind.is_empty() => {
                    let settlement = self.desk.settlement(job, verdict);
                    self.desk.outcomes.send(settlement)?;
                }
                Some(_) => alone.push(Run::begin(job)),
            }
        }
        Ok(alone)
    }

    /// Makes one request with the messages of these runs, and reports its outcomes. Returns the results, and what is left to
    /// be sent alone.
    fn request(
        &self,
        dispatcher: &dyn Dispatcher,
        jobs: Vec<Job>,
        pass: &Pass,
        began: Instant,
    ) -> (Vec<Settlement>, Vec<(Job, Run)>) {
        let (desk, bulkhead) = (&self.desk, self.desk.bulkhead);
        let (mut messages, mut runs) = (Vec::new(), Vec::new());
        for mut job in jobs {
            runs.push((job.lease, job.len()));
            let behind = std::mem::take(&mut job.behind);
            for job in std::iter::once(job).chain(behind) {
                desk.metrics.waited(job.message.claimed, began);
                messages.push(*job.message);
            }
        }
        let spans = Spans::of(&messages, &bulkhead.name);
        let outcomes = spans.within(|| dispatch_batch(dispatcher, &messages));
        spans.end(&outcomes);
        let latency = began.elapsed();
        bulkhead.gate.guard(|| {
            desk.learn(latency);
            for (message, outcome) in messages.iter().zip(&outcomes) {
                desk.tell_sent(message, outcome, latency);
            }
            match telling(runs.iter().map(|(_, count)| *count), &outcomes) {
                Some(telling) => desk.record(pass, telling),
                None => bulkhead.gate.return_pass(pass),
            }
        });
        let mut messages = messages.into_iter();
        let run = |(lease, count)| {
            let mut each = messages.by_ref().take(count).map(|message| {
                let to = To::Bulkhead(bulkhead.number);
                Job::new(Box::new(message), lease, to, bulkhead.limits.terms)
            });
            let mut first = each.next()?;
            first.behind = each.collect();
            Some(first)
        };
        let sent = runs.into_iter().filter_map(run).collect();
        let conclude = |job, outcome| desk.concluded(job, outcome, latency);
        answered(sent, outcomes, &self.desk.shared.bulkheads, conclude)
    }
}

/// The results of the messages of a request, after the response, and the runs that are left. The receiver may have refused
/// the request because of a single message: the first one of a run that was not delivered is sent again alone, with the run
/// so far. `outcomes`: of each message, in order. `conclude` makes the settlement of a message. The delivered messages at the
/// beginning of a run stay delivered. The first message that is not ends the run, or is sent again.
// Why: docs/decisions.md#refused-batch
pub(crate) fn answered(
    sent: Vec<Job>,
    outcomes: Vec<Outcome>,
    bulkheads: &[Bulkhead],
    conclude: impl Fn(Job, Outcome) -> Settlement,
) -> (Vec<Settlement>, Vec<(Job, Run)>) {
    let is_batch = outcomes.len() > 1;
    let (mut settled, mut alone) = (Vec::new(), Vec::new());
    let mut outcomes = outcomes.into_iter();
    for job in sent {
        let count = job.len();
        let (first, mut run) = Run::begin(job);
        let (mut next, mut refused) = (Some(first), None);
        for outcome in outcomes.by_ref().take(count) {
            match next.take() {
                Some(job) if is_batch && is_refusal(&outcome) => refused = Some(job),
                job => next = job.and_then(|job| run.next(conclude(job, outcome), bulkheads)),
            }
        }
        match refused {
            Some(job) => alone.push((job, run)),
            None => settled.extend(run.settlement()),
        }
    }
    (settled, alone)
}

/// The outcome that counts for the destination. The outcomes of one request usually agree; if they differ, the worst
/// counts, without those behind the end of a run. `runs`: their lengths.
pub(crate) fn telling(
    runs: impl IntoIterator<Item = usize>,
    mut outcomes: &[Outcome],
) -> Option<&Outcome> {
    let each = runs.into_iter().flat_map(|count| {
        let of_run;
        (of_run, outcomes) = outcomes.split_at(count);
        let delivered = of_run.iter().take_while(|one| is_delivery(one)).count();
        of_run.iter().take(delivered + 1)
    });
    each.max_by_key(|outcome| weight(outcome))
}

fn is_delivery(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Delivered(_))
}

/// Whether the receiver has refused the request because of its content.
fn is_refusal(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Dead(failure) if failure.response.status.is_some())
}

/// Ranks outcomes by how much they tell about the destination.
fn weight(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Dead(failure) if failure.response.status.is_none() => 0,
        Outcome::Dead(_) => 1,
        Outcome::Delivered(_) => 2,
        Outcome::Retry(failure) if failure.pause.is_none() => 3,
        Outcome::Wait(_) => 4,
        Outcome::Retry(_) => 5,
    }
}

fn dispatch_batch(dispatcher: &dyn Dispatcher, messages: &[Message]) -> Vec<Outcome> {
    let outcomes = match caught(&messages[0], || dispatcher.dispatch_batch(messages)) {
        Ok(outcomes) => outcomes,
        Err(failure) => vec![Outcome::Retry(failure); messages.len()],
    };
    if outcomes.len() == messages.len() {
        return outcomes;
    }
    let (returned, count) = (outcomes.len(), messages.len());
    let error = format!("the dispatcher returned {returned} outcomes for {count} messages");
    let failure = Failure::new(ReasonCode::Failed, error);
    vec![Outcome::Retry(failure); messages.len()]
}
