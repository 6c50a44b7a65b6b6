//! Delivery to endpoints: rows that appear, change and disappear while relays run.

mod failing;
mod removed;
mod settings;
mod tenants;

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
    database.relay().endpoint_threads(16)
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
        .strict_relay()
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
