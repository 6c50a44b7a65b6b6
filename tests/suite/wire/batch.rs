//! Several messages in one request, as a relay passes them to a dispatcher.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use diesel_outbox::config::{Config, Mode};
use diesel_outbox::{
    Destination, Dispatcher, Failure, HttpDispatcher, Message, NewMessage, Outcome, ReasonCode,
    Response,
};
use serde_json::json;

use super::{NEW_SECRET, OLD_SECRET, TRACE, assert_signed, destination, end, topic_and_payload};
use crate::support::{Database, Receiver, eventually};

/// The enqueued messages, as a relay hands them to a dispatcher.
fn claimed(database: &Database) -> Vec<Message> {
    #[derive(Clone, Default)]
    struct Keep(Arc<Mutex<Vec<Message>>>);

    impl Dispatcher for Keep {
        fn dispatch(&self, message: &Message) -> Outcome {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push(message.clone());
            Outcome::Delivered(Response::default())
        }
    }

    let keep = Keep::default();
    let relay = database.relay().dispatcher(keep.clone()).start();
    let relay = relay.expect("a relay");
    eventually("all messages are claimed", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    let mut kept = keep.0.lock().unwrap_or_else(PoisonError::into_inner);
    kept.sort_by_key(|message| message.sequence);
    std::mem::take(&mut *kept)
}

fn dispatcher(destinations: Vec<Destination>) -> HttpDispatcher {
    let mut config = Config::default();
    config.url = destinations.first().map(|first| first.url.clone());
    config.mode = Mode::Batched;
    config.secrets = vec![NEW_SECRET.parse().expect("a secret")];
    config.destinations = destinations;
    HttpDispatcher::new(&config).expect("a dispatcher")
}

fn batched(receiver: &Receiver) -> HttpDispatcher {
    dispatcher(vec![destination(&receiver.url(), Mode::Batched)])
}

/// The reason code of dead messages, `RETRY` or `WAIT` for other failures.
fn words(outcomes: &[Outcome]) -> Vec<String> {
    outcomes
        .iter()
        .map(|outcome| match outcome {
            Outcome::Delivered(_) => "delivered".to_owned(),
            Outcome::Dead(Failure { code, .. }) => format!("dead {code}"),
            Outcome::Retry(Failure { code, .. }) => format!("retry {code}"),
            Outcome::Wait(Failure { code, .. }) => format!("wait {code}"),
            other => format!("{other:?}"),
        })
        .collect()
}

#[test]
fn several_messages_are_one_signed_request_with_an_id_of_its_own() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for n in 0..3 {
        let payload = format!("[ {n} ]");
        let message = NewMessage::from_json("order.paid", payload).expect("JSON");
        database.enqueue_message(
            message
                .header("x-shop", "berlin")
                .header("ce-region", format!("Köln {n}"))
                .trace_context(TRACE, None),
        );
    }
    let messages = claimed(&database);
    let outcomes = batched(&receiver).dispatch_batch(&messages);
    assert_eq!(words(&outcomes), ["delivered"; 3]);

    let requests = receiver.requests();
    assert_eq!(requests.len(), 1);
    let request = &requests[0];
    assert_eq!(
        request.header("content-type"),
        Some("application/cloudevents-batch+json")
    );
    assert_signed(request, &[NEW_SECRET]);
    let id: uuid::Uuid = request.id().parse().expect("an id");
    assert_eq!(id.get_version_num(), 7);
    for name in ["idempotency-key", "outbox-attempt", "x-shop", "traceparent"] {
        assert_eq!(request.header(name), None, "{name}");
    }
    let events = request.json();
    let events = events.as_array().expect("an array");
    let ids: Vec<_> = messages.iter().map(|m| m.message_id.to_string()).collect();
    assert!(!ids.contains(&id.to_string()));
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["id"], ids[n]);
        assert_eq!(event["data"], json!([n]));
        assert_eq!(event["region"], format!("Köln {n}"));
        assert_eq!(
            event["traceparent"].as_str().map(|t| &t[..36]),
            Some(&TRACE[..36])
        );
    }
    assert_eq!(events.len(), 3);
}

#[test]
fn unsendable_messages_are_left_out_of_the_request() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut destination = destination(&receiver.url(), Mode::Batched);
    destination.max_payload_bytes = Some(10);
    let dispatcher = dispatcher(vec![destination]);
    for (payload, headers) in [
        ("1", "{}"),
        ("\"1234567890\"", "{}"),
        ("3", r#"{"webhook-id": "1"}"#),
        ("4", r#"{"x-a": "1"}"#),
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, headers, destination)
             VALUES ('order.paid', '{payload}', '{headers}', 'hook')"
        ));
    }
    let messages = claimed(&database);
    let expected = [
        "delivered",
        "dead PAYLOAD_TOO_LARGE",
        "dead INVALID_HEADER",
        "delivered",
    ];
    assert_eq!(words(&dispatcher.dispatch_batch(&messages)), expected);
    let request = &receiver.requests()[0];
    assert_eq!(request.json().as_array().map(Vec::len), Some(2));

    // One message is left: it is sent as if it were alone.
    assert_eq!(
        words(&dispatcher.dispatch_batch(&messages[1..])),
        expected[1..]
    );
    let request = &receiver.requests()[1];
    assert_eq!(request.id(), messages[3].message_id.to_string());
    assert_eq!(request.header("outbox-attempt"), Some("1"));
    assert_eq!(request.header("x-a"), Some("1"));
    assert!(request.header("idempotency-key").is_some());
    assert_eq!(request.json()[0]["data"], 4);
    assert_signed(request, &[NEW_SECRET, OLD_SECRET]);

    // No message is left.
    assert_eq!(
        words(&dispatcher.dispatch_batch(&messages[1..3])),
        expected[1..3]
    );
    assert_eq!(dispatcher.dispatch_batch(&[]), []);
    assert_eq!(receiver.count(), 2);
}

#[test]
fn the_outcome_of_a_request_is_that_of_each_of_its_messages() {
    let database = Database::new();
    let receiver = Receiver::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 503 Later\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\nno")
    });
    database.enqueue_many(2);
    let messages = claimed(&database);
    for outcome in batched(&receiver).dispatch_batch(&messages) {
        let Outcome::Retry(failure) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!(failure.code, ReasonCode::ServerError);
        assert_eq!(failure.retry_after, Some(Duration::from_secs(7)));
        assert_eq!(
            failure.response,
            Response::new(Some(503), Some("no".to_owned()))
        );
    }
    assert_eq!(receiver.count(), 1);
}

#[test]
fn messages_of_other_destinations_get_requests_of_their_own() {
    let database = Database::new();
    let (first, second, single) = (Receiver::ok(), Receiver::ok(), Receiver::ok());
    let named = |name: &str, receiver: &Receiver, mode| {
        let mut destination = Destination::new(name, &receiver.url()).expect("a URL");
        destination.policy.mode = Some(mode);
        destination
    };
    let dispatcher = dispatcher(vec![
        named("first", &first, Mode::Batched),
        named("second", &second, Mode::Batched),
        named("single", &single, Mode::Binary),
    ]);
    for name in [
        "first", "single", "second", "nowhere", "first", "single", "second",
    ] {
        let message = NewMessage::new("order.paid", &name).expect("JSON");
        database.enqueue_message(message.destination(name));
    }
    let outcomes = words(&dispatcher.dispatch_batch(&claimed(&database)));
    for (index, word) in outcomes.iter().enumerate() {
        let expected = match index {
            3 => "retry UNKNOWN_DESTINATION",
            _ => "delivered",
        };
        assert_eq!(word, expected, "{index}");
    }
    for (name, receiver) in [("first", &first), ("second", &second)] {
        let requests = receiver.requests();
        assert_eq!(requests.len(), 1);
        let events = requests[0].json();
        let names = events.as_array().expect("an array").iter();
        let names: Vec<_> = names.map(|event| event["data"].clone()).collect();
        assert_eq!(names, [name, name]);
    }
    assert_eq!(single.count(), 2);
}

#[test]
fn a_single_message_of_batched_mode_is_an_array_of_one() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue_message(topic_and_payload().idempotency_key("order-7"));
    let messages = claimed(&database);
    let dispatcher = batched(&receiver);
    assert_eq!(words(&[dispatcher.dispatch(&messages[0])]), ["delivered"]);
    let request = &receiver.requests()[0];
    assert_eq!(request.json().as_array().map(Vec::len), Some(1));
    assert_eq!(request.id(), messages[0].message_id.to_string());
    assert_eq!(request.header("idempotency-key"), Some("\"order-7\""));
}
