//! Headers that destinations and messages add.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use diesel_outbox::HttpDispatcher;
use diesel_outbox::config::Mode;

use super::{MODES, delivered, destination};
use crate::support::{Database, Receiver};

#[test]
fn headers_of_a_destination_win_over_stored_ones() {
    for mode in MODES {
        let database = Database::new();
        let receiver = Receiver::ok();
        database.execute(
            r#"INSERT INTO {o} (topic, payload, headers) VALUES ('order.paid', '1',
                '{"Authorization": "stored", "X-Shop": "stored", "ce-region": "stored"}')"#,
        );
        let mut destination = destination(&receiver.url(), mode);
        destination.headers = [("authorization", "Bearer fixed"), ("CE-Region", "Köln")]
            .map(|(name, value)| (name.to_owned(), value.into()))
            .to_vec();
        let requests = delivered(&database, &receiver, destination);
        let request = &requests[0];
        assert_eq!(request.header("authorization"), Some("Bearer fixed"));
        assert_eq!(request.header("x-shop"), Some("stored"));
        let region = request.header("ce-region").map(str::to_owned);
        let document = String::from_utf8_lossy(&request.body);
        match mode {
            Mode::Binary => assert_eq!(region.as_deref(), Some("K%C3%B6ln")),
            _ => assert!(region.is_none() && document.contains(r#""region":"Köln""#)),
        }
        assert!(!document.contains("stored"));
    }
}

#[test]
fn a_message_with_a_forbidden_header_is_dead_lettered() {
    let stored = [
        r#"{"Webhook-Signature": "v1,AAAA"}"#,
        r#"{"WEBHOOK-ID": "1"}"#,
        r#"{"webhook-timestamp": "1"}"#,
        r#"{"Idempotency-Key": "1"}"#,
        r#"{"Content-Type": "text/plain"}"#,
        r#"{"CE-Source": "/elsewhere"}"#,
        r#"{"ce-data": "1"}"#,
        r#"{"ce-too-many-words": "1"}"#,
        r#"{"ce-a": "1\r\nwebhook-signature: v1,AAAA"}"#,
        r#"{"x-a": "1\nwebhook-signature: v1,AAAA"}"#,
        r#"{"x-a: 1\r\nwebhook-signature": "v1,AAAA"}"#,
        r#"{"x-a": "1", "X-A": "2"}"#,
    ];
    for mode in MODES {
        let database = Database::new();
        let receiver = Receiver::ok();
        for headers in stored {
            database.execute(&format!(
                "INSERT INTO {{o}} (topic, payload, headers) VALUES ('order.paid', '1', '{headers}')"
            ));
        }
        delivered(&database, &receiver, destination(&receiver.url(), mode));
        assert_eq!(
            database.number("SELECT count(*) FROM {o}_dead WHERE reason = 'INVALID_HEADER'"),
            i64::try_from(stored.len()).expect("a few"),
            "{mode}"
        );
        assert_eq!(receiver.count(), 0);
    }
}

/// R50: a header that no receiver could get is the message's failure, and names the header.
#[test]
fn a_header_that_is_too_long_to_send_is_the_messages_end_and_not_the_receivers_failure() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for headers in [
        "json_build_object('x-long', repeat('a', 40000))",
        // Encoding triples the length.
        "json_build_object('ce-long', repeat('ä', 8000))",
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, headers) VALUES ('order.paid', '1', {headers})"
        ));
    }
    database.execute("INSERT INTO {o} (topic, payload) VALUES ('order.paid', '1')");
    let destination = destination(&receiver.url(), Mode::Binary);
    let requests = delivered(&database, &receiver, destination);
    assert_eq!(requests.len(), 1);
    let dead = database.text(
        "SELECT string_agg(reason || ' ' || last_error, '; ' ORDER BY sequence) FROM {o}_dead",
    );
    assert_eq!(
        dead.as_deref(),
        Some(
            "INVALID_HEADER stored header \"x-long\": the header would be sent with more than 33 KiB; \
             INVALID_HEADER stored header \"ce-long\": the header would be sent with more than 33 KiB"
        )
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 0);
}

/// R50
#[test]
fn user_and_password_of_a_url_reach_the_receiver_as_they_are() {
    for (user, sent) in [
        ("relay:p%40ss%2Fword", "relay:p@ss/word"),
        ("relay:a=b", "relay:a=b"),
        ("relay:a%3Ab:c", "relay:a:b:c"),
        ("relay:gr%C3%BC%C3%9Fe", "relay:grüße"),
        ("relay:100%25", "relay:100%"),
    ] {
        let database = Database::new();
        let receiver = Receiver::ok();
        database.execute("INSERT INTO {o} (topic, payload) VALUES ('order.paid', '1')");
        let url = receiver.url().replace("://", &format!("://{user}@"));
        let requests = delivered(&database, &receiver, destination(&url, Mode::Binary));
        let value = requests[0].header("authorization").expect("a header");
        let value = value.strip_prefix("Basic ").expect("Basic");
        let value = BASE64_STANDARD.decode(value).expect("base64");
        assert_eq!(String::from_utf8_lossy(&value), sent, "{user}");
    }
    let error = HttpDispatcher::new(&{
        let mut config = diesel_outbox::config::Config::default();
        config
            .set("OUTBOX_URL", "http://a%3Ab:c@shop.example/")
            .expect("a URL");
        config
    });
    let error = error.expect_err("a user with a colon").to_string();
    assert!(error.contains("user name contains a colon"), "{error}");
}
