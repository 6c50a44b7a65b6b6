//! Endpoints of several tenants: none takes time, threads or messages of another.

use super::*;

/// R46, R23: pauses and breakers work for each endpoint.
#[test]
fn a_paused_destination_waits_and_the_others_do_not() {
    let database = Database::new();
    let (acme, other) = (Receiver::ok(), Receiver::ok());
    put(&database, &Endpoint::new("acme", acme.url()));
    put(&database, &Endpoint::new("other", other.url()));
    database.execute(
        "INSERT INTO {o}_pause (kind, name, reason) VALUES ('destination', 'acme', 'BY_HAND')",
    );
    let relay = started(&database);
    for _ in 0..10 {
        database.enqueue("order.paid", json!({}));
    }
    other.wait_for(10);
    eventually("the other destination's messages are settled", || {
        database.count("delivered") == 10
    });
    assert_eq!((acme.count(), database.count("pending")), (0, 10));
    database.execute("DELETE FROM {o}_pause");
    acme.wait_for(10);
    end(&relay);
}

/// R46: hundreds of hanging destinations do not use up the threads, neither for those that have
/// answered nor for new ones.
#[test]
fn hanging_destinations_leave_threads_to_the_others() {
    let database = Database::new();
    let (hanging, gate) = Receiver::held();
    let good = Receiver::ok();
    for n in 0..24 {
        let hook = Endpoint::new(format!("hangs-{n}"), hanging.url());
        put(&database, &hook.topics(["bad"]));
    }
    put(
        &database,
        &Endpoint::new("good", good.url()).topics(["good"]),
    );
    let relay = relay(&database)
        .endpoint_threads(8)
        .send_timeout(Duration::from_secs(10))
        // Longer than this test waits for anything.
        .configure(|config| config.endpoint_timeout = 2 * PATIENCE)
        .lease(Duration::from_secs(60))
        .start()
        .expect("a relay");
    database.enqueue("good", json!({}));
    good.wait_for(1);
    for _ in 0..3 {
        database.enqueue("bad", json!({}));
    }
    eventually("all have their first message", || hanging.count() == 24);
    for _ in 0..100 {
        database.enqueue("good", json!({}));
    }
    good.wait_for(101);
    for n in 0..20 {
        let hook = Endpoint::new(format!("new-{n}"), good.url());
        put(&database, &hook.topics(["new"]));
    }
    database.enqueue("new", json!({}));
    good.wait_for(121);
    gate.open();
    eventually("all messages are settled", || {
        database.count("delivered") == 121 + 72
    });
    end(&relay);
}

/// R46: how long sends take decides, not whether they succeed. A tenant whose receivers succeed slowly, or send their
/// bodies slowly, holds up no other tenant, even right after another's send has failed.
#[test]
fn slow_successes_of_one_tenant_leave_threads_to_the_others() {
    let database = Database::new();
    let (slow, other) = (Uuid::now_v7(), Uuid::now_v7());
    let sleeping = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_secs(1));
        200
    });
    let good = Receiver::answering(|request| match request.json()["n"].as_i64() {
        Some(1) => 500,
        _ => 200,
    });
    for n in 0..20 {
        let hook = Endpoint::new(format!("sleeps-{n}"), sleeping.url());
        put(&database, &hook.tenant(slow));
    }
    let hook = Endpoint::new("good", good.url());
    put(&database, &hook.tenant(other));
    let relay = relay(&database)
        .endpoint_threads(8)
        .send_timeout(Duration::from_secs(10))
        .configure(|config| config.endpoint_timeout = Duration::from_secs(10))
        .lease(Duration::from_secs(60))
        .configure(|config| config.endpoint_max_attempts = 1)
        .start()
        .expect("a relay");
    database.enqueue_message(of_tenant(other, 0));
    good.wait_for(1);
    for n in 0..3 {
        database.enqueue_message(of_tenant(slow, n));
    }
    eventually(
        "new destinations have the threads that they may have",
        || sleeping.count() >= 6,
    );
    let began = Instant::now();
    for n in 1..=20 {
        database.enqueue_message(of_tenant(other, n));
        good.wait_for(n + 1);
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(4), "they waited for {took:?}");
    eventually(
        "slow destinations have the threads that they may have",
        || sleeping.count() >= 20,
    );
    let began = Instant::now();
    for n in 21..=40 {
        database.enqueue_message(of_tenant(other, n));
        good.wait_for(n + 1);
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(4), "they waited for {took:?}");
    end(&relay);
}

/// R65: an operator pauses all destinations of a tenant.
#[test]
fn a_paused_tenant_gets_nothing_until_it_is_resumed() {
    let database = Database::new();
    let (paused, other) = (Receiver::ok(), Receiver::ok());
    let (tenant, neighbour) = (Uuid::now_v7(), Uuid::now_v7());
    let hook = |name: &str, receiver: &Receiver, tenant| {
        put(
            &database,
            &Endpoint::new(name, receiver.url()).tenant(tenant),
        );
    };
    hook("mine", &paused, tenant);
    hook("theirs", &other, neighbour);
    let id = tenant.to_string();
    let said = finish(database.binary(&["pause", "tenant", &id, "--reason", "unpaid"])).code(0);
    let sentence = format!("tenant {id} is paused by an operator: unpaid, until resumed\n");
    assert_eq!(said.stdout, sentence);
    let relay = started(&database);
    let enqueue = |tenant| {
        let message = NewMessage::new("order.paid", &json!({})).expect("JSON");
        database.enqueue_message(message.tenant_id(tenant));
    };
    enqueue(neighbour);
    other.wait_for(1);
    // A relay that runs reads the row right before it sends the messages.
    hook("second", &paused, tenant);
    (0..3).for_each(|_| enqueue(tenant));
    enqueue(neighbour);
    other.wait_for(2);
    eventually("all are addressed", || {
        database.number("SELECT count(*) FROM {o} WHERE destination IN ('mine', 'second')") == 6
    });
    let listed = finish(database.binary(&["message", "list", "--json"])).code(0);
    assert!(listed.stdout.contains("unpaid"), "{}", listed.stdout);
    assert_eq!(paused.count(), 0);
    let said = finish(database.binary(&["resume", "tenant", &id])).code(0);
    assert_eq!(said.stdout, format!("tenant {id} is resumed\n"));
    paused.wait_for(6);
    eventually("all are delivered", || database.count("delivered") == 8);
    end(&relay);
    assert_eq!(
        database.number("SELECT max(attempts) FROM {o}_ledger"),
        1,
        "the pause cost no attempt"
    );
}

/// R65: an event for a thousand endpoints of one tenant is a second's work, and each claim has many such events.
#[test]
fn fan_outs_of_one_tenant_keep_no_message_of_another_from_being_claimed() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let (large, small) = (Uuid::now_v7(), Uuid::now_v7());
    for name in ["one", "two"] {
        let hook = Endpoint::new(name, receiver.url()).tenant(small);
        put(&database, &hook);
    }
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, tenant_id)
         SELECT 'large-' || n, 'https://nobody.example', '{large}' FROM generate_series(1, 1000) n"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}}_pause (kind, name, reason) VALUES ('tenant', '{large}', 'this test')"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload, tenant_id) SELECT 'order.paid', '{{}}', '{large}' FROM generate_series(1, 150)"
    ));
    let relay = relay(&database).batch(20).start().expect("a relay");
    database.enqueue_message(of_tenant(small, 1));
    receiver.wait_for(2);
    let waiting = database.number("SELECT count(*) FROM {o} WHERE destination = ''");
    assert!(waiting > 75, "only {waiting} are left of the other tenant");
    end(&relay);
}

/// R46, R50: the name was registered again for another tenant, or the row was given to another tenant.
#[test]
fn a_message_for_a_destination_of_one_tenant_never_reaches_one_of_another() {
    let (mine, other) = (Uuid::now_v7(), Uuid::now_v7());
    for is_registered_again in [true, false] {
        let database = Database::new();
        let receiver = Receiver::ok();
        let hook = Endpoint::new("hook", receiver.url());
        put(&database, &hook.clone().tenant(mine));
        for n in 0..3 {
            database.enqueue_message(of_tenant(mine, n).destination("hook"));
        }
        database.enqueue_message(
            NewMessage::new("order.paid", &7)
                .expect("JSON")
                .destination("hook"),
        );
        match is_registered_again {
            true => {
                database.execute("DELETE FROM {o}_endpoint");
                put(&database, &hook.tenant(other));
            }
            false => put(&database, &hook.tenant(other)),
        }
        let relay = started(&database);
        database.enqueue_message(of_tenant(other, 9).destination("hook"));
        eventually("all messages are settled", || {
            (database.count("dead"), database.count("delivered")) == (4, 1)
        });
        end(&relay);
        assert_eq!(receiver.count(), 1);
        let reasons =
            "SELECT string_agg(DISTINCT reason, ' ') FROM {o}_ledger WHERE status = 'dead'";
        let reasons = database.text(reasons);
        assert_eq!(reasons.as_deref(), Some("DESTINATION_REMOVED"));
    }
}
