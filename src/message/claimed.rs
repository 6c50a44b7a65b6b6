//! A message that a relay has claimed.

use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::Sequence;
use crate::shows::shows;

/// A claimed message, as a [`Dispatcher`](crate::Dispatcher), an [`Observer`](crate::Observer) or the
/// handler of a topic receives it.
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
///         println!("order {} is paid (message {})", paid.order_id, message.message_id);
///     }
///     Ok(())
/// }
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Message {
    /// The position in the outbox.
    pub sequence: Sequence,
    /// The id of the message, which is the same on every attempt.
    pub message_id: Uuid,
    /// The topic.
    pub topic: String,
    /// The destination that the message names; empty: routed by topic.
    pub destination: String,
    /// The stored JSON, byte for byte.
    pub payload: String,
    /// The stored headers as a JSON object.
    pub headers: Option<String>,
    /// The ordering key. Messages with the same key are delivered in order.
    pub ordering_key: Option<String>,
    /// The idempotency key, by which the receiver can detect duplicates; the message id if the caller gave none. A
    /// replay has the key of the message that it sends again.
    pub idempotency_key: String,
    /// The tenant of the message.
    pub tenant_id: Option<Uuid>,
    /// When the message was enqueued, by the database's clock.
    pub created_at: SystemTime,
    /// When the event occurred, if the application set it.
    pub occurred_at: Option<SystemTime>,
    /// The number of attempts before this one.
    pub attempts: u32,
    /// When the message expires, on this process's monotonic clock.
    pub(crate) expires: Option<Instant>,
    /// When the message became due, in the database's microseconds.
    pub(crate) available_at: i64,
    /// When the message was claimed, in the database's microseconds. Distinguishes the claims of one lease.
    pub(crate) claimed_at: i64,
    /// When the message was claimed, on this process's monotonic clock.
    pub(crate) claimed: Instant,
    /// The age of the message when it was claimed, by the database's clock.
    pub(crate) age: Duration,
    /// How many messages of the same ordering key were claimed one right after another before this message.
    pub(crate) in_a_row: u32,
    /// The last destination, in byte order, that has its part, if the message has been fanned out in part.
    pub(crate) split_to: Option<String>,
    /// The endpoint that the message is addressed to, if it names one.
    pub(crate) registration: Option<Uuid>,
}

impl Message {
    /// When the event occurred: the time that receivers see as `ce-time`. Defaults to the time of enqueueing.
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

    /// A message that is in no outbox: a test, or a challenge.
    #[cfg(any(feature = "http", test))]
    pub(crate) fn unstored(
        topic: &str,
        destination: &str,
        tenant_id: Option<Uuid>,
        payload: &serde_json::Value,
    ) -> Self {
        let message_id = Uuid::now_v7();
        Self {
            sequence: Sequence(0),
            message_id,
            topic: topic.to_owned(),
            destination: destination.to_owned(),
            payload: payload.to_string(),
            headers: None,
            ordering_key: None,
            idempotency_key: message_id.to_string(),
            tenant_id,
            created_at: SystemTime::now(),
            occurred_at: None,
            attempts: 0,
            expires: None,
            available_at: 0,
            claimed_at: 0,
            claimed: Instant::now(),
            age: Duration::ZERO,
            in_a_row: 0,
            split_to: None,
            registration: None,
        }
    }

    /// What tells this message from all others. A sequence may be used again, and an id may be given twice.
    #[cfg(feature = "relay")]
    pub(crate) fn identity(&self) -> (Sequence, Uuid) {
        (self.sequence, self.message_id)
    }

    /// What the database's clock showed at this moment, by its time at the claim.
    #[cfg(feature = "relay")]
    pub(crate) fn time_of(&self, moment: Instant) -> SystemTime {
        let since_claim = moment.saturating_duration_since(self.claimed);
        let age = self.age.saturating_add(since_claim);
        self.created_at.checked_add(age).unwrap_or(self.created_at)
    }

    /// Whether the application gave the message an idempotency key.
    #[cfg(feature = "relay")]
    pub(crate) fn has_idempotency_key(&self) -> bool {
        let mut id = Uuid::encode_buffer();
        self.idempotency_key != *self.message_id.as_hyphenated().encode_lower(&mut id)
    }

    /// The length of the parts that can be large: payload and headers.
    pub(crate) fn bytes(&self) -> usize {
        self.payload.len() + self.headers.as_ref().map_or(0, String::len)
    }
}

/// The idempotency key as logs show it: the first 16 hexadecimal digits of the key's SHA-256.
pub(crate) fn hashed_key(key: &str) -> String {
    Sha256::digest(key)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

shows! {
    /// Omits payload, headers and keys, which may be private.
    Message: sequence, message_id, topic, destination, attempts
}
