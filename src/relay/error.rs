//! Why a relay did not start, or did not end cleanly.

use crate::config::ConfigError;
use crate::error::DatabaseError;

/// Why a relay did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is bad, or contradicts another.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database cannot be reached, or the outbox is not there, or the role may not do all that a
    /// relay does.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The system gave no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Why a shutdown was not clean. Nothing is lost: what was left is taken over by the next relay
/// when the lease is over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShutdownError {
    /// The deadline came first.
    #[error(
        "{messages} messages were not settled at the deadline (threads still at work: {threads}); another relay takes them when the lease is over"
    )]
    Deadline {
        /// Messages claimed and neither settled nor released.
        messages: usize,
        /// Names of the threads that had not ended.
        threads: String,
    },
    /// A thread had panicked.
    #[error("the relay's thread {thread} panicked")]
    Panic {
        /// Its name.
        thread: String,
    },
}
