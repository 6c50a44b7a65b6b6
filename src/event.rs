//! Events: types that define the topic, version and keys of their messages.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::message::{Message, MessageError, NewMessage};

/// The stored header that carries a version other than 1 (a CloudEvents attribute).
const VERSION_HEADER: &str = "ce-dataversion";
/// The name of the same attribute, without the prefix.
pub(crate) const VERSION_ATTRIBUTE: &str = "dataversion";

/// A type whose values are the messages of one topic.
///
/// Implement the trait once for each type. [`Outbox::enqueue`](crate::Outbox::enqueue) then takes
/// values of the type, by value or by reference. A reference to an event is also an event.
///
/// ```
/// use diesel_outbox::{Event, NewMessage};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct OrderPaid { order_id: i64, euro: u32 }
///
/// impl Event for OrderPaid {
///     const TOPIC: &'static str = "order.paid";
///
///     fn ordering_key(&self) -> Option<String> {
///         Some(format!("order-{}", self.order_id))
///     }
///
///     fn idempotency_key(&self) -> Option<String> {
///         Some(format!("order-{}-paid", self.order_id))
///     }
/// }
///
/// // Options that the type does not define can be set for a single message.
/// let message = NewMessage::of(&OrderPaid { order_id: 7, euro: 42 })?
///     .delay(std::time::Duration::from_secs(60));
/// # Ok::<(), diesel_outbox::MessageError>(())
/// ```
///
/// # Versions
/// When the payload's shape changes in a way that an old reader would misread, increment
/// [`VERSION`](Self::VERSION), and teach [`decode`](Self::decode) the old shape. The outbox may still
/// contain messages of the old shape, and other services may still send them.
///
/// ```
/// use diesel_outbox::{DecodeError, Event};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct OrderPaid { order_id: i64, cents: u64 }
///
/// impl Event for OrderPaid {
///     const TOPIC: &'static str = "order.paid";
///     const VERSION: u32 = 2;
///
///     fn decode(version: u32, json: &str) -> Result<Self, DecodeError> {
///         #[derive(Deserialize)]
///         struct Version1 { order_id: i64, euro: u64 }
///
///         if version == 1 {
///             let old: Version1 = serde_json::from_str(json)?;
///             return Ok(Self { order_id: old.order_id, cents: old.euro * 100 });
///         }
///         diesel_outbox::decode_current(version, json)
///     }
/// }
///
/// let paid = OrderPaid::decode(1, r#"{"order_id":7,"euro":42}"#)?;
/// assert_eq!(paid.cents, 4200);
/// # Ok::<(), DecodeError>(())
/// ```
pub trait Event: Serialize {
    /// The topic of the event's messages.
    const TOPIC: &'static str;

    /// The version of the payload's shape. A version other than 1 is sent with the message, as the
    /// CloudEvents attribute `dataversion`. Defaults to 1.
    const VERSION: u32 = 1;

    /// The ordering key. Messages with the same key are delivered in order. Defaults to none.
    fn ordering_key(&self) -> Option<String> {
        None
    }

    /// The idempotency key. Two messages with the same key and content are one message. Defaults to none: the
    /// message is not compared with other messages.
    fn idempotency_key(&self) -> Option<String> {
        None
    }

    /// The tenant of the message (see [`NewMessage::tenant_id`]). Defaults to none.
    ///
    /// ```
    /// use diesel_outbox::{Event, NewMessage};
    /// use std::time::Duration;
    /// use uuid::Uuid;
    ///
    /// #[derive(serde::Serialize)]
    /// struct OrderPlaced {
    ///     order_id: i64,
    ///     // The message has it already.
    ///     #[serde(skip)]
    ///     customer: Uuid,
    /// }
    ///
    /// impl Event for OrderPlaced {
    ///     const TOPIC: &'static str = "order.placed";
    ///
    ///     fn tenant_id(&self) -> Option<Uuid> {
    ///         Some(self.customer)
    ///     }
    ///
    ///     // The customer may cancel it for a minute.
    ///     fn delay(&self) -> Option<Duration> {
    ///         Some(Duration::from_secs(60))
    ///     }
    /// }
    ///
    /// let customer = Uuid::now_v7();
    /// let message = NewMessage::of(&OrderPlaced { order_id: 7, customer })?;
    /// # Ok::<(), diesel_outbox::MessageError>(())
    /// ```
    fn tenant_id(&self) -> Option<Uuid> {
        None
    }

    /// HTTP headers and CloudEvents attributes of the message, as names and values (see [`NewMessage::header`]). Defaults
    /// to none.
    ///
    /// ```
    /// use diesel_outbox::Event;
    ///
    /// #[derive(serde::Serialize)]
    /// struct OrderPlaced {
    ///     order_id: i64,
    /// }
    ///
    /// impl Event for OrderPlaced {
    ///     const TOPIC: &'static str = "order.placed";
    ///
    ///     fn headers(&self) -> Vec<(String, String)> {
    ///         vec![("ce-subject".to_owned(), self.order_id.to_string())]
    ///     }
    /// }
    ///
    /// assert_eq!(OrderPlaced { order_id: 7 }.headers()[0].1, "7");
    /// ```
    fn headers(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Delays the message after the start of the transaction (see [`NewMessage::delay`]). Defaults to no delay.
    fn delay(&self) -> Option<Duration> {
        None
    }

    /// When the event occurred. Receivers see the time as `ce-time`. Defaults to the time of enqueueing.
    ///
    /// ```
    /// use diesel_outbox::Event;
    /// use std::time::SystemTime;
    ///
    /// #[derive(serde::Serialize)]
    /// struct TemperatureMeasured {
    ///     degrees: f64,
    ///     #[serde(skip)]
    ///     at: SystemTime,
    /// }
    ///
    /// impl Event for TemperatureMeasured {
    ///     const TOPIC: &'static str = "temperature.measured";
    ///
    ///     fn occurred_at(&self) -> Option<SystemTime> {
    ///         Some(self.at)
    ///     }
    /// }
    /// ```
    fn occurred_at(&self) -> Option<SystemTime> {
        None
    }

    /// Decodes a payload that was written with this version. Defaults to [`decode_current`].
    ///
    /// # Errors
    /// A [`DecodeError`] if the version is unknown, or the payload does not have the version's shape.
    fn decode(version: u32, json: &str) -> Result<Self, DecodeError>
    where
        Self: DeserializeOwned,
    {
        decode_current(version, json)
    }
}

impl<E: Event> Event for &E {
    const TOPIC: &'static str = E::TOPIC;
    const VERSION: u32 = E::VERSION;

    fn ordering_key(&self) -> Option<String> {
        (**self).ordering_key()
    }

    fn idempotency_key(&self) -> Option<String> {
        (**self).idempotency_key()
    }

    fn tenant_id(&self) -> Option<Uuid> {
        (**self).tenant_id()
    }

    fn headers(&self) -> Vec<(String, String)> {
        (**self).headers()
    }

    fn delay(&self) -> Option<Duration> {
        (**self).delay()
    }

    fn occurred_at(&self) -> Option<SystemTime> {
        (**self).occurred_at()
    }
}

/// Decodes a payload of the type's own version, and refuses all others. This is the default of
/// [`Event::decode`].
///
/// ```
/// use diesel_outbox::{DecodeError, Event, decode_current};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct OrderPaid { order_id: i64 }
///
/// impl Event for OrderPaid {
///     const TOPIC: &'static str = "order.paid";
/// }
///
/// let paid: OrderPaid = decode_current(1, r#"{"order_id":7}"#)?;
/// assert_eq!(paid.order_id, 7);
/// let newer = decode_current::<OrderPaid>(2, r#"{"order":{"id":7}}"#);
/// assert!(matches!(newer, Err(DecodeError::Version { version: 2, known: 1 })));
/// # Ok::<(), DecodeError>(())
/// ```
///
/// # Errors
/// A [`DecodeError`] if the version differs, or the payload does not have the type's shape.
pub fn decode_current<E: Event + DeserializeOwned>(
    version: u32,
    json: &str,
) -> Result<E, DecodeError> {
    if version != E::VERSION {
        return Err(DecodeError::Version {
            version,
            known: E::VERSION,
        });
    }
    Ok(serde_json::from_str(json)?)
}

/// Why a payload cannot be decoded as an event. The error gives the position of the problem, but no part of the
/// payload, which may be private.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The payload was written with another version.
    #[error("unsupported version {version}, expected {known}")]
    Version {
        /// The version of the message.
        version: u32,
        /// The version of the type.
        known: u32,
    },
    /// The message has another topic (in CloudEvents: another type).
    #[error("the topic is {topic:?}, expected {known:?}")]
    Topic {
        /// The topic of the message.
        topic: String,
        /// The topic of the type.
        known: &'static str,
    },
    /// The payload is missing, or has another content type.
    #[error("no JSON payload")]
    NoJson,
    /// The payload is not valid JSON, or has another shape: which of the two, and where.
    #[error("{0}")]
    Payload(String),
}

impl From<serde_json::Error> for DecodeError {
    fn from(error: serde_json::Error) -> Self {
        Self::of(&error)
    }
}

impl DecodeError {
    /// Omits the text of the error, which quotes values of the payload.
    pub(crate) fn of(error: &serde_json::Error) -> Self {
        Self::Payload(unquoted(error))
    }
}

/// What is wrong with the JSON and where, without quoting it.
pub(crate) fn unquoted(error: &serde_json::Error) -> String {
    use serde_json::error::Category;
    let what = match error.classify() {
        Category::Data => "unexpected JSON shape",
        Category::Syntax | Category::Eof | Category::Io => "invalid JSON",
    };
    format!("{what} at line {}, column {}", error.line(), error.column())
}

impl NewMessage {
    /// Creates the message of an event, with all that the event says about its message. The payload is the event as JSON.
    ///
    /// # Errors
    /// [`MessageError::Payload`] if the event cannot be serialised.
    ///
    /// ```
    /// use diesel_outbox::{Event, NewMessage};
    ///
    /// #[derive(serde::Serialize)]
    /// struct MemberJoined { member_id: i64 }
    ///
    /// impl Event for MemberJoined {
    ///     const TOPIC: &'static str = "member.joined";
    /// }
    ///
    /// let message = NewMessage::of(&MemberJoined { member_id: 7 })?.header("x-shop", "berlin");
    /// # Ok::<(), diesel_outbox::MessageError>(())
    /// ```
    pub fn of<E: Event>(event: &E) -> Result<Self, MessageError> {
        let mut message = Self::new(E::TOPIC, event)?;
        message.ordering_key = event.ordering_key();
        message.idempotency_key = event.idempotency_key();
        message.tenant_id = event.tenant_id();
        message.occurred_at = event.occurred_at();
        if let Some(delay) = event.delay() {
            message = message.delay(delay);
        }
        for (name, value) in event.headers() {
            message = message.header(name, value);
        }
        if E::VERSION != 1 {
            message = message.header(VERSION_HEADER, E::VERSION.to_string());
        }
        Ok(message)
    }
}

impl Message {
    /// Decodes the payload as an event. The topic is not checked.
    ///
    /// # Errors
    /// A [`DecodeError`] if the payload has another version or shape.
    pub fn decode<E: Event + DeserializeOwned>(&self) -> Result<E, DecodeError> {
        E::decode(self.version(), &self.payload)
    }

    /// The version of the payload's shape (see [`Event::VERSION`]): 1 if the message does not give a version,
    /// 0 if its version is not a number.
    pub fn version(&self) -> u32 {
        version_of(self.headers.as_deref())
    }
}

/// The version of the payload's shape that stored headers give.
pub(crate) fn version_of(headers: Option<&str>) -> u32 {
    headers.map_or(1, |headers| {
        match serde_json::from_str::<BTreeMap<String, serde_json::Value>>(headers) {
            // Plain SQL may write header names in any case.
            Ok(headers) => headers
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(VERSION_HEADER))
                .map_or(1, |(_, version)| match version {
                    serde_json::Value::String(text) => text.parse().unwrap_or(0),
                    other => other.as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                }),
            Err(_) => 0,
        }
    })
}

/// A value that can be enqueued: a [`NewMessage`], or an [`Event`] by value or by reference.
///
/// ```
/// use diesel_outbox::{IntoMessage, MessageError, NewMessage};
///
/// /// Adds a header with the shop that a message comes from.
/// fn of_shop(message: impl IntoMessage, shop: &str) -> Result<NewMessage, MessageError> {
///     Ok(message.into_message()?.header("x-shop", shop))
/// }
/// # of_shop(NewMessage::new("order.paid", &7)?, "berlin")?;
/// # Ok::<(), MessageError>(())
/// ```
pub trait IntoMessage {
    /// Converts the value into a message.
    ///
    /// # Errors
    /// [`MessageError::Payload`] if an event cannot be serialised.
    fn into_message(self) -> Result<NewMessage, MessageError>;
}

impl IntoMessage for NewMessage {
    fn into_message(self) -> Result<NewMessage, MessageError> {
        Ok(self)
    }
}

impl<E: Event> IntoMessage for E {
    fn into_message(self) -> Result<NewMessage, MessageError> {
        NewMessage::of(&self)
    }
}
