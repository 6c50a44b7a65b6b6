//! The threads of one relay: started in the order of the data, watched, and joined.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::claimer::Claimer;
use super::heartbeat::{self, Ending};
use super::shared::{Job, Shared};
use super::{StartError, janitor, listener, sender, settler};
use crate::store::lease::LeaseId;

/// The thread that ends last, told how.
pub(super) const HEARTBEAT: &str = "relay-heartbeat";

/// What a thread leaves when it ends.
#[derive(Debug)]
pub(super) struct Exit {
    pub(super) thread: String,
    pub(super) panicked: bool,
}

/// Where single threads are told something.
pub(super) struct Told {
    /// The heartbeat, how to end.
    pub(super) ending: Receiver<Ending>,
    /// The claimer, to look.
    pub(super) ring: Receiver<()>,
    /// The heartbeat, to beat.
    pub(super) pulse: Receiver<()>,
}

/// What is needed to end the relay, given up bit by bit.
pub(super) struct Running {
    /// Dropped to stop.
    pub(super) stop: Option<Sender<()>>,
    /// Dropped to give up.
    pub(super) abandon: Option<Sender<()>>,
    pub(super) ending: Sender<Ending>,
    pub(super) exits: Receiver<Exit>,
    pub(super) threads: Vec<(String, JoinHandle<()>)>,
    pub(super) ended: Vec<Exit>,
}

impl Running {
    /// In the order of the data: a channel's receiver runs before its senders.
    pub(super) fn spawn_all(
        &mut self,
        shared: &Arc<Shared>,
        exit: &Sender<Exit>,
        relay_name: &str,
        lease_id: LeaseId,
        told: Told,
    ) -> Result<(), StartError> {
        let queues: Vec<(Sender<Job>, Receiver<Job>)> = shared
            .bulkheads
            .iter()
            .map(|bulkhead| bounded(bulkhead.queue()))
            .collect();
        // Claimed messages are bounded, so a send into it never waits for long.
        let (outcomes, outcome_queue) = bounded(2 * shared.batch() + shared.senders());

        let Told {
            ending,
            ring,
            pulse,
        } = told;
        let (state, name) = (Arc::clone(shared), relay_name.to_owned());
        self.spawn(HEARTBEAT, exit, move || {
            heartbeat::run(&state, &name, lease_id, &ending, &pulse);
        })?;
        // No more than was settled: claimed messages are bounded, and so are these.
        let (continued, continued_queue) = unbounded();
        let (state, left) = (Arc::clone(shared), continued_queue.clone());
        self.spawn("relay-settler", exit, move || {
            settler::run(&state, &outcome_queue, &continued, &left)
        })?;
        let mut number = 0;
        for (bulkhead, (_, queue)) in queues.iter().enumerate() {
            let gathering = Arc::new(Mutex::new(()));
            for _ in 0..shared.bulkheads[bulkhead].concurrency {
                number += 1;
                let (state, gathering) = (Arc::clone(shared), Arc::clone(&gathering));
                let (queue, outcomes) = (queue.clone(), outcomes.clone());
                self.spawn(&format!("relay-send-{number}"), exit, move || {
                    let bulkhead = &state.bulkheads[bulkhead];
                    sender::run(&state, bulkhead, &queue, &gathering, &outcomes);
                })?;
            }
        }
        let state = Arc::clone(shared);
        self.spawn("relay-janitor", exit, move || {
            janitor::run(&state);
        })?;
        if shared.config.listener && shared.config.enabled {
            let state = Arc::clone(shared);
            self.spawn("relay-listener", exit, move || listener::run(&state))?;
        }
        let state = Arc::clone(shared);
        self.spawn("relay-claimer", exit, move || {
            Claimer::new(&state, queues, outcomes, ring, continued_queue).run();
        })
    }

    fn spawn(
        &mut self,
        name: &str,
        exit: &Sender<Exit>,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let guard = ExitGuard {
            thread: name.to_owned(),
            exit: exit.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _guard = guard;
                work();
            })?;
        self.threads.push((name.to_owned(), thread));
        Ok(())
    }

    /// Waits until every thread has ended, but for the one named `but`, or `until`.
    pub(super) fn wait_for_exits(&mut self, until: Option<Instant>, but: Option<&str>) {
        self.ended.extend(self.exits.try_iter());
        while self.is_at_work(but) {
            let exit = match until {
                Some(until) => self.exits.recv_deadline(until).ok(),
                None => self.exits.recv().ok(),
            };
            match exit {
                Some(exit) => self.ended.push(exit),
                None => return,
            }
        }
    }

    /// Whether a thread has not ended, other than the one named `but`.
    pub(super) fn is_at_work(&self, but: Option<&str>) -> bool {
        self.threads.iter().any(|(name, _)| {
            Some(name.as_str()) != but && !self.ended.iter().any(|exit| exit.thread == *name)
        })
    }

    /// Joins the threads that have ended; the others stay.
    pub(super) fn join_ended(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        for (name, thread) in threads {
            if !self.ended.iter().any(|exit| exit.thread == name) {
                self.threads.push((name, thread));
            } else if thread.join().is_err() {
                log::error!(event = "thread_panicked", thread = name; "a thread of the relay panicked");
            }
        }
    }
}

/// Reports a thread's end, also when it ends by a panic.
struct ExitGuard {
    thread: String,
    exit: Sender<Exit>,
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        // The channel has room for every thread; nobody listens when the handle is gone.
        let _ = self.exit.try_send(Exit {
            thread: std::mem::take(&mut self.thread),
            panicked: std::thread::panicking(),
        });
    }
}
