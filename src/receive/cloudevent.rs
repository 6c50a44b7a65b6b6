//! An event of CloudEvents 1.0.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use serde::de::DeserializeOwned;

use super::attributes::{Attributes, DATA_CONTENT_TYPE, rfc3339};
use super::error::CloudEventError;
use crate::event::{DecodeError, Event, VERSION_ATTRIBUTE};

/// The only version there is, and the one that the relay sends.
const SPEC_VERSION: &str = "1.0";
/// The extension that carries the ordering key.
const PARTITION_KEY: &str = "partitionkey";

/// An event, as it came: in a request of its own, or in a batch. It borrows from the request where it
/// can.
///
/// ```
/// use diesel_outbox::receive::{self, Headers};
///
/// let headers = Headers::new([
///     ("content-type", "application/cloudevents+json"),
///     ("idempotency-key", "\"order-7-paid\""),
/// ]);
/// let body = br#"{"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.paid",
///     "partitionkey": "order-7", "dataversion": "2", "data": {"order_id": 7}}"#;
/// let events = receive::events(&headers, body)?;
/// let event = &events[0];
/// assert_eq!(event.ordering_key(), Some("order-7"));
/// assert_eq!(event.idempotency_key(), Some("order-7-paid"));
/// assert_eq!(event.version(), 2);
/// assert_eq!(event.json(), Some(r#"{"order_id": 7}"#));
/// # Ok::<(), receive::CloudEventError>(())
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct CloudEvent<'a> {
    /// Its id: of a message of an outbox the message's, a UUID. With the source it is unique, and the
    /// same on every attempt.
    pub id: Cow<'a, str>,
    /// Where it comes from: `diesel-outbox/outbox`, where the relay is told nothing else.
    pub source: Cow<'a, str>,
    /// Its type: the message's topic.
    pub event_type: Cow<'a, str>,
    /// What in the source it is about.
    pub subject: Option<Cow<'a, str>>,
    /// When it happened: of a message, when it was enqueued.
    pub time: Option<SystemTime>,
    /// The content type of its data. In a document, nothing means JSON.
    pub datacontenttype: Option<Cow<'a, str>>,
    /// The schema that its data follows.
    pub dataschema: Option<Cow<'a, str>>,
    /// All other attributes by their names, as texts: those of the relay (`sequence`,
    /// `partitionkey`), and those that were stored with the message.
    pub extensions: BTreeMap<Cow<'a, str>, Cow<'a, str>>,
    /// What happened, if there is more to say.
    pub data: Option<Data<'a>>,
    pub(super) idempotency_key: Option<Cow<'a, str>>,
}

/// The data of an event.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub enum Data<'a> {
    /// JSON, byte for byte as it came, without white space around it.
    Json(&'a str),
    /// Of another content type.
    Bytes(Cow<'a, [u8]>),
}

impl<'a> Attributes<'a> {
    /// The event that has these, and no others.
    pub(super) fn into_event(
        mut self,
        data: Option<Data<'a>>,
    ) -> Result<CloudEvent<'a>, CloudEventError> {
        if self.required("specversion")? != SPEC_VERSION {
            return Err(CloudEventError::attribute("specversion", "is not 1.0"));
        }
        let time = match self.optional("time")? {
            Some(time) => Some(rfc3339(&time).ok_or_else(|| {
                CloudEventError::attribute("time", "is not a time of RFC 3339 from 1970 to 9999")
            })?),
            None => None,
        };
        Ok(CloudEvent {
            id: self.required("id")?,
            source: self.required("source")?,
            event_type: self.required("type")?,
            subject: self.optional("subject")?,
            time,
            datacontenttype: self.optional(DATA_CONTENT_TYPE)?,
            dataschema: self.optional("dataschema")?,
            extensions: self.values,
            data,
            idempotency_key: None,
        })
    }
}

impl CloudEvent<'_> {
    /// Its data as an event of the application's: of the version that the attribute `dataversion`
    /// says, or 1.
    ///
    /// ```
    /// # use diesel_outbox::receive::{self, Headers};
    /// use diesel_outbox::{DecodeError, Event};
    ///
    /// #[derive(serde::Serialize, serde::Deserialize)]
    /// struct OrderPaid { order_id: i64 }
    ///
    /// impl Event for OrderPaid {
    ///     const TOPIC: &'static str = "order.paid";
    /// }
    ///
    /// # let headers = Headers::new([("content-type", "application/cloudevents+json")]);
    /// # let body = br#"{"specversion":"1.0","id":"1","source":"/","type":"order.paid","data":{"order_id":7}}"#;
    /// # let events = receive::events(&headers, body).map_err(|_| DecodeError::NoJson)?;
    /// # let event = &events[0];
    /// let paid: OrderPaid = event.decode()?;
    /// assert_eq!(paid.order_id, 7);
    /// # Ok::<(), DecodeError>(())
    /// ```
    ///
    /// # Errors
    /// A [`DecodeError`] when its type is not [`Event::TOPIC`], when it has no JSON, or when this is
    /// of another version or shape.
    pub fn decode<E: Event + DeserializeOwned>(&self) -> Result<E, DecodeError> {
        if self.event_type != E::TOPIC {
            return Err(DecodeError::Topic {
                topic: self.event_type.clone().into_owned(),
                known: E::TOPIC,
            });
        }
        E::decode(self.version(), self.json().ok_or(DecodeError::NoJson)?)
    }

    /// The version of its data's shape, as an [`Event`] has it: 1 where it says nothing, 0 where what
    /// it says is no number.
    pub fn version(&self) -> u32 {
        self.extensions
            .get(VERSION_ATTRIBUTE)
            .map_or(1, |version| version.parse().unwrap_or(0))
    }

    /// Its data, where that is JSON.
    pub fn json(&self) -> Option<&str> {
        match &self.data {
            Some(Data::Json(json)) => Some(json),
            Some(Data::Bytes(_)) | None => None,
        }
    }

    /// Messages of one key are delivered in order: the attribute `partitionkey`.
    pub fn ordering_key(&self) -> Option<&str> {
        self.extensions.get(PARTITION_KEY).map(Cow::as_ref)
    }

    /// The key in the header `idempotency-key`, without its quotes: what in it is not printable ASCII
    /// is percent-encoded. A request with several messages has none.
    ///
    /// Use [`id`](Self::id) to tell a duplicate: this header is not signed.
    pub fn idempotency_key(&self) -> Option<&str> {
        self.idempotency_key.as_deref()
    }
}

impl fmt::Debug for CloudEvent<'_> {
    /// Without data, and values of extensions: they may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloudEvent")
            .field("id", &self.id)
            .field("source", &self.source)
            .field("event_type", &self.event_type)
            .field("time", &self.time)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Data<'_> {
    /// Without the data: it may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(json) => write!(f, "Json({} bytes)", json.len()),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
        }
    }
}
