//! A sender thread: sends the messages of one destination, and never uses the database.

pub(crate) mod batch;
pub(crate) mod breaker;
mod bucket;
pub(crate) mod bulkhead;
pub(crate) mod calls;
pub(crate) mod gate;
pub(crate) mod job;
pub(crate) mod limits;
pub(crate) mod paused;
pub(crate) mod pauses;
pub(crate) mod run;
pub(crate) mod sql;
pub(crate) mod verdict;

use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use self::batch::{Gathered, answered, telling};
use self::bulkhead::{Bulkhead, SendsTo};
use self::calls::Calls;
use self::gate::Pass;
use self::job::{Job, is_expired};
use self::run::{Run, Sent};
use self::verdict::Verdict;
use super::host::shared::Shared;
use super::host::threads::{MARGIN, Stay, Within};
use super::lease::sql::lease::LeaseId;
use super::observe::metrics::{Dispatches, OfDestination};
use super::observe::spans::{Span, Spans};
use super::plan::to::To;
use super::settle::settlement::{NobodyListens, Outcomes, Settlement};
use super::settle::sql::settle::Claim;
use crate::config::RequestBatch;
use crate::dispatch::{Dispatcher, Failure, Outcome, caught, fence};
use crate::lock::lock;
use crate::log;
use crate::message::Message;
use crate::status::ReasonCode;

/// Sends until the queue is closed and empty. If the relay stops, the lease is lost or the destination's gate is
/// closed, the thread releases the messages of the queue unsent.
///
/// In batched mode, one thread of the destination at a time gathers messages and holds `gathering`, so that a few
/// messages are not spread over many requests.
///
/// `place` is the number of the bulkhead and the number of the sender within the bulkhead.
pub(crate) fn run(
    shared: &Arc<Shared>,
    place: (usize, usize),
    gathering: &Mutex<()>,
    outcomes: &Outcomes,
) {
    shared.lease.fence().enter();
    let (bulkhead, number) = place;
    let sending = &shared.threads.senders[bulkhead][number];
    let bulkhead = &shared.bulkheads[bulkhead];
    let dispatches = RefCell::new(Dispatches::new(&shared.metrics.outbox));
    let desk = Desk::new(shared, bulkhead, &dispatches, outcomes);
    let sender = SenderThread { desk, sending };
    let end = match (&bulkhead.serves, bulkhead.limits.request_batch) {
        (SendsTo::Dispatcher(dispatcher), Some(limits)) => {
            sender.send_batched(&**dispatcher, limits, gathering)
        }
        _ => sender.send_single(),
    };
    if end.is_err() {
        // The settler has ended: the relay has given up, and its messages are taken over when the lease expires.
        log::debug!(event = "sender_ended", destination:% = bulkhead.name; "a sender of {:?} has ended, because the relay no longer settles: its messages are taken over when the lease expires", bulkhead.name);
    }
}

pub(crate) struct SenderThread<'a> {
    pub(crate) desk: Desk<'a>,
    /// Shows other threads whether this thread sends.
    pub(crate) sending: &'a Stay,
}

/// Reports the outcome of sends: to metrics, observers, the gate and the settlers.
pub(crate) struct Desk<'a> {
    shared: &'a Arc<Shared>,
    bulkhead: &'a Bulkhead,
    metrics: &'a OfDestination,
    /// Of this thread alone.
    dispatches: &'a RefCell<Dispatches>,
    outcomes: &'a Outcomes,
}

impl SenderThread<'_> {
    fn send_single(&self) -> Result<(), NobodyListens> {
        for job in &self.desk.bulkhead.jobs {
            self.ring_for_room();
            self.send_alone(Run::begin(job))?;
        }
        Ok(())
    }

    fn send_batched(
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

    fn ring_for_room(&self) {
        let bulkhead = self.desk.bulkhead;
        let is_room = || bulkhead.jobs.len() <= bulkhead.prefetch();
        self.desk.shared.custody.made_room(is_room);
    }

    /// Sends the messages of a run, each alone.
    fn send_alone(&self, run: (Job, Run)) -> Result<(), NobodyListens> {
        let gate = &self.desk.bulkhead.gate;
        let admit = |lease| gate.guard(|| gate.admit(|| self.may_send(lease))).flatten();
        self.send_run(run, admit).map(drop)
    }

    /// Sends the messages of a run, each after the success of the one before. `admit` asks the gate. Returns the result
    /// of the sends. `None`: nothing was sent, or a handler has the message.
    pub(crate) fn send_run(
        &self,
        (first, mut run): (Job, Run),
        mut admit: impl FnMut(LeaseId) -> Option<Pass>,
    ) -> Result<Option<Sent>, NobodyListens> {
        let (mut next, mut sends) = (Some(first), None);
        while let Some(mut job) = next {
            // The messages behind the first may have waited for long.
            let is_paused = run.is_begun() && self.desk.shared.is_paused(&job.message.topic);
            let pass = match job.unsent {
                None if !is_paused => admit(job.lease),
                _ => None,
            };
            let (settlement, sent) = match pass {
                Some(pass) => self.send(job, pass),
                None => {
                    let verdict = job.unsent.take().unwrap_or(Verdict::Released);
                    (Some(self.desk.settlement(job, verdict)), None)
                }
            };
            sends = sends.into_iter().chain(sent).reduce(Sent::and);
            let bulkheads = &self.desk.shared.bulkheads;
            next = settlement.and_then(|settlement| run.next(settlement, bulkheads));
        }
        if let Some(settlement) = run.settlement() {
            self.desk.outcomes.send(settlement)?;
        }
        Ok(sends)
    }

    /// Sends a message. Returns its settlement, unless a handler has the message, and the result of the send, unless
    /// nothing was sent.
    fn send(&self, job: Job, pass: Pass) -> (Option<Settlement>, Option<Sent>) {
        let desk = &self.desk;
        let sending = self.begin(1);
        self.tell_sending(&job.message);
        let began = Instant::now();
        // Checked after the observers, because they may be slow.
        if let Some(verdict) = self.unsent(&job, began) {
            desk.bulkhead.gate.return_pass(&pass);
            return (Some(desk.settlement(job, verdict)), None);
        }
        let spans = desk.bulkhead.gate.guard(|| {
            desk.metrics.waited(job.message.claimed, began);
            Spans::of(std::slice::from_ref(&job.message), &desk.bulkhead.name)
        });
        let Some(spans) = spans else {
            return (Some(desk.settlement(job, Verdict::Released)), None);
        };
        let begun = Begun {
            job,
            pass,
            spans,
            began,
        };
        match &desk.bulkhead.serves {
            SendsTo::Dispatcher(dispatcher) => {
                let message = &begun.job.message;
                let dispatch = || dispatcher.dispatch(message);
                let outcome = begun.spans.within(|| caught(message, dispatch));
                drop(sending);
                let outcome = outcome.unwrap_or_else(Outcome::Retry);
                let went_well = matches!(outcome, Outcome::Delivered(_));
                let (settlement, took) = desk.ended(begun, outcome);
                let sent = Sent {
                    went_well,
                    took,
                    messages: 1,
                };
                (Some(settlement), Some(sent))
            }
            SendsTo::Handlers(handlers) => {
                self.hand_to(&**handlers, begun);
                (None, None)
            }
            // Not reached: each member has its own dispatcher.
            SendsTo::Members(_) => (None, None),
        }
    }

    /// Has the handler called. The handler may end after this thread has continued with other messages.
    fn hand_to(&self, handlers: &dyn Calls, begun: Begun) {
        let (message, lease) = (begun.job.message.clone(), begun.job.lease);
        let (shared, number) = (Arc::clone(self.desk.shared), self.desk.bulkhead.number);
        let outcomes = self.desk.outcomes.clone();
        let claim = Claim::of(&message);
        shared.custody.begin_handling(lease, claim);
        let span = begun.spans.within(Span::current);
        let conclude = move |outcome| {
            shared.custody.end_handling(lease, claim);
            let dispatches = RefCell::new(Dispatches::new(&shared.metrics.outbox));
            let desk = Desk::new(&shared, &shared.bulkheads[number], &dispatches, &outcomes);
            let (settlement, _) = desk.ended(begun, outcome);
            if desk.outcomes.send(settlement).is_err() {
                log::debug!(event = "handler_unheard", destination:% = desk.bulkhead.name; "a handler of {:?} has ended after the relay: the message is taken over when the lease expires", desk.bulkhead.name);
            }
        };
        handlers.call(*message, span, Box::new(conclude));
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
            let mut each = messages.by_ref().take(count).map(|message| Job {
                message: Box::new(message),
                lease,
                to: To::Bulkhead(bulkhead.number),
                member: None,
                registration: None,
                unsent: None,
                terms: bulkhead.limits.terms,
                behind: Vec::new(),
            });
            let mut first = each.next()?;
            first.behind = each.collect();
            Some(first)
        };
        let sent = runs.into_iter().filter_map(run).collect();
        let conclude = |job, outcome| desk.concluded(job, outcome, latency);
        answered(sent, outcomes, &self.desk.shared.bulkheads, conclude)
    }

    /// Begins a send. The limit grows with `messages`, because a dispatcher may send them one after the other.
    fn begin(&self, messages: usize) -> Within<'_> {
        let messages = u32::try_from(messages).unwrap_or(u32::MAX);
        let longest = self.desk.bulkhead.limits.send_timeout;
        let longest = longest.saturating_mul(messages).saturating_add(MARGIN);
        self.sending.within(longest)
    }

    fn tell_sending(&self, message: &Message) {
        let (observers, name) = (&self.desk.shared.observers, &self.desk.bulkhead.name);
        observers.tell(message, |one| one.sending(message, name));
    }

    /// The verdict on a message that must not be sent any more.
    fn unsent(&self, job: &Job, now: Instant) -> Option<Verdict> {
        if !self.may_send(job.lease) {
            return Some(Verdict::Released);
        }
        fence::begin(job.lease.0);
        is_expired(&job.message, now).then(Verdict::expired)
    }

    fn may_send(&self, lease: LeaseId) -> bool {
        !self.desk.shared.is_stopping() && self.desk.shared.lease.may_send(lease)
    }
}

/// A message that is being sent.
struct Begun {
    job: Job,
    pass: Pass,
    spans: Spans,
    began: Instant,
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
    fn ended(&self, begun: Begun, outcome: Outcome) -> (Settlement, Duration) {
        let took = begun.began.elapsed();
        self.bulkhead.gate.guard(|| {
            self.learn(took);
            self.tell_sent(&begun.job.message, &outcome, took);
            begun.spans.end(std::slice::from_ref(&outcome));
            self.record(&begun.pass, &outcome);
        });
        (self.concluded(begun.job, outcome, took), took)
    }

    fn learn(&self, took: Duration) {
        self.bulkhead.learn(took);
        self.metrics.send_seconds.record(took.as_secs_f64());
    }

    fn tell_sent(&self, message: &Message, outcome: &Outcome, took: Duration) {
        (self.dispatches.borrow_mut()).sent(&message.topic, outcome, took);
        let (observers, name) = (&self.shared.observers, &self.bulkhead.name);
        observers.tell(message, |one| one.sent(message, name, outcome, took));
    }

    fn record(&self, pass: &Pass, outcome: &Outcome) {
        if self.bulkhead.gate.record(pass, outcome) {
            // The claimer records the change of the gate in the table.
            self.shared.signals.doorbell.ring();
        }
    }

    fn concluded(&self, job: Job, outcome: Outcome, took: Duration) -> Settlement {
        let (attempts, retries) = (job.message.attempts, &self.bulkhead.limits.retries);
        let gate = &self.bulkhead.gate;
        let verdict = gate.guard(|| Verdict::of_outcome(outcome, attempts, retries));
        let verdict = verdict.unwrap_or(Verdict::Released);
        Settlement::new(job, &self.shared.bulkheads, verdict, took)
    }

    /// The settlement of a message that is not sent.
    fn settlement(&self, job: Job, verdict: Verdict) -> Settlement {
        Settlement::unsent(job, &self.shared.bulkheads, verdict)
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
