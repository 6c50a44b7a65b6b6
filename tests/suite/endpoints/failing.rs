//! Endpoints whose sends fail: their attempts, what disables them, and what ends it.

use super::*;

/// R46: a failure affects only the messages of its row.
#[test]
fn a_failed_send_is_retried_at_its_destination_only() {
    let database = Database::new();
    let (good, bad) = (Receiver::ok(), Receiver::answering(|_| 500));
    put(&database, &Endpoint::new("good", good.url()));
    put(&database, &Endpoint::new("bad", bad.url()));
    let relay = relay(&database)
        .configure(|config| config.endpoint_max_attempts = 3)
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("both messages are settled", || {
        (database.count("delivered"), database.count("dead")) == (1, 1)
    });
    end(&relay);
    assert_eq!((good.count(), bad.count()), (1, 3));
    assert_eq!(ledger(&database), "bad dead SERVER_ERROR, good delivered");
}

/// R46: a message for a single destination gets a row that names it only after it fails.
#[test]
fn attempts_are_counted_over_the_row_that_follows() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    put(&database, &Endpoint::new("only", receiver.url()));
    let relay = relay(&database)
        .configure(|config| config.endpoint_max_attempts = 4)
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    assert_eq!(receiver.count(), 4);
    assert_eq!(
        database
            .text("SELECT destination || ' ' || attempts FROM {o}_dead")
            .as_deref(),
        Some("only 4")
    );
    let attempts: Vec<String> = receiver
        .requests()
        .iter()
        .filter_map(|request| request.header("outbox-attempt").map(str::to_owned))
        .collect();
    assert_eq!(attempts, ["1", "2", "3", "4"]);
}

/// R46, R56: the customer has removed the endpoint. The messages wait, in case that was a mistake.
#[test]
fn a_destination_that_is_gone_is_disabled_and_its_messages_wait() {
    let database = Database::new();
    let (receiver, alarms) = (Receiver::answering(|_| 410), Receiver::ok());
    put(&database, &Endpoint::new("gone", receiver.url()));
    put(
        &database,
        &Endpoint::new("alarms", alarms.url()).topics(["outbox.*"]),
    );
    let relay = relay(&database).own_events(true).start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("the destination is disabled", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE NOT enabled") == 1
    });
    let told = alarms.wait_for(1);
    end(&relay);
    assert_eq!(told[0].header("ce-type"), Some("outbox.endpoint.disabled"));
    let reason = told[0].json()["reason"].as_str().map(str::to_owned);
    assert!(reason.is_some_and(|reason| reason.starts_with("GONE")));
    let stored = "SELECT disabled_reason FROM {o}_endpoint WHERE name = 'gone'";
    assert_eq!(
        database.text(stored).as_deref(),
        Some("GONE: the receiver responded with 410")
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 0);
    let waiting = database.number("SELECT count(*) FROM {o} WHERE destination = 'gone'");
    assert_eq!((database.count("dead"), waiting), (0, 1));
}

/// R46, R50: at a few messages a second, far too few for a breaker to open.
#[test]
fn a_destination_that_fails_at_ordinary_traffic_is_disabled_however_it_fails() {
    let database = Database::new();
    let good = Receiver::ok();
    let (hanging, gate) = Receiver::held();
    let receivers = [500, 404, 400, 429].map(|status| Receiver::answering(move |_| status));
    let refusing = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        format!("http://{address}/")
    };
    let hook = |name: &str, url: &str| put(&database, &Endpoint::new(name, url));
    for (name, receiver) in ["500", "404", "400", "429"].iter().zip(&receivers) {
        hook(name, &receiver.url());
    }
    hook("hanging", &hanging.url());
    hook("refusing", &refusing);
    hook("good", &good.url());
    let after = Duration::from_secs(3);
    let relay = relay(&database)
        .configure(|config| config.endpoint_disable_after = after)
        .configure(|config| config.endpoint_max_attempts = 1_000_000)
        .start()
        .expect("a relay");
    let began = Instant::now();
    let disabled = "SELECT string_agg(name, ' ' ORDER BY name) FROM {o}_endpoint WHERE NOT enabled";
    eventually("all that fail are disabled", || {
        database.enqueue("order.paid", json!({}));
        std::thread::sleep(Duration::from_millis(250));
        let now = database.text(disabled);
        assert!(now.is_none() || began.elapsed() >= after, "{now:?}");
        now.as_deref() == Some("400 404 429 500 hanging refusing")
    });
    let reasons =
        database.text("SELECT string_agg(DISTINCT disabled_reason, ' ') FROM {o}_endpoint");
    assert_eq!(reasons.as_deref(), Some("has failed for 3s"));
    gate.open();
    end(&relay);
}

/// R46: the change of this column is no change of the destination.
#[test]
fn the_first_failure_is_written_and_a_success_clears_it() {
    let database = Database::new();
    let fails = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let does_fail = std::sync::Arc::clone(&fails);
    let receiver = Receiver::answering(move |_| match does_fail.load(Ordering::SeqCst) {
        true => 500,
        false => 200,
    });
    put(&database, &Endpoint::new("acme", receiver.url()));
    let updated = "SELECT updated_at::text FROM {o}_endpoint";
    let before = database.text(updated);
    let since = "SELECT failing_since::text FROM {o}_endpoint";
    let relays = [started(&database), started(&database)];
    assert_eq!(database.text(since), None);
    database.enqueue("order.paid", json!({}));
    eventually("the failure is written", || database.text(since).is_some());
    let first = database.text(since);
    let sent = receiver.count();
    eventually("more sends fail", || receiver.count() > sent + 3);
    assert_eq!(
        database.text(since),
        first,
        "only the first failure is written"
    );
    fails.store(false, Ordering::SeqCst);
    eventually("the success is written", || {
        database.enqueue("order.paid", json!({}));
        database.text(since).is_none()
    });
    assert_eq!(
        database.text(updated),
        before,
        "the destination has not changed"
    );
    for relay in &relays {
        end(relay);
    }
}

/// R50: the application's transaction holds the row and the mark of its removal.
#[test]
fn who_removes_a_failing_destination_slowly_holds_up_no_other() {
    let database = Database::new();
    let (failing, good) = (Receiver::answering(|_| 500), Receiver::ok());
    put(&database, &Endpoint::new("acme", failing.url()));
    put(&database, &Endpoint::new("good", good.url()));
    let relay = started(&database);
    let mut application = database.connect();
    application
        .batch_execute(&format!(
            "BEGIN; DELETE FROM {}_endpoint WHERE name = 'acme'",
            database.name()
        ))
        .expect("removed");
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        let (sent, began) = (good.count(), Instant::now());
        for _ in 0..10 {
            database.enqueue("order.paid", json!({}));
        }
        good.wait_for(sent + 10);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
    assert!(failing.count() > 0);
    application.batch_execute("ROLLBACK").expect("kept");
    eventually("the failure is written once the row is free", || {
        database.number(
            "SELECT count(*) FROM {o}_endpoint WHERE name = 'acme' AND failing_since IS NOT NULL",
        ) == 1
    });
    end(&relay);
}

/// R50: a relay whose settings leave too little time for the receiver.
#[test]
fn a_destination_that_one_relay_alone_cannot_reach_is_not_disabled() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(500));
        200
    });
    put(&database, &Endpoint::new("acme", receiver.url()));
    let after = Duration::from_secs(3);
    let with = |timeout| {
        let relay = relay(&database).configure(|config| config.endpoint_max_attempts = 1_000_000);
        let relay = relay
            .configure(|config| config.endpoint_disable_after = after)
            .send_timeout(timeout)
            .configure(|config| config.endpoint_timeout = timeout);
        relay.start().expect("a relay")
    };
    let hasty = with(Duration::from_millis(100));
    let patient = with(Duration::from_millis(1200));
    let began = Instant::now();
    let failed = "SELECT count(*) FROM {o}_attempt WHERE event = 'failed' AND happened_at > now() - interval '1 s'";
    eventually(
        "the hasty relay has failed for long, and still fails",
        || {
            database.enqueue("order.paid", json!({}));
            std::thread::sleep(Duration::from_millis(100));
            began.elapsed() > 3 * after && database.number(failed) > 0
        },
    );
    assert!(patient.stats().delivered > 0, "the patient relay delivers");
    assert!(hasty.stats().retried > 0, "the hasty relay fails");
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_endpoint WHERE enabled"),
        1
    );
    for relay in [&hasty, &patient] {
        end(relay);
    }
}

/// R46
#[test]
fn a_new_url_and_enabling_begin_without_failures() {
    let database = Database::new();
    let since = || database.text("SELECT failing_since::text FROM {o}_endpoint");
    let updated = || database.text("SELECT updated_at::text FROM {o}_endpoint");
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, headers, filter) VALUES ('acme', 'https://a.example', '{\"a\": \"b\"}', '{\"a\": [1]}')",
    );
    for change in ["url = 'https://b.example'", "enabled = true"] {
        database.execute("UPDATE {o}_endpoint SET enabled = false");
        let before = updated();
        database.execute("UPDATE {o}_endpoint SET failing_since = now()");
        assert_eq!(updated(), before);
        assert!(since().is_some());
        database.execute(&format!(
            "UPDATE {{o}}_endpoint SET description = $${change}$$, failing_since = now() - interval '1 h'",
        ));
        assert_ne!(updated(), before);
        database.execute(&format!("UPDATE {{o}}_endpoint SET {change}"));
        assert_eq!(since(), None, "{change}");
    }
}

/// R46: what the receiver of the old URL has asked for does not hold up the new one. A pause of an operator does.
#[test]
fn a_new_url_and_enabling_end_the_pauses_of_the_receiver() {
    let database = Database::new();
    let is_good = Arc::new(AtomicBool::new(false));
    let answers = Arc::clone(&is_good);
    let busy = Receiver::start(move |_, stream| match answers.load(Ordering::SeqCst) {
        true => stream.write_all(&status(200)),
        false => {
            stream.write_all(b"HTTP/1.1 503 Busy\r\nretry-after: 600\r\ncontent-length: 0\r\n\r\n")
        }
    });
    let good = Receiver::ok();
    put(&database, &Endpoint::new("acme", busy.url()));
    let relay = started(&database);
    let paused = "SELECT count(*) FROM {o}_pause WHERE kind = 'destination'";
    let is_paused = || {
        eventually("it is paused", || {
            database.enqueue("order.paid", json!({}));
            database.number(paused) == 1
        });
    };
    // Rows are used within a second: until then the relay may send to the old URL, which asks for the same again.
    let reaches = |receiver: &Receiver| {
        let before = receiver.count();
        eventually("the receiver gets messages", || {
            database.enqueue("order.paid", json!({}));
            receiver.count() > before
        });
    };
    is_paused();
    put(&database, &Endpoint::new("acme", good.url()));
    reaches(&good);
    put(&database, &Endpoint::new("acme", busy.url()));
    is_paused();
    is_good.store(true, Ordering::SeqCst);
    database.execute("UPDATE {o}_endpoint SET enabled = false");
    database.execute("UPDATE {o}_endpoint SET enabled = true");
    reaches(&busy);
    finish(database.binary(&["pause", "destination", "acme"])).code(0);
    put(&database, &Endpoint::new("acme", good.url()));
    assert_eq!(database.number(paused), 1);
    end(&relay);
}

/// R46: a failed message is for the destination that it failed at.
#[test]
fn a_failed_message_names_its_destination() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.json()["n"].as_u64() {
        Some(1) => 400,
        _ => 500,
    });
    put(&database, &Endpoint::new("acme", receiver.url()));
    let relay = relay(&database)
        .configure(|config| config.endpoint_backoff = Backoff::Table(vec![Duration::from_secs(1)]))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({ "n": 1 }));
    database.enqueue("order.paid", json!({ "n": 2 }));
    eventually("one is dead and one waits", || {
        (database.count("dead"), database.count("retrying")) == (1, 1)
    });
    database.execute("UPDATE {o}_endpoint SET enabled = false");
    assert_eq!(
        database
            .text("SELECT named_destination FROM {o}_dead")
            .as_deref(),
        Some("acme")
    );
    assert_eq!(
        database.text("SELECT destination FROM {o}").as_deref(),
        Some("acme")
    );
    database.execute("UPDATE {o} SET available_at = now()");
    // A message that nobody wants is settled after the retry was due. Until the relay has read the changed row, which
    // may take a second, new messages still go to the destination.
    eventually("a new message is settled", || {
        database.enqueue("order.paid", json!({ "n": 3 }));
        database.count("no_subscriber") > 0
    });
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE payload::jsonb ->> 'n' = '2'"),
        1
    );
    end(&relay);
}

/// R46, R20
#[test]
fn a_repeated_key_is_not_sent_again_after_a_retry() {
    let database = Database::new();
    let requests = AtomicUsize::new(0);
    let receiver = Receiver::answering(move |_| match requests.fetch_add(1, Ordering::SeqCst) {
        0 => 500,
        _ => 200,
    });
    put(&database, &Endpoint::new("acme", receiver.url()));
    let relay = relay(&database)
        .configure(|config| {
            config.endpoint_backoff = Backoff::Table(vec![Duration::from_millis(10)])
        })
        .start()
        .expect("a relay");
    let message = || {
        NewMessage::new("order.paid", &json!({ "n": 1 }))
            .expect("JSON")
            .idempotency_key("order-1-paid")
    };
    database.enqueue_message(message());
    eventually("delivered", || database.count("delivered") == 1);
    database.enqueue_message(message());
    eventually("the repeat is settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(receiver.count(), 2, "{}", ledger(&database));
}

/// R50: a bug that one destination meets costs no thread, no message and no other destination.
#[test]
fn a_panic_in_the_turns_of_a_destination_ends_its_sends_here_and_nothing_else() {
    crate::traces::install();
    let database = Database::new();
    let busy = Receiver::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n")
    });
    let good = Receiver::ok();
    put(&database, &Endpoint::new(crate::traces::PANICS, busy.url()));
    put(&database, &Endpoint::new("good", good.url()));
    let relay = started(&database);
    for number in 0..20 {
        database.enqueue("order.paid", json!({ "n": number }));
    }
    eventually("the problem names the destination", || {
        refused(&relay).is_some_and(|what| what.contains(crate::traces::PANICS))
    });
    eventually("the other destination gets all", || good.count() == 20);
    eventually("the messages of the first are released", || {
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL") == 0
    });
    database.enqueue("order.paid", json!({ "n": 20 }));
    eventually("the other destination gets the next", || good.count() == 21);
    let left = format!(
        "SELECT count(*) FROM {{o}} WHERE destination = '{}' AND attempts <= 1",
        crate::traces::PANICS
    );
    eventually("none of them is lost", || database.number(&left) == 21);
    assert!(relay.health().is_live());
    let enabled = "SELECT count(*) FROM {o}_endpoint WHERE enabled";
    assert_eq!(database.number(enabled), 2);
    let sent = busy.count();
    assert!(sent <= 4, "{sent} were sent after the panic");
    end(&relay);
}
