//! Delivery to endpoints: rows that appear, change and disappear while relays run.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use diesel::Connection;
use diesel::connection::SimpleConnection;
use diesel_outbox::endpoints::{DeliveryFilter, Endpoint, EndpointFilter};
use diesel_outbox::program;
use diesel_outbox::{Backoff, Destination, NewMessage, ProblemKind, RelayBuilder, RelayHandle};
use serde_json::json;
use uuid::Uuid;

use crate::support::{
    Database, Gate, PATIENCE, Receiver, Request, end, eventually, finish, status,
};

/// A committed change of a row takes effect within this time.
const SOON: Duration = Duration::from_secs(1);

fn relay(database: &Database) -> RelayBuilder {
    database
        .relay()
        .endpoint_threads(16)
        .configure(|config| config.endpoint_https_only = false)
        .configure(|config| config.endpoint_public_only = false)
}

fn started(database: &Database) -> RelayHandle {
    relay(database).start().expect("a relay")
}

fn put(database: &Database, hook: &Endpoint) {
    let conn = &mut database.connect();
    database.outbox().endpoints().put(conn, hook).expect("put");
}

fn of_tenant(tenant: Uuid, n: usize) -> NewMessage {
    NewMessage::new("order.paid", &json!({ "n": n, "total": 100 * n }))
        .expect("JSON")
        .tenant_id(tenant)
}

fn path(request: &Request) -> &str {
    request.line.split(' ').nth(1).unwrap_or_default()
}

/// The ledger's entries, ordered by destination.
fn ledger(database: &Database) -> String {
    let text = database.text(
        "SELECT string_agg(destination || ' ' || status || coalesce(' ' || reason, ''), ', ' ORDER BY destination, sequence)
           FROM {o}_ledger",
    );
    text.unwrap_or_default()
}

/// R46
#[test]
fn a_message_goes_to_each_row_whose_topics_tenant_and_filter_it_meets() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let (mine, other) = (Uuid::now_v7(), Uuid::now_v7());
    let hook = |name: &str| Endpoint::new(name, format!("{}/{name}", receiver.url()));
    put(&database, &hook("everything"));
    put(&database, &hook("mine").tenant(mine).topics(["order.*"]));
    put(&database, &hook("others").tenant(other));
    put(&database, &hook("members").topics(["member.*"]));
    put(
        &database,
        &hook("large").filter(json!({"total": [{"numeric": [">", 150]}]})),
    );
    put(
        &database,
        &hook("never").filter(json!({"total": [{"numeric": [">", 10000]}]})),
    );
    let relay = started(&database);
    database.enqueue_message(of_tenant(mine, 1));
    database.enqueue_message(of_tenant(mine, 2));
    receiver.wait_for(5);
    eventually("all messages are settled", || {
        database.count("delivered") == 5
    });
    end(&relay);
    assert_eq!(
        ledger(&database),
        "everything delivered, everything delivered, large delivered, mine delivered, mine delivered"
    );
    let mut places: Vec<String> = receiver
        .requests()
        .iter()
        .map(|request| format!("{} {}", path(request), request.json()["n"]))
        .collect();
    places.sort();
    assert_eq!(
        places,
        [
            "/events/everything 1",
            "/events/everything 2",
            "/events/large 2",
            "/events/mine 1",
            "/events/mine 2"
        ]
    );
}

/// R46: a route adds one destination to the endpoints.
#[test]
fn routes_and_rows_get_it_both() {
    let database = Database::new();
    let (configured, registered) = (Receiver::ok(), Receiver::ok());
    put(&database, &Endpoint::new("acme", registered.url()));
    let relay = relay(&database)
        .url(&configured.url())
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("both destinations have the message", || {
        database.count("delivered") == 2
    });
    end(&relay);
    assert_eq!((configured.count(), registered.count()), (1, 1));
    assert_eq!(ledger(&database), "acme delivered, default delivered");
}

/// R46: a tenant without destinations is no error.
#[test]
fn a_message_without_a_subscriber_is_settled_and_says_so() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let hook = Endpoint::new("acme", receiver.url()).tenant(Uuid::now_v7());
    put(&database, &hook);
    let relay = started(&database);
    database.enqueue_message(of_tenant(Uuid::now_v7(), 1));
    eventually("the message is settled", || {
        database.count("no_subscriber") == 1
    });
    end(&relay);
    assert_eq!(receiver.count(), 0);
    assert_eq!(ledger(&database), " no_subscriber NO_SUBSCRIBER");
}

/// R46: messages of one key that nobody wants, each claimed behind the one before.
#[test]
fn a_key_without_a_subscriber_is_settled_to_its_end() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let hook = Endpoint::new("acme", receiver.url()).tenant(Uuid::now_v7());
    put(&database, &hook);
    let relay = started(&database);
    for n in 0..50 {
        database.enqueue_message(of_tenant(Uuid::now_v7(), n).ordering_key("order-1"));
    }
    eventually("all messages are settled", || {
        database.count("no_subscriber") == 50
    });
    end(&relay);
    assert_eq!(receiver.count(), 0);
}

/// R46: with two relays.
#[test]
fn rows_by_plain_sql_are_used_disabled_and_removed_within_a_second() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relays = [started(&database), started(&database)];
    // A row of another topic: without any row, messages would wait for a route.
    put(
        &database,
        &Endpoint::new("idle", receiver.url()).topics(["none"]),
    );
    eventually("the relays know of the row", || {
        database.enqueue("other", json!({}));
        database.count("no_subscriber") > 0
    });
    eventually("no message is left", || database.count("pending") == 0);

    let url = receiver.url();
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, topics) VALUES ('acme', '{url}', '{{order.*}}')"
    ));
    let began = Instant::now();
    while receiver.count() == 0 {
        assert!(began.elapsed() < PATIENCE, "the new row is not used");
        database.enqueue("order.paid", json!({}));
        std::thread::sleep(Duration::from_millis(20));
    }
    let took = began.elapsed();
    assert!(took < SOON, "used after {took:?}");

    // A disabled destination keeps the messages that already name it.
    database.execute("UPDATE {o}_endpoint SET enabled = false WHERE name = 'acme'");
    std::thread::sleep(SOON);
    eventually("all other messages are settled", || {
        database.count("pending") == 0
    });
    let before = receiver.count();
    database.execute(
        "INSERT INTO {o} (topic, payload, destination) VALUES ('order.paid', '{}', 'acme')",
    );
    database.enqueue("order.paid", json!({}));
    eventually("the message without a subscriber is settled", || {
        database.number("SELECT count(*) FROM {o} WHERE destination = ''") == 0
    });
    std::thread::sleep(SOON);
    assert_eq!((receiver.count(), database.count("pending")), (before, 1));

    database.execute("UPDATE {o}_endpoint SET enabled = true WHERE name = 'acme'");
    eventually("the message is sent", || receiver.count() == before + 1);

    database.execute("UPDATE {o}_endpoint SET enabled = false WHERE name = 'acme'");
    std::thread::sleep(SOON);
    database.execute(
        "INSERT INTO {o} (topic, payload, destination) VALUES ('order.paid', '{}', 'acme')",
    );
    database.execute("DELETE FROM {o}_endpoint WHERE name = 'acme'");
    eventually("the message has ended", || database.count("dead") == 1);
    for relay in &relays {
        end(relay);
    }
    assert_eq!(
        database
            .text("SELECT reason FROM {o}_ledger WHERE status = 'dead'")
            .as_deref(),
        Some("DESTINATION_REMOVED")
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_dead"), 0);
    assert_eq!(receiver.count(), before + 1);
}

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

/// R46, R50: a bad row is never skipped silently, and only a row that no relay could use is disabled for all.
#[test]
fn a_row_that_no_relay_can_use_is_disabled_and_a_row_against_the_settings_is_refused() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, rate) VALUES ('rate', 'https://a.example/', 'often')",
    );
    database.execute("INSERT INTO {o}_endpoint (name, url) VALUES
        ('plain', 'http://a.example/'), ('inside', 'https://10.0.0.7/'), ('good', 'https://a.example/'),
        ('port', 'https://a.example:22/'), ('other', 'https://a.example:8443/'),
        ('metadata', 'https://169.254.169.254/'), ('broken', 'https://a.example:99999/')");
    let relay = database
        .relay()
        .endpoint_threads(4)
        .configure(|config| config.endpoint_ports = vec![443, 8443])
        .start()
        .expect("a relay");
    eventually("the unusable rows are disabled", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE NOT enabled") == 3
    });
    eventually("the others are refused", || refused(&relay).is_some());
    let listed = database
        .outbox()
        .endpoints()
        .list(&mut database.connect(), &EndpointFilter::default(), 100)
        .expect("the destinations");
    end(&relay);
    let found = |name: &str| listed.iter().find(|one| one.name == name).expect("a row");
    for (name, why) in [
        ("rate", "rate: "),
        ("metadata", "link-local"),
        ("broken", "port"),
    ] {
        let reason = found(name).disabled_reason.clone().unwrap_or_default();
        assert!(reason.contains(why), "{name}: {reason}");
    }
    for (name, why) in [
        ("plain", "OUTBOX_ENDPOINT_HTTPS_ONLY"),
        ("inside", "private"),
        ("port", "OUTBOX_ENDPOINT_PORTS"),
    ] {
        let problem = found(name).problem.clone().unwrap_or_default();
        assert!(found(name).enabled, "{name}");
        assert!(
            problem.starts_with("no running relay serves the endpoint") && problem.contains(why),
            "{name}: {problem}"
        );
    }
    for name in ["good", "other"] {
        assert_eq!((found(name).enabled, &found(name).problem), (true, &None));
    }
}

/// The relay's problem `endpoint_refused`.
fn refused(relay: &RelayHandle) -> Option<String> {
    let health = relay.health();
    let mut problems = health.problems().iter();
    let one = problems.find(|one| one.kind == ProblemKind::EndpointRefused)?;
    Some(one.what.clone())
}

/// R50: the relay with the default settings refuses every row, and runs alone at first.
#[test]
fn settings_of_one_relay_decide_nothing_for_the_others() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for n in 0..3 {
        put(&database, &Endpoint::new(format!("d{n}"), receiver.url()));
    }
    let strict = database
        .relay()
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

/// R46
#[test]
fn each_row_signs_with_its_own_secret_and_never_with_the_relays() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(
        &database,
        &Endpoint::new("signed", format!("{}/signed", receiver.url())),
    );
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url) VALUES ('unsigned', '{}/unsigned')",
        receiver.url()
    ));
    let conn = &mut database.connect();
    let secret = database.outbox().endpoints().secret(conn, "signed");
    let secret = secret.expect("an answer").expect("a secret");
    let relay = started(&database);
    database.enqueue("order.paid", json!({ "n": 1 }));
    let requests = receiver.wait_for(2);
    end(&relay);
    let verifier = diesel_outbox::receive::Verifier::new(&[secret]).expect("a verifier");
    for request in requests {
        let is_signed = request.header("webhook-signature").is_some();
        assert_eq!(is_signed, path(&request) == "/events/signed");
        if is_signed {
            let headers = diesel_outbox::receive::Headers::new(request.headers());
            let verified = verifier.verify(&headers, &request.body);
            assert!(verified.is_ok(), "{verified:?}");
        }
    }
}

/// R46: commas separate secrets as well as white space does, so a replaced secret does not sign after its time.
#[test]
fn old_secrets_stop_signing_however_they_are_separated() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let [new, old] = [0, 1].map(|_| {
        let written = diesel_outbox::config::SigningSecret::random().written();
        secrecy::ExposeSecret::expose_secret(&written).to_owned()
    });
    let separated = [" ", ",", ", "];
    for (n, separator) in separated.iter().enumerate() {
        database.execute(&format!(
            "INSERT INTO {{o}}_endpoint (name, url, secret, old_secrets_until)
             SELECT when_ || {n}, '{}', '{new}{separator}{old}', now() + ago
               FROM (VALUES ('old', interval '-1 s'), ('new', interval '1 h')) AS v(when_, ago)",
            receiver.url()
        ));
    }
    let relay = started(&database);
    database.enqueue("order.paid", json!({ "n": 1 }));
    let requests = receiver.wait_for(2 * separated.len());
    end(&relay);
    let signatures = requests.iter().map(|request| {
        let signatures = request.header("webhook-signature").expect("signed");
        signatures.split(' ').count()
    });
    let mut signatures: Vec<usize> = signatures.collect();
    signatures.sort_unstable();
    assert_eq!(signatures, [1, 1, 1, 2, 2, 2]);
}

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

/// R46, G5: keyed messages arrive in order at every destination.
#[test]
fn order_is_kept_at_each_of_them() {
    let database = Database::new();
    let receiver = Receiver::answering({
        let tries = std::sync::atomic::AtomicUsize::new(0);
        move |_| match tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 5 {
            3 => 503,
            _ => 200,
        }
    });
    for name in ["a", "b"] {
        let url = format!("{}/{name}", receiver.url());
        put(&database, &Endpoint::new(name, url));
    }
    for n in 0..20 {
        let message = NewMessage::new("order.paid", &json!(n)).expect("JSON");
        database.enqueue_message(message.ordering_key("customer-7"));
    }
    let relay = started(&database);
    eventually("all messages are settled", || {
        database.count("delivered") == 40
    });
    end(&relay);
    for path in ["/events/a", "/events/b"] {
        let requests = receiver.requests();
        let of_one = requests
            .iter()
            .filter(|request| self::path(request) == path);
        let mut seen: Vec<i64> = of_one.filter_map(|one| one.json().as_i64()).collect();
        seen.dedup();
        assert_eq!(seen, (0..20).collect::<Vec<i64>>(), "{path}");
    }
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

/// R46: messages for endpoints have a route, in every report.
#[test]
fn messages_of_endpoints_are_not_reported_as_unrouted() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(&database, &Endpoint::new("acme", receiver.url()));
    database.execute("UPDATE {o}_endpoint SET enabled = false");
    let relay = started(&database);
    let waiting = |destination: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, destination) VALUES ('order.paid', '{{}}', '{destination}')"
        ));
    };
    waiting("acme");
    waiting("unknown");
    let depths = || {
        let conn = &mut database.connect();
        let depths = diesel_outbox::admin::depths(conn, &database.outbox_name()).expect("depths");
        let lanes = depths
            .lanes
            .into_iter()
            .filter(|lane| lane.unserved.is_some());
        lanes.map(|lane| lane.destination).collect::<Vec<String>>()
    };
    eventually("only the unknown destination has no route", || {
        depths() == ["unknown"]
    });
    end(&relay);
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

/// R46: what a filter does not ask for decides nothing.
#[test]
fn a_filter_reads_any_payload() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let hook = |name: &str| Endpoint::new(name, format!("{}/{name}", receiver.url()));
    put(&database, &hook("all"));
    put(
        &database,
        &hook("filtered").filter(json!({"good": [{"exists": true}]})),
    );
    for payload in [
        r#"{"bad":"\u0000"}"#,
        r#"{"good":1}"#,
        r#"{"bad":1e999999}"#,
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload) VALUES ('order.paid', '{payload}')"
        ));
    }
    let relay = started(&database);
    eventually("all messages are settled", || {
        database.count("delivered") == 4
    });
    end(&relay);
    assert_eq!(
        ledger(&database),
        "all delivered, all delivered, all delivered, filtered delivered"
    );
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

/// R46: the survey of all lanes takes longer than a claim may wait.
#[test]
fn a_new_topic_does_not_wait_beside_a_hundred_thousand_lanes() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(
        &database,
        &Endpoint::new("new", receiver.url()).topics(["new.*"]),
    );
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, enabled)
         SELECT 'd' || n, 'https://nobody.example', false FROM generate_series(1, 10000) n",
    );
    database.execute(
        "INSERT INTO {o} (topic, payload, destination)
         SELECT 't' || t, '{}', 'd' || n FROM generate_series(1, 10000) n, generate_series(1, 10) t",
    );
    let relay = started(&database);
    for count in 1..=3 {
        database.enqueue(&format!("new.{count}"), json!({}));
        eventually("the message is delivered", || receiver.count() == count);
    }
    end(&relay);
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

/// R50: plain SQL can write any time.
#[test]
fn a_destination_with_a_time_without_end_is_shown_and_served() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(&database, &Endpoint::new("odd", receiver.url()));
    database.execute(
        "UPDATE {o}_endpoint SET created_at = '-infinity', verified_at = 'infinity', old_secrets_until = '-infinity'",
    );
    for arguments in [
        ["endpoint", "list", "--json"].as_slice(),
        &["endpoint", "list"],
        &["endpoint", "show", "odd"],
        &["endpoint", "show", "odd", "--json"],
    ] {
        let shown = finish(database.binary(arguments)).code(0).stdout;
        assert!(shown.contains("odd"), "{arguments:?}: {shown}");
    }
    let relay = started(&database);
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("it is delivered", || receiver.count() == 1);
    end(&relay);
    // Relays compare these, and no clock shows them.
    for sql in [
        "INSERT INTO {o}_endpoint (name, url, updated_at) VALUES ('a', 'https://a.example/', '-infinity')",
        "UPDATE {o}_endpoint SET failing_since = 'infinity'",
    ] {
        let refused = database.refused(sql);
        let constraint = "outbox_endpoint_times_are_of_a_clock";
        assert!(refused.contains(constraint), "{refused}");
    }
}

/// R50: as after a restore, or by a role that ends triggers for its session.
#[test]
fn a_change_without_ordinary_triggers_is_noticed_too() {
    let database = Database::new();
    let [old, new] = [(); 2].map(|()| Receiver::ok());
    put(&database, &Endpoint::new("moved", old.url()));
    let relay = started(&database);
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the first is delivered", || old.count() == 1);
    let conn = &mut database.connect();
    let change = format!(
        "BEGIN; SET LOCAL session_replication_role = replica;
         UPDATE {}_endpoint SET url = '{}'; COMMIT",
        database.name(),
        new.url()
    );
    conn.batch_execute(&change).expect("a superuser");
    eventually("messages go to the new URL", || {
        database.enqueue("order.paid", json!({ "n": 2 }));
        new.count() > 0
    });
    end(&relay);
}
