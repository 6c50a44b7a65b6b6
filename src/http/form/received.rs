//! `receive` reads requests in every form that this crate sends.

use std::time::Duration;

use proptest::option;
use proptest::prelude::{Just, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::test_runner::TestCaseError;
use serde_json::Value;

use super::tests::message;
use super::*;
use crate::receive::{CloudEvent, Headers, Verifier};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn form(mode: Mode) -> Form {
    let mut destination = Destination::new("a", "http://a").expect("a URL");
    destination.policy.mode = Some(mode);
    destination.secrets = vec![SECRET.parse().expect("a secret")];
    Form::new(&destination, &Config::default(), "/shop").expect("a form")
}

fn headers_of(request: &Request<'_>) -> Headers {
    let pairs = request.headers.iter();
    Headers::new(pairs.map(|(name, value)| (name.as_str(), value.as_bytes())))
}

/// Asserts that the event has the values of the message.
fn is_of(event: &CloudEvent<'_>, message: &Message, region: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(&event.id, &message.message_id.to_string());
    prop_assert_eq!(&event.source, "/shop");
    prop_assert_eq!(&event.event_type, &message.topic);
    prop_assert_eq!(event.time, message.occurred_at.or(Some(message.created_at)));
    prop_assert_eq!(event.datacontenttype.as_deref(), Some("application/json"));
    prop_assert_eq!(event.ordering_key(), message.ordering_key.as_deref());
    prop_assert_eq!(event.subject.as_deref(), Some("a b"));
    prop_assert_eq!(&event.extensions["sequence"], "42");
    prop_assert_eq!(&event.extensions["region"], region);
    prop_assert_eq!(event.extensions.len(), 3);
    prop_assert_eq!(event.json(), Some(message.payload.trim()));
    Ok(())
}

proptest! {
    /// R33.
    #[test]
    fn a_message_is_received_as_it_was_enqueued_in_each_mode(
        mode in prop_oneof![Just(Mode::Binary), Just(Mode::Structured), Just(Mode::Batched)],
        text in "\\PC{0,40}",
        topic in ".{1,40}",
        ordering_key in "(?s).{0,40}",
        idempotency_key in "[!-~]{1,20}",
        region in "\\PC{0,20}",
        micros in 0..2_000_000_000_000_000_u64,
        occurred in option::of(0..2_000_000_000_000_000_u64),
        count in 1..4_usize,
    ) {
        let text = Value::String(text);
        let mut message = message(&format!(" {{ \"a\" : [{text},1.0e+2 ]}}\n"));
        message.topic = topic;
        message.ordering_key = Some(ordering_key);
        message.idempotency_key = idempotency_key;
        message.created_at = SystemTime::UNIX_EPOCH + Duration::from_micros(micros);
        message.occurred_at =
            occurred.map(|micros| SystemTime::UNIX_EPOCH + Duration::from_micros(micros));
        let stored = BTreeMap::from([("ce-region", region.as_str()), ("ce-subject", "a b"), ("x-a", "1")]);
        message.headers = Some(serde_json::to_string(&stored)?);
        let (form, now) = (form(mode), SystemTime::now());
        let verifier: Verifier = SECRET.parse()?;

        let request = form.one(form.check(&message).expect("good"), now).expect("a request");
        let headers = headers_of(&request);
        let events = verifier.events(&headers, request.body.as_bytes())?;
        prop_assert_eq!(events.len(), 1);
        is_of(&events[0], &message, &region)?;
        prop_assert_eq!(events[0].idempotency_key(), Some(message.idempotency_key.as_str()));

        if mode == Mode::Batched {
            let checked = || form.check(&message).expect("good");
            let batch: Vec<_> = std::iter::repeat_with(checked).take(count + 1).collect();
            let request = form.several(&batch, now).expect("a request");
            let headers = headers_of(&request);
            let events = verifier.events(&headers, request.body.as_bytes())?;
            prop_assert_eq!(events.len(), count + 1);
            for event in &events {
                is_of(event, &message, &region)?;
                prop_assert!(event.idempotency_key().is_none());
            }
        }
    }
}
