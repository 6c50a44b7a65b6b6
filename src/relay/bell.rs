//! How threads are woken.

use crossbeam_channel::{Receiver, Sender, bounded};

/// Wakes a thread. Rung many times, it says as much as once.
pub(crate) struct Bell {
    rope: Sender<()>,
    pub(super) ear: Receiver<()>,
}

impl Bell {
    pub(super) fn new() -> Self {
        let (rope, ear) = bounded(1);
        Self { rope, ear }
    }

    pub(super) fn ring(&self) {
        // Full: it rings already.
        let _ = self.rope.try_send(());
    }
}
