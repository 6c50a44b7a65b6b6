//! Fan-out of one message to several destinations, and batches of many messages in one request.

use std::collections::HashSet;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use diesel_outbox::config::{Mode, OnDead};
use diesel_outbox::program::{self, MessageKey};
use diesel_outbox::{
    Destination, EnqueueError, NewMessage, Observer, ReasonCode, RelayBuilder, RelayHandle,
    Settled, Status,
};
use serde_json::{Value, json};

use crate::support::{Database, PATIENCE, Receiver, end, eventually, finish, status};

fn to_both(database: &Database, billing: &Receiver, audit: &Receiver) -> RelayBuilder {
    database
        .relay()
        .destination(Destination::new("billing", &billing.url()).expect("a URL"))
        .destination(Destination::new("audit", &audit.url()).expect("a URL"))
        .route_to_each("order.*", &["billing", "audit"])
}

fn order(key: &str, payload: Value) -> NewMessage {
    NewMessage::new("order.paid", &payload)
        .expect("JSON")
        .idempotency_key(key)
}

// --- Several destinations -----------------------------------------------------------------

#[test]
fn a_message_for_two_destinations_has_attempts_and_a_ledger_row_for_each() {
    let database = Database::new();
    let (billing, audit) = (Receiver::ok(), Receiver::answering(|_| 500));
    let message = order("order-7", json!({ "n": 7 }))
        .header("x-shop", "berlin")
        .ordering_key("customer-1");
    let id = message.message_id().to_string();
    let sequence = database.enqueue_message(message);
    let relay = to_both(&database, &billing, &audit)
        .max_attempts(3)
        .start()
        .expect("a relay");
    eventually("both messages are settled", || {
        database.count("delivered") == 1 && database.count("dead") == 1
    });
    end(&relay);
    let whole = program::message(
        &mut database.connect(),
        &database.outbox_name(),
        &MessageKey::Sequence(sequence),
    );
    let parts = whole.expect("an answer").rows.into_iter();
    let parts: Vec<(Status, Option<i64>)> = parts
        .map(|part| (part.status, part.split_from.map(|whole| whole.0)))
        .collect();
    let statuses: HashSet<Status> = parts.iter().map(|part| part.0).collect();
    assert_eq!(statuses, HashSet::from([Status::Delivered, Status::Dead]));
    assert!(
        parts.iter().all(|part| part.1 == Some(sequence)),
        "{parts:?}"
    );
    assert_eq!((billing.count(), audit.count()), (1, 3));
    for request in billing.requests().iter().chain(&audit.requests()) {
        assert_eq!(request.id(), id, "one message, one id");
        assert_eq!(request.json(), json!({ "n": 7 }));
        assert_eq!(request.header("x-shop"), Some("berlin"));
        assert_eq!(request.header("ce-partitionkey"), Some("customer-1"));
    }
    assert_eq!(
        database
            .text(
                "SELECT string_agg(destination || ' ' || status || ' ' || attempts, ', '
                                   ORDER BY destination) FROM {o}_ledger"
            )
            .as_deref(),
        Some("audit dead 3, billing delivered 1")
    );
    assert_eq!(relay.stats().split, 1);
}

#[test]
fn dead_letters_of_one_destination_are_requeued_by_its_name() {
    let database = Database::new();
    let (billing, audit) = (Receiver::answering(|_| 422), Receiver::answering(|_| 422));
    let message = order("order-7", json!(7));
    let id = message.message_id().to_string();
    database.enqueue_message(message);
    let relay = to_both(&database, &billing, &audit)
        .start()
        .expect("a relay");
    eventually("both messages are dead-lettered", || {
        database.count("dead") == 2
    });
    end(&relay);
    let shown = finish(database.binary(&["dead", "show", &id])).code(1);
    for part in ["(billing)", "(audit)"] {
        assert!(shown.stderr.contains(part), "{}", shown.stderr);
    }
    let arguments = ["dead", "list", "--destination", "audit", "--json"];
    let listed = finish(database.binary(&arguments)).code(0).json();
    assert_eq!(listed.as_array().map(Vec::len), Some(1));
    assert_eq!(listed[0]["destination"], "audit");
    finish(database.binary(&["dead", "requeue", "--destination", "audit", "--yes"])).code(0);
    assert_eq!(
        database.text("SELECT string_agg(destination, ',') FROM {o}"),
        Some("audit".to_owned())
    );
}

#[test]
fn a_message_that_is_enqueued_again_reaches_only_who_has_not_got_it() {
    let database = Database::new();
    let (billing, audit) = (Receiver::ok(), Receiver::answering(|_| 500));
    database.enqueue_message(order("order-7", json!(7)));
    let relay = to_both(&database, &billing, &audit)
        .max_attempts(1)
        .start()
        .expect("a relay");
    eventually(
        "one destination has the message, the other does not",
        || database.count("delivered") == 1 && database.count("dead") == 1,
    );
    end(&relay);
    let audit = Receiver::ok();
    let relay = to_both(&database, &billing, &audit)
        .start()
        .expect("a relay");
    database.enqueue_message(order("order-7", json!(7)));
    eventually("the other destination has the message", || {
        audit.count() == 1
    });
    assert!(relay.wait_until_idle(PATIENCE));
    end(&relay);
    assert_eq!(billing.count(), 1);
    assert_eq!(relay.stats().deduplicated, 1);
}

#[test]
fn enqueueing_for_each_of_some_destinations_makes_a_row_for_each_in_one_transaction() {
    let database = Database::new();
    let message = order("order-7", json!(7));
    let id = message.message_id();
    let enqueued = database
        .outbox()
        .enqueue_batch(
            &mut database.connect(),
            message.for_each(["billing", "audit"]),
        )
        .expect("enqueued");
    assert_eq!(enqueued.len(), 2);
    assert_eq!(
        database.text(
            "SELECT string_agg(destination || ' ' || message_id, ', ' ORDER BY sequence) FROM {o}"
        ),
        Some(format!("billing {id}, audit {id}"))
    );
    let (billing, audit) = (Receiver::ok(), Receiver::ok());
    let relay = to_both(&database, &billing, &audit)
        .start()
        .expect("a relay");
    eventually("both messages are delivered", || {
        database.count("delivered") == 2
    });
    end(&relay);
    assert_eq!((billing.count(), audit.count()), (1, 1));
}

type Ends = Vec<(Status, Option<ReasonCode>, u32)>;

/// The ends of messages as an observer sees them.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Ends>>);

impl Observer for Told {
    fn settled(&self, settled: &Settled<'_>) {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.push((settled.status, settled.reason, settled.attempts));
    }
}

/// R25
#[test]
fn a_message_that_stands_in_another_ones_way_is_an_operators_to_judge() {
    let database = Database::new();
    database.enqueue_message(order("order-7", json!("one")).destination("audit"));
    let clash: Result<_, EnqueueError> = database
        .outbox()
        .enqueue(&mut database.connect(), order("order-7", json!("other")));
    clash.expect("a message of another destination");
    let (billing, audit) = (Receiver::ok(), Receiver::ok());
    // The first message is delayed: nothing is sent to audit before the fan-out of the second.
    database.execute(
        "UPDATE {o} SET available_at = now() + interval '1 h' WHERE destination = 'audit'",
    );
    let told = Told::default();
    let relay = to_both(&database, &billing, &audit)
        .observe(told.clone())
        .start()
        .expect("a relay");
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    assert_eq!((relay.stats().dead, relay.stats().split), (1, 0));
    assert_eq!(
        *told.0.lock().unwrap_or_else(PoisonError::into_inner),
        [(Status::Dead, Some(ReasonCode::IdempotencyConflict), 0)]
    );
    assert_eq!(
        database
            .text("SELECT reason || ' ' || payload::text || ' ' || attempts FROM {o}_dead")
            .as_deref(),
        Some("IDEMPOTENCY_CONFLICT \"other\" 0")
    );
    assert_eq!((billing.count(), audit.count()), (0, 0));
    assert_eq!(
        database.count("pending"),
        1,
        "the first message still waits"
    );
}

/// `billing` blocks the key of a dead letter; `audit` does not.
fn billing_blocks(database: &Database, billing: &Receiver, audit: &Receiver) -> RelayBuilder {
    let mut of_billing = Destination::new("billing", &billing.url()).expect("a URL");
    of_billing.policy.on_dead = Some(OnDead::Block);
    database
        .relay()
        .destination(of_billing)
        .destination(Destination::new("audit", &audit.url()).expect("a URL"))
        .route_to_each("order.*", &["billing", "audit"])
}

/// G5: a dead letter at one destination blocks no other destination, whether the later messages were fanned out
/// before or after it was dead-lettered.
#[test]
fn a_dead_letter_that_keeps_its_key_back_does_so_at_its_destination_only() {
    let database = Database::new();
    let (billing, audit) = (Receiver::answering(|_| 422), Receiver::ok());
    let _relay = billing_blocks(&database, &billing, &audit)
        .start()
        .expect("a relay");
    let keyed = |key: &str| order(key, json!(key)).ordering_key("customer-7");
    database.enqueue_message(keyed("first"));
    eventually("the first message is dead-lettered at billing", || {
        database.count("dead") == 1
    });
    database.enqueue_message(keyed("second"));
    eventually("audit has both messages", || audit.count() == 2);
    eventually("the second message waits for billing", || {
        database
            .text("SELECT string_agg(destination || ' ' || idempotency_key, ',') FROM {o}")
            .as_deref()
            == Some("billing second")
    });
    assert_eq!(billing.count(), 1);
}

/// G5: the message is dead-lettered for all its destinations at once, and one of them blocks its key.
#[test]
fn a_message_dead_lettered_instead_of_being_split_blocks_its_key() {
    let database = Database::new();
    database.enqueue_message(order("order-7", json!("one")).destination("audit"));
    database.execute("UPDATE {o} SET available_at = now() + interval '1 h'");
    let (billing, audit) = (Receiver::ok(), Receiver::ok());
    let keyed = |key: &str| order(key, json!(key)).ordering_key("customer-7");
    database.enqueue_message(keyed("order-7"));
    database.enqueue_message(keyed("order-8"));
    let relay = billing_blocks(&database, &billing, &audit)
        .start()
        .expect("a relay");
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    assert_eq!(
        database
            .text("SELECT blocks_key || ' ' || reason FROM {o}_dead")
            .as_deref(),
        Some("true IDEMPOTENCY_CONFLICT")
    );
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!((billing.count(), audit.count()), (0, 0));
    database.execute("DELETE FROM {o}_dead");
    eventually("the next message is fanned out", || {
        (billing.count(), audit.count()) == (1, 1)
    });
}

#[test]
fn many_messages_are_split_and_none_is_lost() {
    let database = Database::new();
    database.enqueue_many(3000);
    let (billing, audit) = (Receiver::ok(), Receiver::ok());
    let relays: Vec<RelayHandle> = (0..2)
        .map(|_| {
            to_both(&database, &billing, &audit)
                .start()
                .expect("a relay")
        })
        .collect();
    eventually("all messages are delivered", || {
        database.count("delivered") == 6000
    });
    for relay in &relays {
        end(relay);
    }
    for receiver in [billing, audit] {
        assert_eq!(receiver.ids().len(), 3000);
        assert_eq!(receiver.count(), 3000, "every message was sent once");
    }
}

#[test]
fn a_message_that_expires_or_is_delayed_does_so_at_each_destination() {
    let database = Database::new();
    let (billing, audit) = (Receiver::ok(), Receiver::ok());
    database.enqueue_message(order("late", json!(1)).expires_after(Duration::ZERO));
    database.enqueue_message(order("early", json!(2)).delay(Duration::from_secs(3600)));
    let relay = to_both(&database, &billing, &audit)
        .start()
        .expect("a relay");
    eventually(
        "the expired message is dead-lettered at both destinations",
        || database.number("SELECT count(*) FROM {o}_dead WHERE reason = 'EXPIRED'") == 2,
    );
    assert!(relay.wait_until_idle(PATIENCE));
    end(&relay);
    assert_eq!((billing.count(), audit.count()), (0, 0));
    assert_eq!(database.count("pending"), 1);
}

// --- Many messages in one request ---------------------------------------------------------

fn batched(database: &Database, receiver: &Receiver, size: usize) -> RelayBuilder {
    let mut destination = Destination::new("billing", &receiver.url()).expect("a URL");
    destination.policy.mode = Some(Mode::Batched);
    destination.request_batch.size = size;
    destination.request_batch.linger = Duration::from_millis(20);
    database
        .relay()
        .destination(destination)
        .route("*", "billing")
}

fn events(request: &crate::support::Request) -> Vec<Value> {
    request.json().as_array().expect("an array").clone()
}

#[test]
fn one_request_delivers_many_messages() {
    let database = Database::new();
    database.enqueue_many(500);
    let receiver = Receiver::ok();
    let relay = batched(&database, &receiver, 50).start().expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 500
    });
    end(&relay);
    let requests = receiver.requests();
    assert!(requests.len() < 50, "{} requests", requests.len());
    let mut ids = HashSet::new();
    for request in &requests {
        assert_eq!(
            request.header("content-type"),
            Some("application/cloudevents-batch+json")
        );
        let events = events(request);
        assert!(events.len() <= 50);
        for event in events {
            assert_eq!(event["type"], "order.paid");
            ids.insert(event["id"].as_str().expect("an id").to_owned());
        }
    }
    assert_eq!(ids.len(), 500);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
}

#[test]
fn of_a_refused_batch_only_the_message_refused_alone_is_dead_lettered() {
    let database = Database::new();
    database.enqueue_many(100);
    let receiver = Receiver::answering(|request| {
        let has_poison = events(request).iter().any(|event| event["data"]["n"] == 42);
        if has_poison { 422 } else { 200 }
    });
    let relay = batched(&database, &receiver, 50).start().expect("a relay");
    eventually("all messages are settled", || {
        database.count("delivered") == 99 && database.count("dead") == 1
    });
    end(&relay);
    assert_eq!(
        database
            .text("SELECT (payload->>'n') || ' ' || reason || ' ' || attempts FROM {o}_dead")
            .as_deref(),
        Some("42 REJECTED 1")
    );
    assert_eq!(
        database.number("SELECT max(attempts) FROM {o}_ledger"),
        1,
        "the refused message cost the others no attempt"
    );
}

#[test]
fn a_failed_batch_is_tried_again_message_by_message() {
    let database = Database::new();
    database.enqueue_many(100);
    let receiver = Receiver::answering(|request| {
        let has_poison = events(request).iter().any(|event| event["data"]["n"] == 42);
        if has_poison { 500 } else { 200 }
    });
    let relay = batched(&database, &receiver, 50)
        .max_attempts(3)
        .start()
        .expect("a relay");
    eventually("all messages are settled", || {
        database.count("delivered") == 99 && database.count("dead") == 1
    });
    end(&relay);
    assert_eq!(
        database.text("SELECT (payload->>'n') || ' ' || attempts FROM {o}_dead"),
        Some("42 3".to_owned())
    );
    for request in receiver.requests() {
        let events = events(&request);
        let is_repeat = request.header("outbox-attempt").is_some_and(|n| n != "1");
        assert!(!is_repeat || events.len() == 1, "{}", events.len());
    }
}

#[test]
fn a_batch_that_asks_to_wait_parks_its_destination() {
    let database = Database::new();
    database.enqueue_many(60);
    let is_first = std::sync::atomic::AtomicBool::new(true);
    let receiver = Receiver::start(move |_, stream| {
        if is_first.swap(false, std::sync::atomic::Ordering::SeqCst) {
            return stream
                .write_all(b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n");
        }
        stream.write_all(&status(200))
    });
    let relay = batched(&database, &receiver, 10).start().expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 60
    });
    end(&relay);
    let requests = receiver.requests();
    assert!(requests[1].at - requests[0].at >= Duration::from_millis(950));
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts > 1"),
        i64::try_from(events(&requests[0]).len()).expect("few")
    );
}
