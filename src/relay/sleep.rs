//! How the claimer falls asleep, and who wakes it.
//!
//! A relay that is about to sleep has the listener take the outbox's advisory lock; from then on the
//! trigger on the outbox notifies. It looks once more after that, because what was enqueued before
//! told nobody. All of it is a hint: without a listener, or with one that hangs, the relay polls.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};

const AWAKE: u8 = 0;
/// The claimer wants to sleep.
const ASKED: u8 = 1;
/// Whoever enqueues will notify.
const ASLEEP: u8 = 2;

/// The state that claimer and listener share, and a pipe by which the listener is told that it has
/// changed.
#[derive(Debug)]
pub(crate) struct Sleep {
    state: AtomicU8,
    to_listener: UnixStream,
    from_claimer: UnixStream,
}

impl Sleep {
    /// # Errors
    /// When the system has no more descriptors.
    pub(crate) fn new() -> std::io::Result<Self> {
        let (to_listener, from_claimer) = UnixStream::pair()?;
        to_listener.set_nonblocking(true)?;
        from_claimer.set_nonblocking(true)?;
        Ok(Self {
            state: AtomicU8::new(AWAKE),
            to_listener,
            from_claimer,
        })
    }

    /// The claimer has nothing to do: whoever enqueues shall ring from now on.
    pub(super) fn ask(&self) {
        let change = self
            .state
            .compare_exchange(AWAKE, ASKED, Ordering::SeqCst, Ordering::SeqCst);
        if change.is_ok() {
            self.tell_listener();
        }
    }

    /// The claimer has something to do: nobody needs to ring.
    pub(super) fn end(&self) {
        if self.state.swap(AWAKE, Ordering::SeqCst) != AWAKE {
            self.tell_listener();
        }
    }

    /// Makes the listener look what is wanted of it.
    pub(super) fn tell_listener(&self) {
        // A full pipe tells it, too.
        let _ = (&self.to_listener).write(&[1]);
    }

    /// What the listener waits on beside its connection.
    pub(super) fn descriptor(&self) -> RawFd {
        self.from_claimer.as_raw_fd()
    }

    /// Takes what was told, so that the next one is noticed.
    pub(super) fn drain(&self) {
        let mut bytes = [0; 64];
        loop {
            match (&self.from_claimer).read(&mut bytes) {
                Ok(count) if count == bytes.len() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    }

    /// Whether the claimer is awake, and wants no notifications.
    pub(super) fn is_awake(&self) -> bool {
        self.state.load(Ordering::SeqCst) == AWAKE
    }

    /// Whoever enqueues notifies from now on. `false`: the claimer has changed its mind.
    pub(super) fn begin(&self) -> bool {
        self.state
            .compare_exchange(ASKED, ASLEEP, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// The lock is gone, or given back. The claimer may ask again.
    pub(super) fn interrupt(&self) {
        self.state.store(AWAKE, Ordering::SeqCst);
    }
}
