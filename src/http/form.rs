//! The form of requests to one destination: the fixed parts, and the parts of each message.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::SystemTime;

use ::http::Method;
use ::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use secrecy::ExposeSecret;
use url::Url;
use uuid::Uuid;

use super::cloudevents::EventEnvelope;
use super::connection::OUTPUT_BYTES;
use super::header_signature::HeaderSigner;
use super::headers;
use super::signature::Signer;
use super::stored::{self, StoredHeaders, invalid};
use crate::config::{AuthKind, Config, ConfigError, Destination, Mode};
use crate::dispatch::Failure;
use crate::header::{ATTRIBUTE_PREFIX, MAX_LINE_BYTES, check_header};
use crate::message::Message;
use crate::status::ReasonCode;

/// The most bytes of all headers of a request. The library accepts far less, but a plain insert may store more, and
/// percent-encoding can triple the length.
const MAX_HEADER_BYTES: usize = 64 * 1024;
// ureq writes a header as a whole, so a line must fit into the output buffer.
const _: () = assert!(MAX_LINE_BYTES < OUTPUT_BYTES);
/// The most headers of a request, without fixed and stored headers. Only used as a capacity.
const OWN_HEADERS: usize = 16;

/// The form of requests to one destination. The parts that all requests share are created once.
#[derive(Debug)]
pub(super) struct Form {
    destination: String,
    mode: Mode,
    /// Headers of every request.
    fixed: Vec<(HeaderName, HeaderValue)>,
    /// The names of the destination's headers. Stored headers with these names are left out.
    fixed_names: Vec<String>,
    envelope: EventEnvelope,
    signer: Signer,
    header_signer: Option<HeaderSigner>,
    max_payload_bytes: Option<usize>,
}

/// Names the origin of requests to receivers that take part in the handshake of CloudEvents.
const REQUEST_ORIGIN: HeaderName = HeaderName::from_static("webhook-request-origin");
/// The origin of a relay whose source names no host.
const ORIGIN: &str = "diesel-outbox";

/// The host of the source.
pub(super) fn origin(source: &str) -> String {
    let url = Url::parse(source).ok();
    let host = url.as_ref().and_then(Url::host_str);
    host.unwrap_or(ORIGIN).to_owned()
}

/// A message that has passed the checks before a send.
#[derive(Debug)]
pub(super) struct Checked<'a> {
    message: &'a Message,
    stored: StoredHeaders,
}

/// A request.
#[derive(Debug)]
pub(super) struct Request<'a> {
    /// OPTIONS has no body.
    pub(super) method: Method,
    pub(super) headers: HeaderMap,
    pub(super) body: Cow<'a, str>,
}

impl<'a> Checked<'a> {
    pub(super) fn message(&self) -> &'a Message {
        self.message
    }
}

impl Form {
    pub(super) fn new(
        destination: &Destination,
        config: &Config,
        source: &str,
    ) -> Result<Self, ConfigError> {
        let name = &destination.name;
        let bad = |key: &str, reason: String| {
            ConfigError::new(format!("destinations.{name}.{key}"), reason)
        };
        let mode = destination.policy.mode.unwrap_or(config.mode);
        let content_type = match mode {
            Mode::Binary => "application/json",
            Mode::Structured => "application/cloudevents+json",
            Mode::Batched => "application/cloudevents-batch+json",
        };
        let mut fixed = HeaderMap::new();
        fixed.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if mode == Mode::Binary {
            let source =
                headers::attribute(source).map_err(|error| bad("source", error.to_string()))?;
            if headers::CE_SOURCE.as_str().len() + source.len() > MAX_LINE_BYTES {
                return Err(bad(
                    "source",
                    "would be sent with more than 33 KiB".to_owned(),
                ));
            }
            fixed.insert(headers::CE_SPECVERSION, HeaderValue::from_static("1.0"));
            fixed.insert(headers::CE_SOURCE, source);
        }
        let mut attributes = BTreeMap::new();
        let mut fixed_names = Vec::new();
        if destination.verification.is_by_cloudevents() {
            let origin = HeaderValue::from_str(&origin(source));
            let origin = origin.map_err(|error| bad("source", error.to_string()))?;
            fixed.insert(REQUEST_ORIGIN, origin);
            fixed_names.push(REQUEST_ORIGIN.as_str().to_owned());
        }
        for (header, value) in &destination.headers {
            let value = value.expose_secret();
            let bad = |reason: String| bad(&format!("headers.{header}"), reason);
            check_header(header, value).map_err(|reason| bad(reason.to_owned()))?;
            let header = HeaderName::try_from(header).map_err(|error| bad(error.to_string()))?;
            let is_attribute = header.as_str().starts_with(ATTRIBUTE_PREFIX);
            fixed_names.push(header.as_str().to_owned());
            if is_attribute && mode != Mode::Binary {
                attributes.insert(header.as_str().to_owned(), value.to_owned());
                continue;
            }
            let value = match is_attribute {
                true => headers::attribute(value),
                false => HeaderValue::from_str(value),
            };
            let mut value = value.map_err(|error| bad(error.to_string()))?;
            value.set_sensitive(true);
            fixed.insert(header, value);
        }
        let signer = match destination.secrets.as_slice() {
            [] => Signer::new(&config.secrets)
                .map_err(|reason| ConfigError::new("OUTBOX_SECRET", reason)),
            own => Signer::new(own).map_err(|reason| bad("secret", reason)),
        };
        let header_signer = match destination.auth.as_ref().map(|auth| &auth.kind) {
            Some(AuthKind::Header(header)) => Some(HeaderSigner::new(header)),
            Some(AuthKind::OAuth2(_) | AuthKind::Sealed) | None => None,
        };
        let header_signer = header_signer.transpose();
        Ok(Self {
            destination: name.clone(),
            mode,
            fixed: fixed
                .iter()
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            fixed_names,
            envelope: EventEnvelope::new(source, &attributes),
            signer: signer?,
            header_signer: header_signer.map_err(|reason| bad("auth", reason))?,
            max_payload_bytes: destination.max_payload_bytes,
        })
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// Checks whether a message may be sent. A failure is final, as the message never changes.
    pub(super) fn check<'a>(&self, message: &'a Message) -> Result<Checked<'a>, Failure> {
        let bytes = message.payload.len();
        if let Some(most) = self.max_payload_bytes.filter(|most| bytes > *most) {
            let error = format!(
                "the payload has {bytes} bytes: destination {:?} takes at most {most}",
                self.destination
            );
            return Err(Failure::new(ReasonCode::PayloadTooLarge, error));
        }
        let stored = stored::read(message.headers.as_deref(), &self.fixed_names)?;
        Ok(Checked { message, stored })
    }

    /// The request for one message.
    pub(super) fn one<'a>(
        &self,
        Checked { message, stored }: Checked<'a>,
        now: SystemTime,
    ) -> Result<Request<'a>, Failure> {
        let unsendable = |error: ::http::header::InvalidHeaderValue| invalid(error.to_string());
        let mut headers = self.headers(stored.headers.len());
        let body = match self.mode {
            Mode::Binary => {
                headers::add_attributes(&mut headers, message, &stored).map_err(unsendable)?;
                Cow::Borrowed(message.payload.as_str())
            }
            Mode::Structured => {
                let mut text = String::with_capacity(self.envelope.len_of(message));
                self.envelope.write(&mut text, message, &stored);
                Cow::Owned(text)
            }
            Mode::Batched => Cow::Owned(self.array(&[(message, &stored)])),
        };
        headers::add_delivery(&mut headers, message).map_err(unsendable)?;
        if let Some(trace) = stored.trace {
            headers::add_trace(&mut headers, trace).map_err(unsendable)?;
        }
        headers.extend(stored.headers);
        self.sign(&mut headers, message.message_id, now, &body)?;
        check_length(&headers)?;
        Ok(Request {
            method: Method::POST,
            headers,
            body,
        })
    }

    /// One request for several messages. The idempotency key, attempt and stored HTTP headers of each message are left
    /// out. Attributes and traces are in the documents.
    pub(super) fn several(
        &self,
        batch: &[Checked<'_>],
        now: SystemTime,
    ) -> Result<Request<'static>, Failure> {
        let events: Vec<_> = batch
            .iter()
            .map(|checked| (checked.message, &checked.stored))
            .collect();
        let body = self.array(&events);
        let mut headers = self.headers(0);
        self.sign(&mut headers, Uuid::now_v7(), now, &body)?;
        Ok(Request {
            method: Method::POST,
            headers,
            body: Cow::Owned(body),
        })
    }

    fn sign(
        &self,
        headers: &mut HeaderMap,
        id: Uuid,
        now: SystemTime,
        body: &str,
    ) -> Result<(), Failure> {
        let signer = self.header_signer.as_ref();
        headers::add_webhook(headers, id, now, (&self.signer, signer), body)
            .map_err(|error| invalid(error.to_string()))
    }

    /// A request that asks what the receiver allows, with the destination's headers.
    pub(super) fn options(&self) -> Request<'static> {
        let is_own = |name: &HeaderName| self.fixed_names.iter().any(|own| own == name.as_str());
        let own = self.fixed.iter().filter(|(name, _)| is_own(name));
        Request {
            method: Method::OPTIONS,
            headers: own.cloned().collect(),
            body: Cow::Borrowed(""),
        }
    }

    fn headers(&self, stored: usize) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(OWN_HEADERS + self.fixed.len() + stored);
        for (name, value) in &self.fixed {
            headers.insert(name.clone(), value.clone());
        }
        headers
    }

    fn array(&self, events: &[(&Message, &StoredHeaders)]) -> String {
        let bytes: usize = events
            .iter()
            .map(|(message, _)| self.envelope.len_of(message))
            .sum();
        let mut text = String::with_capacity(bytes);
        for (message, stored) in events {
            text.push(if text.is_empty() { '[' } else { ',' });
            self.envelope.write(&mut text, message, stored);
        }
        text.push(']');
        text
    }
}

/// Whether the headers can be sent to any receiver.
fn check_length(headers: &HeaderMap) -> Result<(), Failure> {
    let bytes_of = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len();
    let total: usize = headers.iter().map(bytes_of).sum();
    if total > MAX_HEADER_BYTES {
        return Err(invalid(format!(
            "the headers have {total} bytes: at most {MAX_HEADER_BYTES} can be sent"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod received;
#[cfg(test)]
pub(super) mod tests;
