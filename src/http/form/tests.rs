use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::message::Sequence;

const SECRETS: &str =
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

/// A claimed message of the topic `order.paid`.
pub(crate) fn message(payload: &str) -> Message {
    Message {
        sequence: Sequence(42),
        message_id: Uuid::from_u128(0x0198_b2f1_6a3e_7c11_9d3f_0c8f_1d1b_2a3c),
        payload: payload.to_owned(),
        idempotency_key: "order-7-paid".to_owned(),
        created_at: UNIX_EPOCH + Duration::from_secs(1_795_204_800),
        attempts: 2,
        ..Message::unstored("order.paid", "", None, &serde_json::Value::Null)
    }
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(1_795_300_000_999)
}

fn form(mode: Mode, change: impl FnOnce(&mut Destination)) -> Form {
    let mut destination = Destination::new("a", "http://a").expect("a URL");
    destination.policy.mode = Some(mode);
    change(&mut destination);
    Form::new(&destination, &Config::default(), "diesel-outbox/outbox").expect("a form")
}

fn request<'a>(form: &Form, message: &'a Message) -> Request<'a> {
    let checked = form.check(message).expect("a good message");
    form.one(checked, now()).expect("a request")
}

fn names(headers: &HeaderMap) -> Vec<&str> {
    let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    names
}

#[test]
fn each_mode_has_its_headers_and_no_others() {
    let mut message = message("1");
    message.headers = Some(r#"{"x-a": "1", "ce-region": "K\u00f6ln"}"#.to_owned());
    let binary = request(&form(Mode::Binary, |_| ()), &message).headers;
    assert_eq!(
        names(&binary),
        [
            "ce-id",
            "ce-region",
            "ce-sequence",
            "ce-source",
            "ce-specversion",
            "ce-time",
            "ce-type",
            "content-type",
            "idempotency-key",
            "outbox-attempt",
            "webhook-id",
            "webhook-timestamp",
            "x-a"
        ]
    );
    assert_eq!(binary["ce-region"], "K%C3%B6ln");
    for (mode, content_type) in [
        (Mode::Structured, "application/cloudevents+json"),
        (Mode::Batched, "application/cloudevents-batch+json"),
    ] {
        let headers = request(&form(mode, |_| ()), &message).headers;
        assert_eq!(
            names(&headers),
            [
                "content-type",
                "idempotency-key",
                "outbox-attempt",
                "webhook-id",
                "webhook-timestamp",
                "x-a"
            ]
        );
        assert_eq!(headers["content-type"], content_type);
        assert_eq!(headers["webhook-timestamp"], "1795300000");
        assert_eq!(headers["idempotency-key"], "\"order-7-paid\"");
        assert_eq!(headers["outbox-attempt"], "3");
    }
}

#[test]
fn a_request_for_several_messages_has_its_own_id_and_no_headers_of_single_messages() {
    let mut first = message("{\"n\": [1]}");
    first.headers = Some(r#"{"x-a": "1", "ce-region": "eu"}"#.to_owned());
    let second = message(" 2 ");
    let form = form(Mode::Batched, |_| ());
    let batch = [&first, &second].map(|message| form.check(message).expect("good"));
    let Request { headers, body, .. } = form.several(&batch, now()).expect("a request");
    assert_eq!(
        names(&headers),
        ["content-type", "webhook-id", "webhook-timestamp"]
    );
    let id = headers["webhook-id"].to_str().expect("ASCII");
    assert_ne!(id, first.message_id.to_string());
    assert_eq!(id.parse::<Uuid>().expect("an id").get_version_num(), 7);
    let one = |message| request(&form, message).body.into_owned();
    let (first, second) = (one(&first), one(&second));
    assert!(first.contains(r#""region":"eu""#));
    let (first, second) = (first.trim_end_matches(']'), second.trim_start_matches('['));
    assert_eq!(body, format!("{first},{second}"));
}

#[test]
fn headers_of_the_destination_win_in_each_mode() {
    let mut message = message("1");
    message.headers = Some(
        r#"{"X-A": "stored", "ce-region": "stored", "x-b": "stored", "Traceparent":
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}"#
            .to_owned(),
    );
    let fixed = |destination: &mut Destination| {
        destination.headers = [
            ("x-a", "fixed"),
            ("CE-Region", "fixed ä"),
            ("traceparent", "t"),
        ]
        .map(|(name, value)| (name.to_owned(), value.into()))
        .to_vec();
    };
    let Request { headers, .. } = request(&form(Mode::Binary, fixed), &message);
    assert_eq!(headers["x-a"], "fixed");
    assert!(headers["x-a"].is_sensitive());
    assert_eq!(headers["ce-region"], "fixed%20%C3%A4");
    assert_eq!(headers["x-b"], "stored");
    assert_eq!(headers["traceparent"], "t");
    for mode in [Mode::Structured, Mode::Batched] {
        let Request { headers, body, .. } = request(&form(mode, fixed), &message);
        assert_eq!(headers["x-a"], "fixed");
        assert_eq!(headers["traceparent"], "t");
        assert!(!headers.contains_key("ce-region"));
        assert!(body.contains(r#""region":"fixed ä""#) && !body.contains("stored"));
    }
}

#[test]
fn a_header_that_cannot_be_fixed_is_named_and_not_shown() {
    for (name, value) in [
        ("webhook-id", "hunter2"),
        ("x a", "hunter2"),
        ("x-a", "hunter2\r\nx-b: 1"),
        ("x-a", "hunter2\x7f"),
        ("ce-x-a", "hunter2"),
    ] {
        let mut destination = Destination::new("a", "http://a").expect("a URL");
        destination.headers = vec![(name.to_owned(), value.into())];
        let error = Form::new(&destination, &Config::default(), "/").expect_err(name);
        assert_eq!(error.key(), format!("destinations.a.headers.{name}"));
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }
    let form = form(Mode::Structured, |destination| {
        destination.headers = ["x-a", "ce-a"]
            .map(|n| (n.to_owned(), "hunter2".into()))
            .to_vec();
    });
    assert!(!format!("{form:?}").contains("hunter2"), "{form:?}");
}

#[test]
fn a_request_is_signed_by_the_secrets_of_its_destination_or_of_all() {
    let secrets = crate::config::parse_secrets("secrets", SECRETS).expect("secrets");
    let mut config = Config {
        secrets: secrets[1..].to_vec(),
        ..Config::default()
    };
    let mut destination = Destination::new("a", "http://a").expect("a URL");
    let message = message("1");
    let signatures = |destination: &Destination, config: &Config| {
        let form = Form::new(destination, config, "/").expect("a form");
        let headers = request(&form, &message).headers;
        let value = headers.get("webhook-signature").cloned();
        value.map(|value| value.to_str().expect("ASCII").to_owned())
    };
    let of_all = signatures(&destination, &config).expect("signed");
    destination.secrets = secrets;
    let own = signatures(&destination, &config).expect("signed");
    assert_eq!(own.split(' ').count(), 2);
    assert!(own.ends_with(&format!(" {of_all}")), "{own} {of_all}");
    config.secrets.clear();
    destination.secrets.clear();
    assert_eq!(signatures(&destination, &config), None);
}

#[test]
fn a_payload_that_is_too_large_is_not_sent() {
    let form = form(Mode::Structured, |destination| {
        destination.max_payload_bytes = Some(3);
    });
    assert!(form.check(&message("123")).is_ok());
    let failure = form.check(&message("1234")).expect_err("too large");
    assert_eq!(failure.code, ReasonCode::PayloadTooLarge);
    assert_eq!(
        failure.error,
        "the payload has 4 bytes: destination \"a\" takes at most 3"
    );
}

#[test]
fn headers_that_grow_too_large_when_encoded_are_not_sent() {
    let mut message = message("1");
    let value = "ä".repeat(4_000);
    message.headers =
        Some(serde_json::json!({ "ce-a": value, "ce-b": value, "ce-c": value }).to_string());
    let binary = form(Mode::Binary, |_| ());
    let checked = binary.check(&message).expect("a good message");
    let failure = binary.one(checked, now()).expect_err("too large");
    assert_eq!(failure.code, ReasonCode::InvalidHeader);
    let text = "bytes: at most 65536 can be sent";
    assert!(failure.error.ends_with(text), "{}", failure.error);
    assert!(
        request(&form(Mode::Structured, |_| ()), &message)
            .body
            .len()
            > 24_000
    );
}
