//! Open descriptors of this process by their numbers, which is how the sockets of Diesel's connections are found.
//!
//! `unsafe`, with this invariant: a descriptor that is borrowed by its number is only asked and duplicated.

#![allow(
    unsafe_code,
    reason = "Diesel does not expose its socket, and a number is all that libpq tells"
)]

use std::os::fd::{BorrowedFd, RawFd};

/// Asks an open descriptor of this process by its number.
pub(super) fn with_descriptor<T>(number: RawFd, ask: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    // SAFETY: the number is not -1, because it comes from the list of open descriptors, or from libpq. `ask` does not close the
    // descriptor. Its owner may: then each call fails, or asks the descriptor that has the number now.
    ask(unsafe { BorrowedFd::borrow_raw(number) })
}
