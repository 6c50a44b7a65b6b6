//! What the threads of a relay do just now, for whoever looks on: a few atomics, and no lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use diesel::connection::{Instrumentation, InstrumentationEvent, get_default_instrumentation};
use metrics::Counter;

use super::bulkhead::Bulkhead;
use super::metrics::Metrics;
use super::session::LISTENER;
use super::shared::Job;

/// Beyond its limit a stay may take so much longer before anybody worries: a server that is gone is
/// noticed after 20 s, and machines can be slow.
pub(super) const MARGIN: Duration = Duration::from_secs(30);

/// Milliseconds since this process first asked. Never 0.
pub(super) fn now() -> u64 {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    millis(ORIGIN.elapsed()).saturating_add(1)
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Something that a thread goes into, and should come out of before long. In a cache line of its own:
/// senders write theirs with each message.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Stay {
    /// 0: it is outside.
    since: AtomicU64,
    /// The longest that is good, in milliseconds.
    limit: AtomicU64,
}

/// Ends a stay when it is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Within<'a>(&'a Stay);

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Stay {
    /// The thread goes in, for as long as this at most.
    pub(super) fn within(&self, limit: Duration) -> Within<'_> {
        self.begin(limit);
        Within(self)
    }

    /// The thread goes in, or takes the next step there.
    pub(super) fn begin(&self, limit: Duration) {
        self.limit.store(millis(limit), Ordering::Relaxed);
        self.since.store(now(), Ordering::Release);
    }

    pub(super) fn end(&self) {
        self.since.store(0, Ordering::Release);
    }

    pub(super) fn since(&self) -> Option<u64> {
        let since = self.since.load(Ordering::Acquire);
        (since > 0).then_some(since)
    }

    /// How long it has been inside, since its last step.
    pub(super) fn stayed(&self) -> Duration {
        let since = self.since().unwrap_or_else(now);
        Duration::from_millis(now().saturating_sub(since))
    }

    pub(super) fn is_inside(&self) -> bool {
        self.since().is_some()
    }

    /// How long it has been inside, where that is too long at `now`. What was before `awake` does not
    /// count: the whole process may have stood still.
    pub(super) fn overdue(&self, now: u64, awake: u64) -> Option<Duration> {
        let since = self.since()?.max(awake);
        let stayed = now.saturating_sub(since);
        (stayed > self.limit.load(Ordering::Relaxed)).then(|| Duration::from_millis(stayed))
    }
}

/// A thread with a connection of its own.
pub(crate) struct Post {
    pub(super) thread: &'static str,
    /// In the database: connecting, or waiting for the answer to a statement.
    pub(super) in_database: Stay,
    pub(super) is_connected: AtomicBool,
    pub(super) errors: Counter,
}

impl Post {
    fn new(thread: &'static str, metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            thread,
            in_database: Stay::default(),
            is_connected: AtomicBool::new(false),
            errors: metrics.database_errors(thread),
        })
    }

    /// Asks the database something, which takes as long as this at most.
    pub(super) fn asking<T>(&self, limit: Duration, ask: impl FnOnce() -> T) -> T {
        let _within = self.in_database.within(limit);
        ask()
    }

    pub(super) fn set_connected(&self, is_connected: bool) {
        self.is_connected.store(is_connected, Ordering::Relaxed);
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }
}

/// Each statement of a connection has its own time, `limit`: what a thread does by many is not one stay.
pub(super) fn each_statement(post: Arc<Post>, limit: Duration) -> impl Instrumentation {
    // The one that it takes the place of, where the application has set one.
    let mut default = get_default_instrumentation();
    move |event: InstrumentationEvent<'_>| {
        let is_next = matches!(event, InstrumentationEvent::StartQuery { .. });
        if is_next && post.in_database.is_inside() {
            post.in_database.begin(limit);
        }
        if let Some(default) = &mut default {
            default.on_connection_event(event);
        }
    }
}

/// Threads that settle messages with ordering keys.
pub(super) const KEYED_SETTLERS: usize = 2;

/// The threads of one relay.
pub(crate) struct Progress {
    pub(super) claimer: Arc<Post>,
    pub(super) settler: Arc<Post>,
    pub(super) keyed_settlers: [Arc<Post>; KEYED_SETTLERS],
    pub(super) heartbeat: Arc<Post>,
    pub(super) janitor: Arc<Post>,
    pub(super) listener: Arc<Post>,
    /// Of each bulkhead: whether a sender sends.
    pub(super) senders: Vec<Vec<Stay>>,
    /// Of each bulkhead, to be counted only.
    queues: OnceLock<Vec<Receiver<Job>>>,
    /// Changes with whatever is claimed or settled.
    moves: AtomicU64,
    /// Another relay does the work.
    stands_by: AtomicBool,
}

impl Progress {
    pub(super) fn new(metrics: &Metrics, bulkheads: &[Bulkhead]) -> Self {
        let senders = |bulkhead: &Bulkhead| {
            let one_each = std::iter::repeat_with(Stay::default);
            one_each.take(bulkhead.concurrency).collect()
        };
        Self {
            claimer: Post::new("claimer", metrics),
            settler: Post::new("settler", metrics),
            keyed_settlers: ["settler-keyed-1", "settler-keyed-2"]
                .map(|thread| Post::new(thread, metrics)),
            heartbeat: Post::new("heartbeat", metrics),
            janitor: Post::new("janitor", metrics),
            listener: Post::new(LISTENER, metrics),
            senders: bulkheads.iter().map(senders).collect(),
            queues: OnceLock::new(),
            moves: AtomicU64::new(0),
            stands_by: AtomicBool::new(false),
        }
    }

    /// The queues of the bulkheads, once they are there.
    pub(super) fn watch(&self, queues: impl Iterator<Item = Receiver<Job>>) {
        // Once for each relay.
        let _ = self.queues.set(queues.collect());
    }

    /// Messages that wait in the queue of this bulkhead.
    pub(super) fn queued(&self, bulkhead: usize) -> usize {
        let queue = self.queues.get().and_then(|queues| queues.get(bulkhead));
        queue.map_or(0, Receiver::len)
    }

    /// Senders of this bulkhead that send.
    pub(super) fn busy(&self, bulkhead: usize) -> usize {
        let senders = self.senders.get(bulkhead).map_or(&[][..], Vec::as_slice);
        senders.iter().filter(|sender| sender.is_inside()).count()
    }

    /// The threads that the relay cannot do without, and have a connection.
    pub(super) fn needed(&self) -> impl Iterator<Item = &Post> {
        let alone = [&self.claimer, &self.heartbeat, &self.janitor];
        alone.into_iter().chain(self.settlers()).map(|post| &**post)
    }

    fn settlers(&self) -> impl Iterator<Item = &Arc<Post>> {
        std::iter::once(&self.settler).chain(&self.keyed_settlers)
    }

    /// Whether something is being settled.
    pub(super) fn is_settling(&self) -> bool {
        self.settlers().any(|post| post.in_database.is_inside())
    }

    /// Something was claimed or settled.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_standing_by(&self, is_so: bool) {
        self.stands_by.store(is_so, Ordering::Relaxed);
    }

    pub(super) fn stands_by(&self) -> bool {
        self.stands_by.load(Ordering::Relaxed)
    }

    pub(super) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }
}
