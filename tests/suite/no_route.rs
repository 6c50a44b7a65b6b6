//! Topics and destinations that only some relays serve, or none.

use std::time::Duration;

use diesel_outbox::admin;
use diesel_outbox::config::Config;
use diesel_outbox::{
    Destination, NewMessage, ProblemKind, Relay, RelayBuilder, RelayHandle, StartError,
};
use serde_json::json;

use crate::commands::{With, refused};
use crate::metrics::Metrics;
use crate::support::{Database, File, Receiver, Running, end, eventually, finish};

fn to(database: &Database, topic: &str, receiver: &Receiver) -> RelayBuilder {
    let billing = Destination::new("billing", &receiver.url()).expect("a URL");
    database
        .relay()
        .destination(billing)
        .route(topic, "billing")
}

fn keyed(topic: &str, key: &str) -> NewMessage {
    NewMessage::new(topic, &json!({ "key": key }))
        .expect("JSON")
        .ordering_key(key)
}

fn has_problem(relay: &RelayHandle) -> bool {
    let health = relay.health();
    let mut problems = health.problems().iter();
    problems.any(|problem| problem.kind == ProblemKind::NoRoute)
}

/// Inserts the lease of another relay, which serves this topic by a handler.
fn lease_of_another(database: &Database, topic: &str, lives: &str, single_active: bool) {
    let serves = json!({ "routes": [[topic, ["handlers"]]], "handlers": [["handlers", [topic]]] });
    database.execute(&format!(
        "INSERT INTO {{o}}_lease (relay, expires_at, serves, single_active)
         VALUES ('another', now() + '{lives}', '{serves}', {single_active})"
    ));
}

/// R44, G6: a relay without a route leaves messages to the relay that has one.
#[test]
fn a_relay_takes_nothing_that_it_cannot_route() {
    let database = Database::new();
    let (receiver, other) = (Receiver::ok(), Receiver::ok());
    let lacking = to(&database, "invoice.*", &other)
        .max_attempts(3)
        .backoff("50ms,50ms".parse().expect("a backoff"))
        .start()
        .expect("a relay");
    database.enqueue_many(100);
    for n in 0..100 {
        database.enqueue_message(keyed("order.paid", &format!("key-{}", n % 7)));
    }
    let healthy = to(&database, "order.*", &receiver)
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 200
    });
    assert_eq!(database.count("dead"), 0);
    assert_eq!(
        database.number("SELECT max(attempts) FROM {o}_ledger"),
        1,
        "no other relay has tried"
    );
    assert_eq!(lacking.stats().claimed, 0);
    end(&lacking);
    end(&healthy);
}

/// R16, R44: messages that no relay serves are reported everywhere, wait without attempts, and are delivered once a
/// relay serves them.
#[test]
fn a_topic_that_no_relay_serves_waits_and_is_shown() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let receiver = Receiver::ok();
    let relay = to(&database, "order.*", &receiver)
        .start()
        .expect("a relay");
    assert!(!has_problem(&relay));
    database.enqueue("member.joined", json!(1));
    database.enqueue("member.joined", json!(2));
    let named = NewMessage::new("order.paid", &1).expect("JSON");
    database.enqueue_message(named.destination("audit"));
    database.enqueue("order.paid", json!(3));
    eventually(
        "the relay reports the topic and the number of messages",
        || relay.health().to_string().contains("2 messages wait"),
    );
    let health = relay.health();
    assert!(health.is_ready() && health.is_live());
    let said = health.to_string();
    assert!(
        said.contains("no_route") && said.contains("member.joined"),
        "{said}"
    );
    eventually("the metrics report the topic", || {
        relay.record_metrics();
        metrics.value("diesel_outbox_problem", &[("problem", "no_route")]) >= 1.0
    });
    eventually("the message with a route is delivered", || {
        database.count("delivered") == 1
    });
    let status = finish(database.binary(&["status", "--json"]))
        .code(0)
        .json();
    let troubles = status["troubles"].as_array().expect("a list");
    let shown: Vec<_> = troubles
        .iter()
        .map(|row| {
            (
                row["reason"].as_str(),
                row["topic"].as_str(),
                row["count"].as_i64(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            (Some("NO_ROUTE"), Some("member.joined"), Some(2)),
            (Some("NO_ROUTE"), Some("order.paid"), Some(1)),
        ]
    );
    assert_eq!(database.number("SELECT sum(attempts) FROM {o}"), 0);

    let check = database
        .binary(&["check"])
        .with("OUTBOX_URL", &receiver.url());
    let check = finish(check).code(1).stdout;
    assert!(check.contains("member.joined -> default"), "{check}");
    let check = finish(database.binary(&["check"])).code(1).stdout;
    assert!(check.contains("member.joined"), "{check}");
    assert!(check.contains("NO_ROUTE"), "{check}");

    let late = to(&database, "member.*", &receiver)
        .destination(Destination::new("audit", &receiver.url()).expect("a URL"))
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 4
    });
    eventually("the problem has ended", || !has_problem(&relay));
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    end(&relay);
    end(&late);
}

/// R16, R44: the log reports it once, with a count. The other relay's handlers are known through its lease.
#[test]
fn the_log_names_a_topic_when_the_only_relay_that_serves_it_is_gone() {
    let database = Database::new();
    let receiver = Receiver::ok();
    lease_of_another(&database, "member.joined", "6 s", false);
    let file = File::new(&format!(
        "[destinations.billing]\nurl = '{}'\n[[routes]]\ntopic = 'order.*'\nto = 'billing'\n",
        receiver.url()
    ));
    let mut relay = Running::start(
        database
            .binary(&["run"])
            .with("OUTBOX_CONFIG", file.path())
            .with("OUTBOX_LOG_FORMAT", "json"),
    );
    for n in 0..3 {
        database.enqueue("member.joined", json!(n));
    }
    database.enqueue("order.paid", json!(1));
    eventually("the relay is at work", || database.count("delivered") == 1);
    let check = || {
        finish(
            database
                .binary(&["check"])
                .with("OUTBOX_CONFIG", file.path()),
        )
        .stdout
    };
    assert!(
        check().contains("member.joined is served by"),
        "{}",
        check()
    );
    assert!(!relay.log().contains("no_route"));
    // The other relay's lease expires.
    relay.wait_for_log("\"event\":\"no_route\"");
    let log = relay.log();
    let line = log.lines().find(|line| line.contains("no_route"));
    let line = line.expect("a line");
    assert!(
        line.contains("member.joined") && line.contains("\"messages\":3"),
        "{line}"
    );
    relay.signal("TERM");
    relay.wait();
    assert_eq!(relay.log().matches("\"no_route\"").count(), 1);
    assert_eq!(database.count("pending"), 3);
}

/// R10, R44: topics that only a standby relay would serve are not served.
#[test]
fn a_relay_that_stands_by_serves_nothing() {
    let database = Database::new();
    let mut config = Config::default();
    for (variable, value) in [
        ("DATABASE_URL", database.url.as_str()),
        ("OUTBOX_TABLE", &database.name()),
        ("OUTBOX_SINGLE_ACTIVE", "true"),
    ] {
        config.set(variable, value).expect("a good setting");
    }
    let active = Relay::from_config(config)
        .on_topic("order.paid", |_, _| Ok(()))
        .start()
        .expect("a relay");
    lease_of_another(&database, "member.joined", "1 h", true);
    database.enqueue("member.joined", json!(1));
    eventually("the relay reports the topic", || has_problem(&active));
    end(&active);
}

/// R6, G2: a message that no relay serves is dead-lettered when it expires, with a key or without.
#[test]
fn messages_that_no_relay_serves_still_expire() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = to(&database, "order.*", &receiver)
        .start()
        .expect("a relay");
    let message = || NewMessage::new("member.joined", &1).expect("JSON");
    let soon = Duration::from_millis(200);
    database.enqueue_message(message());
    database.enqueue_message(message().expires_after(soon));
    database.enqueue_message(message().destination("audit").expires_after(soon));
    for _ in 0..2 {
        database.enqueue_message(keyed("member.joined", "k").expires_after(soon));
    }
    // Behind the expired messages of its key, and served.
    database.enqueue_message(keyed("order.paid", "k"));
    // Claimed by a relay that has died.
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('dead', now() - interval '1 s')",
    );
    database.execute(
        "INSERT INTO {o} (topic, payload, expires_at, locked_by, locked_at)
         SELECT 'member.joined', '1', now(), id, now() FROM {o}_lease WHERE relay = 'dead'",
    );
    eventually("five messages are dead-lettered", || {
        database.count("dead") == 5
    });
    eventually("the message behind them is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(
        database.text("SELECT string_agg(DISTINCT reason, ' ') FROM {o}_dead"),
        Some("EXPIRED".to_owned())
    );
    assert_eq!(
        database.count("pending"),
        1,
        "the message without an expiry time"
    );
    end(&relay);
}

/// G5: a message that no relay serves keeps the later messages of its key waiting, even right behind a message that
/// was just sent.
#[test]
fn a_message_without_a_route_blocks_its_key() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for topic in ["order.paid", "member.joined", "order.sent"] {
        database.enqueue_message(keyed(topic, "k"));
    }
    let relay = to(&database, "order.*", &receiver)
        .start()
        .expect("a relay");
    eventually("the first message is delivered", || {
        database.count("delivered") == 1
    });
    eventually("the second message is reported", || has_problem(&relay));
    assert!(
        relay.wait_until_idle(Duration::from_secs(30)),
        "nothing is due"
    );
    assert_eq!(
        (database.count("delivered"), database.count("pending")),
        (1, 2)
    );
    assert_eq!(database.number("SELECT sum(attempts) FROM {o}"), 0);
    let other = to(&database, "member.*", &receiver)
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 3
    });
    let topics: Vec<_> = receiver
        .requests()
        .iter()
        .filter_map(|request| request.header("ce-type").map(str::to_owned))
        .collect();
    assert_eq!(topics, ["order.paid", "member.joined", "order.sent"]);
    end(&relay);
    end(&other);
}

/// R44, R46: also after the last endpoint is removed, a relay that delivers to endpoints
/// takes the messages that name it, to dead-letter them. Messages that name no destination wait for a route.
#[test]
fn messages_left_by_a_removed_destination_are_served() {
    let database = Database::new();
    let serves = json!({ "routes": [], "handlers": [], "endpoints": true });
    database.execute(&format!(
        "INSERT INTO {{o}}_lease (relay, expires_at, serves) VALUES ('another', now() + '1 h', '{serves}')"
    ));
    database.execute("INSERT INTO {o}_endpoint (name, url) VALUES ('busy', 'https://a.example')");
    database.execute(
        "INSERT INTO {o} (topic, destination, payload) VALUES ('order.paid', 'busy', '1'), ('order.paid', '', '1')",
    );
    let unrouted = || -> Vec<String> {
        let name = database.outbox_name();
        let depths = admin::depths(&mut database.connect(), &name).expect("depths");
        depths
            .unrouted()
            .map(|lane| lane.destination.clone())
            .collect()
    };
    assert_eq!(unrouted(), Vec::<String>::new());
    database.execute("DELETE FROM {o}_endpoint");
    assert_eq!(unrouted(), [""]);
}

/// R16, R44: a relay that could never send anything does not start, neither as a command nor in an application.
#[test]
fn a_relay_without_any_destination_says_what_to_set() {
    let database = Database::new();
    database.enqueue("order.paid", json!(1));
    for command in ["run", "drain"] {
        refused(
            database.binary(&[command]),
            &["OUTBOX_URL", "outbox.toml", "nothing can be sent"],
        );
    }
    let refused = database.relay().start();
    assert!(matches!(refused, Err(StartError::Config(_))), "{refused:?}");
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
    // A disabled relay sends nothing on purpose.
    let mut disabled = Running::start(database.binary(&["run"]).with("OUTBOX_ENABLED", "false"));
    disabled.wait_for_log("relay started");
    disabled.signal("TERM");
    assert_eq!(disabled.wait().code(), Some(0));
    assert_eq!(database.count("pending"), 1);
}

/// R44: without an active relay there are no reports about routes; a disabled relay does not count as active.
#[test]
fn without_a_relay_no_topic_lacks_a_route() {
    let database = Database::new();
    database.enqueue("order.paid", json!(1));
    let name = database.outbox_name();
    let unrouted = || {
        let depths = admin::depths(&mut database.connect(), &name).expect("depths");
        depths.unrouted().count()
    };
    assert_eq!(unrouted(), 0);
    let disabled = Relay::builder(&database.url)
        .outbox(&database.name())
        .enabled(false)
        .start()
        .expect("a relay");
    assert_eq!(unrouted(), 0);
    lease_of_another(&database, "member.joined", "1 h", false);
    assert_eq!(unrouted(), 1);
    end(&disabled);
}
