//! What the relay sends, byte by byte: the three modes of CloudEvents over HTTP, signatures of Standard Webhooks,
//! headers of destinations, limits and traces.

mod batch;
mod headers;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use diesel_outbox::config::Mode;
use diesel_outbox::{Backoff, Destination, NewMessage, RelayBuilder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::{Database, Receiver, Request, end, eventually, finish, status};

const NEW_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OLD_SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const MODES: [Mode; 3] = [Mode::Binary, Mode::Structured, Mode::Batched];

/// The signature that a receiver computes: HMAC-SHA256 as in RFC 2104.
fn signature(secret: &str, id: &str, timestamp: &str, body: &[u8]) -> String {
    let key = BASE64
        .decode(secret.trim_start_matches("whsec_"))
        .expect("base64");
    let padded = |with: u8| {
        let mut block = [with; 64];
        for (byte, key) in block.iter_mut().zip(&key) {
            *byte ^= key;
        }
        block
    };
    let content = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat();
    let inner = Sha256::new()
        .chain_update(padded(0x36))
        .chain_update(content);
    let outer = Sha256::new()
        .chain_update(padded(0x5c))
        .chain_update(inner.finalize());
    format!("v1,{}", BASE64.encode(outer.finalize()))
}

/// Fails unless the request is signed with these secrets, in this order.
#[track_caller]
fn assert_signed(request: &Request, secrets: &[&str]) {
    let timestamp = request.header("webhook-timestamp").expect("a timestamp");
    let expected: Vec<String> = secrets
        .iter()
        .map(|secret| signature(secret, &request.id(), timestamp, &request.body))
        .collect();
    assert_eq!(
        request.header("webhook-signature"),
        Some(&*expected.join(" "))
    );
}

fn destination(url: &str, mode: Mode) -> Destination {
    let mut destination = Destination::new("hook", url).expect("a URL");
    destination.policy.mode = Some(mode);
    destination.secrets = [NEW_SECRET, OLD_SECRET]
        .map(|secret| secret.parse().expect("a secret"))
        .to_vec();
    destination
}

fn relay(database: &Database, destination: Destination) -> RelayBuilder {
    database.relay().destination(destination).route("*", "hook")
}

/// Delivers all messages and returns the requests.
fn delivered(database: &Database, receiver: &Receiver, destination: Destination) -> Vec<Request> {
    let relay = relay(database, destination).start().expect("a relay");
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    receiver.requests()
}

fn topic_and_payload() -> NewMessage {
    NewMessage::from_json("order.paid", "{ \"n\" : 1.0e+2 }").expect("JSON")
}

fn parent_of(traceparent: &str) -> &str {
    traceparent.split('-').nth(2).expect("a parent id")
}

// --- The three modes ----------------------------------------------------------------------

type Headers = BTreeMap<String, String>;

/// Accepts one request and returns its headers, each of which must occur once.
fn one_request() -> (String, JoinHandle<(Headers, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/in", listener.local_addr().expect("an address"));
    let taken = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut reader = BufReader::new(stream.try_clone().expect("a handle"));
        let mut headers = Headers::new();
        let head = (&mut reader).lines().map(|line| line.expect("a line"));
        for line in head.skip(1).take_while(|line| !line.is_empty()) {
            let (name, value) = line.split_once(": ").expect("a header");
            let before = headers.insert(name.to_owned(), value.to_owned());
            assert_eq!(before, None, "the header {name} repeats");
        }
        let length = headers["content-length"].parse().expect("a number");
        let mut body = vec![0; length];
        reader.read_exact(&mut body).expect("a body");
        stream.write_all(&status(200)).expect("the relay waits");
        (headers, String::from_utf8(body).expect("UTF-8"))
    });
    (url, taken)
}

/// R4, R31.
#[test]
fn each_mode_sends_what_is_documented_and_nothing_else() {
    for mode in MODES {
        let database = Database::new();
        let (url, taken) = one_request();
        let message = topic_and_payload()
            .idempotency_key("order 7 \"ä\"")
            .ordering_key("Straße 7")
            .header("x-shop", "berlin")
            .header("ce-subject", "Köln 100%")
            .trace_context(TRACE, Some("vendor=1"));
        let id = message.message_id().to_string();
        let sequence = database.enqueue_message(message).to_string();
        let relay = relay(&database, destination(&url, mode)).start();
        let relay = relay.expect("a relay");
        eventually("the message is delivered", || {
            database.count("delivered") == 1
        });
        end(&relay);
        let (mut headers, body) = taken.join().expect("a request");
        let time = database.text(
            "SELECT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')
               FROM {o}_ledger",
        );
        let (time, source) = (
            time.expect("a time"),
            format!("diesel-outbox/{}", database.name()),
        );

        let traceparent = headers.remove("traceparent").expect("a traceparent");
        let timestamp = headers["webhook-timestamp"].clone();
        let sign = |secret| signature(secret, &id, &timestamp, body.as_bytes());
        let mut expected: Vec<(&str, String)> = vec![
            ("accept", "*/*".to_owned()),
            ("content-length", body.len().to_string()),
            ("host", url["http://".len()..].replace("/in", "")),
            ("idempotency-key", r#""order 7 \"%C3%A4\"""#.to_owned()),
            ("outbox-attempt", "1".to_owned()),
            ("tracestate", "vendor=1".to_owned()),
            (
                "user-agent",
                format!("diesel-outbox/{}", env!("CARGO_PKG_VERSION")),
            ),
            ("webhook-id", id.clone()),
            (
                "webhook-signature",
                format!("{} {}", sign(NEW_SECRET), sign(OLD_SECRET)),
            ),
            ("webhook-timestamp", timestamp.clone()),
            ("x-shop", "berlin".to_owned()),
        ];
        let content_type = match mode {
            Mode::Structured => "application/cloudevents+json",
            Mode::Batched => "application/cloudevents-batch+json",
            _ => "application/json",
        };
        expected.push(("content-type", content_type.to_owned()));
        if mode == Mode::Binary {
            expected.extend([
                ("ce-id", id.clone()),
                ("ce-partitionkey", "Stra%C3%9Fe%207".to_owned()),
                ("ce-sequence", sequence.clone()),
                ("ce-source", source.clone()),
                ("ce-specversion", "1.0".to_owned()),
                ("ce-subject", "K%C3%B6ln%20100%25".to_owned()),
                ("ce-time", time.clone()),
                ("ce-type", "order.paid".to_owned()),
            ]);
            assert_eq!(body, "{ \"n\" : 1.0e+2 }");
        } else {
            let event: Value = serde_json::from_str(&body).expect("JSON");
            let event = if mode == Mode::Batched {
                &event[0]
            } else {
                &event
            };
            let attributes = json!({
                "specversion": "1.0",
                "id": id,
                "source": source,
                "type": "order.paid",
                "time": time,
                "datacontenttype": "application/json",
                "sequence": sequence,
                "partitionkey": "Straße 7",
                "subject": "Köln 100%",
                "traceparent": traceparent,
                "tracestate": "vendor=1",
                "data": { "n": 100.0 },
            });
            assert_eq!(*event, attributes, "{mode}");
            assert!(body.contains(r#","data":{ "n" : 1.0e+2 }}"#), "{body}");
            assert_eq!(body.starts_with("[{"), mode == Mode::Batched);
        }
        let expected: Headers = expected
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        assert_eq!(headers, expected, "{mode}");
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("after 1970");
        let timestamp: u64 = timestamp.parse().expect("seconds");
        assert!(now.as_secs().abs_diff(timestamp) < 60);
    }
}

#[test]
fn a_document_has_the_payload_byte_for_byte() {
    let payload =
        " { \"b\" : 1.0e+2 ,\t\"a\":[ ],\n\r\n \"b\": \"\\u00e4ä\\/ 😀 \\u2028\", \"c\":1e999 } ";
    for mode in [Mode::Structured, Mode::Batched] {
        let database = Database::new();
        let receiver = Receiver::ok();
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload) VALUES ('order.paid', '{payload}')"
        ));
        let requests = delivered(&database, &receiver, destination(&receiver.url(), mode));
        let body = String::from_utf8(requests[0].body.clone()).expect("UTF-8");
        assert!(body.contains(&format!(",\"data\":{payload}}}")), "{body}");
        assert_signed(&requests[0], &[NEW_SECRET, OLD_SECRET]);
    }
}

// --- Signatures ---------------------------------------------------------------------------

#[test]
fn each_attempt_has_its_own_signature_and_time_and_the_same_id() {
    for mode in MODES {
        let database = Database::new();
        let receiver = Receiver::answering(|request| match request.header("outbox-attempt") {
            Some("1") => 500,
            _ => 200,
        });
        database.enqueue_message(topic_and_payload().trace_context(TRACE, Some("vendor=1")));
        let relay = relay(&database, destination(&receiver.url(), mode))
            // Timestamps are in whole seconds.
            .backoff(Backoff::Table(vec![Duration::from_millis(1100)]))
            .start()
            .expect("a relay");
        eventually("the message is delivered", || {
            database.count("delivered") == 1
        });
        end(&relay);
        let requests = receiver.requests();
        let [first, second] = requests.as_slice() else {
            panic!("expected two requests, got {}", requests.len());
        };
        assert_eq!(first.id(), second.id());
        assert_ne!(
            first.header("webhook-timestamp"),
            second.header("webhook-timestamp")
        );
        for request in [first, second] {
            assert_signed(request, &[NEW_SECRET, OLD_SECRET]);
        }
        // R31: one trace, and a separate span for each attempt.
        let parents: Vec<&str> = [first, second]
            .map(|request| request.header("traceparent").expect("a trace"))
            .map(|traceparent| {
                assert_eq!(traceparent[..36], TRACE[..36]);
                assert!(traceparent.ends_with("-01"));
                parent_of(traceparent)
            })
            .to_vec();
        assert_ne!(parents[0], parents[1]);
        assert!(!parents.contains(&parent_of(TRACE)));
        assert_eq!(second.header("tracestate"), Some("vendor=1"));
    }
}

#[test]
fn secrets_of_the_environment_sign_the_newest_first() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for secrets in [vec![NEW_SECRET], vec![NEW_SECRET, OLD_SECRET], vec![]] {
        database.enqueue_message(topic_and_payload());
        let mut drain = database.binary(&["drain"]);
        drain.env("OUTBOX_URL", receiver.url());
        if !secrets.is_empty() {
            drain.env("OUTBOX_SECRET", secrets.join(" "));
        }
        finish(drain).code(0);
        let requests = receiver.requests();
        let request = requests.last().expect("a request");
        if secrets.is_empty() {
            assert_eq!(request.header("webhook-signature"), None);
        } else {
            assert_signed(request, &secrets);
        }
    }
}

// --- Traces and limits ------------------------------------------------------------------

/// R31.
#[test]
fn a_trace_that_is_not_valid_is_not_passed_on() {
    for mode in [Mode::Binary, Mode::Structured] {
        let database = Database::new();
        let receiver = Receiver::ok();
        let zeros = TRACE.replace("b7ad6b7169203331", "0000000000000000");
        database.enqueue_message(topic_and_payload().trace_context(zeros, Some("vendor=1")));
        let requests = delivered(&database, &receiver, destination(&receiver.url(), mode));
        assert_eq!(requests[0].header("traceparent"), None);
        assert_eq!(requests[0].header("tracestate"), None);
        assert!(!String::from_utf8_lossy(&requests[0].body).contains("trace"));
    }
}

#[test]
fn a_payload_that_is_too_large_for_its_destination_is_dead_lettered_unsent() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for payload in ["\"12345678\"", "\"123456789\""] {
        let message = NewMessage::from_json("order.paid", payload).expect("JSON");
        database.enqueue_message(message);
    }
    let mut destination = destination(&receiver.url(), Mode::Structured);
    destination.max_payload_bytes = Some(10);
    let requests = delivered(&database, &receiver, destination);
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].json()["data"], "12345678");
    assert_eq!(
        database.text("SELECT reason || ': ' || last_error FROM {o}_dead"),
        Some(
            "PAYLOAD_TOO_LARGE: the payload has 11 bytes: destination \"hook\" takes at most 10"
                .to_owned()
        )
    );
}
