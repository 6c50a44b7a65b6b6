//! Whether a sleeping claimer must be woken for room.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Whether the claimer waits for room in a queue. Only the claimer sets this. Another thread makes room without knowing
/// whether the claimer waits for it.
///
/// The claimer sets the flag, and then checks once more whether there is room. Another thread makes room, and then reads
/// the flag: only if the flag is set does it ring. Each side writes first and then reads what the other side writes, so at
/// least one side sees the other's write. This holds only if no read overtakes the write before it. So each side has a
/// `SeqCst` fence between: no weaker fence orders a write before a later read. `tests/interleavings` tries every order.
// Why: docs/decisions.md#shared-facts
#[derive(Debug, Default)]
pub(crate) struct RoomWanted(AtomicBool);

impl RoomWanted {
    /// From now on, a thread that makes room rings. The caller must then check for earlier room.
    pub(crate) fn want(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn no_more(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether the claimer waits for the room that the caller has just made.
    pub(crate) fn is_so(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }
}
