//! Events as CloudEvents, in a batch.

use std::collections::BTreeMap;

use diesel::pg::data_types::PgTimestamp;

use super::event::FeedEvent;
use crate::config::Config;
use crate::http::EventEnvelope;
use crate::message::{Message, Sequence};
use crate::schema::values::system_time;

/// The events as `application/cloudevents-batch+json`: as structured mode writes them, with the extensions `position`, a
/// text, because integers of CloudEvents have 32 bits, and `storedat`. An event whose content was expunged has no data, and
/// the extension `expunged`.
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
        message.headers.clone_from(&event.headers);
        let written = envelope.write_stored(
            &mut text,
            &message,
            (event.position, system_time(PgTimestamp(event.stored_at))),
            event.payload.as_deref(),
        );
        if let Err(bad) = written {
            log::warn!(event = "feed_event_headers_bad", sequence = event.sequence; "the event of message {} has no attributes of its headers: {}", event.sequence, bad.error);
        }
    }
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use serde_json::{Value, json};
    use uuid::Uuid;

    use super::*;

    #[test]
    fn events_are_cloudevents_with_their_positions() {
        let event = |position, payload: Option<&str>| FeedEvent {
            position,
            message_id: Uuid::nil(),
            sequence: 42,
            topic: "order.paid".to_owned(),
            payload: payload.map(str::to_owned),
            headers: Some(
                r#"{"ce-subject": "a \"b\"", "x-shop": "berlin", "traceparent": "00-1"}"#
                    .to_owned(),
            ),
            ordering_key: Some("order-7".to_owned()),
            tenant_id: None,
            created_at: SystemTime::UNIX_EPOCH + Duration::from_secs(1),
            occurred_at: None,
            stored_at: 0,
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
            "position": "2", "storedat": "2000-01-01T00:00:00.000000Z", "expunged": true,
        });
        assert_eq!(batch[1], expected);
        assert_eq!(batch[0]["data"]["n"], 100.0);
    }

    #[test]
    fn attributes_of_plain_sql_do_not_hide_those_of_the_event() {
        let written = |headers: &str| {
            let event = FeedEvent {
                position: 7,
                message_id: Uuid::nil(),
                sequence: 42,
                topic: "order.paid".to_owned(),
                payload: Some("1".to_owned()),
                headers: Some(headers.to_owned()),
                ordering_key: None,
                tenant_id: None,
                created_at: SystemTime::UNIX_EPOCH,
                occurred_at: None,
                stored_at: 0,
            };
            batch(&Config::default(), &[event])
        };
        let plain = written("{}");
        for bad in [
            r#"{"ce-id": "forged"}"#,
            r#"{"ce-position": "1"}"#,
            r#"{"ce-storedat": "2026-11-30T00:00:00Z"}"#,
            r#"{"ce-expunged": "true"}"#,
            r#"{"ce-subject": 1}"#,
            "[]",
        ] {
            assert_eq!(written(bad), plain, "{bad}");
        }
        let own = written(r#"{"traceparent": "00-1", "ce-traceparent": "00-2"}"#);
        assert_eq!(own.matches("traceparent").count(), 1, "{own}");
    }
}
