//! Hooks that the relay calls for each message, for the application's own counters and audit trails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::Outcome;
use crate::log;
use crate::message::Message;
use crate::status::{ReasonCode, Status};

/// Hooks for the steps of a message: for an application's own counters, audit trail or alarms. Add an observer with
/// [`RelayBuilder::observe`](crate::RelayBuilder::observe).
///
/// By default each hook does nothing. The relay's threads call the hooks, several at once, and wait for them to
/// return: a hook must be fast. A panic in a hook is logged and has no other effect.
///
/// ```
/// use diesel_outbox::{Message, Observer, Outcome, Settled, Status};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use std::time::Duration;
///
/// #[derive(Default)]
/// struct Counts {
///     sending: AtomicU64,
///     dead: AtomicU64,
/// }
///
/// impl Observer for Counts {
///     fn sending(&self, _: &Message, _: &str) {
///         self.sending.fetch_add(1, Ordering::Relaxed);
///     }
///
///     fn sent(&self, _: &Message, destination: &str, _: &Outcome, took: Duration) {
///         self.sending.fetch_sub(1, Ordering::Relaxed);
///         if took > Duration::from_secs(1) {
///             println!("{destination} is slow: {took:?}");
///         }
///     }
///
///     fn settled(&self, settled: &Settled<'_>) {
///         if settled.status == Status::Dead {
///             self.dead.fetch_add(1, Ordering::Relaxed);
///         }
///     }
/// }
/// ```
pub trait Observer: Send + Sync + 'static {
    /// A message is about to be sent to this destination (empty for a message without a destination).
    ///
    /// The send does not follow if the relay loses its lease, the relay must stop, or the message expires meanwhile.
    /// After a lost lease or a stop, this hook is called again when a relay claims the message again.
    fn sending(&self, message: &Message, destination: &str) {
        let _ = (message, destination);
    }

    /// A send has ended.
    fn sent(&self, message: &Message, destination: &str, outcome: &Outcome, took: Duration) {
        let _ = (message, destination, outcome, took);
    }

    /// A message is settled: the transaction with its result is committed.
    fn settled(&self, settled: &Settled<'_>) {
        let _ = settled;
    }
}

/// A settled message with its result.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Settled<'a> {
    /// The message, with empty payload and headers.
    pub message: &'a Message,
    /// The destination. Empty for a message without a destination.
    pub destination: &'a str,
    /// The message's new status: delivered, dead, or retrying or pending before the next attempt.
    pub status: Status,
    /// The reason why the message was not delivered.
    pub reason: Option<ReasonCode>,
    /// The counted attempts of the message, including this attempt.
    pub attempts: u32,
}

/// The observers of one relay.
#[derive(Clone, Default)]
pub(crate) struct Observers(pub(crate) Vec<Arc<dyn Observer>>);

impl Observers {
    pub(crate) fn tell(&self, message: &Message, tell: impl Fn(&dyn Observer)) {
        for observer in &self.0 {
            if catch_unwind(AssertUnwindSafe(|| tell(&**observer))).is_err() {
                log::error!(event = "observer_panic", sequence = message.sequence.0, message_id:% = message.message_id; "an observer panicked for message {} ({}): the message is processed as usual", message.message_id, message.topic);
            }
        }
    }
}
