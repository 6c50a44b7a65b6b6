//! What a request carries.

use super::*;

// --- What a request looks like ------------------------------------------------------------

/// Reads one request as raw bytes: the lines of its head, and its body.
fn read_raw(stream: &mut TcpStream) -> (Vec<String>, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let head: Vec<String> = (&mut reader)
        .lines()
        .map(|line| line.expect("a line"))
        .take_while(|line| !line.is_empty())
        .collect();
    let length = head
        .iter()
        .find_map(|line| {
            line.to_lowercase()
                .strip_prefix("content-length:")
                .map(str::to_owned)
        })
        .expect("a length");
    let mut body = vec![0; length.trim().parse().expect("a number")];
    reader.read_exact(&mut body).expect("a body");
    (head, body)
}

#[test]
fn a_request_has_these_headers_and_no_others() {
    let database = Database::new();
    let (sender, requests) = mpsc::channel();
    let sender = Mutex::new(sender);
    let address = listen(move |mut stream| {
        let request = read_raw(&mut stream);
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(request).expect("the test waits");
        let _ = stream.write_all(&status(200));
    });
    let message = NewMessage::new("order.paid", &json!({ "n": 1 }))
        .expect("JSON")
        .idempotency_key("order \"7\"\\ä")
        .ordering_key("Straße 7")
        .header("X-Shop", "Berlin")
        .header("ce-region", "eu")
        .header("authorization", "Bearer t")
        .trace_context(
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            Some("vendor=1"),
        );
    let id = message.message_id().to_string();
    let before = SystemTime::now();
    let sequence = database.enqueue_message(message);
    let relay = relay(&database)
        .url(&format!("http://{address}/hooks/in?a=b"))
        .start()
        .expect("a relay");
    let (head, body) = requests
        .recv_timeout(Duration::from_secs(30))
        .expect("a request");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);

    assert_eq!(head[0], "POST /hooks/in?a=b HTTP/1.1");
    assert_eq!(body, br#"{"n":1}"#);
    let mut headers: HashMap<&str, &str> = HashMap::new();
    for line in &head[1..] {
        let (name, value) = line.split_once(": ").expect("a header");
        assert_eq!(
            headers.insert(name, value),
            None,
            "the header {name} repeats"
        );
    }
    let mut take = |name: &str| headers.remove(name).unwrap_or_else(|| panic!("no {name}"));

    // Times by the clock of one machine: this attempt's in Unix seconds, the message's in RFC 3339.
    let unix = |time: SystemTime| {
        time.duration_since(UNIX_EPOCH)
            .expect("after 1970")
            .as_secs()
    };
    let timestamp: u64 = take("webhook-timestamp").parse().expect("Unix seconds");
    assert!((unix(before)..=unix(SystemTime::now())).contains(&timestamp));
    let time = take("ce-time");
    assert!(
        database.number(&format!(
            "SELECT count(*) FROM {{o}}_ledger WHERE created_at = '{time}'::timestamptz"
        )) == 1,
        "{time} is the time of the enqueue"
    );
    assert!(time.ends_with('Z') && time.contains('T'), "{time}");

    // The same trace and flags, and a new span for this attempt.
    let traceparent = take("traceparent");
    assert_eq!(traceparent[..36], *"00-0af7651916cd43dd8448eb211c80319c-");
    assert_ne!(traceparent[36..52], *"b7ad6b7169203331");
    assert_eq!(traceparent[52..], *"-01");

    let sequence = sequence.to_string();
    let source = format!("diesel-outbox/{}", database.name());
    let agent = format!("diesel-outbox/{}", env!("CARGO_PKG_VERSION"));
    let host = address.to_string();
    for (name, expected) in [
        ("host", host.as_str()),
        ("content-type", "application/json"),
        ("content-length", "7"),
        ("webhook-id", &id),
        ("idempotency-key", r#""order \"7\"\\%C3%A4""#),
        ("outbox-attempt", "1"),
        ("user-agent", &agent),
        ("ce-specversion", "1.0"),
        ("ce-id", &id),
        ("ce-source", &source),
        ("ce-type", "order.paid"),
        ("ce-sequence", &sequence),
        ("ce-partitionkey", "Stra%C3%9Fe%207"),
        ("ce-region", "eu"),
        ("x-shop", "Berlin"),
        ("authorization", "Bearer t"),
        ("tracestate", "vendor=1"),
        ("accept", "*/*"),
    ] {
        assert_eq!(take(name), expected, "{name}");
    }
    assert_eq!(headers, HashMap::new(), "unexpected headers");
}

#[test]
fn the_body_is_what_was_stored_byte_for_byte() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let payload = " { \"b\" : 1.0e+2 ,\t\"a\":[ ],\n\r\n \"b\": \"\\u00e4\u{e4}\\/ \u{1f600}\" } ";
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload) VALUES ('order.paid', '{payload}')"
    ));
    // A timeout would be retried sooner.
    let relay = relay(&database)
        .lease(Duration::from_secs(120))
        .send_timeout(Duration::from_secs(30))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(
        String::from_utf8(receiver.requests()[0].body.clone()).as_deref(),
        Ok(payload)
    );
}

#[test]
fn a_topic_and_keys_in_any_language_arrive_percent_encoded() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, idempotency_key)
         VALUES ('заказ.100%', '1', '東京', 'ключ')",
    );
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let request: &Request = &receiver.requests()[0];
    assert_eq!(
        request.header("ce-type"),
        Some("%D0%B7%D0%B0%D0%BA%D0%B0%D0%B7.100%25")
    );
    assert_eq!(
        request.header("ce-partitionkey"),
        Some("%E6%9D%B1%E4%BA%AC")
    );
    assert_eq!(
        request.header("idempotency-key"),
        Some("\"%D0%BA%D0%BB%D1%8E%D1%87\"")
    );
}

#[test]
fn a_repeat_has_the_same_ids_and_the_next_attempts_number() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("outbox-attempt") {
        Some("1") => 500,
        _ => 200,
    });
    database.enqueue("order.paid", json!(1));
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let requests = receiver.requests();
    for name in [
        "webhook-id",
        "ce-id",
        "ce-time",
        "ce-sequence",
        "idempotency-key",
    ] {
        assert_eq!(requests[0].header(name), requests[1].header(name), "{name}");
    }
    assert_eq!(requests[1].header("outbox-attempt"), Some("2"));
}

#[test]
fn stored_headers_that_cannot_be_sent_kill_the_message_unsent() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for headers in [
        r#"{"webhook-id": "1"}"#,
        r#"{"Content-Length": "1"}"#,
        r#"{"CE-Type": "other"}"#,
        r#"{"outbox-attempt": "1"}"#,
        r#"{"x-a": "1\r\nx-b: 2"}"#,
        r#"{"x a": "1"}"#,
        r#"{"x-a": 1}"#,
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, headers) VALUES ('order.paid', '1', '{headers}')"
        ));
    }
    let relay = relay(&database)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are dead-lettered", || {
        database.count("dead") == 7
    });
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_dead WHERE reason = 'INVALID_HEADER'"),
        7
    );
    assert_eq!(receiver.count(), 0);
    database.execute(
        r#"INSERT INTO {o} (topic, payload, headers) VALUES ('order.paid', '1', '{"X-A": "1"}')"#,
    );
    eventually("the next message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(receiver.requests()[0].header("x-a"), Some("1"));
    end(&relay);
}
