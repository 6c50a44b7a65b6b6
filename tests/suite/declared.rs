//! Declared topics, and what is said of topics that nobody subscribes to.

use diesel_outbox::endpoints::Endpoint;
use serde_json::json;

use crate::support::{Database, File, Receiver, Running, eventually, finish};

/// A customer that subscribes to orders.
fn acme(database: &Database, url: String) {
    let hook = Endpoint::new("acme", url).topics(["order.*"]);
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, &hook)
        .expect("put");
}

fn drain(database: &Database, settings: &[(&str, &str)]) -> serde_json::Value {
    let mut drain = database.binary(&["drain", "--json"]);
    drain.env("OUTBOX_ENDPOINT_THREADS", "4");
    drain.env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false");
    drain.env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
    drain.envs(settings.iter().copied());
    // A message that waits is no success, so the exit code says nothing here.
    let output = drain.output().expect("the program");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// What the program prints, on either stream.
fn said(database: &Database, arguments: &[&str]) -> (Option<i32>, String) {
    let output = database.binary(arguments).output().expect("the program");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&output.stdout) + &text(&output.stderr);
    (output.status.code(), said)
}

/// R66, R67: nobody ends a message of a topic that the application has not declared.
#[test]
fn a_mistyped_topic_waits_where_topics_are_declared() {
    let database = Database::new();
    let receiver = Receiver::ok();
    acme(&database, receiver.url());
    let declared = [("OUTBOX_TOPICS", "order.*,invoice.*")];
    let mistyped = database.enqueue("odrer.paid", json!({})).to_string();
    database.enqueue("invoice.paid", json!({}));
    database.enqueue("order.paid", json!({}));
    let drained = drain(&database, &declared);
    assert_eq!(
        (&drained["delivered"], &drained["no_subscriber"]),
        (&json!(1), &json!(1)),
        "a declared topic without a subscriber ends: {drained}"
    );
    let (_, shown) = said(&database, &["message", "show", &mistyped]);
    assert!(shown.contains("pending, in the outbox"), "{shown}");

    let mut run = database.binary(&["run"]);
    run.envs(declared);
    run.env("OUTBOX_ENDPOINT_THREADS", "4");
    let relay = Running::start(run);
    relay.wait_for_log("event=unknown_topic");
    let (_, shown) = said(&database, &["message", "show", &mistyped]);
    let (_, status) = said(&database, &["status"]);
    let (_, checked) = said(&database, &["check"]);
    for text in [&shown, &status, &checked, &relay.log()] {
        assert!(text.contains("order.*"), "the nearest known topic: {text}");
    }
    assert!(status.contains("UNKNOWN_TOPIC"), "{status}");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);

    // The advice of each: declare the topic, or cancel the message.
    let advice = "topics declare 'odrer.paid' --with-waiting";
    assert!(shown.contains(advice), "{shown}");
    let declare = ["topics", "declare", "odrer.paid"];
    let (code, refused) = said(&database, &declare);
    assert_eq!(code, Some(1), "{refused}");
    assert!(refused.contains("1 waiting message of"), "{refused}");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);
    let declare = [declare.as_slice(), &["--with-waiting"]].concat();
    finish(database.binary(&declare)).code(0);
    eventually("the message ends", || database.count("no_subscriber") == 2);
}

/// R67: a message whose topic only other tenants subscribe to.
#[test]
fn a_mistyped_topic_waits_beside_a_customer_who_wants_every_topic() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let other = Endpoint::new("other", receiver.url()).tenant(uuid::Uuid::now_v7());
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, &other)
        .expect("put");
    finish(database.binary(&["topics", "declare", "order.*"])).code(0);
    database.enqueue("odrer.paid", json!({}));
    let drained = drain(&database, &[]);
    assert_eq!(drained["no_subscriber"], 0, "{drained}");
    let reason = database.text("SELECT last_error_code FROM {o}");
    assert_eq!(reason.as_deref(), Some("UNKNOWN_TOPIC"));
    let attempts = database.number("SELECT attempts::bigint FROM {o}");
    assert_eq!(attempts, 0);
    let (_, shown) = said(&database, &["message", "show", "1"]);
    assert!(shown.contains("is not declared"), "{shown}");
}

/// R66: a topic that ends without a subscriber, and never had one, is a problem with the topic that may be meant.
#[test]
fn a_topic_that_never_had_a_subscriber_is_a_problem() {
    let database = Database::new();
    let receiver = Receiver::ok();
    acme(&database, receiver.url());
    database.enqueue("order.paid", json!({}));
    database.enqueue("oder.paid", json!({}));
    assert_eq!(drain(&database, &[])["no_subscriber"], 1);
    let (_, checked) = said(&database, &["check"]);
    let line = checked.lines().find(|line| line.contains("oder.paid"));
    let line = line.unwrap_or_else(|| panic!("{checked}"));
    assert!(line.contains("order.*"), "{line}");
    assert!(checked.contains("OUTBOX_TOPICS"), "{checked}");

    let mut run = database.binary(&["run"]);
    run.env("OUTBOX_ENDPOINT_THREADS", "4");
    run.env("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    let relay = Running::start(run);
    database.enqueue("oder.paid", json!({}));
    relay.wait_for_log("event=topic_without_subscriber");

    finish(database.binary(&["topics", "forget", "oder.paid", "--yes"])).code(0);
    let (_, checked) = said(&database, &["check"]);
    assert!(!checked.contains("oder.paid"), "{checked}");
}

/// R66: a topic of which a message was delivered had a subscriber.
#[test]
fn a_topic_that_another_tenant_has_got_is_no_problem() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let tenant = uuid::Uuid::now_v7();
    let hook = Endpoint::new("acme", receiver.url()).tenant(tenant);
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, &hook)
        .expect("put");
    let message = diesel_outbox::NewMessage::new("order.paid", &json!({})).expect("JSON");
    database.enqueue_message(message.tenant_id(tenant));
    assert_eq!(drain(&database, &[])["delivered"], 1);
    database.enqueue("order.paid", json!({}));
    assert_eq!(drain(&database, &[])["no_subscriber"], 1);
    let (_, checked) = said(&database, &["check"]);
    assert!(!checked.contains("order.paid"), "{checked}");
}

/// R67: a route is renamed while messages of the old topic wait, and a customer is registered.
#[test]
fn a_renamed_route_keeps_its_messages_as_check_advises() {
    let database = Database::new();
    let (billing, customer) = (Receiver::ok(), Receiver::ok());
    acme(&database, customer.url());
    let settings = |topic: &str| {
        File::new(&format!(
            "[destinations.billing]\nurl = \"{}\"\n[[routes]]\ntopic = \"{topic}\"\nto = \"billing\"\n",
            billing.url()
        ))
    };
    let (old, new) = (settings("invoice.*"), settings("bill.*"));
    let run = |file: &File| {
        let mut run = database.binary(&["run"]);
        run.env("OUTBOX_CONFIG", file.path());
        run.env("OUTBOX_ENDPOINT_THREADS", "4");
        run
    };
    let before = Running::start(run(&old));
    database.enqueue("invoice.paid", json!({}));
    eventually("the first is recorded", || database.count("delivered") == 1);
    before.kill();
    for _ in 0..3 {
        database.enqueue("invoice.paid", json!({}));
    }
    let after = Running::start(run(&new));
    after.wait_for_log("event=no_route");
    let mut check = database.binary(&["check"]);
    check.env("OUTBOX_CONFIG", new.path());
    let checked = check.output().expect("the program");
    let checked = String::from_utf8_lossy(&checked.stdout).into_owned();
    for text in [&checked, &after.log()] {
        let advice = "add a route for 'invoice.*' again until these 3 messages are gone";
        assert!(text.contains(advice), "{text}");
    }

    // Who forgets the topic would lose the messages, and is told so before.
    let forget = ["topics", "forget", "invoice.*"];
    let (code, refused) = said(&database, &forget);
    assert_eq!(code, Some(1), "{refused}");
    assert!(
        refused.contains("3 waiting messages") && refused.contains("no_subscriber"),
        "{refused}"
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);
    // Without a terminal, nobody can be asked.
    let (code, _) = said(
        &database,
        &[forget.as_slice(), &["--with-waiting"]].concat(),
    );
    assert_eq!(code, Some(1));
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);

    // The advice keeps what it promises.
    after.kill();
    let _again = Running::start(run(&old));
    billing.wait_for(4);
    eventually("nothing waits", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    assert_eq!(database.count("no_subscriber"), 0);
}

/// R66: nothing was sent, so no send has failed.
#[test]
fn a_drain_says_that_a_message_of_an_unknown_topic_waits() {
    let database = Database::new();
    let drained = || {
        let mut drain = database.binary(&["drain", "--quiet"]);
        drain.env("OUTBOX_TOPICS", "order.*");
        drain.env("OUTBOX_ENDPOINT_THREADS", "4");
        let said = finish(drain).code(0).stdout;
        assert!(
            said.contains("failed 0 (0 will be retried, 0 dead)"),
            "{said}"
        );
        assert!(!said.contains("NO_ROUTE"), "{said}");
        said
    };
    acme(&database, Receiver::ok().url());
    database.enqueue("odrer.paid", json!({}));
    let waits = "1 of odrer.paid: UNKNOWN_TOPIC, the topic \"odrer.paid\" is not declared";
    let said = drained();
    assert!(said.contains(waits), "{said}");
    // The relay must look whether this one wants the message.
    let all = Endpoint::new("of-another", Receiver::ok().url());
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, &all.tenant(uuid::Uuid::now_v7()))
        .expect("put");
    let said = drained();
    let waits = "UNKNOWN_TOPIC: messages of the topic \"odrer.paid\" wait";
    assert!(said.contains(waits), "{said}");
}

/// R67: what `topics forget` says happens.
#[test]
fn forgetting_a_topic_says_what_becomes_of_its_messages() {
    let database = Database::new();
    let (billing, customer) = (Receiver::ok(), Receiver::ok());
    let billing_url = billing.url();
    let mut with_route = database.binary(&["drain"]);
    with_route.env("OUTBOX_URL", &billing_url);
    database.enqueue("order.paid", json!({}));
    finish(with_route).code(0);
    acme(&database, customer.url());
    database.enqueue("order.paid", json!({}));
    database.enqueue("invoice.paid", json!({}));
    assert_eq!(drain(&database, &[])["delivered"], 0);
    // Gets no message before it is verified.
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, topics, verification, created_at)
         VALUES ('unverified', 'http://127.0.0.1:9/', '{invoice.*}', 'challenge:skip', '2020-01-01')",
    );
    let forget = ["topics", "forget", "*"];
    let (_, refused) = said(&database, &forget);
    for part in ["1 ends as no_subscriber", "1 goes to endpoints"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    let forget = [forget.as_slice(), &["--with-waiting", "--yes"]].concat();
    finish(database.binary(&forget)).code(0);
    let drained = drain(&database, &[]);
    assert_eq!(
        (&drained["delivered"], &drained["no_subscriber"]),
        (&json!(1), &json!(1)),
        "{drained}"
    );
}

/// R67: the first destination that is registered would end the messages.
#[test]
fn a_topic_that_messages_wait_for_is_not_forgotten_while_no_destination_is_registered() {
    let database = Database::new();
    let billing = Receiver::ok();
    let mut with_route = database.binary(&["drain"]);
    with_route.env("OUTBOX_URL", billing.url());
    database.enqueue("order.paid", json!({}));
    finish(with_route).code(0);
    database.enqueue("order.paid", json!({}));
    let (code, refused) = said(&database, &["topics", "forget", "*", "--yes"]);
    assert_eq!(code, Some(1), "{refused}");
    assert!(refused.contains("1 ends as no_subscriber"), "{refused}");
    acme(&database, Receiver::ok().url());
    assert_eq!(drain(&database, &[])["no_subscriber"], 0);
}

/// R66: where topics are declared, a declared one that nobody wants ends as it should.
#[test]
fn a_declared_topic_that_ends_unwanted_is_not_reported() {
    let database = Database::new();
    acme(&database, Receiver::ok().url());
    finish(database.binary(&["topics", "declare", "k.*"])).code(0);
    database.enqueue("k.b", json!({}));
    assert_eq!(drain(&database, &[])["no_subscriber"], 1);
    let (_, listed) = said(&database, &["topics", "list", "--json"]);
    assert!(!listed.contains("no_subscriber"), "{listed}");
}
