//! The stored headers of a message: HTTP headers, CloudEvents attributes and a trace context.

use std::collections::BTreeMap;

use ::http::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;

use super::Failure;
use super::trace::continued;
use crate::header::{ATTRIBUTE_PREFIX, check_header};
use crate::status::ReasonCode;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// The parts of stored headers, ready to be sent.
#[derive(Debug, Default)]
pub(super) struct StoredHeaders {
    pub(super) headers: HeaderMap,
    /// Attributes by their header names: `ce-region`.
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) trace: Option<AttemptTrace>,
}

/// The trace context of one attempt.
#[derive(Debug)]
pub(super) struct AttemptTrace {
    pub(super) parent: String,
    pub(super) state: Option<String>,
    /// Whether a document also has the trace as an attribute. `false` if a trace is stored as an attribute: that
    /// trace says where the event originated, this one only how it is delivered.
    pub(super) is_attribute: bool,
}

/// Splits stored headers into their parts, and checks them: plain inserts bypass the checks of the library.
///
/// Headers with a name in `fixed` (in lower case) are left out, because the destination sets them.
pub(super) fn read(json: Option<&str>, fixed: &[String]) -> Result<StoredHeaders, Failure> {
    let mut stored = split(json, fixed)?;
    stored.trace = take_trace(&mut stored.attributes, fixed);
    Ok(stored)
}

/// The attributes of an event that is read and not sent, by their header names. The trace is that of the producer: a read is
/// no attempt.
pub(super) fn attributes(json: Option<&str>) -> Result<BTreeMap<String, String>, Failure> {
    let mut attributes = split(json, &[])?.attributes;
    if attributes.contains_key("ce-traceparent") || attributes.contains_key("ce-tracestate") {
        attributes.remove(TRACEPARENT);
        attributes.remove(TRACESTATE);
    }
    Ok(attributes)
}

/// The trace is among the attributes.
fn split(json: Option<&str>, fixed: &[String]) -> Result<StoredHeaders, Failure> {
    let mut stored = StoredHeaders::default();
    let Some(json) = json else {
        return Ok(stored);
    };
    // The error of serde_json would show the value, which may be a secret.
    let parsed: BTreeMap<String, Value> = serde_json::from_str(json)
        .map_err(|_| invalid("the stored headers are not a JSON object".to_owned()))?;
    for (mut name, value) in parsed {
        let value = match value {
            Value::String(value) => value,
            other => {
                let kind = kind_of(&other);
                let reason = format!("stored header {name:?}: the value is {kind}, not a string");
                return Err(invalid(reason));
            }
        };
        check_header(&name, &value)
            .map_err(|reason| invalid(format!("stored header {name:?}: {reason}")))?;
        name.make_ascii_lowercase();
        if fixed.contains(&name) {
            continue;
        }
        if stored.attributes.contains_key(&name) || stored.headers.contains_key(&name) {
            return Err(invalid(format!("stored header {name:?} is set twice")));
        }
        if name.starts_with(ATTRIBUTE_PREFIX) || name == TRACEPARENT || name == TRACESTATE {
            stored.attributes.insert(name, value);
            continue;
        }
        let pair = (
            HeaderName::try_from(name.as_str()),
            HeaderValue::try_from(value),
        );
        let (Ok(header), Ok(value)) = pair else {
            return Err(invalid(format!("stored header {name:?} cannot be sent")));
        };
        stored.headers.insert(header, value);
    }
    Ok(stored)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Continues the stored trace context. A state without a valid parent is dropped.
fn take_trace(attributes: &mut BTreeMap<String, String>, fixed: &[String]) -> Option<AttemptTrace> {
    let state = attributes.remove(TRACESTATE);
    let parent = continued(&attributes.remove(TRACEPARENT)?, fastrand::u64(..))?;
    #[cfg(feature = "tracing")]
    tracing::Span::current().record(TRACEPARENT, parent.as_str());
    let own = ["ce-traceparent", "ce-tracestate"];
    let is_own = |name: &str| attributes.contains_key(name) || fixed.iter().any(|f| f == name);
    Some(AttemptTrace {
        parent,
        state,
        is_attribute: !own.into_iter().any(is_own),
    })
}

pub(super) fn invalid(what: String) -> Failure {
    Failure::new(ReasonCode::InvalidHeader, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;

    fn of(json: &str) -> StoredHeaders {
        read(Some(json), &[]).expect("good headers")
    }

    #[test]
    fn stored_headers_are_split_into_their_parts() {
        let stored = of(r#"{"X-Shop": "berlin", "CE-Region": "Köln %"}"#);
        assert_eq!(stored.headers["x-shop"], "berlin");
        assert_eq!(stored.attributes["ce-region"], "Köln %");
        assert_eq!((stored.headers.len(), stored.attributes.len()), (1, 1));
        assert!(stored.trace.is_none());
        assert!(read(None, &[]).expect("nothing").headers.is_empty());
    }

    #[test]
    fn bad_headers_are_named() {
        for (json, named) in [
            (r#"{"webhook-id": "1"}"#, "webhook-id"),
            (r#"{"Webhook-Signature": "v1,a"}"#, "Webhook-Signature"),
            (r#"{"Content-Length": "1"}"#, "Content-Length"),
            (r#"{"x-a": "1\r\nx-b: 2"}"#, "x-a"),
            (r#"{"x-a": "1", "X-A": "2"}"#, "set twice"),
            (r#"{"ce-a": "1", "CE-A": "2"}"#, "set twice"),
            (r#"{"traceparent": "1", "Traceparent": "2"}"#, "set twice"),
            (r#"{"ce-data": "1"}"#, "ce-data"),
            (r#"{"ce-a-b": "1"}"#, "ce-a-b"),
            (r#"{"ce-a": "1\n2"}"#, "ce-a"),
            (r#"{"x a": "1"}"#, "x a"),
            (r#"{"x-a": 70177}"#, "\"x-a\": the value is a number"),
            (r#"{"x-a": -7.0177}"#, "a number"),
            (r#"{"x-a": false}"#, "a boolean"),
            (r#"{"x-a": null}"#, "null"),
            (r#"{"x-a": [70177]}"#, "an array"),
            (r#"{"x-a": {"b": 70177}}"#, "an object"),
            (r#"{"x-a": 70177"#, "not a JSON object"),
            ("[70177]", "not a JSON object"),
            ("\"70177\"", "not a JSON object"),
            ("70177", "not a JSON object"),
        ] {
            let failure = read(Some(json), &[]).expect_err(json);
            assert_eq!(failure.code, ReasonCode::InvalidHeader);
            assert!(failure.error.contains(named), "{}", failure.error);
            // The value may be a secret.
            for part in ["70177", "7.0177", "false"] {
                assert!(!failure.error.contains(part), "{}", failure.error);
            }
        }
    }

    #[test]
    fn headers_that_the_destination_sets_are_left_out() {
        let fixed = ["x-a".to_owned(), "ce-a".to_owned()];
        let stored = read(Some(r#"{"X-A": "1", "ce-a": "1", "x-b": "1"}"#), &fixed);
        let stored = stored.expect("good headers");
        assert_eq!((stored.headers.len(), stored.attributes.len()), (1, 0));
    }

    #[test]
    fn a_trace_that_is_not_valid_is_dropped_with_its_state() {
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let trace = of(&format!(
            r#"{{"traceparent":"{parent}","tracestate":"a=1"}}"#
        ))
        .trace;
        let trace = trace.expect("a trace");
        assert_eq!(trace.state.as_deref(), Some("a=1"));
        assert_ne!(trace.parent, parent);
        for json in [
            r#"{"traceparent":"00-ab-cd-01","tracestate":"a=1"}"#,
            r#"{"tracestate":"a=1"}"#,
        ] {
            let stored = of(json);
            assert!(stored.trace.is_none() && stored.attributes.is_empty());
        }
    }

    proptest! {
        #[test]
        fn any_text_is_headers_or_refused(json in "\\PC{0,80}") {
            let _ = read(Some(&json), &[]);
        }

        #[test]
        fn any_object_is_headers_or_refused(
            object in proptest::collection::btree_map("(?s)(ce-|x-)?.{0,12}", "(?s).{0,20}", 0..5)
        ) {
            let json = serde_json::to_string(&object)?;
            if let Ok(stored) = read(Some(&json), &[]) {
                let breaks = |bytes: &[u8]| bytes.iter().any(|b| matches!(b, b'\r' | b'\n' | 0));
                for (_, value) in &stored.headers {
                    prop_assert!(!breaks(value.as_bytes()));
                }
                for (name, value) in &stored.attributes {
                    prop_assert!(!breaks(name.as_bytes()) && !breaks(value.as_bytes()));
                }
            }
        }
    }
}
