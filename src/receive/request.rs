//! Reading the events of a request, in any of the three modes of CloudEvents.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::attributes::{Attributes, DATA_CONTENT_TYPE, check_name, media_type};
use super::cloudevent::{CloudEvent, Data};
use super::error::CloudEventError;
use super::headers::{CONTENT_TYPE, Headers, IDEMPOTENCY_KEY, decoded, unquoted};
use super::json;

/// The mode in which a request carries events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// One event, whose attributes are headers.
    Binary,
    /// One event, as a document.
    Structured,
    /// Several events, as an array of documents.
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

/// Reads the events of a request in any of the three modes: one event, or all events of a batch.
///
/// Verifies nothing: [`Verifier::events`](super::Verifier::events) verifies the request and reads its events.
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
/// A [`CloudEventError`] for the first problem. For a batch, no event is returned.
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
    // A header of HTTP itself, so its value is not encoded.
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
        body if is_json => Some(Data::Json(Cow::Borrowed(whole_json(text(body)?)?))),
        body => Some(Data::Bytes(Cow::Borrowed(body))),
    };
    attributes.into_event(data)
}

fn text(body: &[u8]) -> Result<&str, CloudEventError> {
    std::str::from_utf8(body).map_err(|_| CloudEventError::Utf8)
}

/// The text without surrounding white space, if it is a single JSON value.
fn whole_json(text: &str) -> Result<&str, CloudEventError> {
    let value: &RawValue = json::parse(text)?;
    Ok(value.get())
}

#[cfg(test)]
mod tests;
