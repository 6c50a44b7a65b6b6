//! Bells that wake threads.

use crossbeam_channel::{Receiver, Sender, bounded};

/// Wakes a thread. Several rings before the thread wakes count as one.
#[derive(Clone)]
pub(crate) struct Bell {
    rope: Sender<()>,
    pub(crate) ear: Receiver<()>,
}

impl Bell {
    pub(crate) fn new() -> Self {
        let (rope, ear) = bounded(1);
        Self { rope, ear }
    }

    pub(crate) fn ring(&self) {
        // Full: the bell is already ringing.
        let _ = self.rope.try_send(());
    }
}
