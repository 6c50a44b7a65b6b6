//! `run`: its signals and its log.

use super::*;

/// R27.
#[test]
fn a_relay_that_is_not_enabled_sends_nothing() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue("order.paid", json!(1));
    let disabled = |arguments: &[&str]| {
        database
            .binary(arguments)
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_ENABLED", "false")
    };
    let text = finish(disabled(&["drain"])).code(0).stdout;
    assert!(text.contains("OUTBOX_ENABLED is false"), "{text}");

    let mut relay = Running::start(disabled(&["run"]));
    relay.wait_for_log("relay_disabled");
    // The relay runs and has polled many times: it renews its lease after a second and polls every 50 ms.
    eventually("the relay has renewed its lease", || {
        database.number("SELECT count(*) FROM {o}_lease WHERE renewed_at > started_at") == 1
    });
    for command in ["leases", "status"] {
        let text = finish(database.binary(&[command])).code(0).stdout;
        assert!(text.contains("switched off"), "{text}");
    }
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0));
    assert_eq!(receiver.count(), 0);
    assert_eq!(database.count("pending"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

// --- Signals ------------------------------------------------------------------------------

/// A relay with a send in flight that ends only when the gate is opened.
fn sending(database: &Database, shutdown_timeout: &str) -> (Running, Receiver, Gate) {
    let (receiver, gate) = Receiver::held();
    database.enqueue("order.paid", json!(1));
    let relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_SEND_TIMEOUT", "100s")
            .with("OUTBOX_LEASE", "300s")
            .with("OUTBOX_SHUTDOWN_TIMEOUT", shutdown_timeout),
    );
    receiver.wait_for(1);
    (relay, receiver, gate)
}

#[test]
fn the_first_signal_lets_sends_finish() {
    for signal in ["TERM", "INT"] {
        let database = Database::new();
        let (mut relay, _receiver, gate) = sending(&database, "100s");
        relay.signal(signal);
        relay.wait_for_log("event=signal");
        assert!(relay.is_running());
        gate.open();
        assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
        assert_eq!(database.count("delivered"), 1);
        relay.wait_for_log("relay_stopped");
    }
}

#[test]
fn the_second_signal_ends_it_at_once() {
    let database = Database::new();
    let (mut relay, _receiver, _gate) = sending(&database, "100s");
    relay.signal("TERM");
    relay.wait_for_log("event=signal");
    let began = Instant::now();
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(1), "{}", relay.log());
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "the relay did not wait for the send"
    );
    assert_eq!(database.count("sending"), 1);
}

#[test]
fn a_shutdown_that_does_not_come_to_its_end_in_time_is_a_failure() {
    let database = Database::new();
    let (mut relay, _receiver, _gate) = sending(&database, "300ms");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(1), "{}", relay.log());
    assert!(
        relay.log().contains("1 messages were not settled"),
        "{}",
        relay.log()
    );
}

// --- Logs ---------------------------------------------------------------------------------

/// R30, R36, R37.
#[test]
fn json_logs_carry_the_event_names_and_never_what_is_private() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let receiver = Receiver::start(move |request, stream| {
        let is_first = request.header("outbox-attempt") == Some("1");
        let code = match request.json()["case"].as_str() {
            Some("retry") if is_first => 500,
            Some("dead") => 400,
            Some("conflict") => {
                // Until the test has assigned the message to another lease.
                pass();
                200
            }
            _ => 200,
        };
        stream.write_all(&status(code))
    });
    let mut database_url = url::Url::parse(&database.url).expect("a URL");
    database_url
        .set_password(Some("sauce-database"))
        .expect("a URL with a host");
    let url = receiver
        .url()
        .replace("http://", "http://shop:sauce-password@")
        + "/services/T0/sauce-path?t=sauce-query";
    let mut relay = Running::start(
        database
            .binary(&["run"])
            .with("DATABASE_URL", database_url.as_str())
            .with("OUTBOX_URL", &url)
            .with("OUTBOX_LOG_FORMAT", "json")
            .with("OUTBOX_SEND_TIMEOUT", "50s")
            .with("OUTBOX_LEASE", "150s")
            .with("RUST_LOG", "debug"),
    );
    let message = |case: &str, key: &str| {
        let payload = json!({ "case": case, "private": "sauce-payload" });
        NewMessage::new("order.paid", &payload)
            .expect("JSON")
            .idempotency_key(key)
            .tenant_id(uuid::Uuid::from_u128(7))
            .header("x-token", "sauce-header")
    };
    for case in ["delivered", "retry", "dead"] {
        database.enqueue_message(message(case, &format!("sauce-key-{case}")));
    }
    eventually("the messages are settled", || {
        database.count("delivered") == 2 && database.count("dead") == 1
    });
    database.enqueue_message(message("delivered", "sauce-key-delivered"));
    relay.wait_for_log("\"event\":\"dedup_hit\"");
    database.enqueue_message(message("conflict", "sauce-key-conflict"));
    receiver.wait_for(5);
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('other:1', now() + interval '1 h')",
    );
    database.execute("UPDATE {o} SET locked_by = (SELECT max(id) FROM {o}_lease)");
    gate.open();
    relay.wait_for_log("\"event\":\"conflict\"");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    eventually("the log is read to its end", || {
        relay.log().contains("relay_stopped")
    });

    let log = relay.log();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for event in [
        "relay_started",
        "delivered",
        "retry",
        "dead",
        "dedup_hit",
        "conflict",
        "signal",
        "relay_stopped",
    ] {
        assert!(
            lines.iter().any(|line| line["event"] == event),
            "{event}: {log}"
        );
    }
    for line in &lines {
        for key in ["time", "level", "message", "target"] {
            assert!(line[key].is_string(), "{line}");
        }
        // Only our own lines have an event.
        let is_ours = line["target"]
            .as_str()
            .is_some_and(|target| target.starts_with("diesel_outbox"));
        let is_event = line["event"].as_str().is_some_and(|event| {
            event
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        });
        assert_eq!(is_ours, is_event, "{line}");
    }
    let line = |event: &str| {
        lines
            .iter()
            .find(|line| line["event"] == event)
            .expect("it is there")
    };
    assert_eq!(line("delivered")["status"], "delivered");
    assert_eq!(line("delivered")["topic"], "order.paid");
    assert_eq!(line("delivered")["attempts"], 1);
    assert_eq!(line("delivered")["key"].as_str().map(str::len), Some(16));
    assert_eq!(line("retry")["reason"], "SERVER_ERROR");
    assert_eq!(line("retry")["status"], "retrying");
    assert_eq!(line("dead")["reason"], "REJECTED");
    assert_eq!(line("dead")["status"], "dead");
    // R36.
    for event in ["delivered", "retry", "dead", "dedup_hit", "conflict"] {
        let tenant = &line(event)["tenant"];
        assert_eq!(tenant, "00000000-0000-0000-0000-000000000007", "{event}");
    }
    // R37: the lease that holds the message now.
    let conflict = line("conflict");
    for (name, value) in [
        ("destination", json!("default")),
        ("outcome", json!("delivered")),
        ("status", json!("sending")),
        ("attempts", json!(0)),
        ("holder", json!("other:1")),
    ] {
        assert_eq!(conflict[name], value, "{conflict}");
    }
    assert!(conflict["holder_lease"].as_i64() > conflict["lease"].as_i64());
    assert_eq!(conflict["message_id"].as_str().map(str::len), Some(36));
    let private: Vec<&Value> = lines
        .iter()
        .filter(|line| line.to_string().contains("sauce"))
        .collect();
    assert!(private.is_empty(), "private values in the log: {private:?}");
}

/// R30. Only an operator holds a lock for so long: the relay reports that its statement was too slow.
#[test]
fn a_statement_that_takes_too_long_is_a_db_timeout() {
    let database = Database::new();
    let relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", "http://127.0.0.1:9/")
            .with("RUST_LOG", "diesel_outbox=debug"),
    );
    relay.wait_for_log("event=relay_started");
    let mut conn = database.connect();
    let lock = format!("BEGIN; LOCK TABLE {}", database.name());
    conn.batch_execute(&lock).expect("locked");
    relay.wait_for_log("event=db_timeout");
    conn.batch_execute("ROLLBACK").expect("unlocked");
    relay.wait_for_log("event=db_recovered");
    assert!(!relay.log().contains("event=db_error"), "{}", relay.log());
    // An error that only quotes a timeout, raised by a trigger, does not count.
    database.execute(
        "CREATE FUNCTION {o}_refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE 'canceling statement due to lock timeout'; END $$",
    );
    database.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON {o} FOR EACH ROW EXECUTE FUNCTION {o}_refuse()",
    );
    let before = relay.log().matches("event=db_timeout").count();
    database.enqueue("order.paid", json!(1));
    relay.wait_for_log("event=db_error");
    assert_eq!(relay.log().matches("event=db_timeout").count(), before);
}

#[test]
fn text_logs_have_one_line_for_each_event() {
    let database = Database::new();
    // The receiver's response tries to forge a log line.
    let receiver = Receiver::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 500 No\r\ncontent-length: 22\r\n\r\n\nforged event=delivered")
    });
    database.enqueue("order.paid", json!(1));
    let relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_BACKOFF", "1h"),
    );
    relay.wait_for_log("event=retry");
    let log = relay.log();
    assert!(
        log.lines().all(|line| line.contains(" event=")),
        "a line without an event: {log}"
    );
    assert!(!log.contains("event=delivered"), "{log}");
}
