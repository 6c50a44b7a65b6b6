//! The events for which a sleeping claimer must be woken.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering, fence};

/// An event that another thread causes, without knowing whether the claimer waits for the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Want {
    /// A queue has room.
    Room = 1,
    /// No message is in flight any more.
    Settled = 2,
}

/// The events that the claimer waits for. Only the claimer sets them.
///
/// The claimer sets the flag of an event, and then checks once more whether the event has happened. Another thread
/// causes the event, and then reads the flag: only if the flag is set does it ring. Each side writes first and then
/// reads what the other side writes, so at least one side sees the other's write. This holds only if no read overtakes
/// the write before it. So each side has a `SeqCst` fence between: no weaker fence orders a write before a later read.
/// `tests/interleavings` tries every order.
#[derive(Debug, Default)]
pub(crate) struct Wanted(AtomicU8);

impl Wanted {
    /// From now on, a thread that causes the event rings. The caller must then check for earlier events.
    pub(crate) fn want(&self, what: Want) {
        self.0.fetch_or(what as u8, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn no_more(&self, what: Want) {
        self.0.fetch_and(!(what as u8), Ordering::Relaxed);
    }

    /// Whether the claimer waits for the event that the caller has just caused.
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
