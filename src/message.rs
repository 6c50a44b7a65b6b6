//! What is enqueued, and what a relay claims and sends.

mod claimed;
mod error;

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

/// Bytes that a payload may have. The table has the same limit.
pub const MAX_PAYLOAD_BYTES: usize = 1024 * 1024;
/// Bytes that names and values of the headers may have together. The table's own limit leaves room
/// for their JSON.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Bytes that payload and headers of a row may have: by the table's own limits, whoever wrote it.
pub(crate) const MAX_ROW_BYTES: usize = MAX_PAYLOAD_BYTES + 64 * 1024;

/// A message's place in its outbox. Given by the database, in the order of the inserts. Receivers see
/// it as `ce-sequence`.
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

/// When a message may be sent first.
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
    /// At once.
    Now,
    /// So long from now on, by the database's clock.
    After(Duration),
    /// At this time.
    At(SystemTime),
}

/// A message to be enqueued, by [`Outbox::enqueue`](crate::Outbox::enqueue).
///
/// A topic, a destination and an idempotency key have 1 to 255 bytes, an ordering key 1 to 1024. None has
/// control characters, and a topic has no white space. A payload has at most [`MAX_PAYLOAD_BYTES`], all
/// headers together at most 16 KiB. A message beyond these limits is refused when it is enqueued, before
/// anything is sent to the database.
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
/// // At a time, to one destination, in the trace of a request.
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
    /// A message of `topic` whose payload is `payload` as JSON. It is stored, and later sent,
    /// byte for byte as it is serialised here.
    ///
    /// # Errors
    /// [`MessageError::Payload`] when `payload` cannot be serialised.
    pub fn new(topic: impl Into<String>, payload: &impl Serialize) -> Result<Self, MessageError> {
        let payload = serde_json::to_string(payload).map_err(not_json)?;
        Ok(Self::with_payload(topic.into(), payload))
    }

    /// A message whose payload is JSON already.
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
    /// [`MessageError::Payload`] when `json` is not one JSON document.
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

    /// Sends it to the destination of this name, and not to where its topic is routed.
    #[must_use]
    pub fn destination(mut self, name: impl Into<String>) -> Self {
        self.destination = name.into();
        self
    }

    /// The same message for each of these destinations, for
    /// [`enqueue_batch`](crate::Outbox::enqueue_batch): each is delivered, counted and settled by
    /// itself. (A route to several destinations does the same without the application's knowing.)
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

    /// Adds an HTTP header. The relay's own headers, and those of a destination, cannot be
    /// replaced.
    ///
    /// One whose name begins with `ce-` is an attribute of CloudEvents: its name goes on with 1 to
    /// 20 letters and digits, and its value is any text, which is encoded when it is sent (a header
    /// in binary mode, a member of the document otherwise). `ce-subject` and `ce-dataschema` are
    /// among them. In batched mode a request for several messages has no place for other headers of
    /// a single one: they are not sent.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers
            .insert(name.into().to_ascii_lowercase(), value.into());
        self
    }

    /// Messages of one key are delivered in the order of their sequence, one at a time.
    #[must_use]
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// Two messages of one key (and destination) with the same topic and payload are one message.
    ///
    /// Without a key a message is compared with no other: enqueued twice it is two messages of one id. Receivers
    /// see the id as its key, and may take the two for one.
    #[must_use]
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// The tenant that the message belongs to: a column for the application's own queries, which is not
    /// sent.
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

    /// Not before `delay` after the start of the transaction, by the database's clock.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.due = Due::After(delay);
        self
    }

    /// Not before `time`, by the database's clock.
    #[must_use]
    pub fn available_at(mut self, time: SystemTime) -> Self {
        self.due = Due::At(time);
        self
    }

    /// Never later than `time_to_live` after the start of the transaction: then it ends dead
    /// with the reason `EXPIRED`.
    #[must_use]
    pub fn expires_after(mut self, time_to_live: Duration) -> Self {
        self.expiry = Some(Due::After(time_to_live));
        self
    }

    /// Never later than `time`: then it ends dead with the reason `EXPIRED`.
    #[must_use]
    pub fn expires_at(mut self, time: SystemTime) -> Self {
        self.expiry = Some(Due::At(time));
        self
    }

    /// When the event occurred, where that was before it is enqueued. Receivers see it as `ce-time`, to the
    /// microsecond; a time before 1970 is sent as 1970. Defaults to the start of the transaction.
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

    /// The W3C trace context in which the message is enqueued. Each attempt continues it as a step
    /// of its own: with the same trace id, and a new parent id. What is not valid is not passed on.
    #[must_use]
    pub fn trace_context(self, traceparent: impl Into<String>, tracestate: Option<&str>) -> Self {
        let message = self.header("traceparent", traceparent);
        match tracestate {
            Some(tracestate) => message.header("tracestate", tracestate),
            None => message,
        }
    }

    /// The id that the receiver sees as `webhook-id` and `ce-id`: a UUID v7.
    pub fn message_id(&self) -> Uuid {
        self.message_id
    }

    /// The idempotency key that was given, or else the id.
    pub(crate) fn key(&self) -> String {
        self.idempotency_key
            .clone()
            .unwrap_or_else(|| self.message_id.to_string())
    }

    /// The headers as a JSON object, where there are some.
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

    /// Whether the table would take it, found out before SQL is sent, so that a bad message
    /// does not abort the caller's transaction.
    pub(crate) fn validate(&self) -> Result<(), MessageError> {
        check_name("topic", &self.topic)?;
        if self.topic.contains(char::is_whitespace) {
            return Err(MessageError::Name {
                field: "topic",
                value: self.topic.clone(),
                reason: "it holds white space",
            });
        }
        if !self.destination.is_empty() {
            check_name("destination", &self.destination)?;
        }
        if let Some(key) = &self.idempotency_key {
            check_name("idempotency_key", key)?;
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

impl fmt::Debug for NewMessage {
    /// Without payload and header values: they may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewMessage")
            .field("message_id", &self.message_id)
            .field("topic", &self.topic)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// SHA-256 of topic, line feed and payload. (A topic holds no line feed, so two different
/// pairs never give one input. The same expression stands in SQL, for plain inserts.)
pub(crate) fn digest(topic: &str, payload: &str) -> Vec<u8> {
    let mut hasher = Sha256::new();
    hasher.update(topic);
    hasher.update(b"\n");
    hasher.update(payload);
    hasher.finalize().to_vec()
}

#[cfg(test)]
mod tests;
