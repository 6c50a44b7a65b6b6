//! The inbox: each message is handled once, even if it arrives twice, concurrently, or with a crash in between.

mod retention;

use std::collections::HashSet;
use std::sync::{Arc, Barrier, Mutex};

use crossbeam_channel::{Receiver as Signal, Sender, bounded};
use diesel::result::{DatabaseErrorKind, Error, QueryResult};
use diesel::sql_types::{Integer, Text};
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::config::Mode;
use diesel_outbox::inbox::{self, Once};
use diesel_outbox::receive::{Headers, Verifier};
use diesel_outbox::{Destination, EnqueueError, Event};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::support::{Database, PATIENCE, Receiver, end, eventually};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A consumer's database: the inbox, shared by all tests, and a table for the work done.
struct Consumer {
    database: Database,
}

impl Consumer {
    fn new() -> Self {
        let database = Database::new();
        let schema = database.schema();
        database.execute(&format!("CREATE TABLE {schema}.done (what text NOT NULL)"));
        Self { database }
    }

    /// The source of this test alone.
    fn source(&self) -> &str {
        self.database.schema()
    }

    fn connect(&self) -> PgConnection {
        self.database.connect()
    }

    fn work(&self, conn: &mut PgConnection, what: &str) -> QueryResult<usize> {
        work(conn, self.source(), what)
    }

    /// Handles a message as an application would.
    fn handle(&self, conn: &mut PgConnection, id: &str) -> QueryResult<Once<usize>> {
        inbox::once(conn, self.source(), id, |conn| self.work(conn, id))
    }

    /// How often this work was done.
    fn done(&self, what: &str) -> i64 {
        let schema = self.source();
        let select = format!("SELECT count(*) FROM {schema}.done WHERE what = '{what}'");
        self.database.number(&select)
    }

    /// Whether the inbox has the message.
    fn is_marked(&self, id: &str) -> bool {
        let source = self.source();
        self.database.number(&format!(
            "SELECT count(*) FROM outbox_inbox WHERE source = '{source}' AND message_id = '{id}'"
        )) == 1
    }
}

fn work(conn: &mut PgConnection, schema: &str, what: &str) -> QueryResult<usize> {
    sql_query(format!("INSERT INTO {schema}.done VALUES ($1)"))
        .bind::<Text, _>(what)
        .execute(conn)
}

#[derive(diesel::QueryableByName)]
struct PidRow {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

fn pid(conn: &mut PgConnection) -> i32 {
    sql_query("SELECT pg_backend_pid() AS pid")
        .get_result::<PidRow>(conn)
        .expect("a process")
        .pid
}

// --- Once ---------------------------------------------------------------------------------

/// R33.
#[test]
fn a_message_is_handled_once() {
    let consumer = Consumer::new();
    let conn = &mut consumer.connect();
    let id = Uuid::now_v7();
    let first = inbox::once(conn, consumer.source(), id, |conn| consumer.work(conn, "a"));
    assert_eq!(first, Ok(Once::Handled(1)));
    // The same id as text, and on another connection, is still the same id.
    let text = id.to_string();
    for conn in [conn, &mut consumer.connect()] {
        let again = inbox::once(conn, consumer.source(), &text, |_| {
            panic!("the handler must not be called")
        });
        let again: QueryResult<Once<()>> = again;
        assert!(again.expect("a duplicate").is_duplicate());
    }
    assert_eq!(consumer.done("a"), 1);

    let conn = &mut consumer.connect();
    let other_source = format!("{}/other", consumer.source());
    let other = inbox::once(conn, &other_source, id, |_| Ok::<_, Error>(7));
    assert_eq!(other.expect("another message").handled(), Some(7));
    assert!(
        !consumer
            .handle(conn, &text.to_uppercase())
            .expect("bytes")
            .is_duplicate()
    );
}

/// R33.
#[test]
fn a_handler_that_fails_leaves_nothing_and_the_message_is_handled_again() {
    let consumer = Consumer::new();
    let conn = &mut consumer.connect();
    for _ in 0..2 {
        let failed: Result<Once<()>, EnqueueError> =
            inbox::once(conn, consumer.source(), "a", |conn| {
                consumer.work(conn, "a")?;
                Err(EnqueueError::Database(Error::RollbackTransaction))
            });
        let error = failed.expect_err("the handler's error");
        assert!(matches!(
            error,
            EnqueueError::Database(Error::RollbackTransaction)
        ));
    }
    // The same for a database error.
    let failed: QueryResult<Once<usize>> = inbox::once(conn, consumer.source(), "a", |conn| {
        consumer.work(conn, "a")?;
        sql_query("SELECT 1 / 0").execute(conn)
    });
    assert!(failed.is_err());
    assert_eq!(consumer.done("a"), 0);
    assert!(!consumer.is_marked("a"));
    assert_eq!(consumer.handle(conn, "a"), Ok(Once::Handled(1)));
    assert_eq!(consumer.done("a"), 1);
}

/// R33. PostgreSQL commits nothing after a failed statement, even if the handler ignores the error.
#[test]
fn a_statement_that_failed_unheeded_leaves_nothing_and_is_an_error() {
    let consumer = Consumer::new();
    let conn = &mut consumer.connect();
    let heedless = inbox::once(conn, consumer.source(), "a", |conn| {
        consumer.work(conn, "a")?;
        let _ = sql_query("SELECT 1 / 0").execute(conn);
        QueryResult::Ok(())
    });
    assert!(heedless.is_err(), "{heedless:?}");
    assert_eq!(consumer.done("a"), 0);
    assert_eq!(consumer.handle(conn, "a"), Ok(Once::Handled(1)));
    // A failure inside the handler's own savepoint spoils nothing.
    let careful = inbox::once(conn, consumer.source(), "b", |conn| {
        let _ = conn.transaction(|conn| sql_query("SELECT 1 / 0").execute(conn));
        consumer.work(conn, "b")
    });
    assert_eq!(careful, Ok(Once::Handled(1)));
    assert_eq!((consumer.done("a"), consumer.done("b")), (1, 1));
}

/// R33. The process, or its database, crashes between the work and the commit.
#[test]
fn a_crash_in_between_undoes_the_work_and_the_mark() {
    let consumer = Consumer::new();
    let mut conn = consumer.connect();
    let crashed = inbox::once(&mut conn, consumer.source(), "a", |conn| {
        consumer.work(conn, "a")?;
        let pid = pid(conn);
        consumer
            .database
            .number(&format!("SELECT pg_terminate_backend({pid})::int"));
        consumer.work(conn, "b")
    });
    assert!(crashed.is_err(), "{crashed:?}");
    assert!(!consumer.is_marked("a"));
    assert_eq!(consumer.done("a"), 0);
    assert_eq!(
        consumer.handle(&mut consumer.connect(), "a"),
        Ok(Once::Handled(1))
    );
}

/// R33.
#[test]
fn in_a_transaction_of_the_callers_it_is_a_savepoint() {
    let consumer = Consumer::new();
    let conn = &mut consumer.connect();
    // The caller's rollback removes the mark as well.
    let outer: QueryResult<()> = conn.transaction(|conn| {
        assert_eq!(consumer.handle(conn, "a"), Ok(Once::Handled(1)));
        assert_eq!(consumer.handle(conn, "a"), Ok(Once::Duplicate));
        Err(Error::RollbackTransaction)
    });
    assert_eq!(outer, Err(Error::RollbackTransaction));
    assert!(!consumer.is_marked("a"));

    // A failing handler leaves the caller's transaction usable.
    conn.transaction(|conn| {
        consumer.work(conn, "before")?;
        let failed = inbox::once(conn, consumer.source(), "a", |conn| {
            consumer.work(conn, "a")?;
            sql_query("SELECT 1 / 0").execute(conn)
        });
        assert!(failed.is_err());
        assert_eq!(consumer.handle(conn, "b"), Ok(Once::Handled(1)));
        QueryResult::Ok(())
    })
    .expect("committed");
    let done = ["before", "a", "b"].map(|what| consumer.done(what));
    assert_eq!(done, [1, 0, 1]);
    assert!(!consumer.is_marked("a") && consumer.is_marked("b"));
}

#[test]
fn a_bad_key_is_an_error_before_sql() {
    let consumer = Consumer::new();
    let conn = &mut consumer.connect();
    let long = "x".repeat(inbox::MAX_KEY_BYTES + 1);
    conn.transaction(|conn| {
        for (source, id, said) in [
            ("", "a", "the source of the message is empty"),
            ("a", "", "the id of the message is empty"),
            (
                &long,
                "a",
                "the source of the message is longer than 1024 bytes",
            ),
            (
                "a",
                &long,
                "the id of the message is longer than 1024 bytes",
            ),
            ("a", "a\0b", "the id of the message contains NUL"),
        ] {
            let error = inbox::once(conn, source, id, |_| QueryResult::Ok(())).expect_err(said);
            assert_eq!(error.to_string(), said);
            assert!(matches!(error, Error::QueryBuilderError(_)), "{error:?}");
        }
        // The transaction is still usable, and the longest keys fit.
        let longest = &long[1..];
        let source = format!("{}{longest}", consumer.source());
        let source = &source[..inbox::MAX_KEY_BYTES];
        inbox::once(conn, source, random(longest.len()), |_| QueryResult::Ok(()))
    })
    .expect("handled");
}

/// Text that does not compress.
fn random(length: usize) -> String {
    std::iter::repeat_with(fastrand::alphanumeric)
        .take(length)
        .collect()
}

// --- At the same time ---------------------------------------------------------------------

/// How the first of two handlers ends when told to.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Commit,
    RollBack,
}

/// Handles a message, reports that the handler runs, and ends as told.
fn handle_slowly(consumer: &Consumer, began: &Sender<()>, end: &Signal<End>) {
    let handled = inbox::once(&mut consumer.connect(), consumer.source(), "a", |conn| {
        consumer.work(conn, "first")?;
        began.send(()).expect("the test waits");
        match end.recv_timeout(PATIENCE).expect("the test continues") {
            End::Commit => Ok(()),
            End::RollBack => Err(Error::RollbackTransaction),
        }
    });
    let _ = handled;
}

/// The result of a second handler that began while the first was at work.
fn second_while_first(end: End) -> (Consumer, Once<usize>) {
    let consumer = Consumer::new();
    let (began, has_begun) = bounded(1);
    let (tell, told) = bounded(1);
    let second = std::thread::scope(|scope| {
        scope.spawn(|| handle_slowly(&consumer, &began, &told));
        has_begun.recv().expect("the first handler has begun");
        let mut conn = consumer.connect();
        let pid = pid(&mut conn);
        let second = scope.spawn({
            let consumer = &consumer;
            move || {
                inbox::once(&mut conn, consumer.source(), "a", |conn| {
                    consumer.work(conn, "second")
                })
            }
        });
        eventually("the second handler waits for the first", || {
            consumer.database.number(&format!(
                "SELECT count(*) FROM pg_stat_activity
                  WHERE pid = {pid} AND wait_event_type = 'Lock'"
            )) == 1
        });
        tell.send(end).expect("the first handler waits");
        second.join().expect("no panic").expect("no error")
    });
    (consumer, second)
}

/// R33.
#[test]
fn a_second_handler_waits_for_the_first_and_sees_a_duplicate() {
    let (consumer, second) = second_while_first(End::Commit);
    assert_eq!(second, Once::Duplicate);
    assert_eq!((consumer.done("first"), consumer.done("second")), (1, 0));
}

/// R33.
#[test]
fn a_second_handler_continues_when_the_first_rolled_back() {
    let (consumer, second) = second_while_first(End::RollBack);
    assert_eq!(second, Once::Handled(1));
    assert_eq!((consumer.done("first"), consumer.done("second")), (0, 1));
}

/// R33.
#[test]
fn threads_that_get_the_same_messages_handle_each_once() {
    const THREADS: usize = 6;
    const MESSAGES: usize = 40;
    let consumer = Consumer::new();
    let start = Barrier::new(THREADS);
    let handled: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (consumer, start) = (&consumer, &start);
                scope.spawn(move || {
                    let mut conn = consumer.connect();
                    start.wait();
                    let handled = (0..MESSAGES).filter(|n| {
                        // Each thread begins at another message.
                        let n = (n + thread * 3) % MESSAGES;
                        let id = format!("m{n}");
                        let done = consumer.handle(&mut conn, &id).expect("handled or known");
                        !done.is_duplicate()
                    });
                    handled.count()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum()
    });
    let schema = consumer.source();
    let count = |what| {
        consumer
            .database
            .number(&format!("SELECT count({what}) FROM {schema}.done"))
    };
    assert_eq!(count("DISTINCT what"), MESSAGES as i64);
    assert_eq!(count("*"), MESSAGES as i64);
    assert_eq!(handled, MESSAGES);
}

/// R33. A snapshot older than the other commit cannot show it; only a new snapshot can.
#[test]
fn under_stricter_isolation_a_concurrent_duplicate_is_an_error_and_then_a_duplicate() {
    let consumer = Consumer::new();
    let transaction = |serializable: bool, conn: &mut PgConnection, id: &str, meanwhile: bool| {
        let builder = conn.build_transaction();
        let mut builder = match serializable {
            true => builder.serializable(),
            false => builder.repeatable_read(),
        };
        builder.run(|conn| {
            // Takes the snapshot.
            sql_query("SELECT 1").execute(conn)?;
            if meanwhile {
                let other = consumer.handle(&mut consumer.connect(), id);
                assert_eq!(other, Ok(Once::Handled(1)));
            }
            consumer.handle(conn, id)
        })
    };
    for serializable in [false, true] {
        let conn = &mut consumer.connect();
        let id = format!("serializable {serializable}");
        let failed = transaction(serializable, conn, &id, true);
        let Err(Error::DatabaseError(DatabaseErrorKind::SerializationFailure, _)) = failed else {
            panic!("{failed:?}")
        };
        let again = transaction(serializable, conn, &id, false);
        assert_eq!(again, Ok(Once::Duplicate));
        assert_eq!(consumer.done(&id), 1);
        let alone = transaction(serializable, conn, &format!("{id} alone"), false);
        assert_eq!(alone, Ok(Once::Handled(1)));
    }
}

// --- From end to end ----------------------------------------------------------------------

#[derive(Debug, Serialize, Deserialize)]
struct OrderPaid {
    order_id: i64,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

/// A receiver that books each order. Its first response to each request is an error although the work is committed:
/// the relay cannot know.
fn booking(consumer: &Arc<Consumer>, duplicates: &Arc<Mutex<usize>>) -> Receiver {
    let verifier: Verifier = SECRET.parse().expect("a secret");
    let (consumer, duplicates) = (Arc::clone(consumer), Arc::clone(duplicates));
    let answered = Mutex::new(HashSet::new());
    Receiver::answering(move |request| {
        let headers = Headers::new(request.headers());
        let events = match verifier.events(&headers, &request.body) {
            Ok(events) => events,
            Err(error) => return error.status(),
        };
        let mut conn = consumer.connect();
        let mut is_first = true;
        for event in &events {
            let handled = inbox::once(&mut conn, &event.source, &event.id, |conn| {
                let paid: OrderPaid = event.decode().expect("an order");
                work(conn, consumer.source(), &format!("order {}", paid.order_id))
            });
            if handled.expect("a database").is_duplicate() {
                *duplicates.lock().expect("no panic") += 1;
            }
            let mut answered = answered.lock().expect("no panic");
            is_first &= answered.insert(event.id.clone().into_owned());
        }
        if is_first { 500 } else { 204 }
    })
}

/// R33.
#[test]
fn a_message_delivered_twice_is_handled_once() {
    const ORDERS: i64 = 12;
    for mode in [Mode::Binary, Mode::Structured, Mode::Batched] {
        let consumer = Arc::new(Consumer::new());
        let duplicates = Arc::new(Mutex::new(0));
        let receiver = booking(&consumer, &duplicates);
        let mut destination = Destination::new("booking", &receiver.url()).expect("a URL");
        destination.policy.mode = Some(mode);
        destination.secrets = vec![SECRET.parse().expect("a secret")];
        destination.policy.breaker = None;
        let outbox = consumer.database.outbox();
        consumer
            .connect()
            .transaction(|conn| {
                for order_id in 0..ORDERS {
                    outbox.enqueue(conn, OrderPaid { order_id })?;
                }
                Ok::<_, EnqueueError>(())
            })
            .expect("enqueued");
        let relay = consumer
            .database
            .relay()
            .destination(destination)
            .route("*", "booking")
            .start()
            .expect("a relay");
        eventually("all messages are delivered", || {
            consumer.database.count("delivered") == ORDERS
        });
        end(&relay);
        for order in 0..ORDERS {
            assert_eq!(consumer.done(&format!("order {order}")), 1, "in {mode:?}");
        }
        let duplicates = *duplicates.lock().expect("no panic");
        assert_eq!(
            duplicates, ORDERS as usize,
            "each message arrived twice, in {mode:?}"
        );
    }
}
