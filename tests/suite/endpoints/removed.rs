//! Endpoints that are removed, disabled or registered again while messages are on their way.

use super::*;

/// R46, R50: no relay delivers while the row is removed, and the name may be registered again before a relay does.
#[test]
fn messages_for_a_removed_row_end_even_if_its_name_is_registered_again() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for name in ["acme", "other"] {
        put(&database, &Endpoint::new(name, receiver.url()));
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, destination) VALUES ('order.paid', '{{}}', '{name}')"
        ));
    }
    database.execute("DELETE FROM {o}_endpoint");
    put(&database, &Endpoint::new("other", receiver.url()));
    let relay = started(&database);
    eventually("both messages are settled", || database.count("dead") == 2);
    database.execute(
        "INSERT INTO {o} (topic, payload, destination) VALUES ('order.paid', '{}', 'other')",
    );
    eventually("a new message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    // R66: no send has failed.
    let stats = relay.stats();
    assert_eq!((stats.dead, stats.cancelled, stats.delivered), (0, 2, 1));
    assert_eq!(receiver.count(), 1);
    assert_eq!(
        ledger(&database),
        "acme dead DESTINATION_REMOVED, other dead DESTINATION_REMOVED, other delivered"
    );
}

/// R46: messages name their destination, and a secret is encrypted for it.
#[test]
fn a_row_keeps_its_name_and_loses_it_only_with_the_table() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_endpoint (name, url) VALUES ('acme', 'https://a.example'), ('other', 'https://a.example')",
    );
    let sql = |sql: &str| {
        let sql = sql.replace("{o}", &database.name());
        database.connect().batch_execute(&sql)
    };
    let renamed = sql("UPDATE {o}_endpoint SET name = 'new' WHERE name = 'acme'");
    let error = renamed.expect_err("refused").to_string();
    assert_eq!(
        error,
        "an endpoint cannot be renamed: insert a new row and delete the old row"
    );
    sql("UPDATE {o}_endpoint SET name = name, url = 'https://b.example'").expect("changed");
    let removed = || {
        database.text(
            "SELECT string_agg(name, ' ' ORDER BY name) FROM {o}_pause WHERE kind = 'removed'",
        )
    };
    assert_eq!(removed(), None);
    sql("DELETE FROM {o}_endpoint WHERE name = 'other'").expect("removed");
    sql("TRUNCATE {o}_endpoint").expect("removed");
    assert_eq!(removed().as_deref(), Some("acme other"));
    sql("INSERT INTO {o}_endpoint (name, url) VALUES ('acme', 'https://a.example')")
        .expect("registered again");
    // As for a copy that must send nothing.
    sql("TRUNCATE {o}, {o}_dead, {o}_lease, {o}_pause, {o}_endpoint").expect("emptied");
    assert_eq!(removed(), None);
}

/// R50: the part of a route waits for a relay that has its destination, and what is for a customer ends with the customer,
/// whichever of the two names a running relay has.
#[test]
fn messages_of_a_removed_row_end_and_those_for_its_namesake_wait() {
    let database = Database::new();
    let (configured, registered) = (Receiver::ok(), Receiver::ok());
    put(&database, &Endpoint::new("acme", registered.url()));
    let of_route = "INSERT INTO {o} (topic, destination, registration, payload)
        VALUES ('order.paid', 'acme', '00000000-0000-0000-0000-000000000000', '1')";
    database.execute(of_route);
    let with_acme = || {
        let acme = Destination::new("acme", &configured.url()).expect("a URL");
        let relay = relay(&database).destination(acme).route("order.*", "acme");
        relay.start().expect("a relay")
    };
    let without = started(&database);
    database.execute("DELETE FROM {o}_endpoint");
    put(&database, &Endpoint::new("other", registered.url()));
    database.enqueue("member.joined", json!({}));
    eventually("the relay has read that the row is gone", || {
        registered.count() == 1
    });
    end(&without);
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NULL"),
        1
    );
    let of_gone = of_route.replace("0000-0000-0000-0000", "1111-0000-0000-0000");
    database.execute(&of_gone);
    let namesake = with_acme();
    eventually("both end", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&namesake);
    assert_eq!(
        ledger(&database),
        "acme delivered, acme dead DESTINATION_REMOVED, other delivered"
    );
    assert_eq!(configured.count(), 1);
}

/// R46: for up to a second, a relay may still believe that a row is gone that has come back.
#[test]
fn a_message_for_a_row_that_was_just_put_again_is_not_dead_lettered() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let again = || {
        let acme = Endpoint::new("acme", receiver.url());
        put(&database, &acme);
    };
    let enqueue = || {
        database.execute(
            "INSERT INTO {o} (topic, payload, destination) VALUES ('order.paid', '{}', 'acme')",
        );
    };
    let is_empty = || database.number("SELECT count(*) FROM {o}") == 0;
    again();
    // As if the listener had just lost its connection.
    database.execute("ALTER TABLE {o}_endpoint DISABLE TRIGGER outbox_endpoint_wake");
    let relay = started(&database);
    for _ in 0..5 {
        database.execute("DELETE FROM {o}_endpoint");
        let dead = database.count("dead");
        eventually("the relay knows that the row is gone", || {
            enqueue();
            database.count("dead") > dead
        });
        eventually("no message is left", is_empty);
        let (sent, dead) = (receiver.count(), database.count("dead"));
        again();
        enqueue();
        relay.wake();
        eventually("the message is settled", || database.count("pending") == 0);
        eventually("the message was sent", || receiver.count() == sent + 1);
        assert_eq!(database.count("dead"), dead);
    }
    end(&relay);
}

/// A destination of which the relay has claimed messages that no thread has sent, its receiver, and its gate.
fn queued(database: &Database) -> (RelayHandle, Receiver, Gate) {
    let (receiver, gate) = Receiver::held();
    put(database, &Endpoint::new("acme", receiver.url()));
    let relay = started(database);
    database.enqueue_many(12);
    receiver.wait_for(1);
    eventually("the others are claimed", || {
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL") > 4
    });
    (relay, receiver, gate)
}

/// R46: messages that were claimed for a destination when it was disabled.
#[test]
fn claimed_messages_of_a_disabled_row_wait_for_it() {
    let database = Database::new();
    let (relay, receiver, gate) = queued(&database);
    database.execute("UPDATE {o}_endpoint SET enabled = false");
    eventually("no claimed message waits for a thread", || {
        gate.open();
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL") == 0
    });
    database.execute("UPDATE {o}_endpoint SET enabled = true");
    eventually("all are delivered", || database.count("delivered") == 12);
    end(&relay);
    assert_eq!(receiver.count(), 12);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE reason IS NOT NULL"),
        0
    );
}

/// R46, G2: a message goes to its only destination without a row of its own. Its relay crashes, and the destination is
/// disabled before another relay takes the message over.
#[test]
fn a_message_that_a_crashed_relay_sent_to_its_only_destination_stays_addressed_when_it_is_disabled()
{
    let database = Database::new();
    let receiver = Receiver::ok();
    let acme = Endpoint::new("acme", receiver.url()).filter(json!({"n": [7]}));
    put(&database, &acme);
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, enabled) VALUES ('off', 'http://a.example', false)",
    );
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('dead:1', now() - interval '1 s')",
    );
    database.execute(
        "INSERT INTO {o} (topic, payload, locked_by, locked_at) SELECT 'order.paid', '{\"n\": 7}', id, now() FROM {o}_lease",
    );
    database.execute("UPDATE {o}_endpoint SET enabled = false WHERE name = 'acme'");
    // Enqueued after that: it is for nobody.
    database.enqueue("order.paid", json!({ "n": 7 }));
    let relay = started(&database);
    eventually("the new message is settled", || {
        ledger(&database) == " no_subscriber NO_SUBSCRIBER"
    });
    eventually("the other message waits for its destination", || {
        database.number("SELECT count(*) FROM {o} WHERE destination = 'acme'") == 1
    });
    database.execute("UPDATE {o}_endpoint SET enabled = true WHERE name = 'acme'");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(receiver.count(), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
}

/// R46: messages that were claimed for a destination when it was removed.
#[test]
fn claimed_messages_of_a_removed_row_end_in_the_ledger() {
    let database = Database::new();
    let (relay, receiver, gate) = queued(&database);
    database.execute("DELETE FROM {o}_endpoint");
    eventually("all are settled", || {
        gate.open();
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    let sent = i64::try_from(receiver.count()).expect("a count");
    let removed = "SELECT count(*) FROM {o}_ledger WHERE reason = 'DESTINATION_REMOVED'";
    assert_eq!(database.number(removed), 12 - sent, "{}", ledger(&database));
}

/// R46, G2: an hour after a removal, relays forget it.
#[test]
fn messages_sent_again_to_a_destination_removed_long_ago_end_in_the_ledger() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.json()["n"] == 1 {
        true => 200,
        false => 400,
    });
    put(&database, &Endpoint::new("acme", receiver.url()));
    let relay = database.keeping_relay().start().expect("a relay");
    for n in [1, 2] {
        database.enqueue("order.paid", json!({ "n": n }));
    }
    eventually("one is delivered and one is dead", || {
        (database.count("delivered"), database.count("dead")) == (1, 1)
    });
    end(&relay);
    database.execute("DELETE FROM {o}_endpoint");
    database.execute("DELETE FROM {o}_pause WHERE kind = 'removed'");
    let relay = started(&database);
    finish(database.binary(&["dead", "requeue", "--all", "--yes"])).code(0);
    let replay = ["replay", "--yes", "--since", "1h", "--destination", "acme"];
    finish(database.binary(&replay)).code(0);
    let removed = "SELECT count(*) FROM {o}_ledger WHERE reason = 'DESTINATION_REMOVED'";
    eventually("both have ended", || database.number(removed) == 2);
    end(&relay);
    assert_eq!(receiver.count(), 2);
}

/// R46: the transaction that registers a destination also enqueues for it.
#[test]
fn a_message_of_the_transaction_that_registers_its_destination_gets_there() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let other = Endpoint::new("other", receiver.url()).topics(["never"]);
    put(&database, &other);
    let relay = started(&database);
    // The relay knows the lane.
    database.enqueue("order.paid", json!({}));
    eventually("nobody wants it", || database.count("no_subscriber") == 1);
    for n in 0..10 {
        let hook = Endpoint::new(format!("acme-{n}"), receiver.url())
            .topics([format!("order.paid.{n}"), "order.paid".to_owned()]);
        let conn = &mut database.connect();
        let outbox = database.outbox();
        conn.transaction::<(), Box<dyn std::error::Error>, _>(|conn| {
            let before = format!("acme-{}", n - 1);
            outbox.endpoints().remove(conn, &before)?;
            outbox.endpoints().put(conn, &hook)?;
            outbox.enqueue(conn, NewMessage::new("order.paid", &json!({ "n": n }))?)?;
            Ok(())
        })
        .expect("committed");
        receiver.wait_for(n as usize + 1);
    }
    end(&relay);
    assert_eq!(receiver.count(), 10);
}

/// R46: the server's clock is set back after the registration, so all messages seem to be older.
#[test]
fn a_message_goes_to_a_destination_that_was_registered_in_the_future() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let hook = |name: &str| Endpoint::new(name, receiver.url());
    put(&database, &hook("all"));
    put(
        &database,
        &hook("some").filter(json!({"n": [{"numeric": [">", 1]}]})),
    );
    database.execute("UPDATE {o}_endpoint SET created_at = now() + interval '1 h'");
    let relay = started(&database);
    for n in [1, 2] {
        database.enqueue("order.paid", json!({ "n": n }));
    }
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}_ledger") >= 2
            && database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(
        ledger(&database),
        "all delivered, all delivered, some delivered"
    );
}

/// R50: a name that is registered again is another destination, also without tenants.
#[test]
fn a_message_for_a_registration_never_reaches_another_of_the_same_name() {
    let database = Database::new();
    let ((first, gate), second) = (Receiver::held(), Receiver::ok());
    put(&database, &Endpoint::new("hook", first.url()));
    let relay = started(&database);
    // One is being sent, and others are claimed, by topic and by name.
    database.enqueue_many(3);
    for n in 0..3 {
        let message = NewMessage::new("order.paid", &json!({ "named": n })).expect("JSON");
        database.enqueue_message(message.destination("hook"));
    }
    first.wait_for(1);
    eventually("others are claimed", || {
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL") > 2
    });
    database.execute("DELETE FROM {o}_endpoint");
    put(
        &database,
        &Endpoint::new("hook", second.url()).topics(["invoice.*"]),
    );
    gate.open();
    eventually("all are settled", || {
        gate.open();
        database.number("SELECT count(*) FROM {o}") == 0
    });
    // A change of the row is no other registration.
    database.execute("UPDATE {o}_endpoint SET topics = '{*}', description = 'mine'");
    database.execute(
        "INSERT INTO {o} (topic, payload, destination) VALUES ('order.paid', '{}', 'hook')",
    );
    second.wait_for(1);
    eventually("all are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(second.count(), 1, "{}", ledger(&database));
    let of_none = "SELECT count(*) FROM {o}_ledger WHERE registration IS NULL AND reason IS DISTINCT FROM 'NO_SUBSCRIBER'";
    assert_eq!(database.number(of_none), 0, "{}", ledger(&database));
    let registrations =
        "SELECT count(DISTINCT registration) FROM {o}_ledger WHERE destination = 'hook'";
    assert_eq!(database.number(registrations), 2);
}

/// R50: a message that has failed is for the registration that it failed at.
#[test]
fn a_failed_message_stays_with_its_registration() {
    let database = Database::new();
    let (first, second) = (Receiver::answering(|_| 500), Receiver::ok());
    put(&database, &Endpoint::new("hook", first.url()));
    let relay = relay(&database)
        .configure(|config| config.endpoint_backoff = Backoff::Table(vec![Duration::from_secs(2)]))
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("an attempt has failed", || database.count("retrying") == 1);
    database.execute("DELETE FROM {o}_endpoint");
    put(&database, &Endpoint::new("hook", second.url()));
    database.execute("UPDATE {o} SET available_at = now()");
    eventually("it has ended", || database.count("dead") == 1);
    end(&relay);
    assert_eq!(second.count(), 0);
    assert_eq!(ledger(&database), "hook dead DESTINATION_REMOVED");
}
