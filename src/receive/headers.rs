//! The headers of a request, from any framework.

use std::borrow::Cow;
use std::fmt;

use percent_encoding::percent_decode_str;

use crate::header::ATTRIBUTE_PREFIX;

pub(super) const CONTENT_TYPE: &str = "content-type";
pub(super) const IDEMPOTENCY_KEY: &str = "idempotency-key";
const WEBHOOK_PREFIX: &str = "webhook-";

/// The headers of a request that concern its signature and its events. Other headers are dropped.
///
/// Create it from pairs of name and value, which every framework can provide:
///
/// ```
/// use diesel_outbox::receive::Headers;
///
/// # let pairs = [("Content-Type", "application/json")];
/// let headers = Headers::new(pairs);
/// // rouille:          Headers::new(request.headers())
/// // Rocket:           Headers::new(request.headers().iter().map(|h| (h.name().to_string(), h.value().to_string())))
/// // tiny_http:        Headers::new(request.headers().iter().map(|h| (h.field.as_str().as_str(), h.value.as_str())))
/// // http::HeaderMap:  Headers::new(headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())))
/// ```
#[derive(Clone)]
pub struct Headers {
    /// Names in lower case, and values.
    kept: Vec<(String, Vec<u8>)>,
}

/// A header occurs more than once.
#[derive(Debug)]
pub(super) struct RepeatedHeader;

impl Headers {
    /// Creates headers from pairs of name and value. Names may be in upper or lower case; values are text or bytes.
    pub fn new<N, V>(headers: impl IntoIterator<Item = (N, V)>) -> Self
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        let kept = headers
            .into_iter()
            .filter_map(|(name, value)| {
                let name = name.as_ref().to_ascii_lowercase();
                let is_read = name.starts_with(ATTRIBUTE_PREFIX)
                    || name.starts_with(WEBHOOK_PREFIX)
                    || [CONTENT_TYPE, IDEMPOTENCY_KEY].contains(&name.as_str());
                is_read.then(|| (name, value.as_ref().trim_ascii().to_vec()))
            })
            .collect();
        Self { kept }
    }

    /// The value of a header. The name must be in lower case.
    pub(super) fn get(&self, name: &str) -> Result<Option<&[u8]>, RepeatedHeader> {
        let mut values = self.kept.iter().filter(|(kept, _)| kept == name);
        match (values.next(), values.next()) {
            (Some(_), Some(_)) => Err(RepeatedHeader),
            (found, _) => Ok(found.map(|(_, value)| value.as_slice())),
        }
    }

    /// The CloudEvents attributes, with names without the prefix, and values as they were sent.
    pub(super) fn attributes(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.kept.iter().filter_map(|(name, value)| {
            let name = name.strip_prefix(ATTRIBUTE_PREFIX)?;
            Some((name, value.as_slice()))
        })
    }
}

impl fmt::Debug for Headers {
    /// Omits the values, which may be private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.kept.iter().map(|(name, _)| name))
            .finish()
    }
}

/// Decodes the value of an attribute according to the HTTP binding of CloudEvents (3.1.3.2): removes the
/// quotes, if any, then decodes percent-encoding once.
pub(super) fn decoded(value: &[u8]) -> Result<Cow<'_, str>, &'static str> {
    let value = std::str::from_utf8(value).map_err(|_| "is not UTF-8")?;
    match unquoted(value) {
        None => Err("has unbalanced quotes"),
        Some(Cow::Borrowed(value)) => percent_decoded(value),
        Some(Cow::Owned(value)) => Ok(Cow::Owned(percent_decoded(&value)?.into_owned())),
    }
}

/// Removes the double quotes around a value, and the escapes inside them. `None`: the quotes or escapes are
/// unbalanced.
pub(super) fn unquoted(value: &str) -> Option<Cow<'_, str>> {
    let Some(inner) = value.strip_prefix('"') else {
        return Some(Cow::Borrowed(value));
    };
    let inner = inner.strip_suffix('"')?;
    if !inner.contains(['"', '\\']) {
        return Some(Cow::Borrowed(inner));
    }
    let mut text = String::with_capacity(inner.len());
    let mut characters = inner.chars();
    while let Some(character) = characters.next() {
        match character {
            '"' => return None,
            '\\' => text.push(characters.next()?),
            _ => text.push(character),
        }
    }
    Some(Cow::Owned(text))
}

fn percent_decoded(value: &str) -> Result<Cow<'_, str>, &'static str> {
    let is_encoded = |after: &str| {
        let digits = after.as_bytes().first_chunk::<2>();
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    match value.split('%').skip(1).all(is_encoded) {
        true => percent_decode_str(value)
            .decode_utf8()
            .map_err(|_| "is not UTF-8"),
        false => Err("has a % without two hexadecimal digits"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_any_case_and_what_says_nothing_of_events_is_not_kept() {
        let headers = Headers::new([
            ("Webhook-Id", "1"),
            ("CE-Type", " a "),
            ("Cookie", "hunter2"),
        ]);
        assert_eq!(headers.get("webhook-id").expect("once"), Some(&b"1"[..]));
        assert_eq!(
            headers.attributes().collect::<Vec<_>>(),
            [("type", &b"a"[..])]
        );
        assert!(headers.get("cookie").expect("none").is_none());
        assert_eq!(format!("{headers:?}"), r#"["webhook-id", "ce-type"]"#);
    }

    #[test]
    fn values_of_attributes_are_decoded_as_the_binding_says() {
        for (sent, value) in [
            ("order.paid", "order.paid"),
            (
                "Euro%20%E2%82%AC%20%f0%9f%98%80%20%22100%25%22",
                "Euro € 😀 \"100%\"",
            ),
            ("%41%2B+", "A++"),
            ("%2520", "%20"),
            (r#""a \"b\" \\ c%20d""#, r#"a "b" \ c d"#),
            ("ä", "ä"),
            ("", ""),
        ] {
            assert_eq!(decoded(sent.as_bytes()).as_deref(), Ok(value), "{sent}");
        }
        // The last value is an overlong encoding of a space, which is not UTF-8.
        for sent in [
            "%", "100%", "%4", "%zz", "%+1", "\"", "\"a", "\"a\"b\"", "\"\\\"", "%C0%A0",
        ] {
            assert!(decoded(sent.as_bytes()).is_err(), "{sent}");
        }
        assert!(decoded(b"\xff").is_err());
    }
}
