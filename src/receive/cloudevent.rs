//! CloudEvents 1.0: what a request says.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::attributes::{Attributes, DATA_CONTENT_TYPE, check_name, media_type, rfc3339};
use super::headers::{CONTENT_TYPE, Headers, IDEMPOTENCY_KEY, decoded, unquoted};
use super::json;
use crate::event::{DecodeError, Event, VERSION_ATTRIBUTE, reason_of};

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
    idempotency_key: Option<Cow<'a, str>>,
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

/// How a request carries events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// One, whose attributes are headers.
    Binary,
    /// One, as a document.
    Structured,
    /// An array of documents.
    Batched,
}

impl Mode {
    pub(super) fn of(headers: &Headers) -> Result<Self, CloudEventError> {
        let content_type = headers
            .get(CONTENT_TYPE)
            .map_err(|_| CloudEventError::ContentType)?;
        let content_type = content_type.unwrap_or_default();
        let content_type = std::str::from_utf8(content_type).unwrap_or_default();
        match media_type(content_type).as_str() {
            "application/cloudevents+json" => Ok(Self::Structured),
            "application/cloudevents-batch+json" => Ok(Self::Batched),
            other if other.starts_with("application/cloudevents") => {
                Err(CloudEventError::ContentType)
            }
            _ => Ok(Self::Binary),
        }
    }
}

/// Reads the events of a request in any of the three modes: one, or of a batch all.
///
/// It verifies nothing; [`Verifier::events`](super::Verifier::events) does both.
///
/// ```
/// use diesel_outbox::receive::{self, Headers};
///
/// let headers = Headers::new([
///     ("content-type", "application/json"),
///     ("ce-specversion", "1.0"),
///     ("ce-id", "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c"),
///     ("ce-source", "diesel-outbox/outbox"),
///     ("ce-type", "order.paid"),
///     ("ce-region", "K%C3%B6ln"),
/// ]);
/// let events = receive::events(&headers, br#"{"order_id": 7}"#)?;
/// assert_eq!(events[0].event_type, "order.paid");
/// assert_eq!(events[0].extensions["region"], "Köln");
/// assert_eq!(events[0].json(), Some(r#"{"order_id": 7}"#));
/// # Ok::<(), receive::CloudEventError>(())
/// ```
///
/// # Errors
/// A [`CloudEventError`] for the first thing that is wrong. Nothing of a batch is returned then.
pub fn events<'a>(
    headers: &'a Headers,
    body: &'a [u8],
) -> Result<Vec<CloudEvent<'a>>, CloudEventError> {
    let mut events = match Mode::of(headers)? {
        Mode::Binary => vec![of_headers(headers, body)?],
        Mode::Structured => vec![json::document(text(body)?)?],
        Mode::Batched => json::batch(text(body)?)?,
    };
    if let [only] = events.as_mut_slice()
        && let Ok(Some(key)) = headers.get(IDEMPOTENCY_KEY)
    {
        let key = std::str::from_utf8(key).ok();
        only.idempotency_key = key.map(|key| unquoted(key).unwrap_or(Cow::Borrowed(key)));
    }
    Ok(events)
}

/// The event of a request in binary mode.
fn of_headers<'a>(headers: &'a Headers, body: &'a [u8]) -> Result<CloudEvent<'a>, CloudEventError> {
    let mut attributes = Attributes::default();
    // A header of HTTP itself: nothing of it is encoded.
    if let Ok(Some(content_type @ [_, ..])) = headers.get(CONTENT_TYPE) {
        let content_type = std::str::from_utf8(content_type)
            .map_err(|_| CloudEventError::attribute(DATA_CONTENT_TYPE, "is not UTF-8"))?;
        attributes.add(
            Cow::Borrowed(DATA_CONTENT_TYPE),
            Cow::Borrowed(content_type),
        )?;
    }
    for (name, value) in headers.attributes() {
        check_name(name)?;
        let value = decoded(value).map_err(|reason| CloudEventError::attribute(name, reason))?;
        attributes.add(Cow::Borrowed(name), value)?;
    }
    let is_json = attributes.data_is_json().unwrap_or(false);
    let data = match body {
        [] => None,
        body if is_json => Some(Data::Json(whole_json(text(body)?)?)),
        body => Some(Data::Bytes(Cow::Borrowed(body))),
    };
    attributes.into_event(data)
}

fn text(body: &[u8]) -> Result<&str, CloudEventError> {
    std::str::from_utf8(body).map_err(|_| CloudEventError::Utf8)
}

/// One JSON value and nothing else, without white space around it.
fn whole_json(text: &str) -> Result<&str, CloudEventError> {
    let value: &RawValue = serde_json::from_str(text)?;
    Ok(value.get())
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

/// Why a request has no events that can be read. It tells the place, and nothing of what stands there:
/// payloads may be private.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloudEventError {
    /// It is there twice, or of CloudEvents in a format that is not JSON.
    #[error("the content type is not one of CloudEvents in JSON")]
    ContentType,
    /// The body is not UTF-8.
    #[error("the body is not UTF-8")]
    Utf8,
    /// The body is not JSON, or not a document or an array of documents.
    #[error("{reason} at line {line}, column {column}")]
    Json {
        /// In which way.
        reason: &'static str,
        /// Counted from 1.
        line: usize,
        /// Counted from 1; 0: before the first.
        column: usize,
    },
    /// An attribute that every event has is not there.
    #[error("the attribute {name} is missing")]
    Missing {
        /// Which one.
        name: &'static str,
    },
    /// An attribute, or `data_base64`, cannot be used.
    #[error("the attribute {name} {reason}")]
    Attribute {
        /// Which one.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// The name of an attribute is not made of lower-case letters and digits.
    #[error("the name of an attribute is not made of lower-case letters and digits")]
    Name,
    /// One event of a batch is bad.
    #[error("event {index} (counted from 0): {error}")]
    InBatch {
        /// How many events came before it.
        index: usize,
        /// What is wrong with it.
        #[source]
        error: Box<CloudEventError>,
    },
}

impl CloudEventError {
    pub(super) fn attribute(name: &str, reason: &'static str) -> Self {
        let name = name.to_owned();
        Self::Attribute { name, reason }
    }
}

impl From<serde_json::Error> for CloudEventError {
    /// Without the error's text: it quotes values.
    fn from(error: serde_json::Error) -> Self {
        Self::Json {
            reason: reason_of(&error),
            line: error.line(),
            column: error.column(),
        }
    }
}

#[cfg(test)]
mod tests;
