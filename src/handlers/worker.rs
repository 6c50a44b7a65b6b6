//! Handlers run on threads of their own, beside the relay's senders: a sender waits for no longer
//! than the handler's time, and a handler that takes longer keeps only its own thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use diesel::PgConnection;

use super::context::{Connections, Context, Lent};
use super::{Handler, Handlers, run};
use crate::dispatch::{Dispatcher, Failure, Outcome};
use crate::message::Message;
use crate::relay::Span;
use crate::status::ReasonCode;

/// Handlers of one group whose time is over and that are at work still, before no more are started. A
/// message that hangs each time gets there by itself after that many attempts: more than it has.
const MOST_STUCK: usize = 64;

/// Gives the messages of one group to its handlers.
pub(crate) struct HandlerDispatcher {
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
    inbox: String,
    connections: Option<Arc<Connections>>,
    /// Handlers at work whose time is over.
    stuck: AtomicUsize,
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
    /// Set by whoever comes first: the handler's end, or the end of its time. What the other one says
    /// does not count.
    is_over: Arc<AtomicBool>,
    answer: Sender<Outcome>,
}

impl HandlerDispatcher {
    pub(crate) fn new(
        name: &str,
        inbox: String,
        timeout: Duration,
        handlers: Handlers,
        connections: Option<Arc<Connections>>,
    ) -> Self {
        Self {
            handlers,
            shared: Arc::new(Shared {
                name: name.to_owned(),
                inbox,
                connections,
                stuck: AtomicUsize::new(0),
            }),
            timeout,
            idle: Mutex::default(),
            started: AtomicUsize::new(0),
        }
    }

    /// Handles a message on this thread, on this connection, without a limit: for tests.
    pub(crate) fn handle_here(&self, message: &Message, conn: &mut PgConnection) -> Outcome {
        let lent = Lent::new(conn);
        let context = Context::lent(message, &self.shared.inbox, &lent);
        match self.handlers.find(&message.topic) {
            Ok(handler) => run(&*handler, message, &context),
            Err(failure) => Outcome::Retry(failure),
        }
    }

    fn worker(&self) -> std::io::Result<Worker> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        if let Some(worker) = idle {
            return Ok(worker);
        }
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let (tasks, queue) = bounded(1);
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("relay-handle-{number}"))
            .spawn(move || shared.work(&queue))?;
        Ok(Worker { tasks, thread })
    }

    fn too_late(&self, message: &Message) -> Outcome {
        let limit = humantime::format_duration(self.timeout);
        log::error!(
            event = "handler_stuck", sequence = message.sequence.0,
            message_id:% = message.message_id, topic = message.topic,
            handlers = self.shared.name;
            "message {} ({}): its handler takes longer than {limit}; it is left alone, and what it says will not count",
            message.message_id, message.topic
        );
        let error = format!("the handler took longer than {limit}");
        Outcome::Retry(Failure::new(ReasonCode::Timeout, error))
    }
}

impl Dispatcher for HandlerDispatcher {
    fn dispatch(&self, message: &Message) -> Outcome {
        let handler = match self.handlers.find(&message.topic) {
            Ok(handler) => handler,
            Err(failure) => return Outcome::Retry(failure),
        };
        let wait = |error: String| Outcome::Wait(Failure::new(ReasonCode::Timeout, error));
        let stuck = self.shared.stuck.load(Ordering::Acquire);
        if stuck >= MOST_STUCK {
            return wait(format!(
                "{stuck} handlers are at work although their time is over: no more are started"
            ));
        }
        let worker = match self.worker() {
            Ok(worker) => worker,
            Err(error) => return wait(format!("no thread for the handler: {error}")),
        };
        let (answer, outcome) = bounded(1);
        let is_over = Arc::new(AtomicBool::new(false));
        let deadline = Instant::now() + self.timeout;
        let task = Task {
            message: message.clone(),
            handler,
            deadline,
            span: Span::current(),
            is_over: Arc::clone(&is_over),
            answer,
        };
        let ended = || {
            let error = "the handler's thread has ended";
            Outcome::Retry(Failure::new(ReasonCode::Panic, error))
        };
        if worker.tasks.send(task).is_err() {
            return ended();
        }
        let outcome = match outcome.recv_deadline(deadline) {
            Err(RecvTimeoutError::Timeout) => {
                self.shared.stuck.fetch_add(1, Ordering::AcqRel);
                if !is_over.swap(true, Ordering::AcqRel) {
                    return self.too_late(message);
                }
                // It came to its end at that very moment.
                self.shared.stuck.fetch_sub(1, Ordering::AcqRel);
                outcome.recv().ok()
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Ok(outcome) => Some(outcome),
        };
        let Some(outcome) = outcome else {
            return ended();
        };
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(worker);
        outcome
    }
}

impl Shared {
    fn work(&self, tasks: &Receiver<Task>) {
        for task in tasks {
            let Task {
                message,
                handler,
                deadline,
                span,
                is_over,
                answer,
            } = task;
            let began = Instant::now();
            let context = Context::new(&message, &self.inbox, deadline, self.connections.as_ref());
            let outcome = span.within(|| run(&*handler, &message, &context));
            if !is_over.swap(true, Ordering::AcqRel) {
                // The sender waits for it, unless it has panicked.
                let _ = answer.send(outcome);
                continue;
            }
            self.stuck.fetch_sub(1, Ordering::AcqRel);
            log::warn!(
                event = "handler_late", sequence = message.sequence.0,
                message_id:% = message.message_id, topic = message.topic, handlers = self.name;
                "message {} ({}): its handler came to its end after {}, which does not count",
                message.message_id, message.topic,
                humantime::format_duration(Duration::from_millis(
                    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
                ))
            );
        }
    }
}

impl Drop for HandlerDispatcher {
    /// Joins the threads but for those that are stuck: nothing ends these but the process.
    fn drop(&mut self) {
        let idle = std::mem::take(self.idle.get_mut().unwrap_or_else(PoisonError::into_inner));
        for Worker { tasks, thread } in idle {
            drop(tasks);
            if thread.join().is_err() {
                log::error!(event = "thread_panicked", handlers = self.shared.name; "a thread of the handlers {} panicked", self.shared.name);
            }
        }
    }
}

impl fmt::Debug for HandlerDispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerDispatcher")
            .field("name", &self.shared.name)
            .field("handlers", &self.handlers)
            .finish_non_exhaustive()
    }
}
