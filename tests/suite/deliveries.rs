//! The deliveries of an endpoint, as its owner sees them, and sending them again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use diesel_outbox::config::{Config, Mode};
use diesel_outbox::endpoints::{Delivery, DeliveryFilter, Endpoint, EndpointError};
use diesel_outbox::{NewMessage, RelayBuilder, Status};
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually, finish};

fn relay(database: &Database) -> RelayBuilder {
    database
        .relay()
        .endpoint_threads(4)
        .configure(|config| config.endpoint_max_attempts = 1)
}

fn put(database: &Database, hook: &Endpoint) {
    let conn = &mut database.connect();
    let put = database.outbox().endpoints().put(conn, hook);
    put.expect("put");
}

fn deliveries(database: &Database, name: &str, filter: &DeliveryFilter) -> Vec<Delivery> {
    let conn = &mut database.connect();
    let outbox = database.outbox();
    let page = outbox.endpoints().deliveries(conn, name, filter, 1000);
    let page = page.expect("deliveries");
    assert!(page.is_complete && page.next.is_none());
    page.rows
}

fn states(deliveries: &[Delivery]) -> String {
    let states: Vec<&str> = deliveries.iter().map(|one| one.state.as_str()).collect();
    states.join(" ")
}

fn send_again(database: &Database, name: &str, delivery: &Delivery) -> Result<bool, EndpointError> {
    let conn = &mut database.connect();
    let outbox = database.outbox();
    outbox
        .endpoints()
        .send_again(conn, name, delivery.message_id)
}

/// A receiver that responds with the status that is currently set.
fn switched() -> (Receiver, Arc<AtomicU16>) {
    let status = Arc::new(AtomicU16::new(200));
    let answer = Arc::clone(&status);
    (
        Receiver::answering(move |_| answer.load(Ordering::SeqCst)),
        status,
    )
}

/// R46
#[test]
fn each_state_is_shown_with_its_last_answer_and_next_attempt() {
    let database = Database::new();
    let (receiver, status) = switched();
    let other = Receiver::ok();
    let tenant = Uuid::now_v7();
    put(&database, &Endpoint::new("acme", receiver.url()));
    put(
        &database,
        &Endpoint::new("other", other.url()).topics(["order.*"]),
    );
    let hour = std::time::Duration::from_secs(3600);
    let relay = relay(&database)
        .configure(|config| config.endpoint_max_attempts = 2)
        .configure(|config| config.endpoint_backoff = diesel_outbox::Backoff::Table(vec![hour]))
        .start()
        .expect("a relay");
    let message = |n: i32| NewMessage::new("order.paid", &json!(n)).expect("JSON");
    database.enqueue_message(message(1).tenant_id(tenant));
    eventually("both destinations have their message", || {
        database.count("delivered") == 2
    });
    status.store(422, Ordering::SeqCst);
    database.enqueue_message(message(2));
    eventually("the message is refused", || database.count("dead") == 1);
    status.store(503, Ordering::SeqCst);
    database.enqueue_message(message(3));
    eventually("the message failed once", || {
        database.count("retrying") == 1
    });
    end(&relay);
    // Added after the relay has ended, so it stays pending.
    let insert = "INSERT INTO {o} (topic, payload, destination, ordering_key, available_at)
        SELECT 'order.paid', '4', destination, key, now() + interval '1 day'
          FROM (VALUES ('acme', 'k'), ('other', NULL)) t (destination, key)";
    database.execute(insert);

    let all = deliveries(&database, "acme", &DeliveryFilter::default());
    assert_eq!(states(&all), "pending retrying dead delivered");
    let [pending, retrying, dead, delivered] = &all[..] else {
        panic!("{all:?}");
    };
    assert_eq!((pending.attempts, pending.http_status), (0, None));
    assert_eq!(pending.public_error(), None);
    assert!(pending.next_attempt_at.is_some() && pending.settled_at.is_none());
    assert_eq!((retrying.attempts, retrying.http_status), (1, Some(503)));
    assert_eq!(retrying.reason.as_deref(), Some("SERVER_ERROR"));
    assert_eq!(
        retrying.public_error().as_deref(),
        Some("your endpoint answered with a server error")
    );
    assert!(retrying.next_attempt_at > Some(retrying.created_at.clone()));
    assert_eq!((dead.attempts, dead.http_status), (1, Some(422)));
    assert_eq!(
        dead.public_error().as_deref(),
        Some("your endpoint refused the request")
    );
    assert!(dead.settled_at.is_some() && dead.next_attempt_at.is_none());
    assert_eq!((delivered.attempts, delivered.http_status), (1, Some(200)));
    assert_eq!(delivered.tenant_id, Some(tenant));
    assert_eq!(
        (delivered.public_error(), delivered.topic.as_str()),
        (None, "order.paid")
    );
    let again: Vec<bool> = all.iter().map(|one| one.can_be_sent_again).collect();
    assert_eq!(again, [false, false, true, false]);

    for &state in Status::ALL {
        let filter = DeliveryFilter::default().state(state);
        let found = deliveries(&database, "acme", &filter);
        let expected = match state {
            Status::Sending | Status::NoSubscriber => "",
            state => state.as_str(),
        };
        assert_eq!(states(&found), expected);
    }
    let of_tenant = DeliveryFilter::default().tenant_id(tenant);
    assert_eq!(
        states(&deliveries(&database, "acme", &of_tenant)),
        "delivered"
    );
    let none = deliveries(&database, "nobody", &DeliveryFilter::default());
    assert_eq!(states(&none), "");
}

/// R46
#[test]
fn deliveries_of_a_destination_are_counted_by_spans_of_time() {
    let database = Database::new();
    // Every 20 minutes: three deliveries, one dead letter, and one delivery of another destination.
    database.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, named_destination,
                status, reason, attempts, created_at, settled_at)
         SELECT 0, n, gen_random_uuid(), 'order.paid', CASE n % 5 WHEN 4 THEN 'other' ELSE 'acme' END, '',
                CASE n % 5 WHEN 3 THEN 'dead' ELSE 'delivered' END,
                CASE n % 5 WHEN 3 THEN 'REJECTED' END, 1, now(),
                now() - interval '10 minutes' - n / 5 * interval '20 minutes'
           FROM generate_series(0, 19) n",
    );
    let conn = &mut database.connect();
    let outbox = database.outbox();
    let mut counts = |name: &str, minutes: u64, windows| -> Vec<(u64, u64)> {
        let window = std::time::Duration::from_secs(60 * minutes);
        let destinations = outbox.endpoints();
        let counts = destinations.delivery_counts(conn, name, window, windows);
        let counts = counts.expect("counts").into_iter();
        let counts = counts.map(|count| count.expect("in two seconds"));
        counts.map(|count| (count.delivered, count.dead)).collect()
    };
    assert_eq!(counts("acme", 20, 3), [(3, 1); 3]);
    assert_eq!(counts("acme", 5, 4), [(0, 0), (3, 1), (0, 0), (0, 0)]);
    assert_eq!(counts("other", 60, 1), [(3, 0)]);
    assert_eq!(counts("nobody", 60, 1), [(0, 0)]);
}

/// R46: whatever the page size, each delivery is on exactly one page.
#[test]
fn pages_have_each_delivery_once() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, destination, ordering_key, available_at, attempts, locked_by)
         SELECT 'topic-' || n % 20, '1', CASE n % 3 WHEN 0 THEN 'other' ELSE 'acme' END,
                CASE n % 2 WHEN 0 THEN 'k' END, now() + (n % 7) * interval '1 minute', n % 2,
                CASE n % 5 WHEN 0 THEN 1 END
           FROM generate_series(1, 90) n",
    );
    database.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, available_at, created_at, attempts,
                               reason, dead_lettered_at)
         SELECT 1000 + n, gen_random_uuid(), 't', CASE n % 3 WHEN 0 THEN 'other' ELSE 'acme' END, '1', now(), now(), 1,
                'TIMEOUT', now() - (n % 7) * interval '1 hour'
           FROM generate_series(1, 90) n",
    );
    database.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, status, attempts, created_at, settled_at)
         SELECT n % 2, 2000 + n, gen_random_uuid(), 't', CASE n % 3 WHEN 0 THEN 'other' ELSE 'acme' END,
                CASE n % 5 WHEN 0 THEN 'dead' ELSE 'delivered' END, 1, now(), now() - (n % 7) * interval '5 hours'
           FROM generate_series(1, 90) n",
    );
    let ids = |rows: &[Delivery]| -> Vec<Uuid> { rows.iter().map(|one| one.message_id).collect() };
    let all = ids(&deliveries(&database, "acme", &DeliveryFilter::default()));
    let conn = &mut database.connect();
    let outbox = database.outbox();
    for limit in [1, 7, 60, 1000] {
        let mut filter = DeliveryFilter::default();
        let mut seen: Vec<Delivery> = Vec::new();
        loop {
            let page = outbox.endpoints().deliveries(conn, "acme", &filter, limit);
            let page = page.expect("a page");
            assert!(page.is_complete);
            seen.extend(page.rows);
            if page.next.is_none() {
                break;
            }
            filter = filter.after(page.next);
        }
        assert_eq!(seen.len(), 60 + 60 + 48, "{limit}");
        assert_eq!(ids(&seen), all);
        let mut distinct = ids(&seen);
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), seen.len());
    }
}

/// R46: a message that one destination missed is sent to that destination alone.
#[test]
fn a_message_sent_again_goes_to_its_destination_only() {
    let database = Database::new();
    let (acme, status) = switched();
    let other = Receiver::ok();
    put(&database, &Endpoint::new("acme", acme.url()));
    let relay = database.keeping_relay().start().expect("a relay");
    // The only destination that wants the topic: the row of the message does not name it.
    status.store(500, Ordering::SeqCst);
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    put(&database, &Endpoint::new("other", other.url()));
    let any = DeliveryFilter::default();
    let dead = deliveries(&database, "acme", &any).remove(0);
    assert!(!send_again(&database, "other", &dead).expect("an answer"));
    assert!(!send_again(&database, "nobody", &dead).expect("an answer"));
    status.store(200, Ordering::SeqCst);
    end(&relay);
    // An impatient operator asks more than once.
    for _ in 0..3 {
        assert!(send_again(&database, "acme", &dead).expect("an answer"));
    }
    assert_eq!(database.count("pending"), 1);
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });

    // And once more: only to this destination, although others want such messages by now.
    let delivered = deliveries(&database, "acme", &any);
    assert_eq!(states(&delivered), "delivered");
    assert!(delivered[0].can_be_sent_again);
    assert!(send_again(&database, "acme", &delivered[0]).expect("an answer"));
    eventually("the message is delivered again", || {
        database.count("delivered") == 2
    });
    assert_eq!(
        states(&deliveries(&database, "acme", &any)),
        "delivered delivered"
    );
    end(&relay);
    let requests = acme.requests();
    assert_eq!((requests.len(), other.count()), (3, 0));
    for request in requests {
        assert_eq!(request.id(), dead.message_id.to_string());
        assert_eq!(request.json(), json!({ "n": 1 }));
    }
    for _ in 0..3 {
        assert!(send_again(&database, "acme", &delivered[0]).expect("an answer"));
    }
    assert_eq!(database.count("pending"), 1);
    let who = database.text("SELECT string_agg(DISTINCT event || ' ' || operator, ', ' ORDER BY event || ' ' || operator)
        FROM {o}_attempt WHERE operator IS NOT NULL");
    assert_eq!(
        who.as_deref(),
        Some("replayed send again, requeued send again")
    );
}

/// R46
#[test]
fn a_message_kept_without_its_payload_cannot_be_sent_again() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(&database, &Endpoint::new("acme", receiver.url()));
    let relay = relay(&database).start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let delivered = deliveries(&database, "acme", &DeliveryFilter::default()).remove(0);
    assert!(!delivered.can_be_sent_again);
    let error = send_again(&database, "acme", &delivered).expect_err("no payload");
    assert!(
        matches!(error, EndpointError::PayloadNotKept { message_id } if message_id == delivered.message_id)
    );
    assert!(
        error.to_string().contains("OUTBOX_LEDGER_PAYLOAD"),
        "{error}"
    );
    let id = delivered.message_id.to_string();
    let run = |arguments: &[&str]| {
        let arguments = [&["endpoint"], arguments].concat();
        finish(database.binary(&arguments))
    };
    let said = run(&["send-again", "acme", &id]).code(1).stderr;
    assert!(said.contains("OUTBOX_LEDGER_PAYLOAD"), "{said}");
}

/// R46
#[test]
fn the_commands_show_deliveries_and_send_again() {
    let database = Database::new();
    let run = |arguments: &[&str]| {
        let arguments = [&["endpoint"], arguments].concat();
        finish(database.binary(&arguments))
    };
    let unknown = run(&["deliveries", "acme"]).code(1).stderr;
    assert!(unknown.contains("no endpoint \"acme\""), "{unknown}");
    run(&["put", "acme", "https://acme.example"]).code(0);
    run(&["disable", "acme", "--why", "moved"]).code(0);
    run(&["disable", "acme"]).code(0);
    let reason = "SELECT disabled_reason FROM {o}_endpoint";
    assert_eq!(database.text(reason).as_deref(), Some("moved"));
    let put = run(&["put", "acme", "https://new.example"]).code(0).stdout;
    assert!(
        put.contains("`diesel-outbox endpoint enable acme`"),
        "{put}"
    );
    run(&["enable", "acme"]).code(0);
    let put = run(&["put", "acme", "https://acme.example"]).code(0).stdout;
    assert!(!put.contains("disabled"), "{put}");
    let none = run(&["deliveries", "acme"]).code(0).stdout;
    assert_eq!(none, "no deliveries\n");
    database.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, available_at, created_at, attempts,
                               reason, last_error, http_status)
         SELECT n, gen_random_uuid(), 'order.paid', 'acme', '1', now(), now(), 3, 'SERVER_ERROR', E'on 10.0.0.7\\x1b[2J', 503
           FROM generate_series(1, 3) n",
    );
    let page = run(&["deliveries", "acme", "--limit", "2", "--json"]).code(0);
    let page = page.json();
    let rows = page["deliveries"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0]["state"], "dead");
    assert_eq!(rows[0]["http_status"], 503);
    assert_eq!(
        rows[0]["public_error"],
        "your endpoint answered with a server error"
    );
    let next = page["next"].as_str().expect("there is more");
    let rest = run(&["deliveries", "acme", "--after", next, "--json"]).code(0);
    assert_eq!(rest.json()["deliveries"].as_array().map(Vec::len), Some(1));
    let shown = run(&["deliveries", "acme", "--limit", "2"]).code(0).stdout;
    for part in ["order.paid", "dead", "503 SERVER_ERROR", "--after"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(!shown.contains('\x1b'), "{shown}");

    let id = rows[0]["message_id"].as_str().expect("an id").to_owned();
    run(&["send-again", "acme", &id]).code(0);
    let pending = run(&["deliveries", "acme", "--state", "pending", "--json"]).code(0);
    assert_eq!(pending.json()["deliveries"][0]["message_id"], json!(id));
    run(&["send-again", "acme", &id]).code(0);
    assert_eq!(database.count("pending"), 1);
    let nobodys = Uuid::now_v7().to_string();
    let said = run(&["send-again", "acme", &nobodys]).code(1).stderr;
    assert!(said.contains("there is no such dead letter"), "{said}");
    let said = run(&["send-again", "other", &id]).code(1).stderr;
    assert!(said.contains("no endpoint"), "{said}");
    for (arguments, flag) in [
        (
            &["deliveries", "acme", "--state", "lost"][..],
            "write pending, sending, retrying",
        ),
        (&["deliveries", "acme", "--after", "now"], "--after"),
    ] {
        let said = run(arguments).code(2).stderr;
        assert!(said.contains(flag), "{said}");
    }
}

/// Allows receivers in the network of the tests.
fn open_config() -> Config {
    let mut config = Config::default();
    config.endpoint_https_only = false;
    config.endpoint_public_only = false;
    config.endpoint_mode = Mode::Binary;
    config
}

fn tested(
    database: &Database,
    config: &Config,
) -> Result<diesel_outbox::endpoints::TestAnswer, EndpointError> {
    let conn = &mut database.connect();
    let outbox = database.outbox();
    let test = outbox.endpoints().test(conn, "acme", config)?;
    Ok(test.expect("it is there").send())
}

/// R46
#[test]
fn a_test_is_sent_at_once_and_signed_as_messages_are() {
    let database = Database::new();
    let (receiver, status) = switched();
    let hook = Endpoint::new("acme", receiver.url())
        .topics(["order.*"])
        .header("x-team", "billing");
    put(&database, &hook);
    let conn = &mut database.connect();
    let outbox = database.outbox();
    let destinations = outbox.endpoints();
    destinations.disable(conn, "acme", "why").expect("disabled");
    let answer = tested(&database, &open_config()).expect("sent");
    assert!(answer.went_well && answer.public_error().is_none());
    assert_eq!(
        (answer.http_status, answer.reason, &answer.error),
        (Some(200), None, &None)
    );
    let request = receiver.requests().remove(0);
    assert_eq!(request.id(), answer.message_id.to_string());
    assert_eq!(request.header("ce-type"), Some("outbox.test"));
    assert_eq!(request.header("x-team"), Some("billing"));
    assert_eq!(request.json(), json!({ "destination": "acme" }));
    let secret = destinations.secret(conn, "acme").expect("an answer");
    let secret = secret.expect("a new destination gets a secret");
    let verifier = diesel_outbox::receive::Verifier::new(&[secret]).expect("a verifier");
    let headers = diesel_outbox::receive::Headers::new(request.headers());
    verifier.verify(&headers, &request.body).expect("signed");
    let rows = "SELECT (SELECT count(*) FROM {o}_messages) + (SELECT count(*) FROM {o}_attempt)";
    assert_eq!(database.number(rows), 0);

    status.store(503, Ordering::SeqCst);
    let answer = tested(&database, &open_config()).expect("sent");
    assert!(!answer.went_well);
    assert_eq!(answer.http_status, Some(503));
    assert_eq!(
        answer.public_error().as_deref(),
        Some("your endpoint answered with a server error")
    );
    let unknown = destinations.test(conn, "other", &open_config());
    assert!(unknown.expect("an answer").is_none());
}

/// R46: customers do not read the names of settings.
#[test]
fn a_test_that_the_settings_refuse_says_so_without_their_names() {
    let database = Database::new();
    put(&database, &Endpoint::new("acme", "http://acme.example"));
    let error = tested(&database, &Config::default()).expect_err("https is required");
    assert!(matches!(error, EndpointError::Refused(_)), "{error:?}");
    assert!(error.to_string().contains("OUTBOX_"), "{error}");
    assert_eq!(
        error.public_error(),
        "the URL is not allowed here: use https and a host with a public address"
    );
}

/// R46: whoever registers a URL learns nothing about the network behind it.
#[test]
fn a_test_reveals_nothing_of_the_network() {
    let database = Database::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = closed.local_addr().expect("a local address").port();
    drop(closed);
    let there = Receiver::ok();
    let port_there = there.url().rsplit(':').next().map(str::to_owned);
    let port_there = port_there.and_then(|rest| rest.split('/').next().map(str::to_owned));
    let url = |host: &str, port: &str| format!("http://{host}:{port}/");
    let mut public_only = open_config();
    public_only.endpoint_public_only = true;
    let port = port.to_string();
    let port_there = port_there.expect("a port");
    let said = |url: String, config: &Config| {
        put(&database, &Endpoint::new("acme", url));
        let answer = tested(&database, config).expect("sent");
        (answer.public_error(), answer.http_status, answer.body)
    };
    let words = |words: &str| (Some(words.to_owned()), None, None);
    let unreachable = words("your endpoint could not be reached");
    assert_eq!(said(url("localhost", &port), &open_config()), unreachable);
    for (host, port) in [
        ("localhost", &*port),
        ("localhost", &*port_there),
        ("nobody.invalid", "80"),
    ] {
        let unresolved = format!("the name {host} does not resolve to a public address");
        assert_eq!(said(url(host, port), &public_only), words(&unresolved));
    }
    assert_eq!(there.count(), 0);
    // A URL that cannot be right is refused without a send.
    for (url, part) in [
        ("https://10.0.0.7/", "private"),
        ("http://a.example/", "OUTBOX_ENDPOINT_HTTPS_ONLY"),
    ] {
        put(&database, &Endpoint::new("acme", url));
        let error = tested(&database, &Config::default()).expect_err(url);
        assert!(matches!(error, EndpointError::Refused(_)), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// R46
#[test]
fn the_command_shows_the_answer_to_a_test() {
    let database = Database::new();
    let (receiver, status) = switched();
    put(&database, &Endpoint::new("acme", receiver.url()));
    let run = |arguments: &[&str], is_open: bool| {
        let arguments = [&["endpoint", "test"], arguments].concat();
        let mut command = database.binary(&arguments);
        if is_open {
            command.env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false");
            command.env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
        }
        finish(command)
    };
    let shown = run(&["acme"], true).code(0).stdout;
    assert!(
        shown.starts_with("acme responded with 200 after "),
        "{shown}"
    );
    status.store(422, Ordering::SeqCst);
    let failed = run(&["acme", "--json"], true).code(1);
    let json: serde_json::Value = serde_json::from_str(&failed.stdout).expect("JSON");
    assert_eq!(
        (&json["http_status"], &json["reason"]),
        (&json!(422), &json!("REJECTED"))
    );
    assert_eq!(json["public_error"], "your endpoint refused the request");
    assert!(failed.stderr.contains("REJECTED"), "{}", failed.stderr);
    let refused = run(&["acme"], false).code(1).stderr;
    assert!(
        refused.contains("nothing was sent") && refused.contains("OUTBOX_ENDPOINT_HTTPS_ONLY"),
        "{refused}"
    );
    let missing = run(&["other"], true).code(1).stderr;
    assert!(missing.contains("no endpoint"), "{missing}");
    assert_eq!(receiver.count(), 2);
}

/// R50: who registers a name after somebody else sees and sends nothing of before.
#[test]
fn deliveries_are_those_of_the_registration_that_has_the_name() {
    let database = Database::new();
    let (first, second) = (
        Receiver::answering(|request| match request.json()["n"].as_i64() {
            Some(1) => 400,
            _ => 200,
        }),
        Receiver::ok(),
    );
    put(&database, &Endpoint::new("hook", first.url()));
    let relay = database.keeping_relay().start().expect("a relay");
    for n in 1..=2 {
        database.enqueue("order.paid", json!({ "n": n }));
    }
    eventually("both are settled", || {
        (database.count("dead"), database.count("delivered")) == (1, 1)
    });
    let all = DeliveryFilter::default();
    let before = deliveries(&database, "hook", &all);
    assert_eq!(before.len(), 2);
    let outbox = database.outbox();
    let again = |id| {
        let conn = &mut database.connect();
        outbox.endpoints().send_again(conn, "hook", id)
    };
    assert!(again(before[0].message_id).expect("sent again"));
    eventually("it is settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    database.execute("DELETE FROM {o}_endpoint");
    put(&database, &Endpoint::new("hook", second.url()));
    assert_eq!(states(&deliveries(&database, "hook", &all)), "");
    let conn = &mut database.connect();
    let minute = std::time::Duration::from_secs(60);
    let counts = outbox
        .endpoints()
        .delivery_counts(conn, "hook", minute, 5)
        .expect("counts");
    let counts: u64 = counts
        .iter()
        .flatten()
        .map(|one| one.delivered + one.dead)
        .sum();
    assert_eq!(counts, 0);
    for one in &before {
        assert!(!again(one.message_id).expect("an answer"));
    }
    database.enqueue("order.paid", json!({ "n": 3 }));
    second.wait_for(1);
    eventually("it is settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(states(&deliveries(&database, "hook", &all)), "delivered");
    assert_eq!(second.count(), 1);
}
