//! The state of a relay's threads: what each thread does and since when, its database problems, and how it ended.
//! Health, metrics, the log and a shutdown read this state.
//!
//! State that changes with each send and each statement is in atomics, one per thread ([`Stay`]). All other state
//! changes rarely and is behind one lock ([`ThreadsState`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::Counter;

use super::sql::logins::Logins;
use crate::engine::observe::metrics::Metrics;
use crate::engine::send::bulkhead::Bulkhead;
use crate::error::DatabaseError;
use crate::lock::lock;
use crate::log;
use crate::words::words;

/// How long a stay may exceed its limit before it counts as stuck. The loss of a server is noticed after 20 s, and
/// machines can be slow.
pub(crate) const MARGIN: Duration = Duration::from_secs(30);
/// If the monitor has not checked for this long, the whole process was stopped.
const ASLEEP: Duration = Duration::from_secs(5);
/// An outage that begins within this time after the last outage is not logged again.
const QUIET: Duration = Duration::from_secs(15);
/// A thread without its database tries again within a second. One that has not tried for longer has no work, and does not
/// know whether the database is back.
const SILENT: Duration = Duration::from_secs(5);

/// Milliseconds since the first call in this process. Never 0.
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

words! {
    /// A thread with its own database connection.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Post {
        Claimer = "claimer",
        Heartbeat = "heartbeat",
        Janitor = "janitor",
        Listener = "listener",
        Settler = "settler",
        KeyedSettler1 = "settler-keyed-1",
        KeyedSettler2 = "settler-keyed-2",
    }
}

impl Post {
    /// The threads that settle messages with ordering keys.
    pub(super) const KEYED_SETTLERS: [Self; 2] = [Self::KeyedSettler1, Self::KeyedSettler2];

    /// The threads that the relay cannot work without.
    pub(crate) fn needed() -> impl Iterator<Item = Self> {
        let all = Self::ALL.iter().copied();
        all.filter(|post| *post != Self::Listener)
    }
}

/// A call that a thread enters and should leave within a limit: a send or a statement. Each stay has its own cache
/// line, because senders write theirs with each message.
///
/// The stay is one number, so that no reader combines the start of one stay with the limit of another. The upper bits
/// are the start in milliseconds, the lower [`LIMIT_BITS`] the limit in seconds. 0 means outside.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Stay(AtomicU64);

/// The limit can be up to half a year; the other bits hold 34 years of milliseconds.
const LIMIT_BITS: u32 = 24;
const LONGEST_LIMIT: u64 = (1 << LIMIT_BITS) - 1;

/// Ends a stay on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct Within<'a>(&'a Stay);

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

impl Stay {
    /// The thread enters, for at most `limit`.
    pub(crate) fn within(&self, limit: Duration) -> Within<'_> {
        self.begin(limit);
        Within(self)
    }

    /// The thread enters, or takes the next step inside.
    pub(super) fn begin(&self, limit: Duration) {
        let seconds = millis(limit).div_ceil(1000).min(LONGEST_LIMIT);
        (self.0).store(now() << LIMIT_BITS | seconds, Ordering::Release);
    }

    /// The time since which the thread has been inside, and the limit of the stay.
    fn read(&self) -> Option<(u64, Duration)> {
        let stay = self.0.load(Ordering::Acquire);
        let limit = Duration::from_secs(stay & LONGEST_LIMIT);
        (stay > 0).then_some((stay >> LIMIT_BITS, limit))
    }

    pub(super) fn is_inside(&self) -> bool {
        self.read().is_some()
    }
}

/// The threads of one relay.
pub(crate) struct Threads {
    /// In the order of [`Post::ALL`]. Inside while the thread connects or waits for the result of a statement.
    in_database: [Stay; Post::ALL.len()],
    /// In the order of [`Post::ALL`].
    errors: [Counter; Post::ALL.len()],
    /// By bulkhead and sender. Inside while the sender sends.
    pub(crate) senders: Vec<Vec<Stay>>,
    /// When the threads may connect.
    pub(crate) logins: Logins,
    state: Mutex<ThreadsState>,
    /// A thread has ended.
    changed: Condvar,
}

/// The state of the threads, except their stays.
#[derive(Debug, Clone, Default)]
pub(crate) struct ThreadsState {
    /// By thread name. The ended threads are in the order of their ends.
    lives: Vec<(Arc<str>, Life)>,
    /// The connection of each thread, in the order of [`Post::ALL`]. `None`: the thread has no connection, and the
    /// database is not the cause.
    connections: [Option<Result<(), ThreadTrouble>>; Post::ALL.len()],
    outage: Outage,
    /// Another relay is active.
    pub(crate) stands_by: bool,
    pub(crate) watch: Watch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    AtWork,
    Ended,
    Panicked,
}

/// Reports the end of a thread on drop, also after a panic.
pub(crate) struct ExitGuard {
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

/// The reason why a thread has no database.
#[derive(Debug, Clone)]
pub(crate) struct ThreadTrouble {
    since: u64,
    /// When the thread last tried.
    last: u64,
    pub(crate) error: String,
    cause: Cause,
}

/// The reason why a statement failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The statement, or a lock it waited for, took longer than its limit.
    TimeOut,
    /// The database responds, but the outbox has this problem.
    Missing(String),
    Other,
}

/// A time during which any thread is without its database. The log reports an outage once.
#[derive(Debug, Clone, Default)]
struct Outage {
    began: u64,
    ended: Option<u64>,
    is_reported: bool,
    /// The outage has begun and not ended.
    lasts: bool,
}

impl ThreadTrouble {
    pub(crate) fn lasts(&self) -> Duration {
        elapsed(self.since)
    }

    pub(crate) fn missing(&self) -> Option<&str> {
        match &self.cause {
            Cause::Missing(what) => Some(what),
            Cause::TimeOut | Cause::Other => None,
        }
    }
}

impl Outage {
    fn begin(&mut self) {
        self.lasts = true;
        self.began = now();
        self.is_reported = self.ended.is_none_or(|ended| elapsed(ended) > QUIET);
    }

    fn level(&self, level: log::Level) -> log::Level {
        if self.is_reported {
            level
        } else {
            log::Level::Debug
        }
    }
}

impl ThreadsState {
    /// Forgets the failures of threads that have not tried again since: other threads say whether the database answers.
    fn forget_silent(&mut self, now: u64, is_inside: impl Fn(usize) -> bool) {
        for (post, connection) in self.connections.iter_mut().enumerate() {
            let is_silent = |trouble: &ThreadTrouble| {
                trouble.missing().is_none() && now.saturating_sub(trouble.last) > millis(SILENT)
            };
            if matches!(connection, Some(Err(trouble)) if is_silent(trouble)) && !is_inside(post) {
                *connection = None;
            }
        }
    }

    /// The threads that are without their database.
    fn failing(&self) -> impl Iterator<Item = (Post, &ThreadTrouble)> {
        let all = Post::ALL.iter().zip(&self.connections);
        all.filter_map(|(post, connection)| Some((*post, connection.as_ref()?.as_ref().err()?)))
    }

    /// The threads that are without their database, except the listener: a relay works without it.
    pub(crate) fn troubles(&self) -> impl Iterator<Item = (Post, &ThreadTrouble)> {
        self.failing().filter(|(post, _)| *post != Post::Listener)
    }

    pub(crate) fn is_connected(&self, post: Post) -> bool {
        matches!(self.connections[post as usize], Some(Ok(())))
    }

    pub(crate) fn connections(&self) -> usize {
        let all = self.connections.iter().flatten();
        all.filter(|connection| connection.is_ok()).count()
    }

    /// Whether any thread except `but` is at work.
    fn is_at_work(&self, but: Option<&str>) -> bool {
        let is_so = |(name, life): &(Arc<str>, Life)| *life == Life::AtWork && Some(&**name) != but;
        self.lives.iter().any(is_so)
    }

    /// Whether all threads have ended.
    pub(crate) fn has_ended(&self) -> bool {
        !self.is_at_work(None)
    }

    /// The ended threads, in the order of their ends.
    pub(crate) fn ended(&self) -> impl Iterator<Item = &str> {
        let ended = (self.lives.iter()).filter(|(_, life)| *life != Life::AtWork);
        ended.map(|(thread, _)| &**thread)
    }

    /// The first thread that panicked.
    pub(super) fn panicked(&self) -> Option<&str> {
        let mut lives = self.lives.iter();
        let panicked = lives.find(|(_, life)| *life == Life::Panicked);
        panicked.map(|(thread, _)| &**thread)
    }
}

impl Threads {
    pub(super) fn new(metrics: &Metrics, bulkheads: &[Bulkhead]) -> Self {
        let senders = |one: &Bulkhead| (0..one.most_threads()).map(|_| Stay::default()).collect();
        Self {
            in_database: Default::default(),
            errors: std::array::from_fn(|post| metrics.database_errors(Post::ALL[post].as_str())),
            senders: bulkheads.iter().map(senders).collect(),
            logins: Logins::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ThreadsState> {
        lock(&self.state)
    }

    /// A copy of the current state.
    pub(crate) fn state(&self) -> ThreadsState {
        let mut state = self.lock();
        state.watch.ask(now());
        let mut state = state.clone();
        // While connects fail, the threads wait for one another.
        if self.logins.wait(Instant::now()).is_none() {
            state.forget_silent(now(), |post| self.in_database[post].is_inside());
        }
        state
    }

    pub(crate) fn in_database(&self, post: Post) -> &Stay {
        &self.in_database[post as usize]
    }

    /// Whether a message is being settled or sent.
    pub(crate) fn is_busy(&self) -> bool {
        let mut stays = (std::iter::once(Post::Settler))
            .chain(Post::KEYED_SETTLERS)
            .map(|post| self.in_database(post));
        stays.any(Stay::is_inside) || self.senders.iter().flatten().any(Stay::is_inside)
    }

    /// The number of senders of this bulkhead that are sending.
    pub(crate) fn busy(&self, bulkhead: usize) -> usize {
        let senders = self.senders[bulkhead].iter();
        senders.filter(|sender| sender.is_inside()).count()
    }

    /// Counts a failed statement.
    pub(super) fn count_error(&self, post: Post) {
        self.errors[post as usize].increment(1);
    }

    /// Records that the thread has its connection, or has none for another reason than the database. Logs the end of an
    /// outage when all threads have their database again.
    pub(crate) fn set_connected(&self, post: Post, is_connected: bool) {
        let mut state = self.lock();
        let connection = is_connected.then_some(Ok(()));
        state.connections[post as usize] = connection;
        self.end_outage(state);
    }

    /// Ends the outage when all threads have their database again: also those that have waited for an answer since before
    /// the outage, perhaps on a connection that leads nowhere.
    fn end_outage(&self, mut state: MutexGuard<'_, ThreadsState>) {
        let began = state.outage.began;
        let waits = |stay: &Stay| stay.read().is_some_and(|(since, _)| since < began);
        if !state.outage.lasts
            || state.failing().next().is_some()
            || self.in_database.iter().any(waits)
        {
            return;
        }
        (state.outage.lasts, state.outage.ended) = (false, Some(now()));
        let level = state.outage.level(log::Level::Info);
        let seconds = elapsed(began).as_secs_f64();
        drop(state);
        log::log!(level, event = "db_recovered", seconds = seconds; "the database is back after {seconds:.1} s: all threads continue");
    }

    /// Records that the thread is without its database. Logs an outage once for all threads.
    pub(crate) fn failed(&self, post: Post, error: &DatabaseError, cause: Cause) {
        self.count_error(post);
        let event = match cause {
            Cause::TimeOut => "db_timeout",
            Cause::Missing(_) | Cause::Other => "db_error",
        };
        let mut state = self.lock();
        let mut level = log::Level::Debug;
        if !state.outage.lasts {
            state.outage.begin();
            level = state.outage.level(log::Level::Error);
        }
        let connection = &mut state.connections[post as usize];
        let since = match connection {
            Some(Err(before)) => before.since,
            Some(Ok(())) | None => now(),
        };
        *connection = Some(Err(ThreadTrouble {
            since,
            last: now(),
            error: error.to_string(),
            cause,
        }));
        drop(state);
        log::log!(level, event = event, thread = post.as_str(), error:% = error; "the database failed in the {} thread ({error}): retrying until it is back", post.as_str());
    }

    pub(crate) fn set_standing_by(&self, is_so: bool) {
        self.lock().stands_by = is_so;
    }

    pub(crate) fn stands_by(&self) -> bool {
        self.lock().stands_by
    }

    /// Records a check by the monitor. `is_stuck`: claimed messages make no progress, unless `moves` has changed.
    /// `is_deaf`: the relay gets no notifications of new messages.
    pub(crate) fn look(&self, moves: u64, is_stuck: bool, is_deaf: bool) {
        let mut state = self.lock();
        state.watch.look(now(), moves, is_stuck, is_deaf);
        self.end_outage(state);
    }

    /// Records the janitor's check whether messages are due that the relay should have claimed.
    pub(crate) fn set_left(&self, is_left: bool) {
        follow(&mut self.lock().watch.left, is_left, now());
    }

    /// Marks a thread as at work until the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>, thread: &str) -> ExitGuard {
        let thread = thread.into();
        self.set_life(&thread, Life::AtWork);
        let threads = Arc::clone(self);
        ExitGuard { threads, thread }
    }

    /// Records that the thread begins or has ended.
    pub(crate) fn set_life(&self, thread: &Arc<str>, life: Life) {
        let mut state = self.lock();
        state.lives.retain(|(name, _)| name != thread);
        state.lives.push((Arc::clone(thread), life));
        self.changed.notify_all();
    }

    /// Waits until all threads except `but` have ended, at most until `until`. Returns whether they have ended.
    pub(super) fn wait_for_ends(&self, until: Option<Instant>, but: Option<&str>) -> bool {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let left = until.map_or(Duration::MAX, left);
        let is_at_work = |state: &mut ThreadsState| state.is_at_work(but);
        let waited = (self.changed).wait_timeout_while(self.lock(), left, is_at_work);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// The observations of the checks on the threads' progress. Times are values of [`now`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Watch {
    /// The last check by the monitor.
    looked: u64,
    /// The last read of the state.
    asked: u64,
    /// The time from which durations count. After a stop of the whole process, all threads seem to have been stuck for
    /// the time of the stop.
    awake: u64,
    /// The count of claims and settles at the monitor's last check.
    moves: u64,
    /// Since when claimed messages make no progress without a known reason.
    pub(crate) stalled: Option<u64>,
    /// Since when due messages are not claimed without a known reason.
    pub(crate) left: Option<u64>,
    /// Since when the relay does not listen.
    pub(crate) deaf: Option<u64>,
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

    /// Records a read of the state. If the monitor has not checked for long, either the process was stopped or the
    /// monitor hangs. In both cases durations count from the first such read.
    fn ask(&mut self, now: u64) {
        if self.is_late(now) && self.awake <= self.looked {
            self.awake = now;
        }
        self.asked = now;
    }

    fn is_late(&self, now: u64) -> bool {
        now.saturating_sub(self.looked) > millis(ASLEEP)
    }

    /// The duration since `since`, if it exceeds `limit`.
    pub(crate) fn overdue(&self, since: Option<u64>, limit: Duration) -> Option<Duration> {
        let lasted = self.asked.saturating_sub(since?.max(self.awake));
        (lasted > millis(limit)).then(|| Duration::from_millis(lasted))
    }

    /// How long a thread has been inside, if it exceeds the limit of the stay.
    pub(crate) fn stuck(&self, stay: &Stay) -> Option<Duration> {
        let (since, limit) = stay.read()?;
        self.overdue(Some(since), limit)
    }
}

/// Keeps the start of a condition while the condition lasts.
fn follow(since: &mut Option<u64>, is_so: bool, now: u64) {
    *since = is_so.then(|| since.unwrap_or(now));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1000;

    /// R65: a thread that failed once and has nothing to do since does not hide that the database answers.
    #[test]
    fn a_thread_that_does_not_ask_the_database_says_nothing_about_it() {
        let trouble = |cause| {
            let error = "gone".to_owned();
            let (since, last) = (1, 1000);
            Some(Err(ThreadTrouble {
                since,
                last,
                error,
                cause,
            }))
        };
        let troubles = |now, is_inside: bool| {
            let mut state = ThreadsState::default();
            state.connections[Post::Janitor as usize] = trouble(Cause::Other);
            state.connections[Post::Settler as usize] = trouble(Cause::TimeOut);
            state.connections[Post::Claimer as usize] =
                trouble(Cause::Missing("a table".to_owned()));
            state.forget_silent(now, |_| is_inside);
            state.troubles().count()
        };
        assert_eq!(troubles(1000 + 5 * SECOND, false), 3);
        assert_eq!(
            troubles(1001 + 5 * SECOND, false),
            1,
            "a missing table stays missing"
        );
        assert_eq!(
            troubles(1001 + 5 * SECOND, true),
            3,
            "the threads try to connect"
        );
    }

    #[test]
    fn a_stay_is_overdue_beyond_its_limit_and_not_for_the_time_that_the_process_stood_still() {
        let (stay, mut watch) = (Stay::default(), Watch::default());
        let mut stuck_at = |stay: &Stay, at: u64| {
            watch.look(at, 0, false, false);
            watch.ask(at);
            watch.stuck(stay)
        };
        assert_eq!(stuck_at(&stay, 1), None, "outside");
        let within = stay.within(Duration::from_secs(10));
        let (since, _) = stay.read().expect("inside");
        // The monitor checks every second.
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
    fn a_process_that_stood_still_counts_from_its_return() {
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
        // The process continues, and the state is read before the monitor checks.
        let back = begin + 100 * asleep;
        assert_eq!(awake(&mut watch, back), back);
        assert_eq!(awake(&mut watch, back + 500), back);
        look(&mut watch, back + 600);
        assert_eq!(awake(&mut watch, back + 700), back + 600);
        // The monitor hangs: durations count from the first read that notices.
        let seen = back + 600 + 2 * asleep;
        assert_eq!(awake(&mut watch, seen), seen);
        assert_eq!(awake(&mut watch, seen + 100 * asleep), seen);
    }
}
