//! The threads of one relay: started in the order of the data, watched, and joined.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::claimer::{self, Claimer};
use super::heartbeat::{self, Ending};
use super::progress::KEYED_SETTLERS;
use super::settlement::Outcomes;
use super::shared::{Job, Shared};
use super::{StartError, janitor, listener, monitor, sender, settler};
use crate::store::relay::lease::LeaseId;

/// The thread that ends last, told how.
pub(super) const HEARTBEAT: &str = "relay-heartbeat";

/// What a thread leaves when it ends.
#[derive(Debug)]
pub(super) struct Exit {
    pub(super) thread: String,
    pub(super) panicked: bool,
}

/// Where single threads are told something.
pub(super) struct Ears {
    /// The heartbeat, how to end.
    pub(super) ending: Receiver<Ending>,
    pub(super) of_claimer: claimer::Ears,
    /// The heartbeat, to beat.
    pub(super) pulse: Receiver<()>,
    /// What waits is to be counted.
    pub(super) count: Receiver<()>,
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
        ears: Ears,
    ) -> Result<(), StartError> {
        let queues: Vec<(Sender<Job>, Receiver<Job>)> = shared
            .bulkheads
            .iter()
            .map(|bulkhead| bounded(bulkhead.queue()))
            .collect();
        shared
            .progress
            .watch(queues.iter().map(|(_, queue)| queue.clone()));
        // Claimed messages are bounded, so a send into one of them never waits for long.
        let most = 2 * shared.batch() + shared.senders();
        let (plain, plain_queue) = bounded(most);
        let (keyed, keyed_queue) = bounded(most);
        let outcomes = Outcomes { plain, keyed };

        let Ears {
            ending,
            of_claimer,
            pulse,
            count,
        } = ears;
        let name = relay_name.to_owned();
        self.spawn(shared, HEARTBEAT, exit, move |shared| {
            heartbeat::run(shared, &name, lease_id, &ending, &pulse);
        })?;
        for number in 1..=KEYED_SETTLERS {
            let (outcomes, left) = (keyed_queue.clone(), of_claimer.inbox.clone());
            self.spawn(
                shared,
                &format!("relay-settler-keyed-{number}"),
                exit,
                move |shared| {
                    let post = &shared.progress.keyed_settlers[number - 1];
                    settler::run_keyed(shared, post, &outcomes, &left);
                },
            )?;
        }
        drop(keyed_queue);
        self.spawn(shared, "relay-settler", exit, move |shared| {
            settler::run(shared, &plain_queue);
        })?;
        let mut number = 0;
        for (bulkhead, (_, queue)) in shared.bulkheads.iter().zip(&queues) {
            let gathering = Arc::new(Mutex::new(()));
            for sender in 0..bulkhead.concurrency {
                number += 1;
                let (gathering, bulkhead) = (Arc::clone(&gathering), bulkhead.number);
                let (queue, outcomes) = (queue.clone(), outcomes.clone());
                self.spawn(
                    shared,
                    &format!("relay-send-{number}"),
                    exit,
                    move |shared| {
                        let stay = (bulkhead, sender);
                        sender::run(shared, stay, &queue, &gathering, &outcomes);
                    },
                )?;
            }
        }
        self.spawn(shared, "relay-janitor", exit, move |shared| {
            janitor::run(shared, &count);
        })?;
        self.spawn(shared, "relay-monitor", exit, |shared| monitor::run(shared))?;
        if shared.config.listener && shared.config.enabled {
            self.spawn(shared, "relay-listener", exit, |shared| {
                listener::run(shared)
            })?;
        }
        self.spawn(shared, "relay-claimer", exit, move |shared| {
            Claimer::new(shared, queues, outcomes, of_claimer).run();
        })
    }

    fn spawn(
        &mut self,
        shared: &Arc<Shared>,
        name: &str,
        exit: &Sender<Exit>,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> Result<(), StartError> {
        let guard = ExitGuard {
            shared: Arc::clone(shared),
            thread: name.to_owned(),
            exit: exit.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&guard.shared))?;
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
    shared: Arc<Shared>,
    thread: String,
    exit: Sender<Exit>,
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        self.shared.thread_ended(&self.thread);
        // The channel has room for every thread; nobody listens when the handle is gone.
        let _ = self.exit.try_send(Exit {
            thread: std::mem::take(&mut self.thread),
            panicked: std::thread::panicking(),
        });
    }
}
