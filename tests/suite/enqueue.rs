//! Enqueueing: what is stored, which messages count as the same, what is refused, and that the caller's transaction
//! stays usable.

use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::Integer;
use diesel::{Connection, PgConnection, QueryableByName, RunQueryDsl, sql_query};
use diesel_outbox::{
    EnqueueError, Enqueued, MAX_PAYLOAD_BYTES, MessageError, NewMessage, Sequence,
};
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually};

fn message(payload: i32) -> NewMessage {
    NewMessage::new("order.paid", &payload).expect("JSON")
}

fn keyed(payload: i32, key: &str) -> NewMessage {
    message(payload).idempotency_key(key)
}

/// Enqueues in a separate transaction.
fn enqueue(database: &Database, message: NewMessage) -> Result<Enqueued, EnqueueError> {
    let outbox = database.outbox();
    database
        .connect()
        .transaction(|conn| outbox.enqueue(conn, message))
}

// --- The same message twice ---------------------------------------------------------------

/// R2.
#[test]
fn the_same_message_again_is_not_new_and_has_the_same_sequence() {
    let database = Database::new();
    let first = enqueue(&database, keyed(1, "order-1")).expect("enqueued");
    assert!(first.is_new);
    let again = enqueue(&database, keyed(1, "order-1")).expect("enqueued");
    assert!(!again.is_new);
    assert_eq!(again.sequence, first.sequence);
    assert_eq!(again.message_id, first.message_id);
    assert_eq!(
        database.text("SELECT message_id FROM {o}"),
        Some(first.message_id.to_string())
    );
    let other = enqueue(&database, keyed(1, "order-2")).expect("enqueued");
    assert!(other.is_new && other.sequence > first.sequence);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 2);
}

#[test]
fn messages_without_a_key_are_never_one() {
    let database = Database::new();
    for _ in 0..3 {
        assert!(enqueue(&database, message(1)).expect("enqueued").is_new);
    }
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);
}

#[test]
fn one_key_stands_for_one_message_per_destination() {
    let database = Database::new();
    enqueue(&database, keyed(1, "order-1")).expect("enqueued");
    let elsewhere = keyed(2, "order-1").destination("billing");
    assert!(enqueue(&database, elsewhere).expect("enqueued").is_new);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 2);
}

#[test]
fn the_same_message_by_plain_sql_counts_as_the_same() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, idempotency_key) VALUES ('order.paid', '1', 'order-1')",
    );
    let again = enqueue(&database, keyed(1, "order-1")).expect("enqueued");
    assert!(!again.is_new);
    assert!(matches!(
        enqueue(&database, keyed(2, "order-1")),
        Err(EnqueueError::Conflict { .. })
    ));
}

/// R2.
#[test]
fn a_conflict_names_the_message_and_leaves_the_transaction_usable() {
    let database = Database::new();
    let outbox = database.outbox();
    let first = enqueue(&database, keyed(1, "order-1")).expect("enqueued");
    let after = database
        .connect()
        .transaction::<_, EnqueueError, _>(|conn| {
            for other in [
                keyed(2, "order-1"),
                NewMessage::new("order.shipped", &1)
                    .expect("JSON")
                    .idempotency_key("order-1"),
            ] {
                let error = outbox.enqueue(conn, other).expect_err("another message");
                assert!(
                    matches!(&error, EnqueueError::Conflict { idempotency_key, sequence }
                        if idempotency_key == "order-1" && *sequence == first.sequence),
                    "{error:?}"
                );
            }
            outbox.enqueue(conn, keyed(3, "order-3"))
        })
        .expect("the transaction commits");
    assert!(after.is_new);
    assert_eq!(
        database
            .text("SELECT string_agg(payload::text, ' ' ORDER BY sequence) FROM {o}")
            .as_deref(),
        Some("1 3")
    );
}

// --- A key that another open transaction holds --------------------------------------------

/// Enqueues in this thread without committing, and in another thread that has to wait. Then ends this thread's
/// transaction. Returns both outcomes.
fn in_flight(database: &Database, other: NewMessage, commits: bool) -> Race {
    let outbox = database.outbox();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        // Inside the closure, so that a failure ends the transaction before the other thread is joined.
        let mut conn = database.connect();
        let mut second = None;
        let first = conn.transaction(|conn| {
            let first = outbox.enqueue(conn, keyed(1, "order-1")).expect("enqueued");
            second = Some(scope.spawn(|| {
                let mut conn = database.connect();
                let pid = sql_query("SELECT pg_backend_pid() AS pid")
                    .get_result::<PidRow>(&mut conn)
                    .expect("a process")
                    .pid;
                tell.send(pid).expect("the test waits");
                conn.transaction(|conn| outbox.enqueue(conn, other.clone()))
            }));
            let pid = told.recv().expect("the other thread has begun");
            eventually("the other enqueue waits for this one", || {
                database.number(&format!(
                    "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
                )) == 1
            });
            if commits {
                Ok(first)
            } else {
                Err(diesel::result::Error::RollbackTransaction)
            }
        });
        assert_eq!(first.is_ok(), commits);
        Race {
            first: first.ok(),
            second: second
                .expect("the thread was started")
                .join()
                .expect("no panic there"),
        }
    })
}

struct Race {
    first: Option<Enqueued>,
    second: Result<Enqueued, EnqueueError>,
}

#[derive(QueryableByName)]
struct PidRow {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

#[test]
fn a_key_in_flight_is_not_new_once_the_other_has_committed() {
    let database = Database::new();
    let race = in_flight(&database, keyed(1, "order-1"), true);
    let second = race.second.expect("enqueued");
    assert!(!second.is_new);
    assert_eq!(
        race.first.map(|first| first.sequence),
        Some(second.sequence)
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);
}

#[test]
fn a_key_in_flight_is_new_once_the_other_has_rolled_back() {
    let database = Database::new();
    let race = in_flight(&database, keyed(1, "order-1"), false);
    assert!(race.second.expect("enqueued").is_new);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);
}

#[test]
fn a_key_in_flight_with_other_content_is_a_conflict_once_the_other_has_committed() {
    let database = Database::new();
    let race = in_flight(&database, keyed(2, "order-1"), true);
    assert!(matches!(race.second, Err(EnqueueError::Conflict { .. })));
    assert_eq!(
        database.text("SELECT payload FROM {o}").as_deref(),
        Some("1")
    );
}

// --- Batches ------------------------------------------------------------------------------

#[test]
fn a_batch_gets_its_sequences_in_its_order() {
    let database = Database::new();
    let outcomes = database
        .outbox()
        .enqueue_batch(&mut database.connect(), (0..100).map(message))
        .expect("enqueued");
    assert_eq!(outcomes.len(), 100);
    assert!(outcomes.iter().all(|outcome| outcome.is_new));
    assert!(outcomes.is_sorted_by(|a, b| a.sequence < b.sequence));
    for (n, outcome) in outcomes.iter().enumerate() {
        assert_eq!(
            database.number(&format!(
                "SELECT payload::text::int FROM {{o}} WHERE sequence = {}",
                outcome.sequence
            )),
            i64::try_from(n).expect("small")
        );
    }
}

#[test]
fn of_a_message_twice_in_a_batch_the_first_is_new() {
    let database = Database::new();
    let known = enqueue(&database, keyed(9, "known")).expect("enqueued");
    let outcomes = database
        .outbox()
        .enqueue_batch(
            &mut database.connect(),
            [
                keyed(1, "a"),
                keyed(9, "known"),
                keyed(1, "a"),
                keyed(2, "b"),
            ],
        )
        .expect("enqueued");
    let is_new: Vec<bool> = outcomes.iter().map(|outcome| outcome.is_new).collect();
    assert_eq!(is_new, [true, false, false, true]);
    assert_eq!(outcomes[2].sequence, outcomes[0].sequence);
    assert_eq!(outcomes[1].sequence, known.sequence);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);
}

#[test]
fn a_conflict_in_a_batch_leaves_nothing_of_it_and_the_transaction_usable() {
    let database = Database::new();
    let outbox = database.outbox();
    enqueue(&database, keyed(9, "known")).expect("enqueued");
    database
        .connect()
        .transaction::<_, EnqueueError, _>(|conn| {
            outbox.enqueue(conn, keyed(1, "before"))?;
            for batch in [
                // A conflict with a stored message, and one within the batch.
                [keyed(2, "a"), keyed(8, "known"), keyed(3, "b")],
                [keyed(2, "a"), keyed(3, "b"), keyed(4, "a")],
            ] {
                let error = outbox.enqueue_batch(conn, batch).expect_err("a conflict");
                assert!(matches!(error, EnqueueError::Conflict { .. }), "{error:?}");
            }
            outbox.enqueue(conn, keyed(5, "after"))
        })
        .expect("the transaction commits");
    assert_eq!(
        database
            .text("SELECT string_agg(idempotency_key, ' ' ORDER BY sequence) FROM {o}")
            .as_deref(),
        Some("known before after")
    );
}

#[test]
fn a_bad_message_in_a_batch_leaves_nothing_of_it() {
    let database = Database::new();
    let bad = NewMessage::new("two words", &1).expect("JSON");
    let error = database
        .outbox()
        .enqueue_batch(&mut database.connect(), [message(1), bad, message(2)])
        .expect_err("a bad topic");
    assert!(matches!(error, EnqueueError::Message(_)), "{error:?}");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
}

#[test]
fn an_empty_batch_is_nothing() {
    let database = Database::new();
    let outcomes = database
        .outbox()
        .enqueue_batch(&mut database.connect(), [] as [NewMessage; 0])
        .expect("enqueued");
    assert_eq!(outcomes, []);
}

#[test]
fn twenty_thousand_messages_are_one_call() {
    let database = Database::new();
    let outcomes = database
        .outbox()
        .enqueue_batch(&mut database.connect(), (0..20_000).map(message))
        .expect("enqueued");
    assert_eq!(outcomes.len(), 20_000);
    assert!(outcomes.is_sorted_by(|a, b| a.sequence < b.sequence));
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 20_000);
}

#[test]
fn a_batch_is_rolled_back_with_the_callers_transaction() {
    let database = Database::new();
    let outbox = database.outbox();
    let result = database
        .connect()
        .transaction::<(), diesel::result::Error, _>(|conn| {
            let outcomes = outbox
                .enqueue_batch(conn, (0..10).map(message))
                .expect("enqueued");
            assert_eq!(outcomes.len(), 10);
            Err(diesel::result::Error::RollbackTransaction)
        });
    assert!(result.is_err());
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
}

// --- When ---------------------------------------------------------------------------------

/// R6.
#[test]
fn a_delayed_message_is_not_sent_before_its_time() {
    let database = Database::new();
    let (sender, arrivals) = mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let receiver = Receiver::answering(move |request| {
        let arrival = (request.json(), SystemTime::now());
        let sender = sender.lock().expect("no panic while locked");
        sender.send(arrival).expect("the test waits");
        200
    });
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    let delay = Duration::from_millis(700);
    let due = SystemTime::now() + delay;
    let first = enqueue(&database, message(1).delay(delay)).expect("enqueued");
    let second = enqueue(&database, message(2).available_at(due)).expect("enqueued");
    enqueue(&database, message(3)).expect("enqueued");
    assert!(second.sequence > first.sequence);
    let arrivals: Vec<_> = arrivals.iter().take(3).collect();
    assert_eq!(arrivals[0].0, 3, "a due message comes before a delayed one");
    for (payload, at) in &arrivals[1..] {
        assert!(
            *at >= due,
            "{payload} came {:?} early",
            due.duration_since(*at)
        );
    }
    eventually("all messages are delivered", || {
        database.count("delivered") == 3
    });
    drop(relay);
}

#[test]
fn times_are_stored_as_given() {
    let database = Database::new();
    let time = UNIX_EPOCH + Duration::from_micros(4_102_444_800_123_456);
    enqueue(&database, message(1).available_at(time).expires_at(time)).expect("enqueued");
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o} WHERE available_at = expires_at
               AND available_at = '2100-01-01 00:00:00.123456Z'"
        ),
        1
    );
    // Delays count from the start of the transaction.
    enqueue(
        &database,
        message(2)
            .delay(Duration::from_secs(60))
            .expires_after(Duration::from_secs(90)),
    )
    .expect("enqueued");
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o} WHERE available_at = created_at + interval '60 s'
               AND expires_at = created_at + interval '90 s'"
        ),
        1
    );
    // A time beyond every clock is stored as very late, without an error.
    enqueue(&database, message(3).delay(Duration::MAX)).expect("enqueued");
    let before_1970 = UNIX_EPOCH - Duration::from_secs(1);
    enqueue(&database, message(4).available_at(before_1970)).expect("enqueued");
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE available_at = '1969-12-31 23:59:59Z'"),
        1
    );
}

/// R6.
#[test]
fn an_expired_message_ends_dead_unsent() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let expired = enqueue(&database, message(1).expires_after(Duration::ZERO)).expect("enqueued");
    enqueue(
        &database,
        message(2).expires_at(SystemTime::now() + Duration::from_secs(3600)),
    )
    .expect("enqueued");
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("both messages are settled", || {
        database.count("dead") == 1 && database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(
        database.number("SELECT sequence FROM {o}_dead"),
        expired.sequence.0
    );
    assert_eq!(
        database.text("SELECT reason FROM {o}_dead").as_deref(),
        Some("EXPIRED")
    );
    assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 0);
    assert_eq!(receiver.count(), 1);
}

// --- What is stored, and what is refused --------------------------------------------------

/// R4.
#[test]
fn everything_given_is_stored_as_given() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    let message = NewMessage::from_json("order.paid", "{ \"n\":\t1 }")
        .expect("JSON")
        .destination("billing")
        .idempotency_key("order-1")
        .ordering_key("customer-7")
        .tenant_id(tenant)
        .header("X-Shop", "Berlin")
        .trace_context("00-ab-cd-01", Some("vendor=1"));
    let id = message.message_id();
    assert_eq!(id.get_version_num(), 7);
    let enqueued = enqueue(&database, message).expect("enqueued");
    let expected = json!({
        "sequence": enqueued.sequence.0,
        "message_id": id.to_string(),
        "topic": "order.paid",
        "destination": "billing",
        "ordering_key": "customer-7",
        "idempotency_key": "order-1",
        "tenant_id": tenant.to_string(),
        "headers": { "x-shop": "Berlin", "traceparent": "00-ab-cd-01", "tracestate": "vendor=1" },
        "attempts": 0,
        "locked_by": null,
        "expires_at": null,
    });
    let row = database
        .text("SELECT to_json(o) FROM {o} o")
        .expect("a row");
    let row: serde_json::Value = serde_json::from_str(&row).expect("JSON");
    for (column, value) in expected.as_object().expect("an object") {
        assert_eq!(row[column], *value, "{column}");
    }
    assert_eq!(
        database.text("SELECT payload FROM {o}").as_deref(),
        Some("{ \"n\":\t1 }")
    );
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o} WHERE available_at = created_at
               AND digest = sha256(convert_to(topic || E'\\n' || payload::text, 'UTF8'))"
        ),
        1
    );
}

#[test]
fn a_bad_message_is_refused_and_the_transaction_stays_usable() {
    let database = Database::new();
    let outbox = database.outbox();
    let topic = |topic: &str| NewMessage::new(topic, &1).expect("JSON");
    let long = "x".repeat(256);
    let cases = [
        (topic("order paid"), "bad topic \"order paid\""),
        (topic("order\npaid"), "bad topic \"order\\npaid\""),
        (topic("order\u{a0}paid"), "bad topic"),
        (topic(""), "bad topic"),
        (topic(&long), "bad topic"),
        (keyed(1, ""), "bad idempotency_key"),
        (keyed(1, &long), "bad idempotency_key"),
        (message(1).ordering_key("a\0b"), "bad ordering_key"),
        (
            message(1).ordering_key("x".repeat(1025)),
            "longer than 1024 bytes",
        ),
        (message(1).destination("a\nb"), "bad destination"),
        (message(1).destination(&long), "longer than 255 bytes"),
        (
            message(1).header("x-a", "1\r\nx-b: 2"),
            "bad header \"x-a\"",
        ),
        (message(1).header("x-a", "1\n2"), "bad header \"x-a\""),
        (message(1).header("x\r\na", "1"), "bad header"),
        (
            message(1).header("Webhook-Id", "1"),
            "bad header \"webhook-id\"",
        ),
    ];
    database
        .connect()
        .transaction::<_, EnqueueError, _>(|conn| {
            for (message, named) in cases {
                let error = outbox.enqueue(conn, message).expect_err(named);
                assert!(matches!(error, EnqueueError::Message(_)), "{error:?}");
                assert!(error.to_string().contains(named), "{error}");
            }
            outbox.enqueue(conn, message(1))
        })
        .expect("the transaction commits");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);
}

#[test]
fn a_payload_may_have_a_mebibyte_and_no_more() {
    let database = Database::new();
    // Two bytes are the quotation marks.
    let payload =
        |bytes: usize| NewMessage::new("order.paid", &"x".repeat(bytes - 2)).expect("JSON");
    enqueue(&database, payload(MAX_PAYLOAD_BYTES)).expect("just small enough");
    for bytes in [MAX_PAYLOAD_BYTES + 1, 5 * 1024 * 1024] {
        let error = enqueue(&database, payload(bytes)).expect_err("too large");
        assert!(
            matches!(&error, EnqueueError::Message(MessageError::PayloadTooLarge { topic, bytes: found })
                if topic == "order.paid" && *found == bytes),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(
            text.contains(&bytes.to_string()) && text.len() < 200,
            "{text}"
        );
    }
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(receiver.requests()[0].body.len(), MAX_PAYLOAD_BYTES);
    drop(relay);
}

/// R48.
#[test]
fn a_destination_may_have_255_bytes_and_an_ordering_key_1024() {
    let database = Database::new();
    let longest = message(1)
        .destination("d".repeat(255))
        .ordering_key("k".repeat(1024));
    enqueue(&database, longest).expect("just short enough");
    // The limits count bytes, not characters.
    for (message, bytes) in [
        (message(2).destination("é".repeat(128)), "255 bytes"),
        (message(2).ordering_key("é".repeat(513)), "1024 bytes"),
    ] {
        let error = enqueue(&database, message).expect_err("too long");
        assert!(
            matches!(error, EnqueueError::Message(MessageError::Name { .. })),
            "{error:?}"
        );
        assert!(error.to_string().contains(bytes), "{error}");
    }
    for (column, bytes, constraint) in [
        (
            "destination",
            256,
            "outbox_destination_is_at_most_255_bytes",
        ),
        ("ordering_key", 1025, "outbox_ordering_key_is_at_most_1_kib"),
    ] {
        let insert = |bytes: i32| {
            format!(
                "INSERT INTO {{o}} (topic, payload, {column}) VALUES ('t', '1', repeat('x', {bytes}))"
            )
        };
        let error = database.refused(&insert(bytes));
        assert!(error.contains(constraint), "{column}: {error}");
        database.execute(&insert(bytes - 1));
    }
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);
}

#[test]
fn the_table_refuses_from_plain_sql_what_the_library_refuses() {
    let database = Database::new();
    for (values, constraint) in [
        (
            "('order paid', '1', 'k', NULL)",
            "outbox_topic_is_1_to_255_bytes_without_spaces",
        ),
        (
            "(E'order\\npaid', '1', 'k', NULL)",
            "outbox_topic_is_1_to_255_bytes_without_spaces",
        ),
        (
            "('', '1', 'k', NULL)",
            "outbox_topic_is_1_to_255_bytes_without_spaces",
        ),
        (
            "(repeat('x', 256), '1', 'k', NULL)",
            "outbox_topic_is_1_to_255_bytes_without_spaces",
        ),
        ("('t', '1', '', NULL)", "outbox_key_is_1_to_255_bytes"),
        (
            "('t', '1', repeat('x', 256), NULL)",
            "outbox_key_is_1_to_255_bytes",
        ),
        ("('t', '1', 'k', '[1]')", "outbox_headers_is_an_object"),
        ("('t', '1', 'k', 'null')", "outbox_headers_is_an_object"),
        (
            "('t', to_json(repeat('x', 5000000)), 'k', NULL)",
            "outbox_payload_is_at_most_1_mib",
        ),
        (
            "('t', '{n: 1}', 'k', NULL)",
            "invalid input syntax for type json",
        ),
        ("('t', NULL, 'k', NULL)", "null value in column"),
    ] {
        let error = database.refused(&format!(
            "INSERT INTO {{o}} (topic, payload, idempotency_key, headers) VALUES {values}"
        ));
        assert!(error.contains(constraint), "{values}: {error}");
    }
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
}

#[test]
fn a_plain_insert_is_delivered() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    database.execute("INSERT INTO {o} (topic, payload) VALUES ('order.paid', '{\"id\":1}')");
    let requests = receiver.wait_for(1);
    assert_eq!(requests[0].body, b"{\"id\":1}");
    assert_eq!(requests[0].header("ce-type"), Some("order.paid"));
    assert!(Uuid::parse_str(&requests[0].id()).is_ok());
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    drop(relay);
}

#[test]
fn connections_of_a_pool_enqueue_from_many_threads() {
    let database = Database::new();
    let pool = Pool::builder()
        .max_size(4)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool");
    let outbox = database.outbox();
    let mut sequences: Vec<Sequence> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let (pool, outbox) = (pool.clone(), &outbox);
                scope.spawn(move || {
                    (0..25)
                        .map(|n| {
                            let mut conn = pool.get().expect("a connection");
                            let message = message(thread * 25 + n);
                            conn.transaction(|conn| outbox.enqueue(conn, message))
                                .expect("enqueued")
                                .sequence
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("no panic there"))
            .collect()
    });
    sequences.sort();
    sequences.dedup();
    assert_eq!(sequences.len(), 200);
    assert_eq!(
        database.number("SELECT count(DISTINCT payload::text) FROM {o}"),
        200
    );
    // The same outside an explicit transaction.
    let mut conn = pool.get().expect("a connection");
    outbox.enqueue(&mut conn, message(200)).expect("enqueued");
    outbox
        .enqueue_batch(&mut conn, [message(201)])
        .expect("enqueued");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 202);
}

#[test]
fn a_missing_outbox_is_an_error_that_says_how_to_create_one() {
    let database = Database::new();
    let outbox = diesel_outbox::Outbox::new("nowhere").expect("a name");
    let error = database
        .connect()
        .transaction(|conn| {
            let message = NewMessage::new("t", &1).expect("JSON");
            outbox.enqueue(conn, message)
        })
        .expect_err("there is no such outbox");
    let text = error.to_string();
    assert!(
        text.contains("does not exist: create the outbox with"),
        "{text}"
    );
    assert!(text.contains("diesel-outbox migrate"), "{text}");
}
