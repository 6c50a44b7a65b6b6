//! Handlers run on threads of their own, beside the relay's senders: a sender waits for a call for as
//! long as the group's limit, and a call that takes longer keeps its message and its own thread, and no
//! place among the group's senders.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use diesel::PgConnection;
use uuid::Uuid;

use super::context::{Connections, Lent, PooledContext};
use super::{Handler, Handlers, run};
use crate::dispatch::{Failure, Outcome};
use crate::lock::lock;
use crate::message::Message;
use crate::relay::Span;
use crate::status::ReasonCode;

/// Calls of one group that run past its limit, before no more are started.
pub(crate) const MOST_LATE: usize = 64;
/// A year: further away than the clock can say is never.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// A group of handlers at work.
pub(crate) struct Group {
    handlers: Handlers,
    shared: Arc<Shared>,
    timeout: Duration,
    /// Threads without work.
    idle: Mutex<Vec<Worker>>,
    /// How many threads there were, for their names.
    started: AtomicUsize,
}

/// What the group's threads have in common.
struct Shared {
    name: String,
    /// Whose messages an inbox has that is asked by a handler's context.
    inbox: Arc<str>,
    connections: Arc<Connections>,
    /// Calls that run past the limit. Changed with the lock of [`CALLS`].
    late: AtomicUsize,
}

/// A thread that takes tasks until nobody has any for it.
struct Worker {
    tasks: Sender<Task>,
    thread: JoinHandle<()>,
}

struct Task {
    message: Message,
    handler: Arc<Handler>,
    deadline: Instant,
    span: Span,
    /// Dropped when everything is done.
    running: Sender<()>,
}

/// Is told the outcome of a call.
pub(crate) type OnEnd = Box<dyn FnOnce(Outcome) + Send>;

/// A call that runs.
struct Call {
    /// Of each claim of its message, since it began: more than one where a lease was lost meanwhile.
    on_end: Vec<OnEnd>,
    /// Disconnected when it has ended.
    running: Receiver<()>,
    group: Arc<Shared>,
    is_late: bool,
}

/// A group of an outbox, and a message.
type Key = (Arc<str>, Uuid);

/// The calls that run in this process, of all its relays: a message has one at most.
static CALLS: LazyLock<Mutex<HashMap<Key, Call>>> = LazyLock::new(Mutex::default);

fn calls() -> MutexGuard<'static, HashMap<Key, Call>> {
    lock(&CALLS)
}

impl Group {
    pub(crate) fn new(
        name: &str,
        inbox: String,
        timeout: Duration,
        handlers: Handlers,
        connections: Arc<Connections>,
    ) -> Self {
        Self {
            handlers,
            shared: Arc::new(Shared {
                name: name.to_owned(),
                inbox: inbox.into(),
                connections,
                late: AtomicUsize::new(0),
            }),
            timeout,
            idle: Mutex::default(),
            started: AtomicUsize::new(0),
        }
    }

    /// How many of its calls run past the limit.
    pub(crate) fn late(&self) -> usize {
        self.shared.late.load(Ordering::Relaxed)
    }

    /// Handles a message on this thread, on this connection, without a limit: for tests.
    pub(crate) fn handle_here(&self, message: &Message, conn: &mut PgConnection) -> Outcome {
        let lent = Lent::new(conn);
        let context = PooledContext::lent(message, &self.shared.inbox, &lent);
        match self.handlers.find(&message.topic) {
            Ok(handler) => run(&*handler, message, &context),
            Err(failure) => Outcome::Retry(failure),
        }
    }

    /// Calls the handler of a message, and returns when the call has ended or the group's limit is over.
    /// `on_end` is told the outcome, by whatever thread and however late. Where a call of this message
    /// runs in this process already, its outcome is this one's, too.
    pub(crate) fn call(&self, message: Message, span: Span, on_end: OnEnd) {
        let handler = match self.handlers.find(&message.topic) {
            Ok(handler) => handler,
            Err(failure) => return on_end(Outcome::Retry(failure)),
        };
        let now = Instant::now();
        let deadline = now.checked_add(self.timeout.min(FAR)).unwrap_or(now);
        let key = (Arc::clone(&self.shared.inbox), message.message_id);
        let (running, ended) = bounded(0);
        let mut all = calls();
        let late = self.late();
        match all.entry(key.clone()) {
            Entry::Occupied(mut call) => {
                let call = call.get_mut();
                call.on_end.push(on_end);
                let ended = call.running.clone();
                drop(all);
                self.wait(&key, &ended, deadline);
            }
            Entry::Vacant(_) if late >= MOST_LATE => {
                drop(all);
                on_end(wait(format!(
                    "{late} handlers of {} run longer than their limit: no more are started",
                    self.shared.name
                )));
            }
            Entry::Vacant(place) => {
                place.insert(Call {
                    on_end: vec![on_end],
                    running: ended.clone(),
                    group: Arc::clone(&self.shared),
                    is_late: false,
                });
                drop(all);
                let task = Task {
                    message,
                    handler,
                    deadline,
                    span,
                    running,
                };
                let worker = match self.give(task) {
                    Ok(worker) => worker,
                    Err(error) => {
                        let outcome = wait(format!("no thread for the handler: {error}"));
                        return self.shared.end(&key, &outcome, now);
                    }
                };
                if self.wait(&key, &ended, deadline) == Waited::ToItsEnd {
                    self.lock_idle().push(worker);
                }
            }
        }
    }

    /// Waits for a call. One that takes longer goes on, and is reported once.
    fn wait(&self, key: &Key, ended: &Receiver<()>, deadline: Instant) -> Waited {
        if ended.recv_deadline(deadline) != Err(RecvTimeoutError::Timeout) {
            return Waited::ToItsEnd;
        }
        let mut all = calls();
        let call = all.get_mut(key);
        let Some(call) = call.filter(|call| call.running.same_channel(ended)) else {
            // It came to its end at that very moment.
            return Waited::ToItsEnd;
        };
        if !call.is_late {
            call.is_late = true;
            call.group.late.fetch_add(1, Ordering::Relaxed);
            drop(all);
            log::error!(
                event = "handler_stuck", message_id:% = key.1, handlers = self.shared.name;
                "a handler of {} has run for more than {}: message {} waits for the handler to return",
                self.shared.name, humantime::format_duration(self.timeout), key.1
            );
        }
        Waited::ToTheLimit
    }

    /// Gives a task to a thread.
    fn give(&self, mut task: Task) -> std::io::Result<Worker> {
        loop {
            let idle = self.lock_idle().pop();
            let worker = match idle {
                Some(worker) => worker,
                None => self.worker()?,
            };
            match worker.tasks.send(task) {
                Ok(()) => return Ok(worker),
                // An observer's or the logger's panic has ended that thread: the next one.
                Err(unsent) => task = unsent.into_inner(),
            }
        }
    }

    fn worker(&self) -> std::io::Result<Worker> {
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let (tasks, queue) = bounded(1);
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("relay-handle-{number}"))
            .spawn(move || shared.work(&queue))?;
        Ok(Worker { tasks, thread })
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<Worker>> {
        lock(&self.idle)
    }
}

/// How long a sender has waited for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    ToItsEnd,
    ToTheLimit,
}

fn wait(error: String) -> Outcome {
    Outcome::Wait(Failure::new(ReasonCode::Timeout, error))
}

impl Shared {
    fn work(&self, tasks: &Receiver<Task>) {
        for task in tasks {
            let Task {
                message,
                handler,
                deadline,
                span,
                running,
            } = task;
            let began = Instant::now();
            let connections = &self.connections;
            let context = PooledContext::new(&message, &self.inbox, deadline, connections);
            let outcome = span.within(|| run(&*handler, &message, &context));
            let key = (Arc::clone(&self.inbox), message.message_id);
            self.end(&key, &outcome, began);
            drop(running);
        }
    }

    /// A call has ended: whoever waits for its outcome gets it.
    fn end(&self, key: &Key, outcome: &Outcome, began: Instant) {
        let mut all = calls();
        let call = all.remove(key);
        if let Some(call) = call.as_ref().filter(|call| call.is_late) {
            call.group.late.fetch_sub(1, Ordering::Relaxed);
        }
        drop(all);
        let Some(call) = call else {
            return;
        };
        if call.is_late {
            let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            log::warn!(
                event = "handler_late", message_id:% = key.1, handlers = self.name;
                "a late handler of {} has returned after {}: message {}",
                self.name, humantime::format_duration(Duration::from_millis(took)), key.1
            );
        }
        for on_end in call.on_end {
            on_end(outcome.clone());
        }
    }
}

impl Drop for Group {
    /// Joins the threads but for those whose handlers have not returned: nothing ends these but the
    /// process.
    fn drop(&mut self) {
        for Worker { tasks, thread } in std::mem::take(&mut *self.lock_idle()) {
            drop(tasks);
            if thread.join().is_err() {
                log::error!(event = "thread_panicked", handlers = self.shared.name; "a thread of the handlers {} panicked", self.shared.name);
            }
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.shared.name)
            .field("handlers", &self.handlers)
            .finish_non_exhaustive()
    }
}
