//! The outbox enqueues events about itself (`OUTBOX_OWN_EVENTS`), each in the transaction of its cause.

use std::time::Duration;

use diesel_outbox::config::Breaker;
use diesel_outbox::destinations::RegisteredDestination;
use diesel_outbox::{Destination, NewMessage, RelayBuilder, RelayHandle};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{Database, Receiver, Request, end, eventually};

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
    database
        .relay()
        .url(&receiver.url())
        .registered_https_only(false)
        .registered_public_only(false)
        .own_events(true)
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

#[test]
fn a_dead_letter_is_reported_without_its_payload() {
    let database = Database::new();
    let (receiver, tenant) = (receiver(), Uuid::now_v7());
    let relay = started(relay(&database, &receiver));
    let sequence = database.enqueue_message(lost(tenant));
    let keyed = database.enqueue_message(lost(tenant).ordering_key("k"));
    eventually("both dead letters are reported", || {
        told(&receiver, "outbox.message.dead").len() == 2
    });
    end(&relay);
    let mut all = told(&receiver, "outbox.message.dead");
    all.sort_by_key(|one| one["sequence"].as_i64());
    for (one, sequence) in all.iter().zip([sequence, keyed]) {
        let id = format!("SELECT message_id FROM {{o}}_dead WHERE sequence = {sequence}");
        assert_eq!(
            one,
            &json!({
                "sequence": sequence, "message_id": database.text(&id), "topic": LOST, "destination": "default",
                "tenant_id": tenant.to_string(), "reason": "REJECTED", "attempts": 1,
            })
        );
    }
}

/// The dead letter and its event become visible together.
#[test]
fn a_dead_letter_is_reported_in_its_own_transaction() {
    let database = Database::new();
    let receiver = receiver();
    database.execute(
        "INSERT INTO {o}_pause (kind, name, reason) VALUES ('topic', 'outbox.message.dead', 'BY_HAND')",
    );
    let relay = started(relay(&database, &receiver));
    for n in 0..5 {
        let message = lost(Uuid::now_v7());
        database.enqueue_message(if n < 3 {
            message
        } else {
            message.ordering_key("k")
        });
    }
    eventually("all messages are dead-lettered", || {
        database.count("dead") == 5
    });
    end(&relay);
    let together = "SELECT count(*) FROM {o} o JOIN {o}_dead d
         ON (o.payload->>'sequence')::bigint = d.sequence AND o.xmin = d.xmin AND o.tenant_id = d.tenant_id";
    assert_eq!(database.number(together), 5);
}

#[test]
fn a_dead_lettered_own_event_is_not_reported() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 422);
    let relay = started(relay(&database, &receiver));
    database.enqueue_message(lost(Uuid::now_v7()));
    eventually("both messages are dead-lettered", || {
        database.count("dead") == 2
    });
    std::thread::sleep(Duration::from_millis(500));
    end(&relay);
    let topics = "SELECT string_agg(topic, ' ' ORDER BY topic) FROM {o}_dead";
    assert_eq!(
        database.text(topics).as_deref(),
        Some("order.lost outbox.message.dead")
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
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
fn a_registered_destination_that_relays_disable_is_reported_once() {
    let database = Database::new();
    let (receiver, tenant) = (receiver(), Uuid::now_v7());
    let relays = [(); 3].map(|()| started(relay(&database, &receiver)));
    database.execute(&format!(
        "INSERT INTO {{o}}_destination (name, url, rate, tenant_id) VALUES ('acme', 'https://a.example/', 'often', '{tenant}')"
    ));
    eventually("the event arrives", || {
        !told(&receiver, "outbox.destination.disabled").is_empty()
    });
    std::thread::sleep(Duration::from_millis(500));
    for relay in &relays {
        end(relay);
    }
    let all = told(&receiver, "outbox.destination.disabled");
    let reason = database.text("SELECT disabled_reason FROM {o}_destination");
    assert_eq!(
        all,
        [json!({ "name": "acme", "tenant_id": tenant.to_string(), "reason": reason })]
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
            to.breaker(breaker)
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
fn registered_destinations_get_it_where_they_ask_for_it() {
    let database = Database::new();
    let (billing, customer, operators) = (receiver(), Receiver::ok(), Receiver::ok());
    let (conn, outbox) = (&mut database.connect(), database.outbox());
    let tenant = Uuid::now_v7();
    for (name, receiver, pattern) in [
        ("customer", &customer, "*"),
        ("operators", &operators, "outbox.*"),
    ] {
        let hook = RegisteredDestination::new(name, receiver.url()).topics([pattern]);
        outbox.destinations().put(conn, &hook).expect("put");
    }
    let relay = started(relay(&database, &billing));
    database.enqueue_message(lost(tenant));
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
    assert_eq!(topics(&operators), ["outbox.message.dead"]);
    assert_eq!(topics(&billing).len(), 2);
}
