//! Messages that no destination wants, and those that wait for a relay that does not run.

use std::sync::mpsc;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{Event, NewMessage, Relay, RelayBuilder, RelayHandle, Status};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::support::{Database, Receiver, Running, end, eventually, finish};

#[derive(Serialize, Deserialize)]
struct MemberJoined {
    member_id: i64,
}

impl Event for MemberJoined {
    const TOPIC: &'static str = "member.joined";
}

fn serving_endpoints(database: &Database) -> RelayBuilder {
    database.relay().endpoint_threads(4)
}

fn put(database: &Database, hook: &Endpoint) {
    let conn = &mut database.connect();
    (database.outbox().endpoints())
        .put(conn, hook)
        .expect("put");
}

fn application(database: &Database, heard: mpsc::Sender<i64>) -> RelayHandle {
    let relay = database.relay().on::<MemberJoined>(move |event, _| {
        heard.send(event.member_id)?;
        Ok(())
    });
    relay.start().expect("an application")
}

fn join(database: &Database, member_id: i64) {
    database.enqueue("member.joined", json!({ "member_id": member_id }));
}

/// R51: the messages of an application that does not run wait for it, whatever other relays serve, and whoever else
/// wants them.
#[test]
fn messages_of_a_crashed_application_wait_for_its_handler() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(&database, &Endpoint::new("all", receiver.url()));
    let (heard, hear) = mpsc::channel();
    let before = application(&database, heard.clone());
    join(&database, 1);
    assert_eq!(hear.recv_timeout(Duration::from_secs(60)), Ok(1));
    end(&before);

    let relay = serving_endpoints(&database).start().expect("a relay");
    for member_id in 2..5 {
        join(&database, member_id);
    }
    // By then, the relay has seen the messages before.
    database.enqueue("member.left", json!({}));
    eventually("another message is delivered", || {
        database.number("SELECT count(*) FROM {o}_ledger WHERE topic = 'member.left'") == 1
    });
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts = 0 AND topic = 'member.joined'"),
        3
    );
    assert_eq!(database.count("no_subscriber"), 0);
    eventually("the relay says that nobody serves the topic", || {
        relay.health().to_string().contains("member.joined")
    });

    let after = application(&database, heard);
    let mut members: Vec<i64> = (0..3)
        .map(|_| hear.recv_timeout(Duration::from_secs(60)).expect("handled"))
        .collect();
    members.sort_unstable();
    assert_eq!(members, [2, 3, 4]);
    eventually("the customer has them, too", || {
        database.number(
            "SELECT count(*) FROM {o}_ledger WHERE topic = 'member.joined' AND destination = 'all'",
        ) >= 3
    });
    end(&after);
    end(&relay);
}

/// R51: the result has its own name, counts as no delivery, and says so once.
#[test]
fn a_misspelt_topic_ends_without_a_subscriber() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let hook = Endpoint::new("acme", receiver.url()).topics(["order.*"]);
    put(&database, &hook);
    for _ in 0..3 {
        database.enqueue("odrer.paid", json!({}));
    }
    let mut drain = database.binary(&["drain", "--json"]);
    drain.env("OUTBOX_ENDPOINT_THREADS", "4");
    drain.env("OUTBOX_LOG_FORMAT", "json");
    let drained = finish(drain).code(0);
    let report: serde_json::Value = serde_json::from_str(&drained.stdout).expect("JSON");
    assert_eq!(
        (&report["delivered"], &report["no_subscriber"]),
        (&json!(0), &json!(3))
    );
    let said = drained
        .stderr
        .matches("\"event\":\"no_subscriber\"")
        .count();
    assert!((1..=2).contains(&said), "{}", drained.stderr);
    assert_eq!(receiver.count(), 0);
    let statuses = "SELECT string_agg(DISTINCT status || ' ' || reason, ',') FROM {o}_ledger";
    assert_eq!(
        database.text(statuses).as_deref(),
        Some("no_subscriber NO_SUBSCRIBER")
    );
    assert_eq!(database.count("no_subscriber"), 3);
    let status = finish(database.binary(&["status", "--json"])).code(0);
    let status: serde_json::Value = serde_json::from_str(&status.stdout).expect("JSON");
    let counts = &status["counts"];
    assert_eq!(counts["no_subscriber"], 3);
    assert!(counts["delivered"].as_i64().is_none_or(|count| count == 0));
    let shown = finish(database.binary(&["message", "show", "1"])).code(0);
    assert!(
        shown.stdout.contains(Status::NoSubscriber.as_str()),
        "{}",
        shown.stdout
    );
}

/// R51: what relays have served is shown, and is forgotten on request.
#[test]
fn topics_are_listed_and_forgotten() {
    let database = Database::new();
    let receiver = Receiver::ok();
    put(
        &database,
        &Endpoint::new("acme", receiver.url()).topics(["order.*"]),
    );
    let (heard, _hear) = mpsc::channel();
    end(&application(&database, heard));
    let list = || {
        finish(database.binary(&["topics", "list", "--json"]))
            .code(0)
            .stdout
    };
    let listed: serde_json::Value = serde_json::from_str(&list()).expect("JSON");
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(listed[0]["pattern"], "member.joined");
    assert_eq!(listed[0]["kind"], "handler");

    join(&database, 1);
    let relay = serving_endpoints(&database).start().expect("a relay");
    database.enqueue_message(NewMessage::new("order.paid", &json!({})).expect("JSON"));
    receiver.wait_for(1);
    assert_eq!(database.count("no_subscriber"), 0);
    let forget = ["topics", "forget", "member.joined", "--kind", "handler"];
    let forget = [forget.as_slice(), &["--with-waiting", "--yes"]].concat();
    finish(database.binary(&forget)).code(0);
    eventually("nothing serves the topic any more", || {
        database.count("no_subscriber") == 1
    });
    let unknown = finish(database.binary(&forget)).code(1);
    assert!(unknown.stderr.contains("topics list"), "{}", unknown.stderr);
    end(&relay);
}

/// R51: otherwise messages would end as soon as the relay has a pause.
#[test]
fn topics_of_a_running_relay_are_not_forgotten() {
    let database = Database::new();
    let (heard, _hear) = mpsc::channel();
    let relay = application(&database, heard);
    eventually("the topic is recorded", || topics(&database).len() == 1);
    let forget = ["topics", "forget", "member.joined", "--yes"];
    let refused = finish(database.binary(&forget)).code(1).stderr;
    assert!(refused.contains("is running and serves"), "{refused}");
    assert_eq!(topics(&database), ["member.joined"]);
    end(&relay);
    finish(database.binary(&forget)).code(0);
    assert!(topics(&database).is_empty());
}

fn topics(database: &Database) -> Vec<String> {
    let listed = finish(database.binary(&["topics", "list", "--json"])).code(0);
    let listed = listed.json();
    let patterns = listed.as_array().expect("topics").iter();
    patterns
        .map(|one| one["pattern"].as_str().expect("a pattern").to_owned())
        .collect()
}

/// R51: a drain that has found nothing to do has served no topic, so no customer's message waits for it.
#[test]
fn a_drain_without_messages_holds_up_no_customer() {
    let database = Database::new();
    let (customer, other) = (Receiver::ok(), Receiver::ok());
    put(
        &database,
        &Endpoint::new("acme", customer.url()).topics(["order.*"]),
    );
    let drain = || {
        let mut drain = database.binary(&["drain", "--json"]);
        drain.env("OUTBOX_URL", other.url());
        finish(drain).code(0);
    };
    drain();
    assert_eq!(topics(&database), [""; 0]);
    let relay = serving_endpoints(&database).start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    customer.wait_for(1);
    end(&relay);

    database.enqueue("odrer.paid", json!({}));
    drain();
    assert_eq!(
        (topics(&database), other.count()),
        (vec!["*".to_owned()], 1)
    );

    // Log, check and the reason of the message say which pattern it waits for, and how to end that.
    let mut run = database.binary(&["run"]);
    run.env("OUTBOX_ENDPOINT_THREADS", "4");
    let relay = Running::start(run);
    let waiting = database.enqueue("order.paid", json!({})).to_string();
    relay.wait_for_log("topics forget '*'");
    let shown = finish(database.binary(&["message", "show", &waiting])).code(0);
    let checked = finish(database.binary(&["check"]));
    for text in [relay.log(), shown.stdout, checked.stdout] {
        for part in ["topics forget '*'", "last started 20", "acme"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

/// R51: a relay that stands by has served no topic, and records the topics when it becomes active.
#[test]
fn a_relay_that_stands_by_records_its_topics_when_it_becomes_active() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let start = |topic: &str| {
        let mut config = Config::default();
        for (name, value) in [
            ("DATABASE_URL", database.url.as_str()),
            ("OUTBOX_TABLE", &database.name()),
            ("OUTBOX_SINGLE_ACTIVE", "true"),
        ] {
            config.set(name, value).expect("a setting");
        }
        let billing = diesel_outbox::Destination::new("billing", &receiver.url()).expect("a URL");
        let relay = Relay::from_config(config).destination(billing);
        relay.route(topic, "billing").start().expect("a relay")
    };
    let first = start("a.*");
    eventually("the first relay is active", || topics(&database) == ["a.*"]);
    let second = start("b.*");
    eventually("the second relay stands by", || second.stands_by());
    assert_eq!(topics(&database), ["a.*"]);
    end(&first);
    eventually("the second relay is active", || {
        topics(&database) == ["a.*", "b.*"]
    });
    end(&second);
}

/// R51: who locks the rows of topics holds up no relay that starts.
#[test]
fn a_relay_starts_beside_locked_rows_of_topics() {
    let database = Database::new();
    let (heard, hear) = mpsc::channel();
    end(&application(&database, heard.clone()));
    let mut person = database.connect();
    let locks = format!("BEGIN; DELETE FROM {}_topic", database.name());
    person.batch_execute(&locks).expect("locked");
    let began = std::time::Instant::now();
    let after = application(&database, heard);
    join(&database, 1);
    assert_eq!(hear.recv_timeout(Duration::from_secs(60)), Ok(1));
    assert!(began.elapsed() < Duration::from_secs(5));
    person.batch_execute("ROLLBACK").expect("ended");
    end(&after);
}

/// R51: a relay without threads for endpoints decides nothing about their messages.
#[test]
fn a_relay_without_threads_for_endpoints_serves_none() {
    let database = Database::new();
    let (configured, registered) = (Receiver::ok(), Receiver::ok());
    put(
        &database,
        &Endpoint::new("acme", registered.url()).topics(["order.*"]),
    );
    let billing = diesel_outbox::Destination::new("billing", &configured.url()).expect("a URL");
    let without = serving_endpoints(&database)
        .endpoint_threads(0)
        .destination(billing)
        .route("invoice.*", "billing")
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!({}));
    database.enqueue("odrer.paid", json!({}));
    database.enqueue("invoice.sent", json!({}));
    configured.wait_for(1);
    eventually("the message is recorded", || {
        database.count("delivered") == 1
    });
    assert_eq!(
        (registered.count(), database.count("no_subscriber")),
        (0, 0)
    );
    let relay = serving_endpoints(&database).start().expect("a relay");
    registered.wait_for(1);
    eventually("the misspelt one has no subscriber", || {
        database.count("no_subscriber") == 1
    });
    end(&without);
    end(&relay);
}
