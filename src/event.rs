//! Messages as types: what a payload's type says about its topic, version and keys.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{Message, MessageError, NewMessage};

/// The attribute of CloudEvents that carries a version other than 1, as a stored header.
const VERSION_HEADER: &str = "ce-dataversion";
/// The same attribute by its own name.
pub(crate) const VERSION_ATTRIBUTE: &str = "dataversion";

/// A type whose values are messages of one topic.
///
/// Bind a type once, and enqueue its values as they are: [`Outbox::enqueue`](crate::Outbox::enqueue)
/// takes them, by value or by reference, where it takes a [`NewMessage`]. References are events where
/// the type is one.
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
/// // What the type does not say can be added for one message.
/// let message = NewMessage::of(&OrderPaid { order_id: 7, euro: 42 })?
///     .delay(std::time::Duration::from_secs(60));
/// # Ok::<(), diesel_outbox::MessageError>(())
/// ```
///
/// # Versions
/// When the payload's shape changes so that an old reader would misread it, count
/// [`VERSION`](Self::VERSION) up, and teach [`decode`](Self::decode) the old shape: messages of it are
/// still in the outbox, and other services may go on sending it.
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
    /// The topic of its messages.
    const TOPIC: &'static str;

    /// The version of its payload's shape. Any but 1 travels with the message, as the CloudEvents
    /// attribute `dataversion`.
    const VERSION: u32 = 1;

    /// Messages of one key are delivered in order. Defaults to none.
    fn ordering_key(&self) -> Option<String> {
        None
    }

    /// Two messages of one key with the same content are one. Defaults to none: compared with no other message.
    fn idempotency_key(&self) -> Option<String> {
        None
    }

    /// When it occurred, as receivers see it in `ce-time`. Defaults to when it is enqueued.
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

    /// Reads a payload that was written as `version`. Defaults to [`decode_current`].
    ///
    /// # Errors
    /// A [`DecodeError`] when the version is not known, or the payload is not of its shape.
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

    fn occurred_at(&self) -> Option<SystemTime> {
        (**self).occurred_at()
    }
}

/// Reads a payload of the type's own version, and no other: what [`Event::decode`] does where a type
/// says nothing else.
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
/// A [`DecodeError`] when the version is another one, or the payload is not of the type's shape.
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

/// Why a payload is not an event of the type that was asked for. It tells the place, and nothing of
/// what stands there: payloads may be private.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// It was written as another version.
    #[error("it is of version {version}; version {known} is known")]
    Version {
        /// Of the message.
        version: u32,
        /// The type's own.
        known: u32,
    },
    /// It is of another topic (the type, in CloudEvents).
    #[error("it is of topic {topic:?}; {known:?} was asked for")]
    Topic {
        /// Of the message.
        topic: String,
        /// The type's own.
        known: &'static str,
    },
    /// There is no payload, or one of another content type.
    #[error("it has no JSON")]
    NoJson,
    /// It is not JSON, or JSON of another shape.
    #[error("{reason} at line {line}, column {column}")]
    Payload {
        /// In which way.
        reason: &'static str,
        /// Counted from 1.
        line: usize,
        /// Counted from 1; 0: before the first.
        column: usize,
    },
}

impl From<serde_json::Error> for DecodeError {
    fn from(error: serde_json::Error) -> Self {
        Self::of(&error)
    }
}

impl DecodeError {
    /// Without the error's text: it quotes values of the payload.
    pub(crate) fn of(error: &serde_json::Error) -> Self {
        Self::Payload {
            reason: reason_of(error),
            line: error.line(),
            column: error.column(),
        }
    }
}

/// What is wrong with JSON, in words that quote nothing of it.
pub(crate) fn reason_of(error: &serde_json::Error) -> &'static str {
    use serde_json::error::Category;
    match error.classify() {
        Category::Data => "the JSON has another shape",
        Category::Syntax | Category::Eof | Category::Io => "it is not JSON",
    }
}

impl NewMessage {
    /// The message of an event: its topic, keys, time and version, and the event as the payload.
    ///
    /// # Errors
    /// [`MessageError::Payload`] when the event cannot be serialised.
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
        message.occurred_at = event.occurred_at();
        if E::VERSION != 1 {
            message = message.header(VERSION_HEADER, E::VERSION.to_string());
        }
        Ok(message)
    }
}

impl Message {
    /// Its payload as an event. (The topic is not looked at.)
    ///
    /// # Errors
    /// A [`DecodeError`] when it is of another version or shape.
    pub fn decode<E: Event + DeserializeOwned>(&self) -> Result<E, DecodeError> {
        E::decode(self.version(), &self.payload)
    }

    /// The version of its payload's shape, as an [`Event`] has it: 1 where it says nothing, 0 where
    /// what it says is no number.
    pub fn version(&self) -> u32 {
        let Some(headers) = &self.headers else {
            return 1;
        };
        match serde_json::from_str::<BTreeMap<String, serde_json::Value>>(headers) {
            // Plain SQL writes names in any case, as HTTP has them.
            Ok(headers) => headers
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(VERSION_HEADER))
                .map_or(1, |(_, version)| match version {
                    serde_json::Value::String(text) => text.parse().unwrap_or(0),
                    other => other.as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                }),
            Err(_) => 0,
        }
    }
}

/// What can be enqueued: a [`NewMessage`], or an [`Event`] by value or by reference.
///
/// ```
/// use diesel_outbox::{IntoMessage, MessageError, NewMessage};
///
/// /// Says of every message which shop it comes from.
/// fn of_shop(message: impl IntoMessage, shop: &str) -> Result<NewMessage, MessageError> {
///     Ok(message.into_message()?.header("x-shop", shop))
/// }
/// # of_shop(NewMessage::new("order.paid", &7)?, "berlin")?;
/// # Ok::<(), MessageError>(())
/// ```
pub trait IntoMessage {
    /// The message.
    ///
    /// # Errors
    /// [`MessageError::Payload`] when an event cannot be serialised.
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
