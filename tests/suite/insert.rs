//! Enqueueing as a query: what the query stores, and its result for a key that already exists. Other kinds of
//! connections: `tests/applications/enqueuer`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::prelude::*;
use diesel_outbox::{EnqueueError, NewMessage, Sequence};
use uuid::Uuid;

use crate::support::Database;

fn full(time: SystemTime) -> NewMessage {
    NewMessage::new("order.paid", &serde_json::json!({ "order_id": 7 }))
        .expect("JSON")
        .destination("billing")
        .idempotency_key("order-7-paid")
        .ordering_key("order-7")
        .header("x-shop", "Zürich \"8\"")
        .tenant_id(Uuid::from_u128(7))
        .available_at(time)
        .expires_after(Duration::from_millis(86_400_001))
        .occurred_at(time)
}

#[test]
fn an_insert_stores_what_enqueue_stores() {
    let one = Database::new();
    let other = Database::new();
    for (micros, delay) in [(0_u64, 0), (1, 1), (1_795_200_000_123_456, 123_456_789)] {
        let time = UNIX_EPOCH + Duration::from_micros(micros);
        let simple = || NewMessage::new("order.paid", &micros).expect("JSON");
        for message in [
            full(time).idempotency_key(format!("{micros}")),
            simple(),
            simple().delay(Duration::from_micros(delay)),
        ] {
            let outbox = one.outbox();
            let sequence: Sequence = one
                .connect()
                .transaction(|conn| outbox.insert(message.clone())?.get_result(conn))
                .expect("inserted");
            let outbox = other.outbox();
            let enqueued = other
                .connect()
                .transaction(|conn| outbox.enqueue(conn, message))
                .expect("enqueued");
            assert_eq!(sequence, enqueued.sequence);
        }
    }
    let rows = "SELECT string_agg(concat_ws('|', sequence, topic, destination, payload, headers, ordering_key,
                tenant_id, occurred_at, encode(digest, 'hex'), available_at - created_at > '1 minute',
                expires_at - created_at, message_id::text = idempotency_key,
                CASE WHEN ordering_key IS NOT NULL THEN concat(available_at, idempotency_key) END), E'\\n'
                ORDER BY sequence) FROM {o}";
    let stored = one.text(rows).expect("rows");
    assert_eq!(Some(&stored), other.text(rows).as_ref());
    assert!(stored.contains("1970-01-01 00:00:00.000001"), "{stored}");
    assert!(stored.contains("Zürich"), "{stored}");
    assert!(stored.contains(".123456"), "{stored}");
    assert_eq!(stored.lines().count(), 9, "{stored}");
}

#[test]
fn a_taken_key_inserts_nothing_and_the_transaction_stays_usable() {
    let database = Database::new();
    let outbox = database.outbox();
    let message = |payload: i32| NewMessage::new("order.paid", &payload).expect("JSON");
    let inserted = database.connect().transaction(|conn| {
        let first = outbox.insert(message(1).idempotency_key("order-1"))?;
        let id = first.message_id();
        assert_eq!(first.execute(conn)?, 1);
        let same = outbox.insert(message(1).idempotency_key("order-1"))?;
        assert_eq!(same.execute(conn)?, 0);
        let other = outbox.insert(message(2).idempotency_key("order-1"))?;
        assert_eq!(other.get_result::<Sequence>(conn).optional()?, None);
        let without = [outbox.insert(message(1))?, outbox.insert(message(1))?];
        for insert in without {
            assert_eq!(insert.execute(conn)?, 1);
        }
        Ok::<_, diesel::result::Error>(id)
    });
    let id = inserted.expect("the transaction continues");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);
    let stored = database.text("SELECT message_id FROM {o} WHERE idempotency_key = 'order-1'");
    assert_eq!(stored, Some(id.to_string()));
}

#[test]
fn a_bad_message_is_an_error_before_there_is_a_query() {
    let database = Database::new();
    let bad = NewMessage::new("", &1).expect("JSON");
    let refused = database.outbox().insert(bad);
    assert!(
        matches!(refused, Err(EnqueueError::Message(_))),
        "{refused:?}"
    );
}
