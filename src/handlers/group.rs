//! A group of handlers and its threads.
//!
//! Handlers run on their own threads, not on the relay's sender threads. A sender waits for a call until the limit of
//! the group. A call that runs longer keeps its message and its thread, but no longer occupies a sender.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use diesel::PgConnection;
use uuid::Uuid;

use super::context::{Connections, Lent, PooledContext};
use super::{Handler, Handlers, run};
use crate::clock;
use crate::dispatch::fence::Hold;
use crate::dispatch::{Failure, Outcome};
use crate::engine::observe::spans::Span;
use crate::engine::send::calls::{Calls, OnEnd};
use crate::lock::lock;
use crate::log;
use crate::message::{Message, Sequence};
use crate::shows::shows;
use crate::status::ReasonCode;

/// The most calls of a group that may run past the limit. At this number the group starts no more calls.
const MOST_LATE: usize = 64;

/// A running group of handlers.
pub(crate) struct HandlerGroup {
    handlers: Handlers,
    shared: Arc<GroupState>,
    timeout: Duration,
    /// Threads without work.
    idle: Mutex<Vec<TaskThread>>,
    /// The number of threads started so far, for their names.
    started: AtomicUsize,
}

/// The state that the threads of a group share.
struct GroupState {
    name: String,
    /// The inbox source of the messages, for the context of handlers.
    inbox: Arc<str>,
    connections: Arc<Connections>,
    /// The number of calls past the limit. Only changed under the lock of [`CALLS`].
    late: AtomicUsize,
}

/// A thread that runs tasks until the sender is dropped.
struct TaskThread {
    tasks: Sender<Task>,
    thread: JoinHandle<()>,
}

struct Task {
    message: Message,
    handler: Arc<Handler>,
    deadline: Instant,
    hold: Arc<Mutex<Option<Hold>>>,
    span: Span,
    /// Dropped after the call has ended and its outcome was passed on.
    running: Sender<()>,
}

/// A running call.
struct Call {
    /// One for each claim of the message since the call started. More than one if a lease was lost meanwhile.
    on_end: Vec<OnEnd>,
    /// The lease of the last of these claims.
    hold: Arc<Mutex<Option<Hold>>>,
    /// Disconnected when the call has ended.
    running: Receiver<()>,
    group: Arc<GroupState>,
    is_late: bool,
}

/// A group of an outbox, and a message. An id alone is no message: plain SQL may give one id to several messages.
type CallKey = (Arc<str>, (Sequence, Uuid));

/// The running calls of all relays in this process. Each message has at most one call.
// Why: docs/decisions.md#one-call
static CALLS: LazyLock<Mutex<HashMap<CallKey, Call>>> = LazyLock::new(Mutex::default);

fn calls() -> MutexGuard<'static, HashMap<CallKey, Call>> {
    lock(&CALLS)
}

impl HandlerGroup {
    pub(crate) fn new(
        name: &str,
        inbox: String,
        timeout: Duration,
        handlers: Handlers,
        connections: Arc<Connections>,
    ) -> Self {
        Self {
            handlers,
            shared: Arc::new(GroupState {
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

    /// Waits for a call until the deadline. A longer call continues, and is reported once.
    fn wait(&self, key: &CallKey, ended: &Receiver<()>, deadline: Instant) -> CallWait {
        if ended.recv_deadline(deadline) != Err(RecvTimeoutError::Timeout) {
            return CallWait::ToItsEnd;
        }
        let mut all = calls();
        let call = all.get_mut(key);
        let Some(call) = call.filter(|call| call.running.same_channel(ended)) else {
            // The call ended just after the deadline.
            return CallWait::ToItsEnd;
        };
        if !call.is_late {
            call.is_late = true;
            call.group.late.fetch_add(1, Ordering::Relaxed);
            drop(all);
            let (_, (_, message_id)) = key;
            log::error!(
                event = "handler_stuck", message_id:% = message_id, handlers = self.shared.name;
                "a handler of {} is still running after {}: message {} stays claimed until the handler returns",
                self.shared.name, humantime::format_duration(self.timeout), message_id
            );
        }
        CallWait::ToTheLimit
    }

    /// Gives a task to a thread.
    fn give(&self, mut task: Task) -> std::io::Result<TaskThread> {
        loop {
            let idle = self.lock_idle().pop();
            let worker = match idle {
                Some(worker) => worker,
                None => self.worker()?,
            };
            match worker.tasks.send(task) {
                Ok(()) => return Ok(worker),
                // A panic of an observer or the logger has ended that thread: try the next thread.
                Err(unsent) => task = unsent.into_inner(),
            }
        }
    }

    fn worker(&self) -> std::io::Result<TaskThread> {
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let (tasks, queue) = bounded(1);
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("relay-handle-{number}"))
            .spawn(move || shared.work(&queue))?;
        Ok(TaskThread { tasks, thread })
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<TaskThread>> {
        lock(&self.idle)
    }
}

impl Calls for HandlerGroup {
    /// If a call of this message is already running in this process, its outcome also counts for this claim.
    fn call(&self, message: Message, span: Span, on_end: OnEnd) {
        let handler = match self.handlers.find(&message.topic) {
            Ok(handler) => handler,
            Err(failure) => return on_end(Outcome::Retry(failure)),
        };
        let now = Instant::now();
        let deadline = clock::after(now, self.timeout);
        let key = (Arc::clone(&self.shared.inbox), message.identity());
        let (running, ended) = bounded(0);
        let mut all = calls();
        let late = self.late();
        match all.entry(key.clone()) {
            Entry::Occupied(mut call) => {
                let call = call.get_mut();
                call.on_end.push(on_end);
                *lock(&call.hold) = Hold::of_thread();
                let ended = call.running.clone();
                drop(all);
                self.wait(&key, &ended, deadline);
            }
            Entry::Vacant(_) if late >= MOST_LATE => {
                drop(all);
                on_end(wait(format!(
                    "{late} handlers of {} run longer than their limit: messages wait until a handler returns",
                    self.shared.name
                )));
            }
            Entry::Vacant(place) => {
                let hold = Arc::new(Mutex::new(Hold::of_thread()));
                place.insert(Call {
                    on_end: vec![on_end],
                    hold: Arc::clone(&hold),
                    running: ended.clone(),
                    group: Arc::clone(&self.shared),
                    is_late: false,
                });
                drop(all);
                let task = Task {
                    message,
                    handler,
                    deadline,
                    hold,
                    span,
                    running,
                };
                let worker = match self.give(task) {
                    Ok(worker) => worker,
                    Err(error) => {
                        let outcome =
                            wait(format!("cannot start a thread for the handler: {error}"));
                        return self.shared.end(&key, &outcome, now);
                    }
                };
                if self.wait(&key, &ended, deadline) == CallWait::ToItsEnd {
                    self.lock_idle().push(worker);
                }
            }
        }
    }

    fn call_here(&self, message: &Message, conn: &mut PgConnection) -> Outcome {
        let lent = Lent::new(conn);
        let context = PooledContext::lent(message, &self.shared.inbox, &lent);
        match self.handlers.find(&message.topic) {
            Ok(handler) => run(&*handler, message, &context),
            Err(failure) => Outcome::Retry(failure),
        }
    }

    fn late(&self) -> usize {
        self.shared.late.load(Ordering::Relaxed)
    }

    fn most_late(&self) -> usize {
        MOST_LATE
    }
}

/// Why a sender stopped waiting for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallWait {
    ToItsEnd,
    ToTheLimit,
}

fn wait(error: String) -> Outcome {
    Outcome::Wait(Failure::new(ReasonCode::Timeout, error))
}

impl GroupState {
    fn work(&self, tasks: &Receiver<Task>) {
        for task in tasks {
            let Task {
                message,
                handler,
                deadline,
                hold,
                span,
                running,
            } = task;
            let began = Instant::now();
            let connections = &self.connections;
            let limits = (deadline, &*hold);
            let context = PooledContext::new(&message, &self.inbox, limits, connections);
            let outcome = span.within(|| run(&*handler, &message, &context));
            let key = (Arc::clone(&self.inbox), message.identity());
            self.end(&key, &outcome, began);
            drop(running);
        }
    }

    /// Ends a call: passes its outcome to every claim that waits.
    fn end(&self, key: &CallKey, outcome: &Outcome, began: Instant) {
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
            let (_, (_, message_id)) = key;
            let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            log::warn!(
                event = "handler_late", message_id:% = message_id, handlers = self.name;
                "a handler of {} returned after {}, past its limit: recording the result of message {}",
                self.name, humantime::format_duration(Duration::from_millis(took)), message_id
            );
        }
        for on_end in call.on_end {
            on_end(outcome.clone());
        }
    }
}

impl Drop for HandlerGroup {
    /// Joins the idle threads. Threads whose handlers have not returned keep running until the process ends.
    fn drop(&mut self) {
        for TaskThread { tasks, thread } in std::mem::take(&mut *self.lock_idle()) {
            drop(tasks);
            if thread.join().is_err() {
                log::error!(event = "thread_panicked", handlers = self.shared.name; "a thread of handler group {} panicked", self.shared.name);
            }
        }
    }
}

shows!(HandlerGroup: name = [shared.name], handlers);
