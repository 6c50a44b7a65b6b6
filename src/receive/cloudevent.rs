//! An event of CloudEvents 1.0.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use serde::de::DeserializeOwned;

use super::attributes::{Attributes, DATA_CONTENT_TYPE, rfc3339};
use super::error::CloudEventError;
use crate::event::{DecodeError, Event, VERSION_ATTRIBUTE};
use crate::shows::shows;

/// The supported version of CloudEvents, which the relay sends.
const SPEC_VERSION: &str = "1.0";
/// The extension that carries the ordering key.
const PARTITION_KEY: &str = "partitionkey";
/// The extension that carries the position in a feed.
const POSITION: &str = "position";
/// The extension that says when an event of a feed was stored.
const STORED_AT: &str = "storedat";

/// A received event, from a request with one event or from a batch. It borrows from the request if possible.
///
/// ```
/// use diesel_outbox::receive::{self, CloudEvent, Headers};
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
/// assert_eq!(event.position(), None); // it comes from no feed
///
/// let event: CloudEvent<'static> = event.clone().into_owned();
/// # Ok::<(), receive::CloudEventError>(())
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct CloudEvent<'a> {
    /// The id of the event, unique together with the source. For a message of an outbox: the message id (a UUID),
    /// which is the same on every attempt.
    pub id: Cow<'a, str>,
    /// The source of the event. The relay sends `diesel-outbox/outbox` by default.
    pub source: Cow<'a, str>,
    /// The type of the event: the topic of the message.
    pub event_type: Cow<'a, str>,
    /// The subject of the event within the source.
    pub subject: Option<Cow<'a, str>>,
    /// When the event occurred. For a message, defaults to the time of enqueueing.
    pub time: Option<SystemTime>,
    /// The content type of the data. In a document, `None` means JSON.
    pub datacontenttype: Option<Cow<'a, str>>,
    /// The schema of the data.
    pub dataschema: Option<Cow<'a, str>>,
    /// All other attributes by name, as texts: attributes of the relay (`sequence`, `partitionkey`), and attributes
    /// that were stored with the message.
    pub extensions: BTreeMap<Cow<'a, str>, Cow<'a, str>>,
    /// The data of the event: the payload of the message.
    pub data: Option<Data<'a>>,
    pub(super) idempotency_key: Option<Cow<'a, str>>,
}

/// The data of an event.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub enum Data<'a> {
    /// JSON as it was received, byte for byte, without surrounding white space.
    Json(Cow<'a, str>),
    /// Data of another content type.
    Bytes(Cow<'a, [u8]>),
}

impl<'a> Attributes<'a> {
    /// Creates an event from these attributes and the data.
    pub(super) fn into_event(
        mut self,
        data: Option<Data<'a>>,
    ) -> Result<CloudEvent<'a>, CloudEventError> {
        if self.required("specversion")? != SPEC_VERSION {
            return Err(CloudEventError::attribute("specversion", "is not 1.0"));
        }
        let time = match self.optional("time")? {
            Some(time) => Some(rfc3339(&time).ok_or_else(|| {
                CloudEventError::attribute("time", "is not an RFC 3339 time from 1970 to 9999")
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
    /// Decodes the data as an event of the application. The attribute `dataversion` gives the version, which
    /// defaults to 1.
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
    /// A [`DecodeError`] if the type is not [`Event::TOPIC`], the data is not JSON, or the data has another
    /// version or shape.
    pub fn decode<E: Event + DeserializeOwned>(&self) -> Result<E, DecodeError> {
        if self.event_type != E::TOPIC {
            return Err(DecodeError::Topic {
                topic: self.event_type.clone().into_owned(),
                known: E::TOPIC,
            });
        }
        E::decode(self.version(), self.json().ok_or(DecodeError::NoJson)?)
    }

    /// The version of the data's shape (see [`Event::VERSION`]): 1 if the event does not give a version, 0 if
    /// its version is not a number.
    pub fn version(&self) -> u32 {
        self.extensions
            .get(VERSION_ATTRIBUTE)
            .map_or(1, |version| version.parse().unwrap_or(0))
    }

    /// The data, if it is JSON.
    pub fn json(&self) -> Option<&str> {
        match &self.data {
            Some(Data::Json(json)) => Some(json),
            Some(Data::Bytes(_)) | None => None,
        }
    }

    /// The ordering key: the attribute `partitionkey`. Messages with the same key are delivered in order.
    pub fn ordering_key(&self) -> Option<&str> {
        self.extensions.get(PARTITION_KEY).map(Cow::as_ref)
    }

    /// The position in a [feed](https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/feeds.md): the attribute
    /// `position`, 1 for the first event. `None` for an event that was posted.
    pub fn position(&self) -> Option<i64> {
        let position = self.extensions.get(POSITION)?.parse().ok();
        position.filter(|position| *position > 0)
    }

    /// When the event was stored in its [feed](https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/feeds.md), by the
    /// clock of its server: the attribute `storedat`. Never before the event at the position before. `None` for an event
    /// that was posted.
    ///
    /// ```
    /// use diesel_outbox::receive::{self, Headers};
    ///
    /// let headers = Headers::new([("content-type", "application/cloudevents-batch+json")]);
    /// let page = br#"[{"specversion":"1.0","id":"1","source":"/","type":"t","position":"7","storedat":"2026-11-21T10:00:00Z"}]"#;
    /// let events = receive::events(&headers, page)?;
    /// assert_eq!(events[0].position(), Some(7));
    /// assert!(events[0].stored_at().is_some());
    /// # Ok::<(), receive::CloudEventError>(())
    /// ```
    pub fn stored_at(&self) -> Option<SystemTime> {
        rfc3339(self.extensions.get(STORED_AT)?)
    }

    /// The idempotency key: the header `idempotency-key` without its quotes. Characters that are not printable
    /// ASCII are percent-encoded. `None` for a request with several messages.
    ///
    /// Use [`id`](Self::id) to detect duplicates, because this header is not signed.
    pub fn idempotency_key(&self) -> Option<&str> {
        self.idempotency_key.as_deref()
    }

    /// The event with copies of what it borrows, to keep it longer than the request.
    pub fn into_owned(self) -> CloudEvent<'static> {
        fn owned(text: Cow<'_, str>) -> Cow<'static, str> {
            Cow::Owned(text.into_owned())
        }
        let extensions = self.extensions.into_iter();
        CloudEvent {
            id: owned(self.id),
            source: owned(self.source),
            event_type: owned(self.event_type),
            subject: self.subject.map(owned),
            time: self.time,
            datacontenttype: self.datacontenttype.map(owned),
            dataschema: self.dataschema.map(owned),
            extensions: extensions
                .map(|(name, value)| (owned(name), owned(value)))
                .collect(),
            data: self.data.map(|data| match data {
                Data::Json(json) => Data::Json(owned(json)),
                Data::Bytes(bytes) => Data::Bytes(Cow::Owned(bytes.into_owned())),
            }),
            idempotency_key: self.idempotency_key.map(owned),
        }
    }
}

shows! {
    /// Omits the data and the extensions, which may be private.
    CloudEvent<'_>: id, source, event_type, time
}

impl fmt::Debug for Data<'_> {
    /// Omits the data, which may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(json) => write!(f, "Json({} bytes)", json.len()),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
        }
    }
}
