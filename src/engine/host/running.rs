//! Starts the threads of a relay, and joins them.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::shared::Shared;
use super::sql::connection::Plans;
use super::threads::{Post, ThreadsState};
use super::{Launch, StartError};
use crate::engine::claim::Claimer;
use crate::engine::lease::heartbeat::{self, Ending};
use crate::engine::observe::monitor;
use crate::engine::send::bulkhead::SendsTo;
use crate::engine::settle::settlement::Outcomes;
use crate::engine::wake::listener;
use crate::engine::workers::Workers;
use crate::engine::{clean, send, settle};
use crate::log::{self, LONGEST_FLUSH};

/// The name of the thread that ends last.
pub(super) const HEARTBEAT: &str = "relay-heartbeat";

/// The means to end the relay. A shutdown gives them up step by step.
pub(super) struct Running {
    /// Dropped to stop claiming and sending.
    pub(super) stop: Option<Sender<()>>,
    /// Dropped to give up unfinished settles.
    pub(super) abandon: Option<Sender<()>>,
    pub(super) ending: Sender<Ending>,
    pub(super) threads: Vec<(Arc<str>, JoinHandle<()>)>,
    /// Passes the lines of the other threads to the logger.
    pub(super) log: Option<LogThread>,
}

pub(super) struct LogThread {
    /// Dropped to end the thread after the last line.
    open: Sender<()>,
    thread: JoinHandle<()>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl LogThread {
    fn start(shared: &Shared) -> std::io::Result<Self> {
        let (open, closed) = bounded(0);
        let (end, ended) = bounded(0);
        let queue = shared.log.clone();
        let thread = std::thread::Builder::new()
            .name(shared.settings.thread_name("relay-log"))
            .spawn(move || {
                let _end: Sender<()> = end;
                queue.pass_on(&closed);
            })?;
        Ok(Self {
            open,
            thread,
            ended,
        })
    }
}

impl Running {
    /// Starts the threads against the flow of the data: the receiver of a channel starts before its senders.
    pub(super) fn spawn_all(
        &mut self,
        shared: &Arc<Shared>,
        launch: Launch,
    ) -> Result<(), StartError> {
        let Launch {
            work,
            registration,
            lease_id,
            ending,
        } = launch;
        let (queues, chores, workers) = (work.queues, work.chores, work.workers);
        self.log = Some(LogThread::start(shared)?);
        // The number of claimed messages is bounded, so a send into either channel never blocks for long.
        let most = 2 * shared.batch() + shared.senders();
        let (plain, plain_queue) = bounded(most);
        let (keyed, keyed_queue) = bounded(most);
        let outcomes = Outcomes { plain, keyed };

        let serves = registration.serves.clone().unwrap_or_default();
        self.spawn(shared, Post::Heartbeat.as_str(), move |shared| {
            heartbeat::run(shared, registration, lease_id, &ending);
        })?;
        // Why: docs/decisions.md#keyed-settlers
        for post in Post::KEYED_SETTLERS {
            let outcomes = keyed_queue.clone();
            self.spawn(shared, post.as_str(), move |shared| {
                settle::run_keyed(shared, post, &outcomes);
            })?;
        }
        drop(keyed_queue);
        let of_settler = workers.clone();
        self.spawn(shared, Post::Settler.as_str(), move |shared| {
            settle::run(shared, of_settler.as_deref(), &plain_queue);
        })?;
        self.spawn_senders(shared, workers.as_ref(), &outcomes)?;
        let of_janitor = workers.clone();
        self.spawn(shared, Post::Janitor.as_str(), move |shared| {
            clean::run(shared, of_janitor.as_deref(), chores);
        })?;
        self.spawn(shared, "monitor", |shared| monitor::run(shared))?;
        if shared.listens() {
            self.spawn(shared, Post::Listener.as_str(), move |shared| {
                listener::run(shared, &serves);
            })?;
        }
        self.spawn(shared, Post::Claimer.as_str(), move |shared| {
            let session = shared.session(Post::Claimer, shared.claim_limit, Plans::ByIndex);
            let inbox = shared.signals.told.1.clone();
            let keeper = workers.map(|workers| workers.keeper());
            Claimer::new(shared, queues, outcomes, inbox, keeper, session).run();
        })
    }

    /// The threads that send, of each destination.
    fn spawn_senders(
        &mut self,
        shared: &Arc<Shared>,
        workers: Option<&Arc<dyn Workers>>,
        outcomes: &Outcomes,
    ) -> Result<(), StartError> {
        let mut number = 0;
        for bulkhead in &shared.bulkheads {
            if let (SendsTo::Members(_), Some(workers)) = (&bulkhead.serves, workers) {
                let outcomes = outcomes.clone();
                let workers = Arc::clone(workers);
                self.spawn(shared, &bulkhead.name, move |shared| {
                    workers.run(shared, &outcomes);
                })?;
                continue;
            }
            let gathering = Arc::new(Mutex::new(()));
            let senders = match bulkhead.serves {
                SendsTo::Feed => 0,
                _ => bulkhead.limits.concurrency,
            };
            for sender in 0..senders {
                number += 1;
                let (gathering, place) = (Arc::clone(&gathering), (bulkhead.number, sender));
                let outcomes = outcomes.clone();
                self.spawn(shared, &format!("send-{number}"), move |shared| {
                    send::run(shared, place, &gathering, &outcomes);
                })?;
            }
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        shared: &Arc<Shared>,
        name: &str,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> Result<(), StartError> {
        let (shared, guard) = (
            Arc::clone(shared),
            shared.threads.begin(&format!("relay-{name}")),
        );
        let name = Arc::clone(&guard.thread);
        let thread_name = shared.settings.thread_name(&name);
        let thread = std::thread::Builder::new()
            .name(thread_name)
            .spawn(move || {
                let _guard = guard;
                let _log = shared.log.enter();
                work(&shared);
            })?;
        self.threads.push((name, thread));
        Ok(())
    }

    /// Ends the thread that passes the lines to the logger, after the other threads. A logger that hangs is not waited for.
    pub(super) fn end_log(&mut self, shared: &Shared, until: Option<Instant>) {
        let Some(LogThread {
            open,
            thread,
            ended,
        }) = self.log.take()
        else {
            return;
        };
        shared.log.close();
        drop(open);
        let longest = Instant::now() + LONGEST_FLUSH;
        let until = until.map_or(longest, |until| until.min(longest));
        if ended.recv_deadline(until) == Err(RecvTimeoutError::Disconnected) {
            // The thread catches what a logger panics with.
            let _ = thread.join();
        }
    }

    /// Joins the threads that have ended; the others stay.
    pub(super) fn join_ended(&mut self, state: &ThreadsState) {
        let threads = std::mem::take(&mut self.threads).into_iter();
        let has_ended = |(name, _): &(Arc<str>, _)| state.ended().any(|ended| *ended == **name);
        let (ended, left): (Vec<_>, _) = threads.partition(has_ended);
        self.threads = left;
        for (name, thread) in ended {
            if thread.join().is_err() {
                log::error!(event = "thread_panicked", thread = &*name; "the relay's thread {name} panicked: other relays take over unsettled messages when the lease expires");
            }
        }
    }
}
