//! Filters of endpoints: they decide which messages a destination gets, and delay nobody.

use std::time::{Duration, Instant, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::endpoints::{Endpoint, Recover};
use diesel_outbox::{Destination, NewMessage, RelayHandle};
use serde_json::json;
use uuid::Uuid;

use crate::metrics::Metrics;
use crate::support::{Database, Receiver, end, eventually};

/// Other messages are delivered within this time. They take about 50 ms; the machine of a test may be busy.
const SOON: Duration = Duration::from_secs(2);
/// A filter of orders.
const LARGE: &str = r#"{"euro": [{"numeric": [">=", 100]}]}"#;

fn started(database: &Database, plain: &Receiver) -> RelayHandle {
    (database.relay())
        .endpoint_threads(16)
        .destination(Destination::new("plain", &plain.url()).expect("a URL"))
        .route("plain", "plain")
        .start()
        .expect("a relay")
}

/// A relay that keeps payloads in the ledger.
fn keeping(database: &Database) -> RelayHandle {
    (database.keeping_relay())
        .endpoint_threads(4)
        .start()
        .expect("a relay")
}

/// Registers destinations with one filter each: `name`, `filter`.
fn put(database: &Database, receiver: &Receiver, hooks: &[(&str, &str)]) {
    let conn = &mut database.connect();
    for (name, filter) in hooks {
        let hook = Endpoint::new(*name, format!("{}/{name}", receiver.url()))
            .topics(["order.*"])
            .filter(serde_json::from_str(filter).expect("JSON"));
        database.outbox().endpoints().put(conn, &hook).expect("put");
    }
}

fn disabled(database: &Database) -> i64 {
    database.number("SELECT count(*) FROM {o}_endpoint WHERE NOT enabled")
}

fn delivered_to(database: &Database, name: &str) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM {{o}}_ledger WHERE destination = '{name}' AND status = 'delivered'"
    ))
}

/// Enqueues a message of another topic, and waits until the receiver has the message. Returns how long that took.
fn pass_by(database: &Database, plain: &Receiver) -> Duration {
    let (before, began) = (plain.count(), Instant::now());
    database.enqueue("plain", json!({}));
    eventually("the message of another topic is delivered", || {
        plain.count() > before
    });
    began.elapsed()
}

/// R50: a lock of the table of destinations, such as of an ALTER TABLE behind a dump.
#[test]
fn a_lock_on_the_destinations_disables_none() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let names: Vec<String> = (0..20).map(|n| format!("hook-{n}")).collect();
    let hooks = names.iter().map(|name| (name.as_str(), LARGE));
    put(&database, &receiver, &hooks.collect::<Vec<_>>());
    let relay = started(&database, &plain);
    let table = format!("{}_endpoint", database.name());
    for n in 1..=3 {
        let mut conn = database.connect();
        conn.transaction(|conn: &mut PgConnection| {
            conn.batch_execute(&format!("LOCK TABLE {table}"))?;
            for _ in 0..5 {
                database.enqueue("order.paid", json!({ "euro": 150 }));
            }
            conn.batch_execute("SELECT pg_sleep(2.5)")
        })
        .expect("locked");
        eventually(
            "the messages are delivered, or a destination is disabled",
            || database.count("delivered") == 20 * 5 * n || disabled(&database) > 0,
        );
        assert_eq!(disabled(&database), 0, "after {n} locks");
    }
    end(&relay);
}

/// R50: a relay continues with the destinations, pauses and topics that it knows.
#[test]
fn a_lock_on_tables_that_people_change_holds_up_no_message() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    put(&database, &receiver, &[("acme", LARGE)]);
    let relay = started(&database, &plain);
    pass_by(&database, &plain);
    let mut person = database.connect();
    for table in ["endpoint", "pause", "topic"] {
        let locked = format!("BEGIN; LOCK TABLE {}_{table}", database.name());
        person.batch_execute(&locked).expect("locked");
        let before = delivered_to(&database, "acme");
        for n in 1..=10 {
            let took = pass_by(&database, &plain);
            assert!(took < SOON, "{took:?} while {table} is locked");
            database.enqueue("order.paid", json!({ "euro": 150 }));
            eventually("the endpoint has the message", || {
                delivered_to(&database, "acme") == before + n
            });
        }
        person.batch_execute("COMMIT").expect("released");
    }
    end(&relay);
}

/// R50: the filters of one tenant delay no other topic.
#[test]
fn a_tenant_with_a_thousand_filters_delays_no_other_topic() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let tenant = Uuid::now_v7();
    database.execute(&format!(
        r#"INSERT INTO {{o}}_endpoint (name, url, tenant_id, topics, filter)
         SELECT 'hook-' || n, '{}', '{tenant}', '{{order.*}}', ('{{"items": {{"id": [' || -n || ']}}}}')::json
           FROM generate_series(1, 1000) n"#,
        receiver.url()
    ));
    let relay = started(&database, &plain);
    let items: Vec<_> = (0..30)
        .map(|n| json!({ "id": n, "name": "a thing" }))
        .collect();
    let messages = (0..40).map(|_| {
        let payload = json!({ "items": items });
        let message = NewMessage::new("order.paid", &payload).expect("JSON");
        message.tenant_id(tenant)
    });
    (database.outbox())
        .enqueue_batch(&mut database.connect(), messages)
        .expect("enqueued");
    let mut took: Vec<Duration> = (0..20).map(|_| pass_by(&database, &plain)).collect();
    took.sort_unstable();
    assert!(took[10] < SOON / 2 && took[19] < SOON, "{took:?}");
    end(&relay);
    assert_eq!(disabled(&database), 0);
}

/// R72: a filter that would need very many comparisons for a message does not match it, is a problem, and delays nobody.
#[test]
fn a_filter_that_needs_too_many_comparisons_does_not_match() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let alternatives: Vec<String> = (0..100).map(|n| format!("no-{n}")).collect();
    let costly = json!({ "items": alternatives }).to_string();
    put(
        &database,
        &receiver,
        &[("all", "{\"n\": [1]}"), ("costly", &costly)],
    );
    let metrics = Metrics::of(&database);
    let relay = started(&database, &plain);
    let items: Vec<String> = (0..20_000).map(|n| format!("item-{n}")).collect();
    for _ in 0..20 {
        database.enqueue("order.paid", json!({ "n": 1, "items": items }));
    }
    let mut longest = Duration::ZERO;
    eventually("the other destination has all messages", || {
        longest = longest.max(pass_by(&database, &plain));
        delivered_to(&database, "all") == 20
    });
    assert!(longest < SOON, "{longest:?}");
    database.enqueue("order.paid", json!({ "n": 1, "items": ["no-7"] }));
    eventually("it matches where it need not compare so much", || {
        delivered_to(&database, "costly") == 1
    });
    let problems = relay.health().to_string();
    assert!(problems.contains("filter_too_much"), "{problems}");
    assert!(relay.health().is_ready());
    end(&relay);
    assert_eq!(disabled(&database), 0);
    assert_eq!(delivered_to(&database, "costly"), 1);
    let given_up = metrics.value("diesel_outbox_filter_too_much_total", &[]);
    assert_eq!(given_up, 20.0);
}

/// R72: the filters of one customer take nothing from those of another, whichever name comes first.
#[test]
fn costly_filters_take_no_messages_from_other_destinations() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let alternatives: Vec<String> = (0..100).map(|n| format!("no-{n}")).collect();
    let costly = json!({ "items": alternatives }).to_string();
    let names: Vec<String> = (0..60).map(|n| format!("a-{n}")).collect();
    let mut hooks: Vec<_> = names.iter().map(|name| (name.as_str(), &*costly)).collect();
    let cheap = json!({ "few": alternatives[..60] }).to_string();
    hooks.push(("zeta", &cheap));
    put(&database, &receiver, &hooks);
    let relay = started(&database, &plain);
    let items: Vec<String> = (0..10_000).map(|n| format!("item-{n}")).collect();
    let few = ["x", "y", "z", "no-59"];
    database.enqueue("order.paid", json!({ "items": items, "few": few }));
    eventually("the cheap filter matches", || {
        delivered_to(&database, "zeta") == 1
    });
    end(&relay);
}

/// R72: a row of plain SQL.
#[test]
fn a_filter_that_cannot_be_read_disables_its_destination_and_says_where() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, filter) VALUES ('acme', '{}', '{{\"euro\": [{{\"numeric\": [\">\"]}}]}}')",
        receiver.url()
    ));
    let relay = started(&database, &plain);
    eventually("it is disabled", || disabled(&database) == 1);
    end(&relay);
    let reason = database.text("SELECT disabled_reason FROM {o}_endpoint");
    let reason = reason.expect("a reason");
    assert!(reason.contains("filter: euro[0].numeric"), "{reason}");
}

/// R72: topic and headers, for deliveries and for what a destination has missed.
#[test]
fn a_filter_asks_for_topic_and_headers_too() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let filter = r#"{"$topic": [{"suffix": ".paid"}], "$header": {"x-shop": ["berlin"]}}"#;
    put(&database, &receiver, &[("acme", filter)]);
    let relay = keeping(&database);
    let all = |n: i64| {
        for (topic, shop) in [
            ("order.paid", "berlin"),
            ("order.sent", "berlin"),
            ("order.paid", "bonn"),
        ] {
            let message = NewMessage::new(topic, &json!(n)).expect("JSON");
            database.enqueue_message(message.header("X-Shop", shop));
        }
        eventually("all are settled", || {
            database.number("SELECT count(*) FROM {o}") == 0
        });
    };
    all(1);
    let destinations = database.outbox();
    let destinations = destinations.endpoints();
    let conn = &mut database.connect();
    destinations
        .disable(conn, "acme", "a day off")
        .expect("disabled");
    end(&relay);
    let relay = keeping(&database);
    all(2);
    destinations.enable(conn, "acme").expect("enabled");
    let (since, note) = (UNIX_EPOCH, Note::new("alice", "a day off"));
    let recovered = destinations
        .recover(conn, "acme", since, Recover::AndMissed, Bulk::new(&note))
        .expect("recovered");
    assert_eq!(recovered.map(|bulked| bulked.changed), Some(1));
    let got: Vec<_> = receiver.wait_for(2).iter().map(|one| one.json()).collect();
    assert_eq!(got, [json!(1), json!(2)]);
    end(&relay);
}

/// Payloads that are JSON for every parser, and that `jsonb` of PostgreSQL does not hold.
const NOT_JSONB: [&str; 3] = [
    r#"{"total": 7, "note": "a\u0000b"}"#,
    r#"{"total": 7, "note": "\ud83d"}"#,
    r#"{"total": 7, "\u0000": 1}"#,
];

fn enqueue_text(database: &Database, payload: &str) {
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload) VALUES ('order.paid', '{payload}')"
    ));
}

/// R61: a filter asks about one member, and another one decides nothing.
#[test]
fn a_filter_reads_payloads_with_any_escaped_character() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(
        &database,
        &receiver,
        &[("wants", r#"{"total": [7]}"#), ("not", r#"{"total": [8]}"#)],
    );
    for payload in NOT_JSONB {
        enqueue_text(&database, payload);
    }
    let relay = started(&database, &receiver);
    eventually("all are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(delivered_to(&database, "wants"), 3);
    assert_eq!(delivered_to(&database, "not"), 0);
    let bodies: Vec<Vec<u8>> = receiver
        .requests()
        .into_iter()
        .map(|one| one.body)
        .collect();
    for payload in NOT_JSONB {
        assert!(
            bodies.iter().any(|body| body == payload.as_bytes()),
            "{payload}"
        );
    }
}

/// R61, R55.
#[test]
fn missing_messages_with_any_escaped_character_are_recovered() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(&database, &receiver, &[("early", r#"{"total": [7]}"#)]);
    let relay = keeping(&database);
    database.execute("UPDATE {o}_endpoint SET enabled = false");
    for payload in NOT_JSONB {
        enqueue_text(&database, payload);
    }
    eventually("they are for nobody", || {
        database.count("no_subscriber") == 3
    });
    let conn = &mut database.connect();
    let destinations = database.outbox();
    let destinations = destinations.endpoints();
    destinations.enable(conn, "early").expect("enabled");
    let (since, note) = (UNIX_EPOCH, Note::new("alice", "it was disabled"));
    let recovered = destinations
        .recover(conn, "early", since, Recover::AndMissed, Bulk::new(&note))
        .expect("recovered");
    assert_eq!(recovered.map(|bulked| bulked.changed), Some(3));
    eventually("they are delivered", || {
        delivered_to(&database, "early") == 3
    });
    end(&relay);
}
