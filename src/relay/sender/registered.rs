//! The threads that send to registered destinations: few for many.
//!
//! Each takes messages out of the queue into their destinations' turns, and does what comes next there.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select};

use super::{Desk, SenderThread};
use crate::clock;
use crate::relay::bulkhead::Bulkhead;
use crate::relay::gate::{Admission, Standing};
use crate::relay::job::Job;
use crate::relay::settlement::{NobodyListens, Outcomes, Settlement};
use crate::relay::shared::Shared;
use crate::relay::to::To;
use crate::relay::turns::Next;
use crate::relay::verdict::Verdict;
use crate::relay::wanted::Want;

/// A thread that has nothing to do looks again after this.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Waits for the first message, and then starts the threads.
pub(crate) fn run(shared: &Arc<Shared>, all: &Bulkhead, outcomes: &Outcomes) {
    let Ok(first) = all.jobs.recv() else {
        return;
    };
    put(shared, first);
    let (bell, ear) = bounded(1);
    thread::scope(|scope| {
        for number in 0..all.concurrency {
            let (bell, ear) = (bell.clone(), ear.clone());
            let pool = Pool {
                shared,
                all,
                number,
                outcomes,
                bell,
                ear,
            };
            let name = format!("relay-registered-{}", number + 1);
            let thread = thread::Builder::new().name(name);
            if let Err(error) = thread.spawn_scoped(scope, move || pool.run()) {
                log::error!(event = "thread_failed", threads = number, error:% = error; "only {number} threads send to registered destinations: the system has no more");
                break;
            }
        }
    });
}

fn put(shared: &Shared, job: Job) {
    if let To::Registered(id) = job.to {
        shared.registered.turns().put(id, job);
    }
}

/// One of the threads.
struct Pool<'a> {
    shared: &'a Arc<Shared>,
    all: &'a Bulkhead,
    /// Its own among them.
    number: usize,
    outcomes: &'a Outcomes,
    /// Rung for another thread: there is more to do.
    bell: Sender<()>,
    ear: Receiver<()>,
}

impl Pool<'_> {
    fn run(&self) {
        if self.work().is_err() {
            log::debug!(event = "sender_ended", destination:% = self.all.name; "nobody takes outcomes any more");
        }
    }

    /// Until the queue is closed and nothing is left.
    fn work(&self) -> Result<(), NobodyListens> {
        loop {
            let until = match self.next() {
                Next::Send(job, pass, send) => {
                    let (went_well, most) = self.send(job, pass)?;
                    self.shared.registered.turns().ended(send, went_well, most);
                    continue;
                }
                Next::GiveBack(jobs) => {
                    self.give_back(jobs)?;
                    continue;
                }
                Next::Nothing(until) => until,
            };
            let wait = until.map_or(LONGEST_WAIT, |at| {
                at.saturating_duration_since(clock::now())
            });
            select! {
                recv(self.all.jobs) -> job => match job {
                    Ok(job) => put(self.shared, job),
                    // The relay stops.
                    Err(_) => {
                        let left = self.shared.registered.turns().take_all();
                        return self.give_back(left);
                    }
                },
                recv(self.ear) -> _ => {}
                default(wait) => {}
            }
        }
    }

    /// What is next. Where there is more, another thread is called.
    fn next(&self) -> Next {
        let (shared, now) = (self.shared, clock::now());
        let registry = shared.registered.registry();
        let mut turns = shared.registered.turns();
        // All that is claimed takes its turn: what waits in the queue would keep its order there.
        for job in self.all.jobs.try_iter() {
            if let To::Registered(id) = job.to {
                turns.put(id, job);
            }
        }
        let next = turns.next(now, |id| {
            let customer = registry.get(id).filter(|one| !one.is_locked);
            let customer = customer.and_then(|one| one.bulkhead.as_ref());
            customer.map_or(Admission::Closed, |one| one.gate.try_pass(now))
        });
        let has_more = turns.has_ready();
        let is_room = turns.waiting_of_good() <= self.all.prefetch();
        drop(turns);
        if has_more {
            // Full: it rings already.
            let _ = self.bell.try_send(());
        }
        if shared.wanted.is(Want::Room) && is_room {
            shared.signals.doorbell.ring();
        }
        next
    }

    /// Returns whether it went well, and how many sends the destination may have under way.
    fn send(
        &self,
        job: Job,
        pass: crate::relay::gate::Pass,
    ) -> Result<(Option<bool>, usize), NobodyListens> {
        let shared = self.shared;
        let registry = shared.registered.registry();
        // As it is now: it may have another URL than when the message was claimed.
        let customer = match job.to {
            To::Registered(id) => registry.get(id),
            _ => None,
        };
        let bulkhead = customer.and_then(|one| Some((one.id, one.bulkhead.as_ref()?)));
        let Some((id, bulkhead)) = bulkhead else {
            self.give_back(vec![job])?;
            return Ok((None, 1));
        };
        let sender = SenderThread {
            shared,
            desk: Desk::new(shared, bulkhead, self.outcomes),
            sending: &shared.threads.senders[self.all.number][self.number],
        };
        let began = Instant::now();
        let went_well = sender.send(job, pass)?;
        if went_well == Some(true) {
            self.all.learn(began.elapsed());
        }
        if bulkhead.gate.standing() != Standing::Flowing {
            shared.registered.watch(id);
            if bulkhead.gate.has_news() {
                // The claimer may have looked before it was watched.
                shared.signals.doorbell.ring();
            }
        }
        Ok((went_well, bulkhead.concurrency))
    }

    fn give_back(&self, jobs: Vec<Job>) -> Result<(), NobodyListens> {
        for job in jobs {
            let settlement = Settlement::unsent(job, &self.shared.bulkheads, Verdict::Released);
            self.outcomes.send(settlement)?;
        }
        Ok(())
    }
}
