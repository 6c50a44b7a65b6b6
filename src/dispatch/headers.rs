//! The headers of a request: CloudEvents 1.0 in binary mode, Standard Webhooks, and what was
//! stored with the message.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use ::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue};
use uuid::Uuid;

use super::Failure;
use crate::message::{Message, check_header};
use crate::status::ReasonCode;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const SPECVERSION: HeaderValue = HeaderValue::from_static("1.0");

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const OUTBOX_ATTEMPT: HeaderName = HeaderName::from_static("outbox-attempt");
const CE_SPECVERSION: HeaderName = HeaderName::from_static("ce-specversion");
const CE_ID: HeaderName = HeaderName::from_static("ce-id");
const CE_SOURCE: HeaderName = HeaderName::from_static("ce-source");
const CE_TYPE: HeaderName = HeaderName::from_static("ce-type");
const CE_TIME: HeaderName = HeaderName::from_static("ce-time");
const CE_SEQUENCE: HeaderName = HeaderName::from_static("ce-sequence");
const CE_PARTITIONKEY: HeaderName = HeaderName::from_static("ce-partitionkey");

/// The headers of one attempt.
pub(super) fn of(
    message: &Message,
    source: &HeaderValue,
    now: SystemTime,
) -> Result<HeaderMap, Failure> {
    let mut headers = HeaderMap::with_capacity(16);
    add_own(&mut headers, message, source, now)
        .map_err(|error| Failure::new(ReasonCode::InvalidHeader, error.to_string()))?;
    if let Some(stored) = &message.headers {
        add_stored(&mut headers, stored)?;
    }
    Ok(headers)
}

fn add_own(
    headers: &mut HeaderMap,
    message: &Message,
    source: &HeaderValue,
    now: SystemTime,
) -> Result<(), InvalidHeaderValue> {
    let mut buffer = Uuid::encode_buffer();
    let id = HeaderValue::from_str(message.message_id.hyphenated().encode_lower(&mut buffer))?;
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = humantime::format_rfc3339_micros(message.created_at).to_string();
    headers.insert(CONTENT_TYPE, JSON);
    headers.insert(WEBHOOK_ID, id.clone());
    headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(seconds));
    headers.insert(
        IDEMPOTENCY_KEY,
        HeaderValue::try_from(quoted(&message.idempotency_key))?,
    );
    headers.insert(
        OUTBOX_ATTEMPT,
        HeaderValue::from(message.attempts.saturating_add(1)),
    );
    headers.insert(CE_SPECVERSION, SPECVERSION);
    headers.insert(CE_ID, id);
    headers.insert(CE_SOURCE, source.clone());
    headers.insert(
        CE_TYPE,
        HeaderValue::from_str(&percent_encoded(&message.topic))?,
    );
    headers.insert(CE_TIME, HeaderValue::try_from(time)?);
    headers.insert(CE_SEQUENCE, HeaderValue::from(message.sequence.0));
    if let Some(key) = &message.ordering_key {
        headers.insert(
            CE_PARTITIONKEY,
            HeaderValue::from_str(&percent_encoded(key))?,
        );
    }
    Ok(())
}

/// Headers of plain inserts were never checked, so they are here.
fn add_stored(headers: &mut HeaderMap, stored: &str) -> Result<(), Failure> {
    let invalid = |what: String| Failure::new(ReasonCode::InvalidHeader, what);
    let stored: BTreeMap<String, String> = serde_json::from_str(stored).map_err(|error| {
        invalid(format!(
            "the stored headers are no object of strings: {error}"
        ))
    })?;
    for (name, value) in stored {
        check_header(&name, &value)
            .map_err(|reason| invalid(format!("stored header {name:?}: {reason}")))?;
        let pair = (HeaderName::try_from(&name), HeaderValue::try_from(value));
        let (Ok(name), Ok(value)) = pair else {
            return Err(invalid(format!("stored header {name:?} cannot be sent")));
        };
        headers.append(name, value);
    }
    Ok(())
}

/// A string of RFC 9651. It has no place for what is not printable ASCII: that is
/// percent-encoded.
fn quoted(key: &str) -> String {
    let mut quoted = String::with_capacity(key.len() + 2);
    quoted.push('"');
    for byte in key.bytes() {
        match byte {
            b'"' | b'\\' => {
                quoted.push('\\');
                quoted.push(char::from(byte));
            }
            b' '..=b'~' => quoted.push(char::from(byte)),
            _ => push_percent(&mut quoted, byte),
        }
    }
    quoted.push('"');
    quoted
}

/// As the HTTP binding of CloudEvents says (3.1.3.2): space, `"`, `%` and all that is not
/// printable ASCII.
fn percent_encoded(value: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| matches!(byte, b'!'..=b'~') && !matches!(byte, b'"' | b'%');
    if value.bytes().all(is_plain) {
        return Cow::Borrowed(value);
    }
    let mut encoded = String::with_capacity(value.len() + 8);
    for byte in value.bytes() {
        if is_plain(byte) {
            encoded.push(char::from(byte));
        } else {
            push_percent(&mut encoded, byte);
        }
    }
    Cow::Owned(encoded)
}

fn push_percent(text: &mut String, byte: u8) {
    // Writing to a string cannot fail.
    let _ = write!(text, "%{byte:02X}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;

    #[test]
    fn a_key_is_a_structured_field_string() {
        assert_eq!(quoted("order-7"), "\"order-7\"");
        assert_eq!(quoted("a\"b\\c"), "\"a\\\"b\\\\c\"");
        assert_eq!(quoted("ä"), "\"%C3%A4\"");
    }

    #[test]
    fn a_topic_is_percent_encoded_as_cloudevents_says() {
        assert_eq!(percent_encoded("order.paid"), "order.paid");
        assert_eq!(percent_encoded("Euro € 100%"), "Euro%20%E2%82%AC%20100%25");
    }

    #[test]
    fn stored_headers_are_added_and_bad_ones_named() {
        let mut headers = HeaderMap::new();
        add_stored(&mut headers, r#"{"x-shop": "berlin", "ce-region": "eu"}"#).expect("good");
        assert_eq!(headers["x-shop"], "berlin");
        for (stored, named) in [
            (r#"{"webhook-id": "1"}"#, "webhook-id"),
            (r#"{"Content-Length": "1"}"#, "Content-Length"),
            (r#"{"x-a": "1\r\nx-b: 2"}"#, "x-a"),
            (r#"{"x a": "1"}"#, "x a"),
            (r#"{"x-a": 1}"#, "no object of strings"),
            ("[1]", "no object of strings"),
        ] {
            let failure = add_stored(&mut HeaderMap::new(), stored).expect_err(stored);
            assert_eq!(failure.code, ReasonCode::InvalidHeader);
            assert!(failure.error.contains(named), "{}", failure.error);
        }
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_header_value(text in "\\PC{0,60}") {
            prop_assert!(HeaderValue::from_str(&quoted(&text)).is_ok());
            prop_assert!(HeaderValue::from_str(&percent_encoded(&text)).is_ok());
        }
    }
}
