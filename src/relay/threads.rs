//! What the threads of a relay do and since when, what hinders them, and how they ended: health, metrics, the
//! log and a shutdown read it here.
//!
//! What changes with each send and each statement is in atomics of the thread's own ([`Stay`]). All else changes
//! rarely, and is behind one lock ([`State`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::Counter;

use super::bulkhead::Bulkhead;
use super::metrics::Metrics;
use crate::error::DatabaseError;
use crate::lock::lock;

/// Beyond its limit a stay may take so much longer before anybody worries: a server that is gone is
/// noticed after 20 s, and machines can be slow.
pub(super) const MARGIN: Duration = Duration::from_secs(30);
/// Where the monitor has not looked for as long, the whole process stood still.
const ASLEEP: Duration = Duration::from_secs(5);
/// An outage shorter than this after the last one is the same one to the log.
const QUIET: Duration = Duration::from_secs(15);

/// Milliseconds since this process first asked. Never 0.
fn now() -> u64 {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    millis(ORIGIN.elapsed()).saturating_add(1)
}

fn elapsed(since: u64) -> Duration {
    Duration::from_millis(now().saturating_sub(since))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A thread with a connection of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Post {
    Claimer,
    Heartbeat,
    Janitor,
    Listener,
    Settler,
    KeyedSettler1,
    KeyedSettler2,
}

impl Post {
    /// In their order, with their names.
    const ALL: [(Self, &str); 7] = [
        (Self::Claimer, "claimer"),
        (Self::Heartbeat, "heartbeat"),
        (Self::Janitor, "janitor"),
        (Self::Listener, "listener"),
        (Self::Settler, "settler"),
        (Self::KeyedSettler1, "settler-keyed-1"),
        (Self::KeyedSettler2, "settler-keyed-2"),
    ];
    /// Those that settle messages with ordering keys.
    pub(super) const KEYED_SETTLERS: [Self; 2] = [Self::KeyedSettler1, Self::KeyedSettler2];

    pub(super) fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// Those that the relay cannot do without.
    pub(super) fn needed() -> impl Iterator<Item = Self> {
        let all = Self::ALL.into_iter().map(|(post, _)| post);
        all.filter(|post| *post != Self::Listener)
    }
}

/// Something that a thread goes into, and should come out of before long. In a cache line of its own:
/// senders write theirs with each message.
///
/// One number, so that nobody sees the beginning of one stay with the limit of another: since when, in milliseconds,
/// and in its last bits the longest that is good, in seconds. 0: it is outside.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Stay(AtomicU64);

/// Half a year, and 34 years are left for the rest.
const LIMIT_BITS: u32 = 24;
const LONGEST_LIMIT: u64 = (1 << LIMIT_BITS) - 1;

/// Ends a stay when it is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Within<'a>(&'a Stay);

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
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
        let seconds = millis(limit).div_ceil(1000).min(LONGEST_LIMIT);
        (self.0).store(now() << LIMIT_BITS | seconds, Ordering::Release);
    }

    /// Since when it has been inside, and for how long that is good.
    fn read(&self) -> Option<(u64, Duration)> {
        let stay = self.0.load(Ordering::Acquire);
        let limit = Duration::from_secs(stay & LONGEST_LIMIT);
        (stay > 0).then_some((stay >> LIMIT_BITS, limit))
    }

    /// How long it has been inside, since its last step.
    pub(super) fn stayed(&self) -> Duration {
        self.read()
            .map_or(Duration::ZERO, |(since, _)| elapsed(since))
    }

    pub(super) fn is_inside(&self) -> bool {
        self.read().is_some()
    }
}

/// The threads of one relay.
pub(crate) struct Threads {
    /// In the order of [`Post::ALL`], in the database: connecting, or waiting for the answer to a statement.
    in_database: [Stay; Post::ALL.len()],
    /// In the same order.
    errors: [Counter; Post::ALL.len()],
    /// Of each bulkhead: whether a sender sends.
    pub(super) senders: Vec<Vec<Stay>>,
    state: Mutex<State>,
    /// A thread has ended.
    changed: Condvar,
}

/// How the threads are, but for their stays.
#[derive(Debug, Clone, Default)]
pub(super) struct State {
    /// By name, those that have ended in the order of their ends.
    lives: Vec<(Arc<str>, Life)>,
    /// In the order of [`Post::ALL`]: what became of a thread's connection; `None`: it has none, by no fault of
    /// the database's.
    connections: [Option<Result<(), Trouble>>; Post::ALL.len()],
    outage: Outage,
    /// Another relay does the work.
    pub(super) stands_by: bool,
    pub(super) watch: Watch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    AtWork,
    Ended,
    Panicked,
}

/// Reports a thread's end, also when it ends by a panic.
pub(super) struct ExitGuard {
    threads: Arc<Threads>,
    pub(super) thread: Arc<str>,
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        let life = match std::thread::panicking() {
            true => Life::Panicked,
            false => Life::Ended,
        };
        self.threads.set_life(&self.thread, life);
    }
}

/// Why a thread has no database.
#[derive(Debug, Clone)]
pub(super) struct Trouble {
    since: u64,
    pub(super) error: String,
    cause: Cause,
}

/// Why a statement has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// It, or a lock that it waited for, took longer than its limit.
    TimeOut,
    /// The database is there, and this is wrong with the outbox.
    Missing(String),
    Other,
}

/// The time in which any thread is without its database, to the log.
#[derive(Debug, Clone, Default)]
struct Outage {
    began: u64,
    ended: Option<u64>,
    is_told: bool,
}

impl Trouble {
    pub(super) fn lasts(&self) -> Duration {
        elapsed(self.since)
    }

    pub(super) fn missing(&self) -> Option<&str> {
        match &self.cause {
            Cause::Missing(what) => Some(what),
            Cause::TimeOut | Cause::Other => None,
        }
    }
}

impl Outage {
    fn begin(&mut self) {
        self.began = now();
        self.is_told = self.ended.is_none_or(|ended| elapsed(ended) > QUIET);
    }

    fn level(&self, level: log::Level) -> log::Level {
        if self.is_told {
            level
        } else {
            log::Level::Debug
        }
    }
}

impl State {
    /// The threads that are without their database.
    fn failing(&self) -> impl Iterator<Item = (Post, &Trouble)> {
        let all = Post::ALL.into_iter().zip(&self.connections);
        all.filter_map(|((post, _), connection)| Some((post, connection.as_ref()?.as_ref().err()?)))
    }

    /// The same, but for the one that the relay can do without.
    pub(super) fn troubles(&self) -> impl Iterator<Item = (Post, &Trouble)> {
        self.failing().filter(|(post, _)| *post != Post::Listener)
    }

    pub(super) fn is_connected(&self, post: Post) -> bool {
        matches!(self.connections[post as usize], Some(Ok(())))
    }

    pub(super) fn connections(&self) -> usize {
        let all = self.connections.iter().flatten();
        all.filter(|connection| connection.is_ok()).count()
    }

    /// Whether a thread is at work, other than the one named `but`.
    fn is_at_work(&self, but: Option<&str>) -> bool {
        let is_so = |(name, life): &(Arc<str>, Life)| *life == Life::AtWork && Some(&**name) != but;
        self.lives.iter().any(is_so)
    }

    /// Whether all of them have ended.
    pub(super) fn is_over(&self) -> bool {
        !self.is_at_work(None)
    }

    /// Those that have come to their ends, in their order.
    pub(super) fn ended(&self) -> impl Iterator<Item = &str> {
        let ended = (self.lives.iter()).filter(|(_, life)| *life != Life::AtWork);
        ended.map(|(thread, _)| &**thread)
    }

    /// The first one that has panicked.
    pub(super) fn panicked(&self) -> Option<&str> {
        let mut lives = self.lives.iter();
        let panicked = lives.find(|(_, life)| *life == Life::Panicked);
        panicked.map(|(thread, _)| &**thread)
    }
}

impl Threads {
    pub(super) fn new(metrics: &Metrics, bulkheads: &[Bulkhead]) -> Self {
        let senders = |one: &Bulkhead| (0..one.concurrency).map(|_| Stay::default()).collect();
        Self {
            in_database: Default::default(),
            errors: Post::ALL.map(|(_, name)| metrics.database_errors(name)),
            senders: bulkheads.iter().map(senders).collect(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// How they are now.
    pub(super) fn state(&self) -> State {
        let mut state = self.lock();
        state.watch.ask(now());
        state.clone()
    }

    pub(super) fn in_database(&self, post: Post) -> &Stay {
        &self.in_database[post as usize]
    }

    /// Whether a message is being settled or sent.
    pub(super) fn is_busy(&self) -> bool {
        let settlers = [Post::Settler].into_iter().chain(Post::KEYED_SETTLERS);
        let mut stays = settlers.map(|post| self.in_database(post));
        stays.any(Stay::is_inside) || self.senders.iter().flatten().any(Stay::is_inside)
    }

    /// Senders of this bulkhead that send.
    pub(super) fn busy(&self, bulkhead: usize) -> usize {
        let senders = self.senders[bulkhead].iter();
        senders.filter(|sender| sender.is_inside()).count()
    }

    /// A statement has failed.
    pub(super) fn count_error(&self, post: Post) {
        self.errors[post as usize].increment(1);
    }

    /// The thread has its connection, or is without one by no fault of the database's. Says so when all have their
    /// database again.
    pub(super) fn set_connected(&self, post: Post, is_connected: bool) {
        let mut state = self.lock();
        let connection = is_connected.then_some(Ok(()));
        let before = std::mem::replace(&mut state.connections[post as usize], connection);
        if !matches!(before, Some(Err(_))) || state.failing().next().is_some() {
            return;
        }
        state.outage.ended = Some(now());
        let level = state.outage.level(log::Level::Info);
        let seconds = elapsed(state.outage.began).as_secs_f64();
        drop(state);
        log::log!(level, event = "db_recovered", seconds = seconds; "the database is back");
    }

    /// The thread is without its database. Says so once for all of them.
    pub(super) fn failed(&self, post: Post, error: &DatabaseError, cause: Cause) {
        self.count_error(post);
        let event = match cause {
            Cause::TimeOut => "db_timeout",
            Cause::Missing(_) | Cause::Other => "db_error",
        };
        let mut state = self.lock();
        let mut level = log::Level::Debug;
        if state.failing().next().is_none() {
            state.outage.begin();
            level = state.outage.level(log::Level::Error);
        }
        let connection = &mut state.connections[post as usize];
        let since = match connection {
            Some(Err(before)) => before.since,
            Some(Ok(())) | None => now(),
        };
        *connection = Some(Err(Trouble {
            since,
            error: error.to_string(),
            cause,
        }));
        drop(state);
        log::log!(level, event = event, thread = post.name(), error:% = error; "the database failed; trying again until it is back");
    }

    pub(super) fn set_standing_by(&self, is_so: bool) {
        self.lock().stands_by = is_so;
    }

    /// The monitor looks: whether what is claimed does not move unless `moves` has changed, and whether the relay
    /// does not hear of new messages.
    pub(super) fn look(&self, moves: u64, is_stuck: bool, is_deaf: bool) {
        self.lock().watch.look(now(), moves, is_stuck, is_deaf);
    }

    /// The janitor has looked whether something is due that the relay should have claimed.
    pub(super) fn set_left(&self, is_left: bool) {
        follow(&mut self.lock().watch.left, is_left, now());
    }

    /// A thread is at work from here on, until the guard is dropped.
    pub(super) fn begin(self: &Arc<Self>, thread: &str) -> ExitGuard {
        let thread = thread.into();
        self.set_life(&thread, Life::AtWork);
        let threads = Arc::clone(self);
        ExitGuard { threads, thread }
    }

    /// The thread is about to begin, or has come to its end.
    pub(super) fn set_life(&self, thread: &Arc<str>, life: Life) {
        let mut state = self.lock();
        state.lives.retain(|(name, _)| name != thread);
        state.lives.push((Arc::clone(thread), life));
        self.changed.notify_all();
    }

    /// Waits until all threads have ended, but for the one named `but`, or `until`. Returns whether they have.
    pub(super) fn wait_for_ends(&self, until: Option<Instant>, but: Option<&str>) -> bool {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let left = until.map_or(Duration::MAX, left);
        let is_at_work = |state: &mut State| state.is_at_work(but);
        let waited = (self.changed).wait_timeout_while(self.lock(), left, is_at_work);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// What was seen by whoever looks whether the threads move. Times are those of [`now`].
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Watch {
    /// When the monitor last looked.
    looked: u64,
    /// When somebody last asked.
    asked: u64,
    /// Since when times count. A process that stood still sees that its threads were where they are for long,
    /// before they could move.
    awake: u64,
    /// What had been claimed and settled when the monitor last looked.
    moves: u64,
    /// Since when what is claimed does not move, and nothing explains it.
    pub(super) stalled: Option<u64>,
    /// Since when what is due is not claimed, and nothing explains it.
    pub(super) left: Option<u64>,
    /// Since when the relay does not listen.
    pub(super) deaf: Option<u64>,
}

impl Watch {
    fn look(&mut self, now: u64, moves: u64, is_stuck: bool, is_deaf: bool) {
        if self.is_late(now) {
            self.awake = now;
        }
        self.looked = now;
        let has_moved = std::mem::replace(&mut self.moves, moves) != moves;
        follow(&mut self.stalled, is_stuck && !has_moved, now);
        follow(&mut self.deaf, is_deaf, now);
    }

    /// Somebody asks. Where the monitor has not looked for long, either the process has stood still just now, or
    /// the monitor itself hangs: then times count from when that is first seen.
    fn ask(&mut self, now: u64) {
        if self.is_late(now) && self.awake <= self.looked {
            self.awake = now;
        }
        self.asked = now;
    }

    fn is_late(&self, now: u64) -> bool {
        now.saturating_sub(self.looked) > millis(ASLEEP)
    }

    /// How long that has lasted, where it is longer than this.
    pub(super) fn overdue(&self, since: Option<u64>, limit: Duration) -> Option<Duration> {
        let lasted = self.asked.saturating_sub(since?.max(self.awake));
        (lasted > millis(limit)).then(|| Duration::from_millis(lasted))
    }

    /// How long a thread has been inside, where that is too long.
    pub(super) fn stuck(&self, stay: &Stay) -> Option<Duration> {
        let (since, limit) = stay.read()?;
        self.overdue(Some(since), limit)
    }
}

/// Begins where it is so and was not before; ends where it is not.
fn follow(since: &mut Option<u64>, is_so: bool, now: u64) {
    *since = is_so.then(|| since.unwrap_or(now));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1000;

    #[test]
    fn a_stay_is_overdue_beyond_its_limit_and_not_for_the_time_that_the_process_stood_still() {
        let (stay, mut watch) = (Stay::default(), Watch::default());
        let mut stuck_at = |stay: &Stay, at: u64| {
            watch.look(at, 0, false, false);
            watch.ask(at);
            watch.stuck(stay)
        };
        assert_eq!(stuck_at(&stay, 1), None, "it is outside");
        let within = stay.within(Duration::from_secs(10));
        let (since, _) = stay.read().expect("inside");
        // The monitor looks each second.
        for second in 0..=10 {
            assert_eq!(stuck_at(&stay, since + second * SECOND), None, "{second}");
        }
        let stuck = stuck_at(&stay, since + 10_001);
        assert_eq!(stuck, Some(Duration::from_millis(10_001)));
        let awake = since + 50_000;
        for second in 0..=10 {
            assert_eq!(stuck_at(&stay, awake + second * SECOND), None, "{second}");
        }
        assert!(stuck_at(&stay, awake + 10_001).is_some());
        drop(within);
        assert_eq!(stuck_at(&stay, awake + 10_002), None);
    }

    #[test]
    fn a_process_that_stood_still_counts_from_when_it_goes_on() {
        let asleep = millis(ASLEEP);
        let mut watch = Watch::default();
        let look = |watch: &mut Watch, at| watch.look(at, 0, false, false);
        let awake = |watch: &mut Watch, at| {
            watch.ask(at);
            watch.awake
        };
        look(&mut watch, 1000);
        look(&mut watch, 1000 + SECOND);
        let begin = 1000 + SECOND;
        assert!(
            awake(&mut watch, begin + SECOND) <= 1000,
            "nothing happened"
        );
        // It goes on, and somebody asks before the monitor looks.
        let back = begin + 100 * asleep;
        assert_eq!(awake(&mut watch, back), back);
        assert_eq!(awake(&mut watch, back + 500), back);
        look(&mut watch, back + 600);
        assert_eq!(awake(&mut watch, back + 700), back + 600);
        // The monitor itself hangs: times count from when that was first seen.
        let seen = back + 600 + 2 * asleep;
        assert_eq!(awake(&mut watch, seen), seen);
        assert_eq!(awake(&mut watch, seen + 100 * asleep), seen);
    }
}
