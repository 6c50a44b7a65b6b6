//! Readers who wait for events. They hold no connection: one thread asks for all of them, with one query.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::Waiting;

/// How often the thread asks while somebody waits.
const INTERVAL: Duration = Duration::from_millis(100);
/// After a failure of the database.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// How long the thread stays without anybody who waits.
const IDLE: Duration = Duration::from_secs(30);

type Wake = Box<dyn FnOnce() + Send>;
/// Those of these feeds that have events behind these positions, or are gone.
type Ask = dyn Fn(&[(&str, i64)]) -> anyhow::Result<Changed> + Send + Sync;
type Changed = HashSet<(String, i64)>;

/// Those who wait.
pub(crate) struct Waiters {
    shared: Arc<Shared>,
    most: usize,
}

struct Shared {
    ask: Box<Ask>,
    state: Mutex<State>,
    /// Somebody came, or the pages are dropped.
    came: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<Place>,
    /// Of the next place.
    number: u64,
    has_thread: bool,
    has_ended: bool,
}

/// Somebody who waits.
struct Place {
    number: u64,
    waiting: Waiting,
    wake: Wake,
}

/// Nobody else may wait.
#[derive(Debug)]
pub(crate) struct TooMany;

impl Waiters {
    /// At most so many.
    pub(crate) fn new(
        most: usize,
        ask: impl Fn(&[(&str, i64)]) -> anyhow::Result<Changed> + Send + Sync + 'static,
    ) -> Self {
        let shared = Arc::new(Shared {
            ask: Box::new(ask),
            state: Mutex::default(),
            came: Condvar::new(),
        });
        Self { shared, most }
    }

    /// Calls `wake` once: when the feed has an event behind the position, when the time has passed, or when the pages end.
    /// If all places are taken, a reader of the party that has the most gives way, unless that is the newcomer's: no tenant
    /// keeps the others out. Returns the number of the place.
    pub(crate) fn wait(
        &self,
        waiting: Waiting,
        wake: impl FnOnce() + Send + 'static,
    ) -> Result<u64, TooMany> {
        let mut state = self.shared.lock();
        let is_full = state.waiting.len() >= self.most;
        let gives_way = is_full.then(|| state.gives_way_to(&waiting).ok_or(TooMany));
        let gives_way = gives_way.transpose()?;
        if !state.has_thread {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new()
                .name("feeds".to_owned())
                .spawn(move || shared.run_until_idle());
            // Without a thread to spare, the reader asks again.
            state.has_thread = spawned.map_err(|_| TooMany).is_ok();
            if !state.has_thread {
                return Err(TooMany);
            }
        }
        let gone = gives_way.map(|at| state.waiting.swap_remove(at));
        state.number += 1;
        let number = state.number;
        state.waiting.push(Place {
            number,
            waiting,
            wake: Box::new(wake),
        });
        self.shared.came.notify_one();
        drop(state);
        if let Some(one) = gone {
            (one.wake)();
        }
        Ok(number)
    }

    /// Waits on the caller's thread, until the time has passed at the latest: the thread may wait for the database then.
    pub(crate) fn block(&self, waiting: Waiting) -> Result<(), TooMany> {
        let longest = waiting.until.saturating_duration_since(Instant::now());
        let (woken, wakes) = std::sync::mpsc::sync_channel(1);
        // Whoever has not waited for this is gone.
        let number = self.wait(waiting, move || _ = woken.send(()))?;
        if wakes.recv_timeout(longest).is_err() {
            let mut state = self.shared.lock();
            state.waiting.retain(|one| one.number != number);
        }
        Ok(())
    }
}

impl State {
    /// Who of the party with the most waits leaves its place to this one: the one whose time ends first.
    fn gives_way_to(&self, newcomer: &Waiting) -> Option<usize> {
        let mut counts: HashMap<(Option<Uuid>, &str), usize> = HashMap::new();
        for one in &self.waiting {
            *counts.entry(one.waiting.party()).or_default() += 1;
        }
        let own = counts.get(&newcomer.party()).copied().unwrap_or(0);
        let (party, most) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let all = self.waiting.iter().map(|one| &one.waiting).enumerate();
        let its = all.filter(|(_, one)| one.party() == party);
        let first = its.min_by_key(|(_, one)| one.until)?;
        (most > own + 1).then_some(first.0)
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.shared.came.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A panic, for example of the function that lends connections, wakes all: the next who waits starts another thread.
    fn run_until_idle(&self) {
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            log::error!(event = "pages_failed"; "the thread that wakes readers of feeds panicked");
            self.end(self.lock());
        }
    }

    /// Wakes all. The thread ends.
    fn end(&self, mut state: MutexGuard<'_, State>) {
        state.has_thread = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|one| (one.wake)());
    }

    fn run(&self) {
        let mut interval = INTERVAL;
        loop {
            let mut state = self.lock();
            if state.waiting.is_empty() && !state.has_ended {
                let waited = self.came.wait_timeout(state, IDLE);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.has_ended || state.waiting.is_empty() {
                return self.end(state);
            }
            let waited = self
                .came
                .wait_timeout_while(state, interval, |state| !state.has_ended);
            let state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let all: Changed = (state.waiting.iter())
                .map(|one| one.waiting.place())
                .collect();
            drop(state);
            let asked: Vec<(&str, i64)> = (all.iter())
                .map(|(feed, position)| (feed.as_str(), *position))
                .collect();
            let changed = match (self.ask)(&asked) {
                Ok(changed) => {
                    interval = INTERVAL;
                    changed
                }
                Err(error) => {
                    // Once, until the database answers again.
                    if interval != AFTER_FAILURE {
                        log::warn!(event = "pages_failed", error:% = format!("{error:#}"); "readers of feeds wait longer: {error:#}");
                    }
                    interval = AFTER_FAILURE;
                    Changed::new()
                }
            };
            self.wake(&changed);
        }
    }

    fn wake(&self, changed: &Changed) {
        let now = Instant::now();
        let is_due = |one: &Waiting| now >= one.until || changed.contains(&one.place());
        let mut state = self.lock();
        let all = std::mem::take(&mut state.waiting);
        let (due, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| is_due(&one.waiting));
        state.waiting = rest;
        drop(state);
        due.into_iter().for_each(|one| (one.wake)());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use diesel_outbox::feed::Cursor;

    use super::*;

    fn waiting(time: Duration) -> Waiting {
        of("acme", None, time)
    }

    fn of(feed: &str, tenant_id: Option<Uuid>, time: Duration) -> Waiting {
        Waiting {
            feed: feed.to_owned(),
            tenant_id,
            behind: "0".parse::<Cursor>().expect("a cursor"),
            until: Instant::now() + time,
        }
    }

    #[test]
    fn who_waits_is_woken_by_a_thread_that_panics_and_the_next_has_another() {
        let panics = AtomicBool::new(true);
        let waiters = Waiters::new(1, move |_| {
            assert!(!panics.swap(false, Ordering::SeqCst), "the pool is broken");
            Ok(Changed::from([("acme".to_owned(), 0)]))
        });
        let began = Instant::now();
        for _ in 0..2 {
            let waited = waiters.block(waiting(Duration::from_secs(60)));
            waited.expect("only one waits");
        }
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_tenant_with_many_readers_leaves_places_to_others() {
        let waiters = Waiters::new(4, |_| Ok(Changed::new()));
        let (woken, wakes) = std::sync::mpsc::channel();
        let wait = |name: &'static str, feed: &str, tenant_id, seconds| {
            let woken = woken.clone();
            let waiting = of(feed, tenant_id, Duration::from_secs(seconds));
            waiters.wait(waiting, move || woken.send(name).expect("the test waits"))
        };
        let (big, small) = (Some(Uuid::from_u128(1)), Some(Uuid::from_u128(2)));
        for (name, feed) in [("first", "a"), ("second", "b"), ("third", "c")] {
            wait(name, feed, big, 60).expect("a place");
        }
        wait("soonest", "a", big, 50).expect("a place");
        assert!(wait("fifth", "d", big, 60).is_err());
        wait("small", "s", small, 60).expect("a place");
        assert_eq!(wakes.try_recv(), Ok("soonest"));
        // Feeds without a tenant are parties of their own.
        wait("own", "of the operator", None, 60).expect("a place");
        assert_eq!(wakes.try_recv(), Ok("first"));
        // As many as the others have at least.
        assert!(wait("small again", "s", small, 60).is_err());
        drop(waiters);
    }

    #[test]
    fn a_database_that_hangs_holds_up_no_reader_beyond_its_time() {
        let (hung, hangs) = crossbeam_channel::bounded::<()>(0);
        let waiters = Waiters::new(1, move |_| {
            // Until the test ends.
            let _ = hangs.recv();
            Ok(Changed::new())
        });
        // Nor does it take the place of the next one.
        for _ in 0..2 {
            let waited = waiters.block(waiting(Duration::from_millis(300)));
            waited.expect("only one waits");
        }
        drop(hung);
    }
}
