//! Readers who wait for events. They hold no connection: one thread asks for all of them, with one query.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Waiting;

/// How often the thread asks while somebody waits.
const INTERVAL: Duration = Duration::from_millis(100);
/// After a failure of the database.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// How long the thread stays without anybody who waits.
const IDLE: Duration = Duration::from_secs(30);

type Wake = Box<dyn FnOnce() + Send>;
/// The position of the last event of each of these feeds.
type Ask = dyn Fn(&[&str]) -> Option<HashMap<String, i64>> + Send + Sync;

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
    waiting: Vec<(Waiting, Wake)>,
    has_thread: bool,
    has_ended: bool,
}

/// Nobody else may wait.
#[derive(Debug)]
pub(crate) struct TooMany;

impl Waiters {
    /// At most so many. `ask`: `None` if the database fails.
    pub(crate) fn new(
        most: usize,
        ask: impl Fn(&[&str]) -> Option<HashMap<String, i64>> + Send + Sync + 'static,
    ) -> Self {
        let shared = Arc::new(Shared {
            ask: Box::new(ask),
            state: Mutex::default(),
            came: Condvar::new(),
        });
        Self { shared, most }
    }

    /// Calls `wake` once: when the feed has an event behind the position, when the time has passed, or when the pages end.
    pub(crate) fn wait(
        &self,
        waiting: Waiting,
        wake: impl FnOnce() + Send + 'static,
    ) -> Result<(), TooMany> {
        let mut state = self.shared.lock();
        if state.waiting.len() >= self.most {
            return Err(TooMany);
        }
        if !state.has_thread {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new()
                .name("feeds".to_owned())
                .spawn(move || shared.run());
            // Without a thread to spare, the reader asks again.
            state.has_thread = spawned.map_err(|_| TooMany).is_ok();
            if !state.has_thread {
                return Err(TooMany);
            }
        }
        state.waiting.push((waiting, Box::new(wake)));
        self.shared.came.notify_one();
        Ok(())
    }

    /// Waits on the caller's thread.
    pub(crate) fn block(&self, waiting: Waiting) -> Result<(), TooMany> {
        let (woken, wakes) = std::sync::mpsc::sync_channel(1);
        // The thread calls it, or drops it when the process ends.
        self.wait(waiting, move || _ = woken.send(()))?;
        let _ = wakes.recv();
        Ok(())
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

    fn run(&self) {
        let mut interval = INTERVAL;
        loop {
            let mut state = self.lock();
            if state.waiting.is_empty() && !state.has_ended {
                let waited = self.came.wait_timeout(state, IDLE);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.has_ended || state.waiting.is_empty() {
                state.has_thread = false;
                let waiting = std::mem::take(&mut state.waiting);
                drop(state);
                waiting.into_iter().for_each(|(_, wake)| wake());
                return;
            }
            let waited = self
                .came
                .wait_timeout_while(state, interval, |state| !state.has_ended);
            let state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let mut feeds: Vec<String> = state
                .waiting
                .iter()
                .map(|(one, _)| one.feed.clone())
                .collect();
            drop(state);
            feeds.sort_unstable();
            feeds.dedup();
            let names: Vec<&str> = feeds.iter().map(String::as_str).collect();
            let found = (self.ask)(&names);
            interval = match found {
                Some(_) => INTERVAL,
                None => AFTER_FAILURE,
            };
            self.wake(&found.unwrap_or_default());
        }
    }

    fn wake(&self, last: &HashMap<String, i64>) {
        let now = Instant::now();
        let is_due = |waiting: &Waiting| {
            let has_more = last
                .get(&waiting.feed)
                .is_some_and(|last| *last != waiting.behind.position());
            has_more || now >= waiting.until
        };
        let mut state = self.lock();
        let all = std::mem::take(&mut state.waiting);
        let (due, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|(one, _)| is_due(one));
        state.waiting = rest;
        drop(state);
        due.into_iter().for_each(|(_, wake)| wake());
    }
}
