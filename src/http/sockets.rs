//! The connections to receivers that this process may have. Some file descriptors are always left for the database, so
//! that every send can be recorded.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use crate::lock::lock;

/// The descriptors that receivers leave to everything else: sessions, files, lookups, and 64 requests of the pages, which
/// have two each. At most half of all.
const RESERVE: usize = 192;

/// The connections of all dispatchers of this process.
static SOCKETS: LazyLock<Sockets> = LazyLock::new(|| Sockets::new(most(descriptors())));

#[derive(Debug)]
struct Sockets {
    most: usize,
    used: AtomicUsize,
    /// Threads that wait for a connection. A thread counts itself before it looks once more, and who closes a connection
    /// looks at the count afterwards, so no wake-up is lost.
    waiting: AtomicUsize,
    wait: Mutex<()>,
    freed: Condvar,
}

/// The right to one connection.
#[derive(Debug)]
pub(super) struct Permit(&'static Sockets);

/// The most descriptors of this process. `None`: without a limit.
fn descriptors() -> Option<usize> {
    let limit = getrlimit(Resource::Nofile).current?;
    Some(usize::try_from(limit).unwrap_or(usize::MAX))
}

fn most(descriptors: Option<usize>) -> usize {
    let left = |all: usize| all - RESERVE.max(all / 16).min(all / 2);
    descriptors.map_or(usize::MAX, left).max(1)
}

impl Sockets {
    fn new(most: usize) -> Self {
        Self {
            most,
            used: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            wait: Mutex::new(()),
            freed: Condvar::new(),
        }
    }

    fn try_take(&'static self) -> Option<Permit> {
        let more = |used: usize| (used < self.most).then_some(used + 1);
        self.used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
            .ok()
            .map(|_| Permit(self))
    }

    fn is_scarce(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.most / 4 * 3
    }

    fn take(&'static self, until: Instant) -> Option<Permit> {
        if let Some(permit) = self.try_take() {
            return Some(permit);
        }
        let mut turn = lock(&self.wait);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let permit = loop {
            if let Some(permit) = self.try_take() {
                break Some(permit);
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                break None;
            };
            (turn, _) = self
                .freed
                .wait_timeout(turn, left)
                .unwrap_or_else(PoisonError::into_inner);
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        permit
    }
}

impl Permit {
    /// The right to one connection, once another connection is closed. `None`: all are in use for this long.
    pub(super) fn take(patience: Duration) -> Option<Self> {
        SOCKETS.take(Instant::now() + patience)
    }

    /// The right to a connection that a send can do without. `None`: so many are open that others may need it.
    pub(super) fn spare() -> Option<Self> {
        (!SOCKETS.is_scarce()).then(|| SOCKETS.try_take()).flatten()
    }

    /// Whether so many connections are open that none should be kept idle.
    pub(super) fn is_scarce(&self) -> bool {
        self.0.is_scarce()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::SeqCst);
        if self.0.waiting.load(Ordering::SeqCst) > 0 {
            let _turn = lock(&self.0.wait);
            self.0.freed.notify_one();
        }
    }
}

/// How many connections this process may have, for display.
pub(super) fn most_sockets() -> usize {
    SOCKETS.most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_leave_descriptors_to_the_database() {
        for (all, left) in [(Some(128), 64), (Some(1024), 832), (Some(65536), 61440)] {
            assert_eq!(most(all), left);
        }
        assert_eq!((most(Some(1)), most(None)), (1, usize::MAX));
    }

    #[test]
    fn a_closed_connection_makes_room_for_another() {
        let sockets: &'static Sockets = Box::leak(Box::new(Sockets::new(1)));
        let first = sockets.take(Instant::now()).expect("the first");
        assert!(sockets.take(Instant::now()).is_none());
        let waiting = std::thread::spawn(|| sockets.take(Instant::now() + Duration::from_secs(20)));
        drop(first);
        assert!(waiting.join().expect("no panic").is_some());
    }
}
