use super::*;

fn message() -> NewMessage {
    NewMessage::new("order.paid", &1).expect("a number is JSON")
}

#[test]
fn a_bad_message_is_refused_by_the_name_of_what_is_wrong() {
    let mut large = message();
    large.payload = "1".repeat(MAX_PAYLOAD_BYTES + 1);
    let mut topic_of_two_words = message();
    topic_of_two_words.topic = "order paid".to_owned();
    let mut topic_of_two_lines = message();
    topic_of_two_lines.topic = "order\npaid".to_owned();
    for (message, named) in [
        (large, "1048577 bytes"),
        (topic_of_two_words, "bad topic \"order paid\""),
        (topic_of_two_lines, "bad topic \"order\\npaid\""),
        (message().idempotency_key(""), "bad idempotency_key"),
        (message().ordering_key("a\0b"), "bad ordering_key"),
        (message().header("x-a", "1\r\nx-b: 2"), "bad header \"x-a\""),
        (message().header("x a", "1"), "bad header \"x a\""),
        (
            // 16 KiB in Rust, and three times as much in a request.
            message().header("ce-name", "ä".repeat(8_000)),
            "bad header \"ce-name\": the header would be sent with more than 33 KiB",
        ),
        (
            message().header("Webhook-Id", "1"),
            "bad header \"webhook-id\"",
        ),
    ] {
        let error = message.validate().expect_err(named).to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn debug_shows_no_payload_and_no_header() {
    let message = NewMessage::new("t", &"secret")
        .expect("JSON")
        .header("authorization", "secret");
    assert!(!format!("{message:?}").contains("secret"));
}
