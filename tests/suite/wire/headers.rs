//! Headers that destinations and messages add.

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
fn what_a_message_must_not_set_is_its_end() {
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
