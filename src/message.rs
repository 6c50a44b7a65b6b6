//! Messages that an application enqueues, and messages that a relay claims and sends.

mod claimed;
mod error;
pub(crate) mod replays;

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use diesel::deserialize::FromSqlRow;
use diesel::expression::AsExpression;
use diesel::sql_types::BigInt;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use uuid::Uuid;

pub use self::claimed::Message;
pub(crate) use self::claimed::hashed_key;
pub use self::error::MessageError;

use self::error::{check_name, check_ordering_key, not_json};
use crate::header::check_header;
use crate::shows::shows;

/// The maximum length of a payload, in bytes. The table has the same limit.
pub const MAX_PAYLOAD_BYTES: usize = 1024 * 1024;
/// The maximum total length of the names and values of all headers, in bytes. The table's limit is larger: it
/// applies to the headers as JSON.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// The maximum total length of a row's payload and headers, in bytes. The table's limits ensure it, also for rows
/// from plain SQL.
pub(crate) const MAX_ROW_BYTES: usize = MAX_PAYLOAD_BYTES + 64 * 1024;

/// The position of a message in its outbox. The database assigns sequences in the order of the inserts.
/// Receivers see the sequence as `ce-sequence`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, AsExpression, FromSqlRow, Serialize,
)]
#[diesel(sql_type = BigInt)]
pub struct Sequence(pub i64);

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// When a message becomes due.
///
/// ```
/// use diesel_outbox::Due;
/// use std::time::Duration;
///
/// let tomorrow = Due::After(Duration::from_secs(24 * 3600));
/// # let _ = tomorrow;
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Due {
    /// Immediately.
    Now,
    /// After this delay, by the database's clock.
    After(Duration),
    /// At this time, by the database's clock.
    At(SystemTime),
}

/// A message for [`Outbox::enqueue`](crate::Outbox::enqueue).
///
/// Limits: a topic, a destination and an idempotency key have 1 to 255 bytes, and an ordering key 1 to
/// 1024 bytes, all without control characters. A topic contains no white space. A payload has at most
/// [`MAX_PAYLOAD_BYTES`], and all headers together have at most 16 KiB, each at most 33 KiB as it is sent: the
/// value of a `ce-` header is percent-encoded. Enqueueing refuses a message beyond these limits before anything is sent to
/// the database.
///
/// ```
/// use diesel_outbox::NewMessage;
/// use serde::Serialize;
/// use std::time::Duration;
///
/// #[derive(Serialize)]
/// struct OrderPaid { order_id: i64 }
///
/// let message = NewMessage::new("order.paid", &OrderPaid { order_id: 7 })?
///     .idempotency_key("order-7-paid")
///     .ordering_key("order-7")
///     .header("x-shop", "berlin")
///     .delay(Duration::from_secs(30))
///     .expires_after(Duration::from_secs(24 * 3600));
///
/// // Due at a fixed time, for one destination, in the trace of a request.
/// let start = std::time::SystemTime::now() + Duration::from_secs(3600);
/// let reminder = NewMessage::new("auction.begins", &7)?
///     .available_at(start)
///     .expires_at(start + Duration::from_secs(60))
///     .destination("mailer")
///     .trace_context("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None);
/// println!("the receiver will see {}", reminder.message_id());
/// # Ok::<(), diesel_outbox::MessageError>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct NewMessage {
    pub(crate) message_id: Uuid,
    pub(crate) topic: String,
    pub(crate) destination: String,
    pub(crate) payload: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) tenant_id: Option<Uuid>,
    pub(crate) due: Due,
    pub(crate) expiry: Option<Due>,
    pub(crate) occurred_at: Option<SystemTime>,
}

impl NewMessage {
    /// Creates a message of `topic` with `payload` as JSON. The serialised payload is stored and sent
    /// byte for byte.
    ///
    /// # Errors
    /// [`MessageError::Payload`] if `payload` cannot be serialised.
    pub fn new(topic: impl Into<String>, payload: &impl Serialize) -> Result<Self, MessageError> {
        let payload = serde_json::to_string(payload).map_err(not_json)?;
        Ok(Self::with_payload(topic.into(), payload))
    }

    /// Creates a message of `topic` from a payload that is already JSON.
    ///
    /// ```
    /// use diesel_outbox::NewMessage;
    ///
    /// let message = NewMessage::from_json("order.paid", r#"{"order_id": 7}"#)?;
    /// assert!(NewMessage::from_json("order.paid", "{order_id: 7}").is_err());
    /// # Ok::<(), diesel_outbox::MessageError>(())
    /// ```
    ///
    /// # Errors
    /// [`MessageError::Payload`] if `json` is not a single JSON document.
    pub fn from_json(
        topic: impl Into<String>,
        json: impl Into<String>,
    ) -> Result<Self, MessageError> {
        let json = json.into();
        serde_json::from_str::<&RawValue>(&json).map_err(not_json)?;
        Ok(Self::with_payload(topic.into(), json))
    }

    fn with_payload(topic: String, payload: String) -> Self {
        Self {
            message_id: Uuid::now_v7(),
            topic,
            destination: String::new(),
            payload,
            headers: BTreeMap::new(),
            ordering_key: None,
            idempotency_key: None,
            tenant_id: None,
            due: Due::Now,
            expiry: None,
            occurred_at: None,
        }
    }

    /// Sends the message to the destination `name`, and ignores routes. Defaults to the route of the topic.
    #[must_use]
    pub fn destination(mut self, name: impl Into<String>) -> Self {
        self.destination = name.into();
        self
    }

    /// Copies the message for each of these destinations, for
    /// [`enqueue_batch`](crate::Outbox::enqueue_batch). Each copy is delivered, counted and settled
    /// independently. A route to several destinations does the same without changing the application.
    ///
    /// ```
    /// # use diesel_outbox::NewMessage;
    /// let message = NewMessage::new("order.paid", &7)?;
    /// assert_eq!(message.for_each(["billing", "audit"]).count(), 2);
    /// # Ok::<(), diesel_outbox::MessageError>(())
    /// ```
    pub fn for_each<T: Into<String>>(
        self,
        destinations: impl IntoIterator<Item = T>,
    ) -> impl Iterator<Item = Self> {
        destinations
            .into_iter()
            .map(move |name| self.clone().destination(name))
    }

    /// Adds an HTTP header. A message cannot replace the headers of the relay or of a destination.
    ///
    /// A header whose name begins with `ce-` is a CloudEvents attribute, such as `ce-subject` or
    /// `ce-dataschema`. The rest of the name is 1 to 20 letters and digits. The value is any text without
    /// control characters. Binary mode sends the attribute as an encoded header, the other modes as a member
    /// of the document. In batched mode, a request with several messages does not send other headers.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers
            .insert(name.into().to_ascii_lowercase(), value.into());
        self
    }

    /// Sets the ordering key. Messages with the same key are delivered one at a time, in the order of
    /// their sequences. Defaults to none.
    #[must_use]
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// Sets the idempotency key. Two messages with the same key, destination, topic and payload are one message.
    /// Defaults to none.
    ///
    /// A message without a key is not compared with other messages: enqueued twice, it is two messages with the
    /// same id. Receivers see the id as the key, and may treat the second message as a duplicate.
    #[must_use]
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// Sets the tenant of the message. An endpoint can select messages by tenant, and so can your own
    /// queries. Receivers do not see the tenant. Defaults to none.
    ///
    /// ```
    /// use diesel_outbox::NewMessage;
    /// use uuid::Uuid;
    ///
    /// fn of_tenant(tenant: Uuid) -> Result<NewMessage, diesel_outbox::MessageError> {
    ///     Ok(NewMessage::new("user.invited", &"ada@example.com")?.tenant_id(tenant))
    /// }
    /// ```
    #[must_use]
    pub fn tenant_id(mut self, tenant_id: Uuid) -> Self {
        self.tenant_id = Some(tenant_id);
        self
    }

    /// Delays the message until `delay` after the start of the transaction, by the database's clock. Defaults to no
    /// delay.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.due = Due::After(delay);
        self
    }

    /// Delays the message until `time`, by the database's clock. Defaults to no delay.
    #[must_use]
    pub fn available_at(mut self, time: SystemTime) -> Self {
        self.due = Due::At(time);
        self
    }

    /// Lets the message expire `time_to_live` after the start of the transaction. An expired message is
    /// not sent: it is dead-lettered with the reason `EXPIRED`. Defaults to never.
    #[must_use]
    pub fn expires_after(mut self, time_to_live: Duration) -> Self {
        self.expiry = Some(Due::After(time_to_live));
        self
    }

    /// Lets the message expire at `time`. An expired message is not sent: it is dead-lettered with the
    /// reason `EXPIRED`. Defaults to never.
    #[must_use]
    pub fn expires_at(mut self, time: SystemTime) -> Self {
        self.expiry = Some(Due::At(time));
        self
    }

    /// Sets when the event occurred. Receivers see the time as `ce-time`, to the microsecond; a time before 1970 is
    /// sent as 1970. Defaults to the start of the transaction.
    ///
    /// ```
    /// use diesel_outbox::NewMessage;
    /// use std::time::SystemTime;
    ///
    /// fn measured(degrees: f64, at: SystemTime) -> Result<NewMessage, diesel_outbox::MessageError> {
    ///     Ok(NewMessage::new("temperature.measured", &degrees)?.occurred_at(at))
    /// }
    /// ```
    #[must_use]
    pub fn occurred_at(mut self, time: SystemTime) -> Self {
        self.occurred_at = Some(time);
        self
    }

    /// Sets the W3C trace context in which the message is enqueued. Each attempt continues the trace with a
    /// new parent id. An invalid trace context is not sent. Defaults to none.
    #[must_use]
    pub fn trace_context(self, traceparent: impl Into<String>, tracestate: Option<&str>) -> Self {
        let message = self.header("traceparent", traceparent);
        match tracestate {
            Some(tracestate) => message.header("tracestate", tracestate),
            None => message,
        }
    }

    /// The id of the message, a UUID v7. Receivers see it as the id of the event, and as `webhook-id`.
    pub fn message_id(&self) -> Uuid {
        self.message_id
    }

    /// The idempotency key; the message id if the caller gave none.
    pub(crate) fn key(&self) -> String {
        self.idempotency_key
            .clone()
            .unwrap_or_else(|| self.message_id.to_string())
    }

    /// The headers as a JSON object; `None` if there are no headers.
    pub(crate) fn headers_json(&self) -> Option<String> {
        if self.headers.is_empty() {
            return None;
        }
        let object = self
            .headers
            .iter()
            .map(|(name, value)| (name.clone(), value.clone().into()))
            .collect();
        Some(serde_json::Value::Object(object).to_string())
    }

    pub(crate) fn digest(&self) -> Vec<u8> {
        digest(&self.topic, &self.payload)
    }

    /// Checks the limits of the table before SQL is sent, so that an invalid message does not abort the
    /// caller's transaction.
    pub(crate) fn validate(&self) -> Result<(), MessageError> {
        check_name("topic", &self.topic)?;
        if self.topic.contains(char::is_whitespace) {
            return Err(MessageError::Name {
                field: "topic",
                value: self.topic.clone(),
                reason: "contains white space",
            });
        }
        if !self.destination.is_empty() {
            check_name("destination", &self.destination)?;
        }
        if let Some(key) = &self.idempotency_key {
            check_name("idempotency_key", key)?;
            if replays::base_of(key).is_some() {
                return Err(MessageError::Name {
                    field: "idempotency_key",
                    value: key.clone(),
                    reason: "has the form of a replay's key (#replay-)",
                });
            }
        }
        if let Some(key) = &self.ordering_key {
            check_ordering_key(key)?;
        }
        if self.payload.len() > MAX_PAYLOAD_BYTES {
            return Err(MessageError::PayloadTooLarge {
                topic: self.topic.clone(),
                bytes: self.payload.len(),
            });
        }
        let header_bytes: usize = self.headers.iter().map(|(n, v)| n.len() + v.len()).sum();
        if header_bytes > MAX_HEADER_BYTES {
            return Err(MessageError::HeadersTooLarge {
                bytes: header_bytes,
            });
        }
        for (name, value) in &self.headers {
            check_header(name, value).map_err(|reason| MessageError::Header {
                name: name.clone(),
                reason,
            })?;
        }
        Ok(())
    }
}

shows! {
    /// Omits the payload and the header values, which may be private.
    NewMessage: message_id, topic, payload_bytes = [payload.len()]
}

/// SHA-256 of topic, line feed and payload. A topic contains no line feed, so different messages never
/// have the same input. SQL contains the same expression, for plain inserts.
pub(crate) fn digest(topic: &str, payload: &str) -> Vec<u8> {
    let mut hasher = Sha256::new();
    hasher.update(topic);
    hasher.update(b"\n");
    hasher.update(payload);
    hasher.finalize().to_vec()
}

#[cfg(test)]
mod tests;
