use proptest::prelude::{Just, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use serde::{Deserialize, Serialize};

use super::*;
use crate::event::{DecodeError, Event};
use crate::receive::attributes::rfc3339;

const DOCUMENT: &str = "application/cloudevents+json";
const BATCH: &str = "application/cloudevents-batch+json";

fn headers(content_type: &str) -> Headers {
    Headers::new([("Content-Type", content_type)])
}

fn binary(more: &[(&str, &str)]) -> Headers {
    let fixed = [
        ("Content-Type", "application/json; charset=utf-8"),
        ("CE-SpecVersion", "1.0"),
        ("CE-Id", "1"),
        ("CE-Source", "/shop"),
        ("CE-Type", "order.paid"),
    ];
    Headers::new(fixed.iter().chain(more).copied())
}

/// A document with the required attributes and these members.
fn document(members: &str) -> String {
    format!(r#"{{"specversion":"1.0","id":"1","source":"/shop","type":"order.paid"{members}}}"#)
}

fn error_of(content_type: &str, body: &str) -> String {
    let error = events(&headers(content_type), body.as_bytes()).expect_err(body);
    for text in [error.to_string(), format!("{error:?}")] {
        assert!(!text.contains("hunter2"), "{text}");
    }
    error.to_string()
}

#[test]
fn a_document_is_an_event_with_its_data_byte_for_byte() {
    let body = document(
        r#", "subject" : "a \"b\"","time":"2026-11-20T20:00:00.25+01:30","dataschema":"/s",
            "region":"K\u00f6ln","count":7,"is\u0061":true,"gone":null,"data": { "n" : 1.0e+2 } "#,
    );
    let headers = headers("Application/CloudEvents+JSON; charset=utf-8");
    let events = events(&headers, body.as_bytes()).expect("an event");
    let [event] = events.as_slice() else {
        panic!("{events:?}")
    };
    assert_eq!(
        (
            event.id.as_ref(),
            event.source.as_ref(),
            event.event_type.as_ref()
        ),
        ("1", "/shop", "order.paid")
    );
    assert_eq!(event.subject.as_deref(), Some("a \"b\""));
    assert_eq!(event.dataschema.as_deref(), Some("/s"));
    assert_eq!(
        event.time,
        Some(humantime::parse_rfc3339("2026-11-20T18:30:00.25Z").expect("a time"))
    );
    let extensions: Vec<(&str, &str)> = event
        .extensions
        .iter()
        .map(|(name, value)| (name.as_ref(), value.as_ref()))
        .collect();
    assert_eq!(
        extensions,
        [("count", "7"), ("isa", "true"), ("region", "Köln")]
    );
    assert_eq!(event.json(), Some(r#"{ "n" : 1.0e+2 }"#));
    assert!(matches!(event.id, Cow::Borrowed(_)));
    assert_eq!(&event.clone().into_owned(), event);
}

#[test]
fn data_is_json_bytes_text_or_nothing() {
    let bytes = |bytes: &'static [u8]| Some(Data::Bytes(Cow::Borrowed(bytes)));
    for (members, data) in [
        ("", None),
        (r#","data":null"#, Some(Data::Json(Cow::Borrowed("null")))),
        (r#","data":"a""#, Some(Data::Json(Cow::Borrowed("\"a\"")))),
        (
            r#","datacontenttype":"text/json","data":"a""#,
            Some(Data::Json(Cow::Borrowed("\"a\""))),
        ),
        (
            r#","datacontenttype":"a/b+JSON; c=d","data":1"#,
            Some(Data::Json(Cow::Borrowed("1"))),
        ),
        (
            r#","datacontenttype":"text/xml","data":"<a b=\"c\"/>""#,
            bytes(b"<a b=\"c\"/>"),
        ),
        (
            r#","data":"<a/>","datacontenttype":"text/xml""#,
            bytes(b"<a/>"),
        ),
        (
            r#","datacontenttype":"text/xml","data":{"a":1}"#,
            Some(Data::Json(Cow::Borrowed(r#"{"a":1}"#))),
        ),
        (r#","data_base64":"AP8=""#, bytes(b"\x00\xff")),
        (r#","data_base64":null"#, None),
    ] {
        let (headers, body) = (headers(DOCUMENT), document(members));
        let events = events(&headers, body.as_bytes()).expect("an event");
        assert_eq!(events[0].data, data, "{members}");
    }
    for (content_type, body, data) in [
        (
            "application/json",
            " [1] ",
            Some(Data::Json(Cow::Borrowed("[1]"))),
        ),
        ("application/json", "", None),
        ("text/plain", "[1", bytes(b"[1")),
    ] {
        let headers = Headers::new(
            [
                ("content-type", content_type),
                ("ce-specversion", "1.0"),
                ("ce-id", "1"),
            ]
            .into_iter()
            .chain([("ce-source", "/"), ("ce-type", "a")]),
        );
        let events = events(&headers, body.as_bytes()).expect("an event");
        assert_eq!(events[0].data, data, "{content_type}: {body}");
    }
}

#[test]
fn an_invalid_event_is_refused_by_name_and_not_quoted() {
    for (body, said) in [
        ("hunter2".to_owned(), "invalid JSON at line 1, column 1"),
        ("\"hunter2\"".to_owned(), "unexpected JSON shape"),
        ("[]".to_owned(), "unexpected JSON shape"),
        (document(r#","data":hunter2"#), "invalid JSON"),
        (document("") + "hunter2", "invalid JSON"),
        ("{}".to_owned(), "the attribute specversion is missing"),
        (
            document("").replace("1.0", "hunter2"),
            "the attribute specversion is not 1.0",
        ),
        (
            document("").replace("\"id\"", "\"ide\""),
            "the attribute id is missing",
        ),
        (
            document("").replace("\"1\"", "null"),
            "the attribute id is missing",
        ),
        (
            document("").replace("\"1\"", "7"),
            "the attribute id is not a text",
        ),
        (
            document("").replace("\"1\"", "\"\""),
            "the attribute id is empty",
        ),
        (
            document("").replace("\"1\"", r#""\ud800""#),
            "the attribute id is not a Unicode text",
        ),
        (
            document("").replace("/shop", ""),
            "the attribute source is empty",
        ),
        (
            document(r#","id":"hunter2""#),
            "the attribute id occurs twice",
        ),
        (
            document(r#","\u0069d":"hunter2""#),
            "the attribute id occurs twice",
        ),
        (
            document(r#","data":1,"data":"hunter2""#),
            "the attribute data occurs twice",
        ),
        (
            document(r#","data":1,"data_base64":"AA==""#),
            "the attribute data_base64 occurs together with",
        ),
        (
            document(r#","data_base64":"hunter2!""#),
            "the attribute data_base64 is not base64",
        ),
        (
            document(r#","data_base64":[1]"#),
            "the attribute data_base64 is not a text",
        ),
        (
            document(r#","subject":["hunter2"]"#),
            "the attribute subject is not a text",
        ),
        (
            document(r#","subject":"""#),
            "the attribute subject is empty",
        ),
        (
            document(r#","a":{"b":"hunter2"}"#),
            "the attribute a is not a text, number or boolean",
        ),
        (document(r#","hunter2-":"1""#), "the name of an attribute"),
        (document(r#","Id":"1""#), "the name of an attribute"),
        (document(r#","":"1""#), "the name of an attribute"),
        (
            document(r#","time":"hunter2""#),
            "the attribute time is not an RFC 3339 time",
        ),
    ] {
        let error = error_of(DOCUMENT, &body);
        assert!(error.starts_with(said), "{body}: {error}");
    }
    let error = error_of(
        BATCH,
        &format!("[{},{}]", document(""), document(r#","id":"2""#)),
    );
    assert_eq!(
        error,
        "event 1 (counted from 0): the attribute id occurs twice"
    );
    assert!(error_of(BATCH, &document("")).starts_with("unexpected JSON shape"));
    assert!(error_of("application/cloudevents+xml", "<a/>").contains("content type"));
    assert_eq!(
        error_of("application/json", "1"),
        "the attribute specversion is missing"
    );
    let headers = headers(DOCUMENT);
    let latin = events(&headers, b"{\"id\":\"\xe4\"}");
    assert_eq!(latin, Err(CloudEventError::Utf8));
}

#[test]
fn bad_headers_of_binary_mode_are_refused_by_name() {
    for (header, said) in [
        (("ce-id", "2"), "the attribute id occurs twice"),
        (("ce-a-b", "1"), "the name of an attribute"),
        (("ce-", "1"), "the name of an attribute"),
        (("ce-data", "1"), "the name of an attribute"),
        (("ce-a", "100%"), "the attribute a has a % without"),
        (("ce-a", "%C0%A0"), "the attribute a is not UTF-8"),
        (("ce-subject", ""), "the attribute subject is empty"),
        (
            ("ce-datacontenttype", "text/xml"),
            "the attribute datacontenttype occurs twice",
        ),
        (("content-type", "text/xml"), "the content type"),
    ] {
        let error = events(&binary(&[header]), b"1").expect_err(said);
        assert!(error.to_string().starts_with(said), "{header:?}: {error}");
    }
    for body in [&b"{"[..], b"1 2", b"\xff"] {
        assert!(events(&binary(&[]), body).is_err(), "{body:?}");
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct OrderPaid {
    order_id: i64,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
    const VERSION: u32 = 2;

    fn decode(version: u32, json: &str) -> Result<Self, DecodeError> {
        match version {
            1 => Ok(Self {
                order_id: serde_json::from_str(json)?,
            }),
            version => crate::decode_current(version, json),
        }
    }
}

/// R33.
#[test]
fn an_event_is_decoded_as_the_version_that_it_says_it_is_of() {
    let decode = |more: &[(&str, &str)], body: &str| {
        let headers = binary(more);
        let events = events(&headers, body.as_bytes()).expect("an event");
        events[0].decode::<OrderPaid>()
    };
    let paid = Ok(OrderPaid { order_id: 7 });
    assert_eq!(decode(&[], "7"), paid);
    assert_eq!(
        decode(&[("ce-dataversion", "2")], r#"{"order_id":7}"#),
        paid
    );
    for version in ["0", "3", "two", "-1"] {
        let error = decode(&[("ce-dataversion", version)], "7");
        assert!(
            matches!(error, Err(DecodeError::Version { .. })),
            "{error:?}"
        );
    }
    assert_eq!(decode(&[], ""), Err(DecodeError::NoJson));
    let headers = headers(DOCUMENT);
    let body = document("").replace("order.paid", "order.sent");
    let other = events(&headers, body.as_bytes()).expect("an event");
    assert_eq!(
        other[0]
            .decode::<OrderPaid>()
            .expect_err("another")
            .to_string(),
        "the topic is \"order.sent\", expected \"order.paid\""
    );
}

#[test]
fn the_keys_of_a_message_are_at_hand() {
    let more = [
        ("ce-partitionkey", "order%207"),
        ("idempotency-key", r#""a \"b\" %20""#),
    ];
    let one = binary(&more);
    let one = events(&one, b"1").expect("an event");
    assert_eq!(one[0].ordering_key(), Some("order 7"));
    assert_eq!(one[0].idempotency_key(), Some(r#"a "b" %20"#));
    let bare = binary(&[("idempotency-key", "a")]);
    assert_eq!(
        events(&bare, b"1").expect("one")[0].idempotency_key(),
        Some("a")
    );

    let headers = Headers::new([("content-type", BATCH), ("idempotency-key", "\"a\"")]);
    let body = format!("[{},{}]", document(""), document(""));
    let several = events(&headers, body.as_bytes()).expect("two");
    assert_eq!(several.len(), 2);
    assert!(
        several
            .iter()
            .all(|event| event.idempotency_key().is_none())
    );
    assert_eq!(several[0].ordering_key(), None);
}

#[test]
fn debug_shows_no_data() {
    let (headers, body) = (
        headers(DOCUMENT),
        document(r#","a":"hunter2","data":"hunter2""#),
    );
    let events = events(&headers, body.as_bytes()).expect("an event");
    let shown = format!("{events:?} {:?}", events[0].data);
    assert!(
        !shown.contains("hunter2") && shown.contains("9 bytes"),
        "{shown}"
    );
}

proptest! {
    /// R33.
    #[test]
    fn any_bytes_are_events_or_refused(
        content_type in prop_oneof![Just(DOCUMENT), Just(BATCH), Just("application/json")],
        body in proptest::collection::vec(any::<u8>(), 0..100),
        name in "(?s).{0,6}",
        value in proptest::collection::vec(any::<u8>(), 0..20),
    ) {
        let _ = events(&headers(content_type), &body);
        let named = Headers::new([
            ("content-type".to_owned(), content_type.as_bytes().to_vec()),
            (format!("ce-{name}"), value),
        ]);
        let _ = events(&named, &body);
    }

    #[test]
    fn anything_like_a_document_is_an_event_or_refused(
        members in proptest::collection::vec(
            ("(id|data|data_base64|time|a)", "(\"[^\"\\\\]{0,9}\"|null|-?[0-9]{1,3}|\\[\\]|\\{\"a\":1\\}|x)"),
            0..4,
        ),
        time in "[0-9TZ:.+-]{0,30}",
    ) {
        let members: String = members.iter().map(|(n, v)| format!(r#","{n}":{v}"#)).collect();
        let body = document(&members);
        let _ = events(&headers(DOCUMENT), body.as_bytes());
        prop_assert_eq!(rfc3339(&time).is_some(), rfc3339(&time.to_lowercase()).is_some());
        let bodies = format!("[{body},{body}]");
        let one = events(&headers(DOCUMENT), body.as_bytes()).is_ok();
        prop_assert!(one == events(&headers(BATCH), bodies.as_bytes()).is_ok());
    }
}
