//! Hooks: what an application is told of each message, beside the log.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::Outcome;
use crate::message::Message;
use crate::status::{ReasonCode, Status};

/// Is told what happens to messages: for an application's own counters, audit trail or alarms.
///
/// Each hook does nothing unless it is written. They are called by the threads that do the work, many
/// at once, and these wait for them: be quick. A panic is logged and has no other effect. Add one by
/// [`RelayBuilder::observe`](crate::RelayBuilder::observe).
///
/// ```
/// use diesel_outbox::{Message, Observer, Outcome, Settled, Status};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use std::time::Duration;
///
/// #[derive(Default)]
/// struct Counts {
///     under_way: AtomicU64,
///     dead: AtomicU64,
/// }
///
/// impl Observer for Counts {
///     fn sending(&self, _: &Message, _: &str) {
///         self.under_way.fetch_add(1, Ordering::Relaxed);
///     }
///
///     fn sent(&self, _: &Message, destination: &str, _: &Outcome, took: Duration) {
///         self.under_way.fetch_sub(1, Ordering::Relaxed);
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
    /// A message is about to be sent to this destination (empty: nothing serves it). It is not, where the
    /// relay loses its lease or is to stop meanwhile (then it is told of again), or the message's time ends.
    fn sending(&self, message: &Message, destination: &str) {
        let _ = (message, destination);
    }

    /// A send has come to its end.
    fn sent(&self, message: &Message, destination: &str, outcome: &Outcome, took: Duration) {
        let _ = (message, destination, outcome, took);
    }

    /// What became of a message is written down: the transaction is committed.
    fn settled(&self, settled: &Settled<'_>) {
        let _ = settled;
    }
}

/// A message whose outcome is written down.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Settled<'a> {
    /// The message. Its payload and its headers are empty here.
    pub message: &'a Message,
    /// The destination, where it has one.
    pub destination: &'a str,
    /// Where it stands now: delivered or dead; or retrying or pending, where it waits for its next
    /// attempt.
    pub status: Status,
    /// Why it was not delivered.
    pub reason: Option<ReasonCode>,
    /// Attempts that count, with this one.
    pub attempts: u32,
}

/// Those of one relay.
#[derive(Clone, Default)]
pub(crate) struct Observers(pub(super) Vec<Arc<dyn Observer>>);

impl Observers {
    pub(super) fn tell(&self, message: &Message, tell: impl Fn(&dyn Observer)) {
        for observer in &self.0 {
            if catch_unwind(AssertUnwindSafe(|| tell(&**observer))).is_err() {
                log::error!(event = "observer_panic", sequence = message.sequence.0, message_id:% = message.message_id; "an observer panicked: message {} ({})", message.message_id, message.topic);
            }
        }
    }
}
