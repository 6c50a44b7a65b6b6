//! How the claimer falls asleep, and how it is woken.
//!
//! Before the claimer sleeps, the listener takes the outbox's advisory lock. While the lock is held, the trigger on
//! the outbox notifies. The claimer then checks once more, because earlier inserts did not notify. Notifications
//! are only hints: without a listener, or with a listener that hangs, the relay polls.
//!
//! Why: docs/decisions.md#notify-while-asleep

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};

/// The claimer is awake, and has found nothing yet, or may not claim.
const AWAKE: u8 = 0;
/// The claimer wants to sleep.
const ASKED: u8 = 1;
/// The claimer sleeps, and inserts notify.
const ASLEEP: u8 = 2;
/// The claimer has work. It finds the messages of new commits without notifications.
const AT_WORK: u8 = 3;

/// The state that the claimer and the listener share, and a pipe that tells the listener about changes.
#[derive(Debug)]
pub(crate) struct Sleep {
    state: AtomicU8,
    to_listener: UnixStream,
    from_claimer: UnixStream,
}

impl Sleep {
    /// # Errors
    /// An error if the system has no more file descriptors.
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

    /// Called when the claimer has nothing to do: inserts must notify from now on.
    pub(crate) fn ask(&self) {
        self.change(&[AWAKE, AT_WORK], ASKED);
    }

    /// Called when the claimer has work: inserts need not notify.
    pub(crate) fn end(&self) {
        self.change(&[AWAKE, ASKED, ASLEEP], AT_WORK);
    }

    /// Called when the claimer stands by: inserts need not notify it, and others must not rely on it.
    pub(crate) fn rest(&self) {
        self.change(&[ASKED, ASLEEP, AT_WORK], AWAKE);
    }

    /// Changes the state if it is one of these, and tells the listener.
    fn change(&self, from: &[u8], to: u8) {
        let changed = (self.state).fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
            from.contains(&state).then_some(to)
        });
        if changed.is_ok() {
            self.tell_listener();
        }
    }

    /// Makes the listener read the state.
    pub(crate) fn tell_listener(&self) {
        // A full pipe wakes the listener as well.
        let _ = (&self.to_listener).write(&[1]);
    }

    /// The descriptor that the listener waits for, in addition to its connection.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.from_claimer.as_fd()
    }

    /// Empties the pipe, so that the listener notices the next change.
    pub(crate) fn drain(&self) {
        let mut bytes = [0; 64];
        loop {
            match (&self.from_claimer).read(&mut bytes) {
                Ok(count) if count == bytes.len() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    }

    /// Whether the claimer is awake and needs no notifications.
    pub(crate) fn is_awake(&self) -> bool {
        matches!(self.state.load(Ordering::SeqCst), AWAKE | AT_WORK)
    }

    /// Whether the claimer has work, so that others that serve the same need no notifications either.
    pub(crate) fn is_at_work(&self) -> bool {
        self.state.load(Ordering::SeqCst) == AT_WORK
    }

    /// Called when inserts notify. `false`: the claimer does not want to sleep any more.
    pub(crate) fn begin(&self) -> bool {
        self.state
            .compare_exchange(ASKED, ASLEEP, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// Called when the lock is lost or released. The claimer may ask again.
    pub(crate) fn interrupt(&self) {
        self.state.store(AWAKE, Ordering::SeqCst);
    }
}
