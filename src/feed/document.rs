//! Events as CloudEvents, in a batch.

use std::collections::BTreeMap;

use super::event::FeedEvent;
use crate::config::Config;
use crate::http::EventEnvelope;
use crate::message::{Message, Sequence};

/// The events as `application/cloudevents-batch+json`: as structured mode writes them, with the extension `position`, a
/// text, because integers of CloudEvents have 32 bits. An event whose content was expunged has no data, and the extension
/// `expunged`.
pub(crate) fn batch(config: &Config, events: &[FeedEvent]) -> String {
    let source =
        (config.source.clone()).unwrap_or_else(|| format!("diesel-outbox/{}", config.table));
    let envelope = EventEnvelope::new(&source, &BTreeMap::new());
    let mut text = String::from("[");
    for event in events {
        if text.len() > 1 {
            text.push(',');
        }
        let payload = serde_json::Value::Null;
        let mut message = Message::unstored(&event.topic, "", event.tenant_id, &payload);
        message.sequence = Sequence(event.sequence);
        message.message_id = event.message_id;
        message.ordering_key.clone_from(&event.ordering_key);
        message.created_at = event.created_at;
        message.occurred_at = event.occurred_at;
        let stored = (event.headers.as_deref())
            .and_then(|json| serde_json::from_str::<BTreeMap<String, String>>(json).ok());
        let mut attributes = attributes(stored.unwrap_or_default());
        attributes.insert("position".to_owned(), event.position.to_string());
        envelope.write_stored(&mut text, &message, &attributes, event.payload.as_deref());
    }
    text.push(']');
    text
}

/// The attributes of an event among its stored headers. The trace is that of the producer: a read is no attempt.
fn attributes(stored: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let trace = |name: &str| ["traceparent", "tracestate"].contains(&name);
    let attribute = |(name, value): (String, String)| {
        let name = name.to_ascii_lowercase();
        let own = name.strip_prefix(crate::header::ATTRIBUTE_PREFIX);
        let is_one = |own: &str| !own.is_empty() && own.bytes().all(|b| b.is_ascii_alphanumeric());
        match own {
            Some(own) if is_one(own) => Some((own.to_owned(), value)),
            None if trace(&name) => Some((name, value)),
            _ => None,
        }
    };
    stored.into_iter().filter_map(attribute).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use serde_json::{Value, json};
    use uuid::Uuid;

    use super::*;

    #[test]
    fn events_are_cloudevents_with_their_positions() {
        let event = |position, payload: Option<&str>| {
            FeedEvent {
            position,
            message_id: Uuid::nil(),
            sequence: 42,
            topic: "order.paid".to_owned(),
            payload: payload.map(str::to_owned),
            headers: Some(
                r#"{"ce-subject": "a \"b\"", "x-shop": "berlin", "traceparent": "00-1", "ce-": "no"}"#
                    .to_owned(),
            ),
            ordering_key: Some("order-7".to_owned()),
            tenant_id: None,
            created_at: SystemTime::UNIX_EPOCH + Duration::from_secs(1),
            occurred_at: None,
        }
        };
        let text = batch(
            &Config::default(),
            &[event(1, Some(r#"{ "n" : 1.0e+2 }"#)), event(2, None)],
        );
        assert!(text.contains(r#""data":{ "n" : 1.0e+2 }"#), "{text}");
        let batch: Value = serde_json::from_str(&text).expect("JSON");
        let expected = json!({
            "specversion": "1.0", "datacontenttype": "application/json", "source": "diesel-outbox/outbox",
            "id": Uuid::nil().to_string(), "time": "1970-01-01T00:00:01.000000Z", "sequence": "42",
            "type": "order.paid", "partitionkey": "order-7", "subject": "a \"b\"", "traceparent": "00-1",
            "position": "2", "expunged": true,
        });
        assert_eq!(batch[1], expected);
        assert_eq!(batch[0]["data"]["n"], 100.0);
    }
}
