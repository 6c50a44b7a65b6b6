//! Taking a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes the lock, also where a thread that had it has panicked: whoever holds one leaves its value whole.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
