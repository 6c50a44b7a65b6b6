//! A message that a relay has claimed.

use std::fmt;
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::Sequence;

/// A claimed message, as a [`Dispatcher`](crate::Dispatcher), an [`Observer`](crate::Observer) and the
/// handler of a topic see it.
///
/// ```
/// use diesel_outbox::{DecodeError, Event, Message};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct OrderPaid { order_id: i64 }
///
/// impl Event for OrderPaid {
///     const TOPIC: &'static str = "order.paid";
/// }
///
/// fn print(message: &Message) -> Result<(), DecodeError> {
///     if message.topic == OrderPaid::TOPIC && message.version() == OrderPaid::VERSION {
///         let paid: OrderPaid = message.decode()?;
///         println!("order {} is paid (key {})", paid.order_id, message.hashed_key());
///     }
///     Ok(())
/// }
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Message {
    /// Its place in the outbox.
    pub sequence: Sequence,
    /// Its id, the same on every attempt.
    pub message_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// The named destination, or empty: routed by topic.
    pub destination: String,
    /// The stored JSON, byte for byte.
    pub payload: String,
    /// The stored headers as a JSON object.
    pub headers: Option<String>,
    /// Messages of one key are delivered in order.
    pub ordering_key: Option<String>,
    /// What the receiver can tell duplicates by.
    pub idempotency_key: String,
    /// The tenant that it belongs to.
    pub tenant_id: Option<Uuid>,
    /// When it was enqueued, by the database's clock.
    pub created_at: SystemTime,
    /// When the event occurred, where who enqueued it has said so.
    pub occurred_at: Option<SystemTime>,
    /// Attempts before this one.
    pub attempts: u32,
    /// When it must not be sent any more, on this process's monotonic clock.
    pub(crate) expires: Option<Instant>,
    /// When it could first be claimed, as the database counts.
    pub(crate) available_at: i64,
    /// When it was claimed, as the database counts: tells this claim of a lease from another one.
    pub(crate) claimed_at: i64,
    /// When it was claimed, on this process's monotonic clock.
    pub(crate) claimed: Instant,
    /// How old it was then, by the database's clock.
    pub(crate) age: Duration,
    /// How many messages of its key were claimed right after one another before it.
    pub(crate) in_a_row: u32,
}

impl Message {
    /// When the event occurred: what receivers see as `ce-time`. Defaults to when it was enqueued.
    ///
    /// ```
    /// use diesel_outbox::Relay;
    ///
    /// let relay = Relay::builder("postgres://localhost/shop").on_topic("audit.entry", |message, _| {
    ///     println!("{} s old", message.time().elapsed()?.as_secs());
    ///     Ok(())
    /// });
    /// ```
    pub fn time(&self) -> SystemTime {
        self.occurred_at.unwrap_or(self.created_at)
    }

    /// The idempotency key as logs show it: the first 16 hexadecimal digits of its SHA-256.
    pub fn hashed_key(&self) -> String {
        hashed_key(&self.idempotency_key)
    }

    /// What can be large of it: payload and headers.
    pub(crate) fn bytes(&self) -> usize {
        self.payload.len() + self.headers.as_ref().map_or(0, String::len)
    }
}

pub(crate) fn hashed_key(key: &str) -> String {
    Sha256::digest(key)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

impl fmt::Debug for Message {
    /// Without payload, headers and key: they may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("sequence", &self.sequence)
            .field("message_id", &self.message_id)
            .field("topic", &self.topic)
            .field("destination", &self.destination)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
