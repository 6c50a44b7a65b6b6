//! What the claimer, about to sleep, is to be woken for.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering, fence};

/// What somebody else makes, and does not know whether the claimer waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Want {
    /// A place in some queue.
    Room = 1,
    /// That nothing is in flight any more.
    Settled = 2,
}

/// What the claimer waits for. Set by the claimer only.
///
/// The claimer says what it waits for, and then looks once more whether it is there. Others make it, and then
/// look whether it is waited for: only then they ring. Each side writes one thing and then reads the other's,
/// so one of the two sees what the other one has done: but only if no read overtakes the write before it. So
/// both have a fence between, and it is `SeqCst`: nothing weaker orders a write before a later read.
/// `tests/interleavings` tries every order.
#[derive(Debug, Default)]
pub(crate) struct Wanted(AtomicU8);

impl Wanted {
    /// From now on whoever makes it rings. What is there already is to be looked at after this.
    pub(crate) fn want(&self, what: Want) {
        self.0.fetch_or(what as u8, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn no_more(&self, what: Want) {
        self.0.fetch_and(!(what as u8), Ordering::Relaxed);
    }

    /// Whether the claimer waits for what was made before this.
    pub(crate) fn is(&self, what: Want) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) & what as u8 != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_is_wanted_by_itself() {
        let wanted = Wanted::default();
        wanted.want(Want::Room);
        assert!(wanted.is(Want::Room) && !wanted.is(Want::Settled));
        wanted.want(Want::Settled);
        wanted.no_more(Want::Room);
        assert!(!wanted.is(Want::Room) && wanted.is(Want::Settled));
    }
}
