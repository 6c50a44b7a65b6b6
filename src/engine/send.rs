//! A sender thread: sends the messages of one destination, and never uses the database.

pub(crate) mod batch;
pub(crate) mod breaker;
mod bucket;
pub(crate) mod bulkhead;
pub(crate) mod calls;
pub(crate) mod desk;
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
use std::time::Instant;

use self::bulkhead::SendsTo;
use self::calls::Calls;
use self::desk::{Begun, Desk};
use self::gate::Pass;
use self::job::{Job, is_expired};
use self::run::{Run, Sent};
use self::verdict::Verdict;
use super::host::shared::Shared;
use super::host::threads::{MARGIN, Stay, Within};
use super::lease::sql::lease::LeaseId;
use super::observe::metrics::Dispatches;
use super::observe::spans::{Span, Spans};
use super::settle::settlement::{NobodyListens, Outcomes, Settlement};
use super::settle::sql::settle::Claim;
use crate::dispatch::{Outcome, caught, fence};
use crate::log;
use crate::message::Message;

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

impl SenderThread<'_> {
    fn send_single(&self) -> Result<(), NobodyListens> {
        for job in &self.desk.bulkhead.jobs {
            self.ring_for_room();
            self.send_alone(Run::begin(job))?;
        }
        Ok(())
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
            // Not reached: each member has its own dispatcher, and a feed has no senders.
            SendsTo::Members(_) | SendsTo::Feed => (None, None),
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
