//! The pool of threads that send to all endpoints.
//!
//! The endpoints take turns. A free thread sends the next message in turn.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::select;

use super::serving::{ServedEndpoint, ServedEndpoints};
use super::turns::NextWork;
use crate::clock;
use crate::engine::host::shared::Shared;
use crate::engine::observe::metrics::Dispatches;
use crate::engine::plan::to::To;
use crate::engine::send::SenderThread;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::send::desk::Desk;
use crate::engine::send::gate::{Admission, Pass, Standing};
use crate::engine::send::job::Job;
use crate::engine::send::run::{Run, Sent};
use crate::engine::settle::settlement::{NobodyListens, Outcomes, Settlement};
use crate::log;

/// An idle thread checks for work again after this time.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// The least time between two looks at the sends that last.
const LOOK_AFTER: Duration = Duration::from_millis(50);
/// A thread waits this long for the next message of a run, if the rate limit of its endpoint asks for it.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// Starts the threads with the first message, more of them while sends last, and waits for their end.
pub(super) fn run(
    served: &ServedEndpoints,
    shared: &Arc<Shared>,
    all: &Bulkhead,
    outcomes: &Outcomes,
) {
    let ServedEndpoints { bell, begins, .. } = served;
    select! {
        recv(bell.ear) -> _ => bell.ring(),
        recv(shared.signals.stop) -> _ => return,
    }
    thread::scope(|scope| {
        let (mut started, mut most) = (0, usize::MAX);
        while !shared.is_stopping() {
            let mut turns = served.turns();
            let look = turns.look(clock::now());
            let has_ready = turns.has_ready();
            drop(turns);
            while started < look.threads.min(most) {
                let worker = PoolThread {
                    served,
                    shared,
                    all,
                    number: started,
                    dispatches: RefCell::new(Dispatches::new(&shared.metrics.outbox)),
                    outcomes,
                };
                let name = format!("relay-endpoint-{}", started + 1);
                let thread = thread::Builder::new().name(shared.settings.thread_name(&name));
                let work = move || {
                    let _guard = shared.threads.begin(&name);
                    let _log = shared.log.enter();
                    shared.lease.fence().enter();
                    worker.run();
                };
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    log::error!(event = "thread_failed", threads = started, error:% = error; "could not start another thread ({error}): only {started} threads send to endpoints");
                    most = started;
                    break;
                }
                started += 1;
            }
            if has_ready {
                bell.ring();
            }
            match look.again {
                Some(at) => shared.pause(until(at).max(LOOK_AFTER)),
                None => select! {
                    recv(begins.ear) -> _ => {}
                    recv(shared.signals.stop) -> _ => {}
                },
            }
        }
    });
}

fn until(at: Instant) -> Duration {
    at.saturating_duration_since(clock::now())
}

impl ServedEndpoints {
    /// The next step of a thread of the pool. Wakes another thread if more work is ready.
    pub(crate) fn next_turn(&self, shared: &Shared, all: &Bulkhead) -> NextWork {
        let now = clock::now();
        let pool = self.pool();
        let mut turns = self.turns();
        let mut refused = None;
        let next = turns.next(now, |id| {
            let member = pool.get(&id).filter(|one| !one.endpoint.is_held());
            let gate = member.map(|one| &one.bulkhead.gate);
            let admission = gate.map(|gate| gate.guard(|| gate.try_pass(now)));
            refused = matches!(admission, Some(None)).then_some(id);
            admission.flatten().unwrap_or(Admission::Closed)
        });
        // While this thread sends, another thread waits for the endpoints that wait for a time.
        let is_send = matches!(next, NextWork::Send(..));
        let is_first = matches!(&next, NextWork::Send(_, _, send) if turns.is_first(send));
        let has_more = turns.has_ready() || is_send && turns.has_later();
        let is_room = turns.waiting_of_quick() <= all.prefetch();
        drop(turns);
        if let Some(id) = refused {
            self.watch(id);
        }
        if has_more {
            self.bell.ring();
        }
        if is_first {
            self.begins.ring();
        }
        shared.custody.made_room(|| is_room);
        next
    }

    /// Called after a send. If the endpoint's gate restricts sends, the claimer must watch the gate.
    pub(crate) fn sent(&self, shared: &Shared, id: u32, bulkhead: &Bulkhead) {
        let has_news = bulkhead.gate.has_news();
        if has_news || bulkhead.gate.standing() != Standing::Flowing {
            self.watch(id);
            if has_news {
                // The claimer may have checked before the gate was watched.
                shared.signals.doorbell.ring();
            }
        }
    }
}

/// One thread of the pool.
struct PoolThread<'a> {
    served: &'a ServedEndpoints,
    shared: &'a Arc<Shared>,
    all: &'a Bulkhead,
    /// The number of this thread in the pool.
    number: usize,
    dispatches: RefCell<Dispatches>,
    outcomes: &'a Outcomes,
}

impl PoolThread<'_> {
    fn run(&self) {
        if self.work().is_err() {
            log::debug!(event = "sender_ended", destination:% = self.all.name; "a sender of the {} has ended, because the relay no longer settles: its messages are taken over when the lease expires", self.all.name);
        }
    }

    /// Works until the relay stops. The claimer then releases the messages that no thread has taken.
    fn work(&self) -> Result<(), NobodyListens> {
        let (shared, bell) = (self.shared, &self.served.bell);
        while !shared.is_stopping() {
            let again = match self.served.next_turn(shared, self.all) {
                NextWork::Send(job, pass, send) => {
                    let (sent, most) = self.send(job, pass)?;
                    self.served.turns().ended(send, sent, most);
                    continue;
                }
                NextWork::GiveBack(jobs) => {
                    self.release(jobs)?;
                    continue;
                }
                NextWork::Nothing(again) => again,
            };
            let wait = again.map_or(LONGEST_WAIT, until);
            select! {
                recv(bell.ear) -> _ => {}
                recv(shared.signals.stop) -> _ => {}
                default(wait) => {}
            }
        }
        Ok(())
    }

    /// Returns the result of the send, and the most concurrent sends of the endpoint.
    fn send(&self, job: Job, pass: Pass) -> Result<(Option<Sent>, usize), NobodyListens> {
        let shared = self.shared;
        let pool = self.served.pool();
        // The current settings: the URL may have changed since the claim.
        let member = match job.to {
            To::Member(id) => pool.get(&id),
            _ => None,
        };
        // The name may have been registered again since the claim, or belong to another tenant.
        let member = member.filter(|one| !one.endpoint.is_another(&job.message));
        let Some(ServedEndpoint {
            endpoint, bulkhead, ..
        }) = member.map(AsRef::as_ref)
        else {
            self.release(vec![job])?;
            return Ok((None, 1));
        };
        let sender = SenderThread {
            desk: Desk::new(shared, bulkhead, &self.dispatches, self.outcomes),
            sending: &shared.threads.senders[self.all.number][self.number],
        };
        let (id, mut pass) = (endpoint.id, Some(pass));
        let admit = |_| pass.take().or_else(|| self.admit(id, bulkhead));
        let sent = sender.send_run(Run::begin(job), admit)?;
        if let Some(sent) = sent.filter(|sent| sent.went_well) {
            self.all.learn(sent.mean());
        }
        self.served.sent(shared, endpoint.id, bulkhead);
        Ok((sent, bulkhead.limits.concurrency))
    }

    /// Admits the next message of a run. A change of the endpoint, a closed gate, or a long wait for the rate limit
    /// ends the run.
    fn admit(&self, id: u32, bulkhead: &Bulkhead) -> Option<Pass> {
        loop {
            let pool = self.served.pool();
            let member = pool.get(&id).filter(|one| !one.endpoint.is_held());
            let is_same = member.is_some_and(|one| std::ptr::eq(&one.bulkhead, bulkhead));
            if !is_same || self.shared.is_stopping() {
                return None;
            }
            let gate = &bulkhead.gate;
            match gate.guard(|| gate.try_pass(clock::now()))? {
                Admission::Pass(pass) => return Some(pass),
                Admission::Wait(wait) if wait <= SHORT_WAIT => self.shared.pause(wait),
                Admission::Wait(_) | Admission::Closed => return None,
            }
        }
    }

    /// Gives messages back unsent.
    fn release(&self, jobs: Vec<Job>) -> Result<(), NobodyListens> {
        for job in jobs {
            let verdict = job.release_unsent();
            let settlement = Settlement::unsent(job, &self.shared.bulkheads, verdict);
            self.outcomes.send(settlement)?;
        }
        Ok(())
    }
}
