//! Bulk enqueue: many messages in few statements, all or none, with the guarantees of `enqueue`. Also what an enqueue
//! adds to the caller's transaction: one round trip.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::{Connection, PgConnection, QueryableByName, RunQueryDsl, sql_query};
use diesel_outbox::{
    EnqueueError, MAX_PAYLOAD_BYTES, MessageError, NewMessage, Outbox, TraceContext,
};
use serde_json::json;
use uuid::Uuid;

use crate::support::Database;

/// More messages than one statement takes.
const MANY: i64 = 25_000;

fn message(payload: i64) -> NewMessage {
    NewMessage::new("order.paid", &payload).expect("JSON")
}

fn keyed(payload: i64) -> NewMessage {
    message(payload).idempotency_key(format!("order-{payload}"))
}

fn bulk(
    database: &Database,
    messages: impl IntoIterator<Item = NewMessage>,
) -> Result<u64, EnqueueError> {
    let outbox = database.outbox();
    outbox.enqueue_bulk(&mut database.connect(), messages)
}

fn stored(database: &Database) -> i64 {
    database.number("SELECT count(*) FROM {o}")
}

// --- Many messages ------------------------------------------------------------------------

/// R1.
#[test]
fn all_are_written_in_the_order_of_the_iterator() {
    let database = Database::new();
    assert_eq!(
        bulk(&database, (0..MANY).map(message)).expect("enqueued"),
        MANY as u64
    );
    assert_eq!(stored(&database), MANY);
    assert_eq!(
        database.number(
            "SELECT count(*) FROM (
                 SELECT payload::text::int AS payload, row_number() OVER (ORDER BY sequence) - 1 AS n
                   FROM {o}) t
              WHERE payload = n"
        ),
        MANY
    );
}

#[test]
fn of_no_messages_nothing_is_written() {
    let database = Database::new();
    assert_eq!(bulk(&database, []).expect("an empty bulk"), 0);
}

#[test]
fn messages_are_taken_from_the_iterator_as_they_are_written() {
    let database = Database::new();
    let mut watcher = database.connect();
    // The uncommitted rows of the bulk show in the size of the table.
    let mut pages = || {
        sql_query(format!(
            "SELECT pg_relation_size('{}') AS bytes",
            database.name()
        ))
        .get_result::<BytesRow>(&mut watcher)
        .expect("a size")
        .bytes
    };
    let mut seen = Vec::new();
    let messages = (0..MANY).map(|n| {
        if n % 6000 == 0 {
            seen.push(pages());
        }
        message(n)
    });
    bulk(&database, messages).expect("enqueued");
    assert_eq!(seen[0], 0);
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
}

#[derive(QueryableByName)]
struct BytesRow {
    #[diesel(sql_type = diesel::sql_types::BigInt)]
    bytes: i64,
}

#[test]
fn large_payloads_go_by_smaller_statements() {
    let database = Database::new();
    let text = "x".repeat(MAX_PAYLOAD_BYTES - 2);
    let large = (0..12).map(|_| NewMessage::new("order.paid", &text).expect("JSON"));
    assert_eq!(bulk(&database, large).expect("enqueued"), 12);
    assert_eq!(stored(&database), 12);
}

/// R4.
#[test]
fn every_column_arrives_whatever_the_others_have() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    let at = UNIX_EPOCH + Duration::from_secs(4_000_000_000);
    let full = keyed(1)
        .destination("billing")
        .ordering_key("customer-7")
        .tenant_id(tenant)
        .header("X-Shop", "Berlin")
        .available_at(at)
        .expires_at(at + Duration::from_secs(60));
    let relative = keyed(2)
        .delay(Duration::from_secs(60))
        .expires_after(Duration::from_secs(120));
    let ids = [full.message_id(), relative.message_id()];
    // Written by one statement, by a call with a repeated key, and by a batch.
    let plain = message(3);
    bulk(&database, [full.clone(), relative.clone(), plain]).expect("enqueued");
    let row = |key: &str| -> serde_json::Value {
        let row = database
            .text(&format!(
                "SELECT to_jsonb(o) || jsonb_build_object(
                     'due_in', extract(epoch FROM available_at - created_at)::bigint,
                     'expires_in', extract(epoch FROM expires_at - created_at)::bigint,
                     'due_at', extract(epoch FROM available_at)::bigint,
                     'expired_at', extract(epoch FROM expires_at)::bigint)
                   FROM {{o}} o WHERE idempotency_key = '{key}'"
            ))
            .expect("a row");
        serde_json::from_str(&row).expect("JSON")
    };
    let has = |key: &str, expected: serde_json::Value| {
        let row = row(key);
        for (column, value) in expected.as_object().expect("an object") {
            assert_eq!(row[column], *value, "{column} of {key}");
        }
    };
    let all_as_given = || {
        has(
            "order-1",
            json!({
                "message_id": ids[0].to_string(), "topic": "order.paid", "destination": "billing",
                "payload": 1, "ordering_key": "customer-7", "tenant_id": tenant.to_string(),
                "headers": { "x-shop": "Berlin" }, "attempts": 0, "locked_by": null,
                "due_at": 4_000_000_000_i64, "expired_at": 4_000_000_060_i64,
            }),
        );
        has(
            "order-2",
            json!({
                "message_id": ids[1].to_string(), "destination": "", "payload": 2, "ordering_key": null,
                "tenant_id": null, "headers": null, "due_in": 60, "expires_in": 120,
            }),
        );
        assert_eq!(
            database.number(
                "SELECT count(*) FROM {o}
                  WHERE payload::text = '3' AND available_at = created_at AND expires_at IS NULL
                    AND idempotency_key IS NULL"
            ),
            1
        );
        assert_eq!(
            database.number(
                "SELECT count(*) FROM {o}
                  WHERE digest = sha256(convert_to(topic || E'\\n' || payload::text, 'UTF8'))"
            ),
            2,
            "the digests of the messages with a key"
        );
    };
    all_as_given();
    database.execute("DELETE FROM {o}");
    let repeat = || [full.clone(), full.clone(), relative.clone(), message(3)];
    assert_eq!(bulk(&database, repeat()).expect("enqueued"), 3);
    all_as_given();
    database.execute("DELETE FROM {o}");
    let outbox = database.outbox();
    let mut conn = database.connect();
    outbox.enqueue_batch(&mut conn, repeat()).expect("enqueued");
    all_as_given();
    database.execute("DELETE FROM {o}");
    for message in repeat() {
        outbox.enqueue(&mut conn, message).expect("enqueued");
    }
    all_as_given();
}

#[test]
fn each_message_gets_the_trace_of_its_moment() {
    let database = Database::new();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let outbox = database.outbox().trace_with(move || {
        let n = counted.fetch_add(1, Ordering::Relaxed);
        Some(TraceContext {
            traceparent: format!("00-{n:032x}-00f067aa0ba902b7-01"),
            tracestate: None,
        })
    });
    outbox
        .enqueue_bulk(&mut database.connect(), (0..100).map(message))
        .expect("enqueued");
    assert_eq!(count.load(Ordering::Relaxed), 100);
    assert_eq!(
        database.number("SELECT count(DISTINCT headers->>'traceparent') FROM {o}"),
        100
    );
}

// --- All or none --------------------------------------------------------------------------

/// R1.
#[test]
fn a_rollback_leaves_nothing() {
    let database = Database::new();
    let outbox = database.outbox();
    let rolled_back = database
        .connect()
        .transaction::<(), EnqueueError, _>(|conn| {
            assert_eq!(
                outbox.enqueue_bulk(conn, (0..MANY).map(message))?,
                MANY as u64
            );
            Err(diesel::result::Error::RollbackTransaction.into())
        });
    assert!(rolled_back.is_err());
    assert_eq!(stored(&database), 0);
}

#[test]
fn a_bad_message_is_named_and_leaves_nothing() {
    let database = Database::new();
    let outbox = database.outbox();
    let messages = (0..MANY).map(|n| match n {
        12_345 => NewMessage::new("order paid", &n).expect("JSON"),
        n => message(n),
    });
    database
        .connect()
        .transaction::<_, EnqueueError, _>(|conn| {
            let error = outbox
                .enqueue_bulk(conn, messages)
                .expect_err("a bad topic");
            assert!(
                matches!(
                    &error,
                    EnqueueError::MessageAt {
                        index: 12_345,
                        error: MessageError::Name { field: "topic", .. }
                    }
                ),
                "{error:?}"
            );
            assert_eq!(
                error.to_string(),
                "message 12345 (counted from 0): bad topic \"order paid\": contains white space"
            );
            outbox.enqueue(conn, message(1))
        })
        .expect("the transaction commits");
    assert_eq!(stored(&database), 1);
}

#[test]
fn an_iterator_that_panics_leaves_nothing() {
    let database = Database::new();
    let messages = (0..MANY).map(|n| {
        assert!(n < 12_345, "a bug in the application");
        message(n)
    });
    let ended =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bulk(&database, messages)));
    assert!(ended.is_err());
    assert_eq!(stored(&database), 0);
}

#[test]
fn messages_that_the_table_refuses_leave_nothing_and_the_transaction_usable() {
    let database = Database::new();
    database.execute("ALTER TABLE {o} ADD CHECK (payload::text <> '12345')");
    let outbox = database.outbox();
    database
        .connect()
        .transaction::<_, EnqueueError, _>(|conn| {
            let error = outbox
                .enqueue_bulk(conn, (0..MANY).map(message))
                .expect_err("a constraint");
            assert!(matches!(error, EnqueueError::Database(_)), "{error:?}");
            outbox.enqueue(conn, message(1))
        })
        .expect("the transaction commits");
    assert_eq!(stored(&database), 1);
}

// --- The same message twice ---------------------------------------------------------------

/// R2.
#[test]
fn messages_already_in_the_outbox_are_left_and_not_counted() {
    let database = Database::new();
    assert_eq!(bulk(&database, (0..100).map(keyed)).expect("enqueued"), 100);
    // The first statement has only new keys.
    let again = || (5000..MANY).chain(0..200).map(keyed);
    assert_eq!(
        bulk(&database, again()).expect("enqueued"),
        MANY as u64 - 5000 + 100
    );
    assert_eq!(bulk(&database, again()).expect("enqueued"), 0);
    assert_eq!(stored(&database), MANY - 5000 + 200);
}

/// R2.
#[test]
fn a_key_twice_in_one_call_is_one_message() {
    let database = Database::new();
    let twice = (0..MANY).chain(0..MANY).map(keyed);
    assert_eq!(bulk(&database, twice).expect("enqueued"), MANY as u64);
    let adjacent = (MANY..MANY + 10).flat_map(|n| [keyed(n), keyed(n)]);
    assert_eq!(bulk(&database, adjacent).expect("enqueued"), 10);
    // Messages without a key are never compared, even in a call with a repeated key.
    let same = message(1);
    assert_eq!(
        bulk(&database, [same.clone(), same.clone()]).expect("enqueued"),
        2
    );
    let beside = [same.clone(), keyed(MANY), same.clone()];
    assert_eq!(bulk(&database, beside).expect("enqueued"), 2);
    let other = same.clone().ordering_key("another");
    let conn = &mut database.connect();
    let batch = conn.transaction(|conn| {
        database
            .outbox()
            .enqueue_batch(conn, [same.clone(), other, same])
    });
    let batch = batch.expect("enqueued");
    let mut sequences: Vec<_> = batch.iter().map(|one| one.sequence).collect();
    assert!(batch.iter().all(|one| one.is_new), "{batch:?}");
    assert!(sequences.is_sorted(), "{batch:?}");
    sequences.dedup();
    assert_eq!(sequences.len(), 3);
    assert_eq!(stored(&database), MANY + 17);
}

#[test]
fn one_key_stands_for_one_message_per_destination() {
    let database = Database::new();
    let each = (0..10).flat_map(|n| keyed(n).for_each(["billing", "audit"]));
    assert_eq!(bulk(&database, each).expect("enqueued"), 20);
}

/// R2.
#[test]
fn a_key_of_another_message_is_a_conflict_that_leaves_the_transaction_usable() {
    let database = Database::new();
    let outbox = database.outbox();
    let other = || message(-1).idempotency_key("order-12345");
    database
        .connect()
        .transaction::<_, EnqueueError, _>(|conn| {
            let taken = outbox.enqueue(conn, other())?.sequence;
            let error = outbox
                .enqueue_bulk(conn, (0..MANY).map(keyed))
                .expect_err("the key is in the outbox");
            assert!(
                matches!(&error, EnqueueError::Conflict { idempotency_key, sequence }
                    if idempotency_key == "order-12345" && *sequence == taken),
                "{error:?}"
            );
            let far = (20_000..MANY)
                .map(keyed)
                .chain([message(-2).idempotency_key("order-20000")]);
            let near = [keyed(1), message(-2).idempotency_key("order-1")];
            for error in [
                outbox.enqueue_bulk(conn, far),
                outbox.enqueue_bulk(conn, near),
            ] {
                assert!(
                    matches!(error, Err(EnqueueError::Conflict { .. })),
                    "{error:?}"
                );
            }
            outbox.enqueue_bulk(conn, (0..10).map(keyed))
        })
        .expect("the transaction commits");
    assert_eq!(stored(&database), 11);
}

// --- Round trips --------------------------------------------------------------------------

/// A proxy between client and server that counts how often the client sends after the server has answered.
struct RoundTrips {
    url: String,
    count: Arc<AtomicUsize>,
}

impl RoundTrips {
    fn to(database: &Database) -> Self {
        let (before, after) = database.url.split_once('@').expect("user@host");
        let (server, path) = after.split_once('/').expect("host/database");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let count = Arc::new(AtomicUsize::new(0));
        let (server, counted) = (server.to_owned(), Arc::clone(&count));
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("the client connects");
            let server = TcpStream::connect(server).expect("PostgreSQL is there");
            let client_is_next = Arc::new(AtomicBool::new(true));
            let (from, to) = (server.try_clone(), client.try_clone());
            let answered = Arc::clone(&client_is_next);
            let answers = std::thread::spawn(move || {
                pass(from.expect("a socket"), to.expect("a socket"), || {
                    answered.store(true, Ordering::SeqCst);
                });
            });
            pass(client, server, || {
                if client_is_next.swap(false, Ordering::SeqCst) {
                    counted.fetch_add(1, Ordering::SeqCst);
                }
            });
            answers.join().expect("no panic there");
        });
        Self {
            url: format!("{before}@{address}/{path}"),
            count,
        }
    }

    /// The round trips of `work`.
    fn of<T>(&self, work: impl FnOnce() -> T) -> (usize, T) {
        let before = self.count.load(Ordering::SeqCst);
        let result = work();
        (self.count.load(Ordering::SeqCst) - before, result)
    }
}

/// Forwards bytes until the connection ends; calls `heard` before it forwards each piece.
fn pass(mut from: TcpStream, mut to: TcpStream, heard: impl Fn()) {
    let mut buffer = [0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        heard();
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn an_enqueue_adds_one_round_trip_to_the_transaction() {
    let database = Database::new();
    let outbox = Outbox::new(&database.name()).expect("a name");
    let trips = RoundTrips::to(&database);
    let mut conn = PgConnection::establish(&trips.url).expect("PostgreSQL is there");
    let (count, refused) = trips.of(|| outbox.enqueue(&mut conn, keyed(1)));
    assert!(
        matches!(refused, Err(EnqueueError::NotInTransaction)),
        "{refused:?}"
    );
    assert_eq!(count, 0, "outside a transaction");
    let (begin_and_commit, _) = trips.of(|| conn.transaction(|_| diesel::QueryResult::Ok(())));
    assert_eq!(begin_and_commit, 2, "the proxy counts");
    conn.transaction::<_, EnqueueError, _>(|conn| {
        // The same for the first enqueue on the connection and for a repeated key.
        for (payload, is_new) in [(1, true), (2, true), (3, true), (1, false), (2, false)] {
            let (count, enqueued) = trips.of(|| outbox.enqueue(conn, keyed(payload)));
            assert_eq!(enqueued?.is_new, is_new);
            assert_eq!(count, 1, "round trips for {payload}");
        }
        let full = keyed(4)
            .header("x-shop", "Berlin")
            .tenant_id(Uuid::now_v7())
            .available_at(SystemTime::now())
            .expires_after(Duration::from_secs(60));
        assert_eq!(trips.of(|| outbox.enqueue(conn, full)).0, 1);
        let (count, conflict) =
            trips.of(|| outbox.enqueue(conn, message(-1).idempotency_key("order-1")));
        assert!(
            matches!(conflict, Err(EnqueueError::Conflict { .. })),
            "{conflict:?}"
        );
        assert_eq!(count, 1);
        Ok(())
    })
    .expect("the transaction commits");
    // BEGIN, SAVEPOINT, the statement, RELEASE, COMMIT.
    let (count, _) = trips.of(|| {
        conn.transaction(|conn| outbox.enqueue_batch(conn, (10..1000).map(keyed)))
            .expect("enqueued")
    });
    assert_eq!(count, 5);
}

/// A panic that is caught inside the transaction: later messages must not be lost without an error.
#[test]
fn a_panic_of_the_messages_leaves_the_transaction_as_it_was() {
    let database = Database::new();
    let outbox = Outbox::new(&database.name()).expect("a name");
    let mut conn = database.connect();
    conn.transaction(|conn| {
        outbox.enqueue(conn, message(1))?;
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let messages = (0..MANY).map(|n| match n {
                20_000 => panic!("no such order"),
                n => message(n),
            });
            outbox.enqueue_bulk(conn, messages)
        }));
        let panic = panics.expect_err("the panic continues");
        assert_eq!(panic.downcast_ref(), Some(&"no such order"));
        outbox.enqueue(conn, message(2))
    })
    .expect("committed");
    assert_eq!(stored(&database), 2, "the transaction is committed");
    conn.transaction(|conn| outbox.enqueue(conn, message(3)))
        .expect("committed");
    drop(conn);
    assert_eq!(stored(&database), 3);
}
