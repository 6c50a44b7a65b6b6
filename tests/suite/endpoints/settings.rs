//! Rows beside the settings of relays: what one relay may do with a row, another may not.

use super::*;

/// R50: the relay with the default settings refuses every row, and runs alone at first.
#[test]
fn settings_of_one_relay_decide_nothing_for_the_others() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for n in 0..3 {
        put(&database, &Endpoint::new(format!("d{n}"), receiver.url()));
    }
    let strict = database
        .strict_relay()
        .endpoint_threads(4)
        .start()
        .expect("a relay");
    for n in 0..4 {
        database.enqueue_message(of_tenant(Uuid::now_v7(), n));
    }
    database
        .execute("INSERT INTO {o} (topic, payload, destination) VALUES ('order.paid', '{}', 'd1')");
    eventually("the messages are fanned out", || {
        database.number("SELECT count(*) FROM {o} WHERE destination <> ''") == 13
    });
    eventually("the problem shows", || {
        refused(&strict).is_some_and(|what| what.contains("3 endpoints"))
    });
    let conn = &mut database.connect();
    let unserved = || {
        let found = program::refused_destinations(&mut database.connect(), &database.outbox_name());
        let found = found.expect("an answer");
        found.iter().filter(|one| !one.is_served).count()
    };
    assert_eq!(unserved(), 3);
    assert_eq!(strict.stats().retried + strict.stats().dead, 0);

    let lenient = started(&database);
    eventually("the other relay delivers all", || {
        database.count("delivered") == 13
    });
    assert_eq!(unserved(), 0);
    let found = program::refused_destinations(conn, &database.outbox_name()).expect("an answer");
    assert_eq!(found.len(), 3, "the strict relay still refuses them");
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_endpoint WHERE enabled"),
        3
    );
    for relay in [&strict, &lenient] {
        end(relay);
    }
    assert_eq!((receiver.count(), database.count("dead")), (13, 0));
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
}

/// R50: the strict relay runs alone at first, and learns only from the name server that its settings refuse the address.
#[test]
fn a_name_that_one_relay_may_not_follow_costs_its_messages_nothing() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let url = receiver.url().replace("127.0.0.1", "localhost");
    put(&database, &Endpoint::new("acme", url));
    let strict = relay(&database)
        .configure(|config| config.endpoint_public_only = true)
        .configure(|config| config.endpoint_max_attempts = 1);
    let strict = strict.start().expect("a relay");
    let enqueue = |n| database.enqueue_message(of_tenant(Uuid::now_v7(), n));
    (0..5).map(enqueue).for_each(drop);
    eventually("the problem shows", || {
        refused(&strict).is_some_and(|what| what.contains("acme"))
    });
    let unserved = || {
        let found = program::refused_destinations(&mut database.connect(), &database.outbox_name());
        let found = found.expect("an answer");
        found.iter().filter(|one| !one.is_served).count()
    };
    eventually("the lease says so", || unserved() == 1);
    assert_eq!(
        (
            database.number("SELECT max(attempts) FROM {o}"),
            database.count("dead")
        ),
        (0, 0)
    );
    let lenient = started(&database);
    eventually("the other relay serves it", || unserved() == 0);
    (5..30).map(enqueue).for_each(drop);
    eventually("the other relay delivers all", || {
        database.count("delivered") == 30
    });
    for relay in [&strict, &lenient] {
        end(relay);
    }
    assert_eq!((receiver.count(), database.count("dead")), (30, 0));
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
}

/// R50: the settings of the command need not be those of the relays.
#[test]
fn put_warns_where_a_relay_with_its_settings_would_refuse() {
    let database = Database::new();
    let put = |arguments: &[&str], https_only| {
        let mut command = database.binary(&[&["endpoint", "put"], arguments].concat());
        command.env("OUTBOX_ENDPOINT_HTTPS_ONLY", https_only);
        finish(command).code(0)
    };
    let warned = put(&["acme", "http://a.example/"], "true").stdout;
    assert!(
        warned.contains("would not send to acme") && warned.contains("OUTBOX_ENDPOINT_HTTPS_ONLY"),
        "{warned}"
    );
    let stored = put(&["acme", "--json"], "true").json();
    let why = stored["refused_by_these_settings"]
        .as_str()
        .expect("a reason");
    assert!(why.contains("must be https"), "{why}");
    let silent = put(&["acme", "http://a.example/"], "false").stdout;
    assert!(!silent.contains("warning"), "{silent}");
}

/// R50: `drain` in a shell without the settings of the deployment.
#[test]
fn drain_with_other_settings_disables_nothing_hands_the_messages_back_and_says_so() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for n in 0..20 {
        put(&database, &Endpoint::new(format!("d{n}"), receiver.url()));
    }
    for n in 0..5 {
        database.enqueue("order.paid", json!({ "n": n }));
    }
    let mut drain = database.binary(&["drain", "--quiet"]);
    drain.env("OUTBOX_ENDPOINT_THREADS", "4");
    let drained = finish(drain).code(1);
    assert!(
        drained
            .stderr
            .contains("100 due messages for 20 endpoints were not sent")
            && drained.stderr.contains("OUTBOX_ENDPOINT_HTTPS_ONLY"),
        "{}",
        drained.stderr
    );
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_endpoint WHERE enabled"),
        20
    );
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o} WHERE locked_by IS NULL AND attempts = 0 AND last_error IS NULL"
        ),
        100
    );
    assert_eq!(ledger(&database), "");
    let relay = started(&database);
    eventually("all messages are delivered", || {
        database.count("delivered") == 100
    });
    end(&relay);
}

/// R46, R50: a message that names a configured destination goes to that one, and what is for the customer waits for a
/// relay without that destination.
#[test]
fn a_row_with_the_name_of_a_configured_destination_waits_for_another_relay() {
    let database = Database::new();
    let (configured, registered) = (Receiver::ok(), Receiver::ok());
    for name in ["acme", "other"] {
        put(&database, &Endpoint::new(name, registered.url()));
    }
    let acme = Destination::new("acme", &configured.url()).expect("a URL");
    let namesake = relay(&database)
        .destination(acme)
        .route("order.*", "acme")
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    database.enqueue("member.joined", json!({}));
    let waits = "SELECT count(*) FROM {o} WHERE destination = 'acme' AND locked_by IS NULL AND last_error_code IS NULL";
    eventually("only the part of the customer is left", || {
        database.number("SELECT count(*) FROM {o}") == 1 && database.number(waits) == 1
    });
    let problem = refused(&namesake).expect("the relay says so");
    assert!(
        problem.contains("acme (a destination in this relay's settings has the same name)"),
        "{problem}"
    );
    assert_eq!(
        ledger(&database),
        "acme delivered, other delivered, other delivered"
    );
    assert_eq!((configured.count(), registered.count()), (1, 2));
    for _ in 0..20 {
        database.enqueue("member.joined", json!({}));
    }
    eventually(
        "the parts of the customer are left, and the relay takes none",
        || database.number("SELECT count(*) FROM {o}") == 21 && database.number(waits) == 21,
    );
    let other = started(&database);
    // While both run.
    eventually("the other relay delivers what is for the customer", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    database.enqueue("order.paid", json!({}));
    eventually("the relay that has the route delivers its part", || {
        configured.count() == 2
    });
    end(&namesake);
    end(&other);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_endpoint WHERE enabled"),
        2
    );
}

/// R50: nobody could tell which of two destinations of one name is meant.
#[test]
fn put_refuses_a_name_that_the_settings_of_a_running_relay_have() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let before = Endpoint::new("before", receiver.url());
    put(&database, &before);
    let configured = |name| Destination::new(name, &receiver.url()).expect("a URL");
    let relay = relay(&database)
        .destination(configured("billing"))
        .destination(configured("before"))
        .start()
        .expect("a relay");
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let billing = Endpoint::new("billing", receiver.url());
    let error = outbox.endpoints().put(conn, &billing);
    let error = error.expect_err("refused").to_string();
    assert!(
        error.contains("destinations.billing.name") && error.contains("choose another one"),
        "{error}"
    );
    let tenant = Uuid::now_v7();
    let error = outbox.endpoints().of_tenant(tenant).put(conn, &billing);
    let error = error.expect_err("refused").public_error();
    assert_eq!(error, "name: the name is not available");
    // A row that is there already can be changed.
    put(&database, &before.topics(["order.*"]));
    end(&relay);
    put(&database, &billing);
}

/// R46: URLs from strangers. Even if a URL leads to an internal address only after it was registered, no internal
/// server gets a request, and the public error reveals nothing.
#[test]
fn a_url_that_leads_inside_when_it_is_used_gets_nothing() {
    let database = Database::new();
    let inside = Receiver::ok();
    let port = inside.url().rsplit(':').next().expect("a port").to_owned();
    let name_inside = format!("https://localhost:{}", port.trim_end_matches('/'));
    put(&database, &Endpoint::new("named", &name_inside));
    put(
        &database,
        &Endpoint::new("changed", "https://hooks.invalid/"),
    );
    let relay = relay(&database)
        .configure(|config| config.endpoint_https_only = true)
        .configure(|config| config.endpoint_public_only = true)
        .configure(|config| config.endpoint_max_attempts = 1_000_000)
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    let failed =
        "SELECT string_agg(destination, ' ') FROM {o} WHERE last_error_code = 'BLOCKED_ADDRESS'";
    eventually("the first destination has failed", || {
        database.text(failed).as_deref() == Some("named")
    });
    let literal = inside.url().replace("http://", "https://");
    database.execute(&format!(
        "UPDATE {{o}}_endpoint SET url = '{literal}' WHERE name = 'changed'"
    ));
    eventually("the other destination is refused", || {
        refused(&relay).is_some()
    });
    end(&relay);
    assert_eq!(inside.count(), 0);
    let waiting = (database.count("pending"), database.count("retrying"));
    assert_eq!(
        waiting,
        (1, 1),
        "another relay may send to the first destination"
    );
    let (outbox, filter) = (database.outbox(), DeliveryFilter::default());
    let deliveries = outbox.endpoints();
    for name in ["named", "changed"] {
        let page = deliveries
            .deliveries(&mut database.connect(), name, &filter, 10)
            .expect("a page");
        let words = page.rows[0].public_error().expect("a failed delivery");
        assert!(
            words.ends_with(" does not resolve to a public address"),
            "{words}"
        );
    }
}
