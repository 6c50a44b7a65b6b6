//! The errors of starting a relay and of shutting a relay down.

use crate::config::ConfigError;
use crate::error::DatabaseError;

/// The reason why a relay did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is bad, or two settings contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database cannot be reached, the outbox is missing or has another version, or the role lacks a right.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The system could not start a thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// The reason why a shutdown was not clean. No message is lost: another relay takes over the remaining messages
/// when the lease expires.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShutdownError {
    /// The deadline passed before the relay had ended.
    #[error(
        "{messages} messages were not settled at the deadline (threads still running: {threads}); another relay takes them over when the lease expires"
    )]
    Deadline {
        /// Messages claimed and neither settled nor released.
        messages: usize,
        /// The names of the threads that had not ended.
        threads: String,
    },
    /// A thread of the relay panicked.
    #[error(
        "the relay's thread {thread} panicked; another relay takes over unsettled messages when the lease expires"
    )]
    Panic {
        /// The name of the thread.
        thread: String,
    },
    /// This process is a fork of the process that runs the relay, and has none of its threads. The relay was not touched.
    #[error(
        "this process is a fork: the relay runs in the process that started the relay, and continues there"
    )]
    Forked,
}
