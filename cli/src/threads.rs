//! Threads with names.

use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result};

/// Starts a thread.
///
/// # Errors
///
/// The system has no thread left.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = Builder::new().name(name.into()).spawn(work);
    thread.context("cannot start a thread")
}
