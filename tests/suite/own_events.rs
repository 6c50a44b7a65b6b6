//! The outbox enqueues events about itself (`OUTBOX_OWN_EVENTS`), each in the transaction of its cause.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use diesel_outbox::config::Breaker;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{Backoff, Destination, NewMessage, RelayBuilder, RelayHandle};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{Database, Receiver, Request, Running, end, eventually};

/// The topic that the receiver refuses: its messages are dead-lettered.
const LOST: &str = "order.lost";

/// Accepts everything but `order.lost`.
fn receiver() -> Receiver {
    Receiver::answering(|request| match topic(request) {
        LOST => 422,
        _ => 200,
    })
}

fn topic(request: &Request) -> &str {
    request.header("ce-type").unwrap_or_default()
}

fn relay(database: &Database, receiver: &Receiver) -> RelayBuilder {
    database.relay().url(&receiver.url()).own_events(true)
}

fn started(builder: RelayBuilder) -> RelayHandle {
    builder.start().expect("a relay")
}

/// The payloads of the outbox's own events with this topic.
fn told(receiver: &Receiver, of: &str) -> Vec<Value> {
    let requests = receiver.requests().into_iter();
    let of_topic = requests.filter(|request| topic(request) == of);
    of_topic.map(|request| request.json()).collect()
}

fn lost(tenant: Uuid) -> NewMessage {
    let message = NewMessage::new(LOST, &json!({ "secret": 7 })).expect("JSON");
    message.tenant_id(tenant)
}

/// The events about dead letters that are not sent yet: how many, and the sum of their counts.
fn counted(database: &Database) -> (i64, i64) {
    let events = "FROM {o} WHERE topic = 'outbox.messages.dead'";
    let sum = format!("SELECT coalesce(sum((payload->>'count')::bigint), 0)::bigint {events}");
    let count = format!("SELECT count(*) {events}");
    (database.number(&count), database.number(&sum))
}

/// Ends the minute that events about dead letters wait for.
fn end_the_minute(database: &Database) {
    database.execute("UPDATE {o} SET available_at = now() WHERE topic = 'outbox.messages.dead'");
}

/// R58: the test may begin in one minute and end in the next.
#[test]
fn dead_letters_are_one_event_for_each_destination_and_minute() {
    let database = Database::new();
    let (receiver, tenant) = (receiver(), Uuid::now_v7());
    let conn = &mut database.connect();
    let hook = Endpoint::new("acme", receiver.url()).topics([LOST]);
    let hook = hook.tenant(tenant);
    (database.outbox().endpoints().put(conn, &hook)).expect("put");
    let relays = [(); 3].map(|()| started(relay(&database, &receiver)));
    for n in 0..30 {
        let message = lost(tenant);
        database.enqueue_message(match n % 3 {
            0 => message.destination("acme"),
            1 => message.destination("default"),
            _ => message.destination("default").ordering_key("k"),
        });
    }
    eventually("all are dead-lettered", || database.count("dead") == 30);
    let early = "SELECT count(*) FROM {o} WHERE available_at <> date_trunc('minute', available_at)
            OR available_at::text <> ((payload->>'minute')::timestamptz + interval '1 min')::text";
    assert_eq!(
        database.number(early),
        0,
        "each is due at the end of its minute"
    );
    end_the_minute(&database);
    let sum =
        |events: &[Value]| -> i64 { events.iter().filter_map(|one| one["count"].as_i64()).sum() };
    eventually("the events arrive", || {
        sum(&told(&receiver, "outbox.messages.dead")) == 30
    });
    for relay in &relays {
        end(relay);
    }
    for (name, tenant_id, count) in [
        ("acme", json!(tenant.to_string()), 10),
        ("default", Value::Null, 20),
    ] {
        let all = told(&receiver, "outbox.messages.dead").into_iter();
        let of_name: Vec<Value> = all.filter(|one| one["destination"] == name).collect();
        assert_eq!(sum(&of_name), count, "{of_name:?}");
        // One for each minute.
        let minutes: BTreeSet<String> = of_name
            .iter()
            .map(|one| one["minute"].to_string())
            .collect();
        assert_eq!(of_name.len(), minutes.len(), "{of_name:?}");
        assert!(minutes.len() <= 3, "{of_name:?}");
        assert!(of_name.iter().all(|one| one["tenant_id"] == tenant_id));
    }
}

/// R58: the dead letter and its event become visible together.
#[test]
fn a_dead_letter_is_counted_in_its_own_transaction() {
    let database = Database::new();
    // The events are sent at the end of the minute, and are not counted then.
    eventually("the minute lasts for a while", || {
        database.number("SELECT (extract(second FROM clock_timestamp()) < 40)::int::bigint") == 1
    });
    let receiver = receiver();
    let relay = started(relay(&database, &receiver));
    for n in 0..5 {
        let message = lost(Uuid::now_v7());
        database.enqueue_message(if n < 3 {
            message
        } else {
            message.ordering_key("k")
        });
    }
    let is_counted = "SELECT (SELECT count(*) FROM {o}_dead)
        - (SELECT coalesce(sum((payload->>'count')::bigint), 0)::bigint FROM {o} WHERE topic = 'outbox.messages.dead')";
    eventually("all messages are dead-lettered", || {
        assert_eq!(database.number(is_counted), 0);
        database.count("dead") == 5
    });
    end(&relay);
    let together = "SELECT count(*) FROM {o} o WHERE o.xmin IN (SELECT d.xmin FROM {o}_dead d)";
    assert_eq!(database.number(together), counted(&database).0);
}

#[test]
fn a_dead_lettered_own_event_is_not_counted() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 422);
    let relay = started(relay(&database, &receiver));
    database.enqueue_message(lost(Uuid::now_v7()));
    eventually("the message is counted", || counted(&database) == (1, 1));
    end_the_minute(&database);
    eventually("both messages are dead-lettered", || {
        database.count("dead") == 2
    });
    end(&relay);
    let topics = "SELECT string_agg(topic, ' ' ORDER BY topic) FROM {o}_dead";
    assert_eq!(
        database.text(topics).as_deref(),
        Some("order.lost outbox.messages.dead")
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
}

/// The number of events with this topic that were ever written.
fn ever_written(database: &Database, topic: &str) -> i64 {
    database.number(&format!(
        "SELECT count(DISTINCT message_id) FROM {{o}}_messages WHERE topic = '{topic}'"
    ))
}

/// R58: three processes, of which one is killed at each step, and another begins.
#[test]
fn a_destination_that_fails_and_recovers_is_reported_once_by_all_relays() {
    let database = Database::new();
    let works = Arc::new(AtomicBool::new(false));
    let (does_work, alarms) = (Arc::clone(&works), Receiver::ok());
    let customer = Receiver::answering(move |_| match does_work.load(Ordering::SeqCst) {
        true => 200,
        false => 503,
    });
    let tenant = Uuid::now_v7();
    let conn = &mut database.connect();
    let hook = Endpoint::new("acme", customer.url()).tenant(tenant);
    (database.outbox().endpoints().put(conn, &hook)).expect("put");
    let begin = || {
        let mut command = database.binary(&["run"]);
        command.env("OUTBOX_URL", alarms.url()).envs([
            ("OUTBOX_OWN_EVENTS", "true"),
            ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
            ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
            ("OUTBOX_ENDPOINT_MAX_ATTEMPTS", "1000000"),
        ]);
        Running::start(command)
    };
    let mut relays = VecDeque::from([begin(), begin(), begin()]);
    let mut kill_one = || {
        relays.push_back(begin());
        relays.pop_front().expect("a relay").kill();
    };
    let message = || {
        let message = NewMessage::new("order.paid", &json!({})).expect("JSON");
        database.enqueue_message(message.tenant_id(tenant).destination("acme"));
    };
    (0..5).for_each(|_| message());
    let since = "SELECT failing_since::text FROM {o}_endpoint";
    let failing = "SELECT count(*) FROM {o}_endpoint WHERE failing";
    eventually("the first failure is recorded", || {
        database.text(since).is_some()
    });
    kill_one();
    let tries = customer.count();
    eventually("more sends fail", || customer.count() > tries + 3);
    assert_eq!(database.number(failing), 0, "not for ten minutes yet");
    database.execute("UPDATE {o}_endpoint SET failing_since = now() - interval '11 min'");
    eventually("the destination is failing", || {
        database.number(failing) == 1
    });
    kill_one();
    let tries = customer.count();
    eventually("more sends fail", || customer.count() > tries + 3);
    works.store(true, Ordering::SeqCst);
    eventually("the recovery is recorded", || {
        database.text(since).is_none()
    });
    kill_one();
    message();
    eventually("everything is sent", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    // A relay that is killed may have sent an event without recording that.
    let told_of = |topic: &str| {
        let mut all = told(&alarms, topic);
        all.dedup();
        all
    };
    let failing = told_of("outbox.endpoint.failing");
    let since = failing[0]["failing_since"].clone();
    assert!(since.is_string(), "{failing:?}");
    let mut expected = json!({
        "destination": "acme", "tenant_id": tenant.to_string(), "failing_since": since,
    });
    let recovered = told_of("outbox.endpoint.recovered");
    assert_eq!(recovered, [expected.clone()]);
    expected["reason"] = "SERVER_ERROR".into();
    assert_eq!(failing, [expected]);
    for topic in ["outbox.endpoint.failing", "outbox.endpoint.recovered"] {
        assert_eq!(ever_written(&database, topic), 1, "{topic}");
    }
}

/// R58: the next retry may be hours away.
#[test]
fn a_destination_that_fails_is_reported_after_ten_minutes_without_another_send() {
    let database = Database::new();
    let (refuses, fails) = (Receiver::answering(|_| 422), Receiver::answering(|_| 503));
    let conn = &mut database.connect();
    for (name, customer) in [("refuses", &refuses), ("fails", &fails)] {
        let hook = Endpoint::new(name, customer.url());
        (database.outbox().endpoints().put(conn, &hook)).expect("put");
    }
    let alarms = Receiver::ok();
    let relay = relay(&database, &alarms)
        .configure(|config| config.endpoint_backoff = "1h".parse::<Backoff>().expect("a backoff"));
    let relay = started(relay);
    for name in ["refuses", "fails"] {
        let message = NewMessage::new("order.paid", &json!({})).expect("JSON");
        database.enqueue_message(message.destination(name));
    }
    eventually("both failures are recorded", || {
        database.number("SELECT count(failing_since) FROM {o}_endpoint") == 2
    });
    database.execute("UPDATE {o}_endpoint SET failing_since = now() - interval '11 min'");
    eventually("the event arrives", || {
        !told(&alarms, "outbox.endpoint.failing").is_empty()
    });
    end(&relay);
    let told = told(&alarms, "outbox.endpoint.failing");
    let facts = |one: &Value| (one["destination"].clone(), one["reason"].clone());
    assert_eq!(
        told.iter().map(facts).collect::<Vec<_>>(),
        [("fails".into(), "SERVER_ERROR".into())],
        "one refused message is no news"
    );
    assert_eq!((refuses.count(), fails.count()), (1, 1));
}

/// R58: who was never told of a failure need not be told of its end.
#[test]
fn a_short_failure_is_not_reported() {
    let database = Database::new();
    let tries = Arc::new(AtomicUsize::new(0));
    let customer = Receiver::answering(move |_| match tries.fetch_add(1, Ordering::SeqCst) {
        0..5 => 503,
        _ => 200,
    });
    let conn = &mut database.connect();
    let hook = Endpoint::new("acme", customer.url());
    (database.outbox().endpoints().put(conn, &hook)).expect("put");
    let relay = started(relay(&database, &Receiver::ok()));
    let message = NewMessage::new("order.paid", &json!({})).expect("JSON");
    database.enqueue_message(message.destination("acme"));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    eventually("the success is recorded", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE failing_since IS NULL") == 1
    });
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}_messages"), 1);
}

/// R58
#[test]
fn a_failing_destination_that_relays_disable_is_reported_as_disabled_alone() {
    let database = Database::new();
    let (customer, alarms) = (Receiver::answering(|_| 503), Receiver::ok());
    let conn = &mut database.connect();
    let hook = Endpoint::new("acme", customer.url());
    (database.outbox().endpoints().put(conn, &hook)).expect("put");
    let relays = [(); 3].map(|()| {
        let relay =
            relay(&database, &alarms).configure(|config| config.endpoint_max_attempts = 1_000_000);
        started(relay.configure(|config| config.endpoint_disable_after = Duration::from_secs(3600)))
    });
    for _ in 0..5 {
        let message = NewMessage::new("order.paid", &json!({})).expect("JSON");
        database.enqueue_message(message.destination("acme"));
    }
    let is_so = |what: &str| {
        let count = format!("SELECT count(*) FROM {{o}}_endpoint WHERE {what}");
        database.number(&count) == 1
    };
    eventually("a failure is recorded", || {
        is_so("failing_since IS NOT NULL")
    });
    for (time, what) in [("30 min", "failing"), ("2 h", "NOT enabled")] {
        database.execute(&format!(
            "UPDATE {{o}}_endpoint SET failing_since = failing_since - interval '{time}'"
        ));
        eventually(what, || is_so(what));
    }
    eventually("the event arrives", || {
        !told(&alarms, "outbox.endpoint.disabled").is_empty()
    });
    for relay in &relays {
        end(relay);
    }
    assert_eq!(
        told(&alarms, "outbox.endpoint.disabled"),
        [json!({ "destination": "acme", "tenant_id": null, "reason": "has failed for 1h" })]
    );
    for (topic, count) in [("failing", 1), ("disabled", 1), ("recovered", 0)] {
        let topic = format!("outbox.endpoint.{topic}");
        assert_eq!(ever_written(&database, &topic), count, "{topic}");
    }
    assert!(is_so("failing"), "the row still says why");
    database.execute("UPDATE {o}_endpoint SET enabled = true");
    assert!(is_so("NOT failing AND failing_since IS NULL"));
}

/// R58: only the pause that an operator must end, and only the first of them.
#[test]
fn a_destination_that_relays_pause_is_reported_once() {
    let database = Database::new();
    let (gone, alarms) = (Receiver::answering(|_| 410), Receiver::ok());
    let relays = [(); 3].map(|()| {
        let to = |name: &str, receiver: &Receiver| {
            Destination::new(name, &receiver.url()).expect("a URL")
        };
        started(
            database
                .relay()
                .destination(to("billing", &gone))
                .destination(to("alarms", &alarms))
                .route("order.*", "billing")
                .route("outbox.*", "alarms")
                .own_events(true),
        )
    });
    database.enqueue_many(30);
    alarms.wait_for(1);
    for relay in &relays {
        end(relay);
    }
    assert_eq!(
        told(&alarms, "outbox.endpoint.paused"),
        [json!({ "destination": "billing", "tenant_id": null, "reason": "GONE" })]
    );
    assert_eq!(ever_written(&database, "outbox.endpoint.paused"), 1);
}

#[test]
fn nothing_is_reported_unless_own_events_are_on() {
    let database = Database::new();
    let receiver = receiver();
    let relay = started(relay(&database, &receiver).own_events(false));
    database.enqueue_message(lost(Uuid::now_v7()));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(receiver.count(), 1);
}

/// Several relays see the bad row, but only one event is enqueued.
#[test]
fn an_endpoint_that_relays_disable_is_reported_once() {
    let database = Database::new();
    let (receiver, tenant) = (receiver(), Uuid::now_v7());
    let relays = [(); 3].map(|()| started(relay(&database, &receiver)));
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, rate, tenant_id) VALUES ('acme', 'https://a.example/', 'often', '{tenant}')"
    ));
    eventually("the event arrives", || {
        !told(&receiver, "outbox.endpoint.disabled").is_empty()
    });
    std::thread::sleep(Duration::from_millis(500));
    for relay in &relays {
        end(relay);
    }
    let all = told(&receiver, "outbox.endpoint.disabled");
    let reason = database.text("SELECT disabled_reason FROM {o}_endpoint");
    assert_eq!(
        all,
        [json!({ "destination": "acme", "tenant_id": tenant.to_string(), "reason": reason })]
    );
}

/// Failing probes and other relays enqueue no further event.
#[test]
fn a_breaker_that_opens_is_reported_once_until_it_has_closed() {
    let database = Database::new();
    let (alarms, billing) = (Receiver::ok(), Receiver::answering(|_| 500));
    let mut breaker = Breaker::default();
    breaker.min_sends = 5;
    breaker.open = Duration::from_millis(200);
    let relays = [(); 3].map(|()| {
        let to = |name: &str, receiver: &Receiver| {
            let to = Destination::new(name, &receiver.url()).expect("a URL");
            to.configure(|destination| destination.policy.breaker = Some(breaker))
        };
        let relay = database
            .relay()
            .max_attempts(1000)
            .destination(to("billing", &billing))
            .destination(to("alarms", &alarms))
            .route("order.*", "billing")
            .route("outbox.*", "alarms")
            .own_events(true);
        started(relay)
    });
    database.enqueue_many(100);
    eventually("the breaker has opened several times", || {
        database.number("SELECT coalesce(max(openings), 0) FROM {o}_pause") >= 3
    });
    let all = told(&alarms, "outbox.breaker.opened");
    for relay in &relays {
        end(relay);
    }
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!(all[0]["destination"], "billing");
    assert_eq!(all[0]["tenant_id"], Value::Null);
    let until = all[0]["until"].as_str().expect("a time");
    assert!(until.ends_with('Z'), "{until}");
}

/// A customer's pattern `*` covers the application's topics only.
#[test]
fn endpoints_get_it_where_they_ask_for_it() {
    let database = Database::new();
    let (billing, customer, operators) = (receiver(), Receiver::ok(), Receiver::ok());
    let (conn, outbox) = (&mut database.connect(), database.outbox());
    let tenant = Uuid::now_v7();
    for (name, receiver, pattern) in [
        ("customer", &customer, "*"),
        ("operators", &operators, "outbox.*"),
    ] {
        let hook = Endpoint::new(name, receiver.url()).topics([pattern]);
        outbox.endpoints().put(conn, &hook).expect("put");
    }
    let relay = started(relay(&database, &billing));
    database.enqueue_message(lost(tenant));
    eventually("the dead letter is counted", || {
        counted(&database) == (1, 1)
    });
    end_the_minute(&database);
    operators.wait_for(1);
    eventually("the outbox is empty", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    let topics = |receiver: &Receiver| -> Vec<String> {
        let requests = receiver.requests().into_iter();
        requests.map(|one| topic(&one).to_owned()).collect()
    };
    assert_eq!(topics(&customer), [LOST]);
    assert_eq!(topics(&operators), ["outbox.messages.dead"]);
    assert_eq!(topics(&billing).len(), 2);
}
