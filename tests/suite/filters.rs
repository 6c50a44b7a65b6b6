//! Filters of registered destinations: what is slow, fails or waits harms neither other destinations nor other messages.

use std::time::{Duration, Instant, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection};
use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::destinations::{Recover, RegisteredDestination};
use diesel_outbox::{Destination, NewMessage, RelayHandle};
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually};

/// Other messages are delivered within this time. They take about 50 ms; the machine of a test may be busy.
const SOON: Duration = Duration::from_secs(2);
/// A filter that takes minutes for [`items`], by nested loops.
const SLOW: &str = "$.items[*] ? (exists ($.items[*] ? (@ == -1)))";
/// A filter that takes as long, by nested descents.
const NESTED: &str = "$.** ? (exists ($.** ? (@ == -1)))";

fn started(database: &Database, plain: &Receiver) -> RelayHandle {
    (database.relay())
        .registered_threads(16)
        .configure(|config| config.registered_https_only = false)
        .configure(|config| config.registered_public_only = false)
        .destination(Destination::new("plain", &plain.url()).expect("a URL"))
        .route("plain", "plain")
        .start()
        .expect("a relay")
}

/// Registers destinations with one filter each: `name`, `filter`.
fn put(database: &Database, receiver: &Receiver, hooks: &[(&str, &str)]) {
    let conn = &mut database.connect();
    for (name, filter) in hooks {
        let hook = RegisteredDestination::new(*name, format!("{}/{name}", receiver.url()))
            .topics(["order.*"])
            .filter(*filter);
        database
            .outbox()
            .destinations()
            .put(conn, &hook)
            .expect("put");
    }
}

fn disabled(database: &Database) -> i64 {
    database.number("SELECT count(*) FROM {o}_destination WHERE NOT enabled")
}

fn delivered_to(database: &Database, name: &str) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM {{o}}_ledger WHERE destination = '{name}' AND status = 'delivered'"
    ))
}

fn items() -> serde_json::Value {
    json!({ "items": (1..=20_000).collect::<Vec<i32>>(), "euro": 100 })
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

/// R50: size and number of messages are no property of a filter.
#[test]
fn a_filter_that_many_large_messages_wait_for_stays_enabled_and_matches() {
    for (count, bytes) in [(500, 30_000), (16, 830_000)] {
        let database = Database::new();
        let (receiver, plain) = (Receiver::ok(), Receiver::ok());
        put(&database, &receiver, &[("acme", "$.euro ? (@ >= 100)")]);
        let lines =
            (0..bytes / 60).map(|n| json!({ "id": n, "name": "a thing", "cents": [100, n] }));
        let lines: Vec<_> = lines.collect();
        let messages = (0..count).map(|n| {
            let payload = json!({ "n": n, "euro": 150, "lines": lines });
            NewMessage::new("order.paid", &payload).expect("JSON")
        });
        (database.outbox())
            .enqueue_batch(&mut database.connect(), messages)
            .expect("enqueued");
        let relay = started(&database, &plain);
        eventually(
            "all messages are delivered, or the destination is disabled",
            || delivered_to(&database, "acme") == count || disabled(&database) > 0,
        );
        end(&relay);
        assert_eq!(disabled(&database), 0);
        assert_eq!(receiver.ids().len() as i64, count);
    }
}

/// R50: a lock of the table of destinations, such as of an ALTER TABLE behind a dump.
#[test]
fn a_lock_on_the_destinations_disables_none() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let names: Vec<String> = (0..20).map(|n| format!("hook-{n}")).collect();
    let hooks = names
        .iter()
        .map(|name| (name.as_str(), "$.euro ? (@ >= 100)"));
    put(&database, &receiver, &hooks.collect::<Vec<_>>());
    let relay = started(&database, &plain);
    let table = format!("{}_destination", database.name());
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
    put(&database, &receiver, &[("acme", "$.euro ? (@ >= 100)")]);
    let relay = started(&database, &plain);
    pass_by(&database, &plain);
    let mut person = database.connect();
    for table in ["destination", "pause", "topic"] {
        let locked = format!("BEGIN; LOCK TABLE {}_{table}", database.name());
        person.batch_execute(&locked).expect("locked");
        let before = delivered_to(&database, "acme");
        for n in 1..=10 {
            let took = pass_by(&database, &plain);
            assert!(took < SOON, "{took:?} while {table} is locked");
            database.enqueue("order.paid", json!({ "euro": 150 }));
            eventually("the registered destination has the message", || {
                delivered_to(&database, "acme") == before + n
            });
        }
        person.batch_execute("COMMIT").expect("released");
    }
    end(&relay);
}

/// R50: errors that PostgreSQL raises although filters are evaluated silently.
#[test]
fn a_filter_that_fails_for_a_message_does_not_match_it_and_holds_no_other_message() {
    let deep = format!("{}{}", "[".repeat(12_000), "]".repeat(12_000));
    let zoned = r#"{"at": "2026-01-02T03:04:05+02:00"}"#.to_owned();
    for payload in [zoned, deep] {
        let database = Database::new();
        let (receiver, plain) = (Receiver::ok(), Receiver::ok());
        let dated = r#"$.at.datetime() < "2026-05-01".datetime()"#;
        put(
            &database,
            &receiver,
            &[("dated", dated), ("all", "$.** ? (@.n == 1)")],
        );
        let mut conn = database.connect();
        let insert = |conn: &mut PgConnection, payload: &str| {
            conn.batch_execute(&format!(
                "INSERT INTO {} (topic, payload) VALUES ('order.paid', '{payload}')",
                database.name()
            ))
            .expect("inserted");
        };
        insert(&mut conn, r#"{"n": 1}"#);
        insert(&mut conn, &payload);
        for _ in 0..9 {
            insert(&mut conn, r#"{"n": 1, "at": "2026-01-02"}"#);
        }
        let (relay, began) = (started(&database, &plain), Instant::now());
        eventually("the other messages are delivered", || {
            delivered_to(&database, "all") == 10
        });
        assert!(began.elapsed() < 2 * SOON, "{:?}", began.elapsed());
        eventually("the message that a filter fails for is settled", || {
            database.number("SELECT count(*) FROM {o}") == 0
        });
        assert!(pass_by(&database, &plain) < SOON);
        let problems = relay.health().to_string();
        assert!(problems.contains("filter_failed"), "{problems}");
        assert!(relay.health().is_ready());
        end(&relay);
        assert_eq!(disabled(&database), 0);
    }
}

/// R50: the filters of one tenant delay no other topic.
#[test]
fn a_tenant_with_a_thousand_filters_delays_no_other_topic() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let tenant = Uuid::now_v7();
    database.execute(&format!(
        "INSERT INTO {{o}}_destination (name, url, tenant_id, topics, filter)
         SELECT 'hook-' || n, '{}', '{tenant}', '{{order.*}}', ('$.items[*] ? (@.id == ' || -n || ')')::jsonpath
           FROM generate_series(1, 1000) n",
        receiver.url()
    ));
    let relay = started(&database, &plain);
    let items: Vec<_> = (0..600)
        .map(|n| json!({ "id": n, "name": "a thing" }))
        .collect();
    let messages = (0..300).map(|_| {
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

/// R50: a filter that takes very long for each message is disabled in the end, and meanwhile delays nobody.
#[test]
fn a_slow_filter_is_bounded_and_disabled_while_others_continue() {
    for filter in [SLOW, NESTED] {
        let database = Database::new();
        let (receiver, plain) = (Receiver::ok(), Receiver::ok());
        put(
            &database,
            &receiver,
            &[("good", "$.euro ? (@ >= 100)"), ("slow", filter)],
        );
        let relay = started(&database, &plain);
        let payload = items();
        for _ in 0..20 {
            database.enqueue("order.paid", payload.clone());
        }
        let mut longest = Duration::ZERO;
        eventually("the slow destination is disabled", || {
            longest = longest.max(pass_by(&database, &plain));
            disabled(&database) == 1
        });
        assert!(longest < SOON, "{longest:?}");
        eventually("the other destination has all messages", || {
            delivered_to(&database, "good") == 20
        });
        end(&relay);
        let reason = database
            .text("SELECT disabled_reason FROM {o}_destination WHERE name = 'slow'")
            .expect("a reason");
        assert!(reason.contains("filter"), "{reason}");
    }
}

/// R51, R54: a message whose filters are not evaluated yet waits, without an attempt and with the reason.
#[test]
fn a_message_waits_with_the_reason_while_a_filter_is_not_evaluated() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    put(&database, &receiver, &[("slow", SLOW)]);
    let relay = started(&database, &plain);
    database.enqueue("order.paid", items());
    eventually("the reason is recorded", || {
        database
            .text("SELECT last_error FROM {o}")
            .is_some_and(|error| error.contains("filter of the registered destination slow"))
    });
    assert_eq!(
        database
            .text("SELECT last_error_code || ' ' || attempts FROM {o}")
            .as_deref(),
        Some("FILTER_NOT_EVALUATED 0")
    );
    assert_eq!(database.count("no_subscriber"), 0);
    eventually(
        "the destination is disabled, and nobody else wants the message",
        || database.number("SELECT count(*) FROM {o}_ledger") == 1,
    );
    end(&relay);
    assert_eq!(disabled(&database), 1);
}

/// R50: a tenant whose filters are slow delays no other tenant, also not on the same topic.
#[test]
fn a_tenant_with_slow_filters_and_many_topics_delays_no_other_tenant() {
    let database = Database::new();
    let (receiver, plain) = (Receiver::ok(), Receiver::ok());
    let (slow, other) = (Uuid::now_v7(), Uuid::now_v7());
    // Each evaluation takes some time, but not enough to be called slow.
    let filter = r#"$ ? (@.a like_regex "(a*)(a*)(a*)\\1\\2\\3x$" && N > 0)"#;
    database.execute(&format!(
        "INSERT INTO {{o}}_destination (name, url, tenant_id, topics, filter)
         SELECT 'slow-' || n, '{url}/slow', '{slow}'::uuid, '{{order.*}}'::text[], replace('{filter}', 'N', n::text)::jsonpath
           FROM generate_series(1, 100) n
         UNION ALL SELECT 'filtered', '{url}/filtered', '{other}', '{{order.*}}', '$.euro ? (@ > 1)'
         UNION ALL SELECT 'all', '{url}/all', '{other}', '{{order.*}}', NULL",
        url = receiver.url()
    ));
    let relay = started(&database, &plain);
    let payload = json!({ "a": format!("{}x", "a".repeat(150)) });
    let messages = (0..600).map(|n| {
        let topic = format!("order.{}", n % 60);
        let message = NewMessage::new(topic, &payload).expect("JSON");
        message.tenant_id(slow)
    });
    (database.outbox())
        .enqueue_batch(&mut database.connect(), messages)
        .expect("enqueued");
    let mut took: Vec<Duration> = (0..20)
        .map(|n| {
            let message = NewMessage::new(format!("order.{n}"), &json!({ "euro": 2 }));
            let message = message.expect("JSON").tenant_id(other);
            let began = Instant::now();
            (database.outbox())
                .enqueue(&mut database.connect(), message)
                .expect("enqueued");
            eventually("the other tenant has its message", || {
                delivered_to(&database, "filtered") == n + 1
                    && delivered_to(&database, "all") == n + 1
            });
            began.elapsed()
        })
        .collect();
    took.sort_unstable();
    assert!(took[10] < SOON && took[19] < 2 * SOON, "{took:?}");
    assert_eq!(disabled(&database), 0);
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
#[ignore = "PostgreSQL evaluates filters as jsonb, which holds no U+0000 and no half of a surrogate pair: filters move into the process"]
fn a_filter_reads_payloads_with_any_escaped_character() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(
        &database,
        &receiver,
        &[
            ("wants", "$.total ? (@ == 7)"),
            ("not", "$.total ? (@ == 8)"),
        ],
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
#[ignore = "PostgreSQL evaluates filters as jsonb, which holds no U+0000 and no half of a surrogate pair: filters move into the process"]
fn missing_messages_with_any_escaped_character_are_recovered() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(&database, &receiver, &[("early", "$.total ? (@ == 7)")]);
    let relay = (database.keeping_relay())
        .registered_threads(4)
        .configure(|config| config.registered_https_only = false)
        .configure(|config| config.registered_public_only = false)
        .start()
        .expect("a relay");
    database.execute("UPDATE {o}_destination SET enabled = false");
    for payload in NOT_JSONB {
        enqueue_text(&database, payload);
    }
    eventually("they are for nobody", || {
        database.count("no_subscriber") == 3
    });
    let conn = &mut database.connect();
    let destinations = database.outbox();
    let destinations = destinations.destinations();
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
