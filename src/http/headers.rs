//! The request headers that the relay sets: Standard Webhooks, CloudEvents in binary mode, and the relay's own
//! headers.

use std::borrow::Cow;
use std::time::{SystemTime, UNIX_EPOCH};

use ::http::header::{HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue};
use percent_encoding::{CONTROLS, utf8_percent_encode};
use uuid::Uuid;

use super::header_signature::HeaderSigner;
use super::signature::Signer;
use super::stored::{AttemptTrace, StoredHeaders};
use crate::header::ENCODED;
use crate::message::Message;

pub(super) const CE_SPECVERSION: HeaderName = HeaderName::from_static("ce-specversion");
pub(super) const CE_SOURCE: HeaderName = HeaderName::from_static("ce-source");
const CE_ID: HeaderName = HeaderName::from_static("ce-id");
const CE_TYPE: HeaderName = HeaderName::from_static("ce-type");
const CE_TIME: HeaderName = HeaderName::from_static("ce-time");
const CE_SEQUENCE: HeaderName = HeaderName::from_static("ce-sequence");
const CE_PARTITIONKEY: HeaderName = HeaderName::from_static("ce-partitionkey");
const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const OUTBOX_ATTEMPT: HeaderName = HeaderName::from_static("outbox-attempt");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Adds id, timestamp and signatures of a request. `body` must be the sent body, byte for byte.
pub(super) fn add_webhook(
    headers: &mut HeaderMap,
    id: Uuid,
    now: SystemTime,
    (signer, header_signer): (&Signer, Option<&HeaderSigner>),
    body: &str,
) -> Result<(), InvalidHeaderValue> {
    let id = id_value(id)?;
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let timestamp = HeaderValue::from(seconds);
    if let Some(signature) = signer.sign(id.as_bytes(), timestamp.as_bytes(), body.as_bytes())? {
        headers.insert(WEBHOOK_SIGNATURE, signature);
    }
    if let Some(signer) = header_signer
        && let (Ok(id), Ok(timestamp)) = (id.to_str(), timestamp.to_str())
    {
        signer.sign(headers, id, timestamp, body)?;
    }
    headers.insert(WEBHOOK_ID, id);
    headers.insert(WEBHOOK_TIMESTAMP, timestamp);
    Ok(())
}

/// Adds the idempotency key and the attempt of the message, for a request with a single message.
pub(super) fn add_delivery(
    headers: &mut HeaderMap,
    message: &Message,
) -> Result<(), InvalidHeaderValue> {
    let attempt = message.attempts.saturating_add(1);
    let key = HeaderValue::try_from(quoted(&message.idempotency_key))?;
    headers.insert(IDEMPOTENCY_KEY, key);
    headers.insert(OUTBOX_ATTEMPT, HeaderValue::from(attempt));
    Ok(())
}

pub(super) fn add_trace(
    headers: &mut HeaderMap,
    trace: AttemptTrace,
) -> Result<(), InvalidHeaderValue> {
    headers.insert(TRACEPARENT, HeaderValue::try_from(trace.parent)?);
    if let Some(state) = trace.state {
        headers.insert(TRACESTATE, HeaderValue::try_from(state)?);
    }
    Ok(())
}

/// Adds the attributes of an event in binary mode, without the attributes that all events have.
pub(super) fn add_attributes(
    headers: &mut HeaderMap,
    message: &Message,
    stored: &StoredHeaders,
) -> Result<(), InvalidHeaderValue> {
    let time = humantime::format_rfc3339_micros(message.time()).to_string();
    headers.insert(CE_ID, id_value(message.message_id)?);
    headers.insert(CE_TYPE, attribute(&message.topic)?);
    headers.insert(CE_TIME, HeaderValue::try_from(time)?);
    headers.insert(CE_SEQUENCE, HeaderValue::from(message.sequence.0));
    if let Some(key) = &message.ordering_key {
        headers.insert(CE_PARTITIONKEY, attribute(key)?);
    }
    for (name, value) in &stored.attributes {
        // `stored::read` has checked the names.
        if let Ok(name) = HeaderName::try_from(name.as_str()) {
            headers.insert(name, attribute(value)?);
        }
    }
    Ok(())
}

pub(super) fn attribute(value: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    HeaderValue::from_str(&Cow::from(utf8_percent_encode(value, ENCODED)))
}

fn id_value(id: Uuid) -> Result<HeaderValue, InvalidHeaderValue> {
    let mut buffer = Uuid::encode_buffer();
    HeaderValue::from_str(id.hyphenated().encode_lower(&mut buffer))
}

/// A string of RFC 9651. Such strings hold only printable ASCII, so everything else is percent-encoded.
fn quoted(key: &str) -> String {
    let escaped = key.replace('\\', r"\\").replace('"', r#"\""#);
    format!("\"{}\"", utf8_percent_encode(&escaped, CONTROLS))
}

#[cfg(test)]
mod tests {
    use percent_encoding::percent_decode_str;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    #[test]
    fn a_key_is_a_structured_field_string() {
        assert_eq!(quoted("order-7"), "\"order-7\"");
        assert_eq!(quoted("a\"b\\c"), "\"a\\\"b\\\\c\"");
        assert_eq!(quoted("ä"), "\"%C3%A4\"");
    }

    #[test]
    fn a_value_is_percent_encoded_as_cloudevents_requires() {
        for (value, sent) in [
            ("order.paid", "order.paid"),
            (
                "Euro € 😀 \"100%\"",
                "Euro%20%E2%82%AC%20%F0%9F%98%80%20%22100%25%22",
            ),
        ] {
            assert_eq!(attribute(value).expect("a value"), sent);
        }
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_header_value(text in "(?s).{0,60}") {
            prop_assert!(HeaderValue::from_str(&quoted(&text)).is_ok());
            let value = attribute(&text)?;
            let value = value.to_str()?;
            prop_assert!(value.bytes().all(|byte| matches!(byte, b'!'..=b'~') && byte != b'"'));
            prop_assert_eq!(percent_decode_str(value).decode_utf8()?, text);
        }
    }
}
