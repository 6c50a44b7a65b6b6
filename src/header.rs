//! The rules for headers that are stored with a message or set for a destination.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Headers that only the relay or the HTTP client sets, and `ce-data`, which CloudEvents forbids.
const RESERVED_HEADERS: &[&str] = &[
    "accept",
    "accept-encoding",
    "ce-data",
    "ce-datacontenttype",
    "ce-id",
    "ce-partitionkey",
    "ce-sequence",
    "ce-source",
    "ce-specversion",
    "ce-time",
    "ce-type",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "outbox-attempt",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "webhook-id",
    "webhook-signature",
    "webhook-timestamp",
];

/// The prefix of headers that carry CloudEvents attributes.
pub(crate) const ATTRIBUTE_PREFIX: &str = "ce-";
/// What is percent-encoded in an attribute's value, besides everything outside of ASCII (CloudEvents, HTTP binding, 3.1.3.2).
pub(crate) const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');
/// The most bytes of a header with its name, as it is sent. The relay sends a header as a whole, from a buffer.
pub(crate) const MAX_LINE_BYTES: usize = 33 * 1024;
/// The maximum length of an attribute's name, without the prefix.
const MAX_ATTRIBUTE_NAME: usize = 20;

/// Checks whether a header of a message or a destination may be sent. The error is the reason.
pub(crate) fn check_header(name: &str, value: &str) -> Result<(), &'static str> {
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err("the name is not an HTTP token");
    }
    if RESERVED_HEADERS
        .iter()
        .any(|other| other.eq_ignore_ascii_case(name))
    {
        return Err("the name is reserved for the relay");
    }
    if value.bytes().any(|b| matches!(b, b'\r' | b'\n' | 0)) {
        return Err("the value contains a line break or NUL");
    }
    if line_bytes(name, value) > MAX_LINE_BYTES {
        return Err("the header would be sent with more than 33 KiB");
    }
    match name.split_at_checked(ATTRIBUTE_PREFIX.len()) {
        Some((prefix, attribute)) if prefix.eq_ignore_ascii_case(ATTRIBUTE_PREFIX) => {
            check_attribute(attribute, value)
        }
        _ if value
            .bytes()
            .all(|b| matches!(b, b' '..=b'~' | b'\t' | 0x80..)) =>
        {
            Ok(())
        }
        _ => Err("the value contains a character that HTTP does not allow"),
    }
}

/// The bytes of a header with its name, as it is sent. Percent-encoding triples the length of a byte.
fn line_bytes(name: &str, value: &str) -> usize {
    let prefix = name.get(..ATTRIBUTE_PREFIX.len());
    let value_bytes = match prefix.is_some_and(|it| it.eq_ignore_ascii_case(ATTRIBUTE_PREFIX)) {
        true => utf8_percent_encode(value, ENCODED).map(str::len).sum(),
        false => value.len(),
    };
    name.len() + value_bytes
}

/// The value of an attribute is encoded before it is sent, so it may contain non-ASCII characters.
fn check_attribute(name: &str, value: &str) -> Result<(), &'static str> {
    let has_length = (1..=MAX_ATTRIBUTE_NAME).contains(&name.len());
    if !has_length || !name.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err("the name must be ce- and 1 to 20 letters (a to z) or digits");
    }
    if value.contains(char::is_control) {
        return Err("the value contains a control character");
    }
    if value.is_empty()
        && ["subject", "dataschema"]
            .iter()
            .any(|n| n.eq_ignore_ascii_case(name))
    {
        return Err("the value is empty");
    }
    Ok(())
}

/// Whether a header's name may contain the byte (RFC 9110, 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;

    #[test]
    fn reserved_headers_are_refused_in_any_case_of_letters() {
        for name in RESERVED_HEADERS {
            for name in [(*name).to_owned(), name.to_ascii_uppercase()] {
                let refused = Err("the name is reserved for the relay");
                assert_eq!(check_header(&name, "1"), refused, "{name}");
            }
        }
    }

    #[test]
    fn a_header_has_a_length_as_it_is_sent() {
        let most = MAX_LINE_BYTES - "x-a".len();
        let too_long = Err("the header would be sent with more than 33 KiB");
        for (name, part, times, checked) in [
            ("x-a", "a", most, Ok(())),
            ("x-a", "a", most + 1, too_long),
            // A value of another header is sent as it is.
            ("x-a", " ", most, Ok(())),
            ("ce-a", "a", most - 1, Ok(())),
            ("CE-A", " ", 11_262, Ok(())),
            ("CE-A", " ", 11_263, too_long),
            ("ce-a", "ä", 5_630, Ok(())),
            ("ce-a", "ä", 5_632, too_long),
        ] {
            assert_eq!(
                check_header(name, &part.repeat(times)),
                checked,
                "{name}: {part}"
            );
        }
    }

    #[test]
    fn attributes_have_short_names_and_any_text() {
        for (name, value) in [
            ("ce-region", "Köln, \"Altstadt\" 50% 😀"),
            ("CE-Subject", "order/7"),
            ("ce-dataschema", "https://shop.example/order.json"),
            ("ce-a0123456789abcdefghi", ""),
        ] {
            assert_eq!(check_header(name, value), Ok(()), "{name}");
        }
        for (name, value) in [
            ("ce-", "1"),
            ("ce-a-b", "1"),
            ("ce-a_b", "1"),
            ("ce-a0123456789abcdefghij", "1"),
            ("ce-data", "1"),
            ("ce-a", "1\r\n2"),
            ("ce-a", "1\t2"),
            ("ce-a", "\u{85}"),
            ("ce-subject", ""),
            ("Ce-DataSchema", ""),
        ] {
            assert!(check_header(name, value).is_err(), "{name}: {value:?}");
        }
    }

    proptest! {
        #[test]
        fn a_header_that_passes_the_check_can_be_sent(
            name in "(ce-|x-)?[!-~]{0,12}|.{0,9}",
            value in "(?s)[ -~]{0,20}|.{0,20}",
        ) {
            let header = http::HeaderName::from_bytes(name.as_bytes());
            let as_it_is = http::HeaderValue::from_str(&value);
            if check_header(&name, &value).is_ok() {
                prop_assert!(header.is_ok());
                let is_attribute = name.to_ascii_lowercase().starts_with(ATTRIBUTE_PREFIX);
                prop_assert!(is_attribute || as_it_is.is_ok());
                prop_assert!(!value.contains(['\r', '\n', '\0']));
            } else {
                prop_assert!(header.is_err() || !name.starts_with("x-") || as_it_is.is_err());
            }
        }
    }
}
