//! CloudEvents 1.0: events as JSON documents.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::SystemTime;

use serde_json::Value;
use uuid::Uuid;

use super::Failure;
use super::stored::{self, StoredHeaders};
use crate::header::ATTRIBUTE_PREFIX;
use crate::message::Message;
use crate::shows::shows;

/// The most bytes of a document, without the head, the payload and the topic.
const OTHER_BYTES: usize = 256;

/// The beginning that all documents of a destination share.
pub(crate) struct EventEnvelope {
    head: String,
}

impl EventEnvelope {
    /// An envelope with attributes that all events have. Their names are those of headers: `ce-region`.
    pub(crate) fn new(source: &str, attributes: &BTreeMap<String, String>) -> Self {
        let mut head = r#"{"specversion":"1.0","datacontenttype":"application/json""#.to_owned();
        push_attribute(&mut head, "source", source);
        for (name, value) in attributes {
            push_attribute(&mut head, name, value);
        }
        Self { head }
    }

    /// The approximate length of the document in bytes.
    pub(super) fn len_of(&self, message: &Message) -> usize {
        self.head.len() + message.payload.len() + message.topic.len() + OTHER_BYTES
    }

    /// Writes one event. `data` is the stored payload, byte for byte: no parser touches what the producer wrote.
    pub(super) fn write(&self, text: &mut String, message: &Message, stored: &StoredHeaders) {
        self.write_head(text, message);
        for (name, value) in &stored.attributes {
            push_attribute(text, name, value);
        }
        if let Some(trace) = stored.trace.as_ref().filter(|trace| trace.is_attribute) {
            push_attribute(text, "traceparent", &trace.parent);
            if let Some(state) = &trace.state {
                push_attribute(text, "tracestate", state);
            }
        }
        text.push_str(r#","data":"#);
        text.push_str(&message.payload);
        text.push('}');
    }

    /// Writes an event that is read and not sent, with its position and the time at which it was stored. Without a payload: it
    /// was expunged.
    ///
    /// # Errors
    /// The stored headers are bad, as plain SQL can write them: the event is written without their attributes.
    pub(crate) fn write_stored(
        &self,
        text: &mut String,
        message: &Message,
        (position, stored_at): (i64, SystemTime),
        payload: Option<&str>,
    ) -> Result<(), Failure> {
        self.write_head(text, message);
        let (attributes, bad) = match stored::attributes(message.headers.as_deref()) {
            Ok(attributes) => (attributes, Ok(())),
            Err(bad) => (BTreeMap::new(), Err(bad)),
        };
        let own = ["ce-position", "ce-storedat", "ce-expunged"];
        for (name, value) in attributes {
            if !own.contains(&name.as_str()) {
                push_attribute(text, &name, &value);
            }
        }
        push_attribute(text, "position", &position.to_string());
        let stored_at = humantime::format_rfc3339_micros(stored_at);
        push_attribute(text, "storedat", &stored_at.to_string());
        match payload {
            Some(payload) => {
                text.push_str(r#","data":"#);
                text.push_str(payload);
            }
            None => text.push_str(r#","expunged":true"#),
        }
        text.push('}');
        bad
    }

    /// Writes the attributes of every event.
    fn write_head(&self, text: &mut String, message: &Message) {
        text.push_str(&self.head);
        text.push_str(r#","id":""#);
        let mut buffer = Uuid::encode_buffer();
        text.push_str(message.message_id.hyphenated().encode_lower(&mut buffer));
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            r#"","time":"{}","sequence":"{}""#,
            humantime::format_rfc3339_micros(message.time()),
            message.sequence
        );
        push_attribute(text, "type", &message.topic);
        if let Some(key) = &message.ordering_key {
            push_attribute(text, "partitionkey", key);
        }
    }
}

shows! {
    /// Without the header values of the destination.
    EventEnvelope:
}

/// Writes a member of the document. Names are already checked, and need no escapes.
fn push_attribute(text: &mut String, name: &str, value: &str) {
    let name = name.strip_prefix(ATTRIBUTE_PREFIX).unwrap_or(name);
    // Writing to a string cannot fail.
    let _ = write!(text, ",\"{name}\":{}", Value::from(value));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};
    use serde_json::value::RawValue;

    use super::super::form::tests::message;
    use super::super::stored;
    use super::*;

    fn document(message: &Message, fixed: &[(&str, &str)]) -> String {
        let fixed: BTreeMap<String, String> = fixed
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let names: Vec<String> = fixed.keys().cloned().collect();
        let stored = stored::read(message.headers.as_deref(), &names).expect("good headers");
        let mut text = String::new();
        EventEnvelope::new("diesel-outbox/outbox", &fixed).write(&mut text, message, &stored);
        text
    }

    #[test]
    fn a_document_has_all_attributes_and_the_payload_as_it_was_stored() {
        let mut message = message(r#" { "n" : 1.0e+2 } "#);
        message.ordering_key = Some("order-7".to_owned());
        message.headers = Some(r#"{"ce-subject": "a \"b\"", "x-shop": "berlin"}"#.to_owned());
        assert_eq!(
            document(&message, &[("ce-region", "eu")]),
            concat!(
                r#"{"specversion":"1.0","datacontenttype":"application/json","#,
                r#""source":"diesel-outbox/outbox","region":"eu","#,
                r#""id":"0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c","#,
                r#""time":"2026-11-20T20:00:00.000000Z","sequence":"42","type":"order.paid","#,
                r#""partitionkey":"order-7","subject":"a \"b\"","data": { "n" : 1.0e+2 } }"#
            )
        );
    }

    #[test]
    fn a_trace_is_an_attribute_unless_the_event_has_one_of_its_own() {
        let mut message = message("1");
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        message.headers = Some(format!(
            r#"{{"traceparent":"{parent}","tracestate":"a=1"}}"#
        ));
        let value: Value = serde_json::from_str(&document(&message, &[])).expect("JSON");
        let next = value["traceparent"].as_str().expect("a trace");
        assert_eq!(next[..36], parent[..36]);
        assert_ne!(next, parent);
        assert_eq!(value["tracestate"], "a=1");

        message.headers = Some(format!(
            r#"{{"traceparent":"{parent}","tracestate":"a=1","ce-traceparent":"started here"}}"#
        ));
        let text = document(&message, &[]);
        assert_eq!(text.matches("traceparent").count(), 1, "{text}");
        assert!(text.contains("started here") && !text.contains("tracestate"));
        assert!(!document(&message, &[("ce-tracestate", "b=2")]).contains("a=1"));
    }

    /// Any JSON, with white space that no serialiser would write.
    fn any_payload() -> impl Strategy<Value = String> {
        prop_oneof![
            "[ \t\n]{0,3}-?[1-9][0-9]{0,20}(\\.[0-9]{1,9})?([eE][+-]?[0-9]{1,3})?[ \r]{0,2}",
            "\\PC{0,40}".prop_map(|text| Value::String(text).to_string()),
            "\\PC{0,20}".prop_map(|text| {
                let text = Value::String(text);
                format!("\n{{ {text} :[ {text},true ,null, \"\\u00e4\\/\" ] , \"data\":{{}} }}")
            }),
        ]
    }

    proptest! {
        #[test]
        fn any_message_is_a_document_that_says_the_same(
            payload in any_payload(),
            topic in ".{1,40}",
            key in "(?s).{0,40}",
            name in "[a-z0-9]{1,15}",
            value in "\\PC{1,40}",
        ) {
            let mut message = message(&payload);
            message.topic = topic;
            message.ordering_key = Some(key);
            let name = format!("own{name}");
            let headers = BTreeMap::from([(format!("ce-{name}"), value.clone())]);
            message.headers = Some(serde_json::to_string(&headers)?);
            let text = document(&message, &[]);

            // A number may be too large for this parser: the payload is compared as text.
            let mut members: BTreeMap<String, &RawValue> = serde_json::from_str(&text)?;
            let data = members.remove("data").map(RawValue::get);
            prop_assert_eq!(data, Some(payload.trim()));
            prop_assert_eq!(members.len(), 9);
            let attribute = |name: &str| serde_json::from_str::<String>(members[name].get());
            prop_assert_eq!(attribute("type")?, message.topic);
            prop_assert_eq!(Some(attribute("partitionkey")?), message.ordering_key);
            prop_assert_eq!(attribute(&name)?, value);
            let end = format!(",\"data\":{payload}}}");
            prop_assert!(text.ends_with(&end));
        }
    }
}
