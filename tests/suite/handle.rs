//! The relay as part of an application: how it starts, what its handle reports, how it ends.

use std::process::Command;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel::{Connection, PgConnection};
use diesel_outbox::config::Config;
use diesel_outbox::{
    DatabaseError, Destination, Dispatcher, Failure, Message, NewMessage, Outcome, ReasonCode,
    Relay, ShutdownError, StartError,
};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::support::{Database, Dispatch, Gate, PATIENCE, Receiver, delivered, end, eventually};

/// A dispatcher whose sends hang until the gate is open.
fn gated() -> (impl Dispatcher, Gate) {
    let (gate, pass) = Gate::new();
    let dispatcher = Dispatch(move |_: &Message| {
        pass();
        delivered()
    });
    (dispatcher, gate)
}

// --- Starting -----------------------------------------------------------------------------

#[test]
fn the_reason_why_a_relay_cannot_start_has_a_type() {
    let database = Database::new();
    // The test module `settings` covers errors of single settings.
    for (relay, named) in [
        (database.relay().lease(Duration::MAX), "RelayBuilder::lease"),
        (database.relay().route("order.*", "nobody"), "nobody"),
        (
            Relay::builder("").on_topic("t", |_, _| Ok(())),
            "Relay::builder",
        ),
        (
            Relay::builder("mysql://db/shop").on_topic("t", |_, _| Ok(())),
            "Relay::builder",
        ),
        (
            Relay::from_config(Config::default()).on_topic("t", |_, _| Ok(())),
            "DATABASE_URL",
        ),
    ] {
        let error = relay.start().expect_err(named);
        assert!(
            matches!(&error, StartError::Config(error) if error.to_string().contains(named)),
            "{error:?}"
        );
    }

    let unreachable = "postgres://shop:sekret@127.0.0.1:1/shop";
    let error = Relay::builder(unreachable)
        .url("http://127.0.0.1:9/")
        .start()
        .expect_err("no server at that port");
    assert!(
        matches!(&error, StartError::Database(DatabaseError::Connect(text)) if !text.contains("sekret")),
        "{error:?}"
    );
    let missing = format!("{}.missing", database.schema());
    let error = database
        .relay()
        .outbox(&missing)
        .url("http://127.0.0.1:9/")
        .start()
        .expect_err("no outbox");
    assert!(
        matches!(&error, StartError::Database(DatabaseError::Schema(text)) if text.contains(&missing)),
        "{error:?}"
    );
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_lease"),
        0,
        "none of the relays took a lease"
    );
}

#[test]
fn a_wake_delivers_long_before_the_next_poll() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .poll_interval(Duration::from_secs(24 * 3600))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    for n in 1..=3 {
        assert!(relay.wait_until_idle(PATIENCE), "the relay is idle");
        database.enqueue("order.paid", json!(n));
        relay.wake();
        receiver.wait_for(n);
        eventually("the message is settled", || {
            relay.stats().delivered == n as u64
        });
    }
    end(&relay);
}

/// R6: delayed, dead and delivered messages stay unchanged, and the relay continues.
#[test]
fn a_wake_with_nothing_to_do_changes_nothing() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("ce-type") {
        Some("order.refused") => 400,
        _ => 200,
    });
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    database.enqueue("order.paid", json!(1));
    database.enqueue("order.refused", json!(2));
    eventually("one message is delivered", || {
        database.count("delivered") == 1
    });
    eventually("one message is dead-lettered", || {
        database.count("dead") == 1
    });
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         VALUES ('order.paid', '3', now() + interval '1 day')",
    );
    assert!(relay.wait_until_idle(PATIENCE));
    // A rewritten row has another version, even if its content is the same.
    let rows = || {
        database.text(
            "SELECT string_agg(row, ' ' ORDER BY row)
               FROM (SELECT xmin || ':' || sequence || ':' || attempts AS row FROM {o}
                     UNION ALL SELECT xmin || ':' || sequence FROM {o}_dead
                     UNION ALL SELECT xmin || ':' || sequence FROM {o}_ledger) AS all_rows",
        )
    };
    let (rows_before, stats_before) = (rows(), relay.stats());
    for _ in 0..1000 {
        relay.wake();
    }
    // A claim that began after the last wake has found nothing.
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(rows(), rows_before);
    assert_eq!(relay.stats(), stats_before);
    assert_eq!(receiver.requests().len(), 2);
    database.enqueue("order.paid", json!(4));
    eventually("the relay still works", || database.count("delivered") == 2);
    end(&relay);
}

#[test]
fn a_relay_is_healthy_while_its_database_answers() {
    let fresh = FreshDatabase::new();
    let database = Database::at(&fresh.url);
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    assert!(relay.is_healthy());
    fresh.close();
    eventually("the relay is not healthy", || !relay.is_healthy());
    assert!(!relay.has_failed(), "no thread has ended");
    fresh.open();
    eventually("the relay is healthy again", || relay.is_healthy());
    database.enqueue("order.paid", json!(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert!(!relay.is_healthy(), "the relay has ended");
    assert!(!relay.has_failed(), "the shutdown was requested");
}

// --- Ending -------------------------------------------------------------------------------

#[test]
fn a_shutdown_lets_sends_finish_and_releases_the_others() {
    let database = Database::new();
    let (dispatcher, gate) = gated();
    database.enqueue_many(100);
    let relay = database
        .relay()
        .concurrency(4)
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .dispatcher(dispatcher)
        .start()
        .expect("a relay");
    eventually("four sends are in flight", || gate.came() == 4);
    eventually("other messages are claimed", || {
        database.count("sending") > 4
    });
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| relay.shutdown(PATIENCE));
        eventually("the relay is ending", || !relay.is_healthy());
        gate.open();
        shutdown
            .join()
            .expect("no panic there")
            .expect("a clean shutdown");
    });
    assert_eq!(gate.came(), 4, "nothing else was sent");
    assert_eq!(database.count("delivered"), 4);
    assert_eq!(database.count("pending"), 96);
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts = 0 AND last_error_code IS NULL"),
        96
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

#[test]
fn a_shutdown_returns_at_its_deadline_and_loses_nothing() {
    let database = Database::new();
    let (dispatcher, gate) = gated();
    database.enqueue_many(100);
    let relay = database
        .relay()
        .concurrency(4)
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .dispatcher(dispatcher)
        .start()
        .expect("a relay");
    eventually("four sends are in flight", || gate.came() == 4);
    eventually("other messages are claimed", || {
        database.count("sending") > 4
    });
    let asked = Instant::now();
    let error = relay
        .shutdown(Duration::from_secs(1))
        .expect_err("sends hang");
    // A busy machine may delay the return, but not by the time of a send.
    assert!(asked.elapsed() < Duration::from_secs(20));
    assert!(
        matches!(&error, ShutdownError::Deadline { messages: 4, threads } if threads.contains("relay-send-1")),
        "{error}"
    );
    // The four messages stay with the lease; the others are released at once without an attempt.
    assert_eq!(database.count("sending"), 4);
    assert_eq!(database.count("pending"), 96);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}"), 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 1);
    drop(gate);
    drop(relay);
}

/// A send that this process is still making counts until the lease expires, so the takeover waits for that.
/// `RelayHandle::shutdown` documents this and may be called once more.
#[test]
fn messages_that_a_process_still_sends_after_the_deadline_are_not_taken_over_in_seconds() {
    let database = Database::new();
    let (dispatcher, gate) = gated();
    database.enqueue_many(1);
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(60))
        .dispatcher(dispatcher)
        .start()
        .expect("a relay");
    let is_locked = || {
        let free = "SELECT count(*) FROM {o}_lease WHERE pg_try_advisory_xact_lock(id)";
        database.number(free) == 0
    };
    eventually("its session has the lease's lock", is_locked);
    eventually("a send is in flight", || gate.came() == 1);
    relay
        .shutdown(Duration::from_secs(1))
        .expect_err("the send hangs");
    assert!(is_locked());
    drop(gate);
    relay.shutdown(PATIENCE).expect("the send ends");
    assert_eq!(database.count("delivered"), 1);
}

#[test]
fn a_second_shutdown_has_nothing_left_to_do() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    end(&relay);
    relay
        .shutdown(Duration::from_secs(10))
        .expect("still clean");
    relay.wake();
    database.enqueue("order.paid", json!(1));
    assert_eq!(database.count("pending"), 1);
}

/// R28
#[test]
fn a_shutdown_beside_another_one_takes_no_longer_than_its_own_deadline() {
    let database = Database::new();
    let (dispatcher, gate) = gated();
    let relay = database
        .relay()
        .send_timeout(PATIENCE)
        .lease(4 * PATIENCE)
        .dispatcher(dispatcher)
        .start()
        .expect("the relay starts");
    database.enqueue_many(1);
    eventually("a send is in flight", || gate.came() == 1);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| relay.shutdown(PATIENCE));
        // Either call may be the first: the send hangs in both cases.
        let second = relay.shutdown(Duration::from_millis(200));
        assert!(
            matches!(second, Err(ShutdownError::Deadline { messages: 1, .. })),
            "{second:?}"
        );
        assert!(!first.is_finished());
        drop(gate);
        first.join().expect("no panic").expect("a clean shutdown");
    });
    assert_eq!(database.count("delivered"), 1);
    relay.shutdown(PATIENCE).expect("the shutdown finishes");
}

#[test]
fn a_second_shutdown_continues_the_first() {
    let database = Database::new();
    let (dispatcher, gate) = gated();
    database.enqueue("order.paid", json!(1));
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .dispatcher(dispatcher)
        .start()
        .expect("a relay");
    eventually("a send is in flight", || gate.came() == 1);
    relay
        .shutdown(Duration::from_millis(200))
        .expect_err("the send hangs");
    drop(gate);
    relay.shutdown(PATIENCE).expect("the send ends");
    assert_eq!(database.count("delivered"), 1);
}

/// The number of threads of this process whose names start with `prefix`.
fn threads(prefix: &str) -> usize {
    std::fs::read_dir("/proc/self/task")
        .expect("a system with /proc")
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with(prefix))
        .count()
}

/// Runs the test of this name in a separate process. Returns `true` inside that process.
pub(crate) fn in_a_process_of_its_own(test: &str) -> bool {
    const MARK: &str = "A_PROCESS_OF_ITS_OWN";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test])
        .env(MARK, "1")
        .output()
        .expect("the test binary runs");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}");
    assert!(stdout.contains("1 passed"), "{stdout}");
    false
}

#[test]
fn a_relay_that_ends_leaves_no_thread() {
    if !in_a_process_of_its_own("handle::a_relay_that_ends_leaves_no_thread") {
        return;
    }
    let database = Database::new();
    let receiver = Receiver::ok();
    let start = || {
        database
            .relay()
            .concurrency(4)
            .url(&receiver.url())
            .start()
            .expect("a relay")
    };
    assert_eq!(threads("relay-"), 0);
    let relay = start();
    database.enqueue("order.paid", json!(1));
    receiver.wait_for(1);
    // At least four senders, a claimer, a settler, a heartbeat and a janitor.
    assert!(threads("relay-") >= 8, "{}", threads("relay-"));
    end(&relay);
    drop(relay);
    eventually("the threads have ended", || threads("relay-") == 0);

    drop(start());
    eventually("the threads have ended", || threads("relay-") == 0);

    // A relay that does not start leaves no thread either.
    database
        .relay()
        .outbox("missing")
        .url(&receiver.url())
        .start()
        .expect_err("no outbox");
    eventually("the threads have ended", || threads("relay-") == 0);
}

#[test]
fn a_dropped_relay_ends_as_by_a_shutdown() {
    let database = Database::new();
    database.enqueue_many(50);
    let slow = Dispatch(|_: &Message| {
        std::thread::sleep(Duration::from_millis(20));
        delivered()
    });
    let relay = database.relay().dispatcher(slow).start().expect("a relay");
    eventually("the relay has begun", || relay.stats().delivered > 0);
    drop(relay);
    assert_eq!(database.count("sending"), 0);
    assert_eq!(database.count("pending") + database.count("delivered"), 50);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

// --- Dispatchers --------------------------------------------------------------------------

/// R17.
#[test]
fn a_dispatcher_that_panics_costs_its_message_an_attempt_and_harms_no_other() {
    let database = Database::new();
    let panics = Dispatch(|message: &Message| {
        match (message.topic.as_str(), message.attempts) {
            ("always", _) => panic!("out of cheese"),
            ("once", 0) => std::panic::panic_any(7),
            _ => {}
        }
        delivered()
    });
    let relay = database
        .relay()
        .max_attempts(3)
        .dispatcher(panics)
        .start()
        .expect("a relay");
    for topic in ["always", "once", "never"] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload) SELECT '{topic}', '1' FROM generate_series(1, 20)"
        ));
    }
    eventually("all messages are settled", || {
        database.count("delivered") == 40 && database.count("dead") == 20
    });
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o}_dead WHERE topic = 'always' AND reason = 'PANIC'
               AND attempts = 3 AND last_error LIKE '%out of cheese%'"
        ),
        20
    );
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE topic = 'once' AND attempts = 2"),
        20
    );
    assert!(relay.is_healthy());
    end(&relay);
}

/// R24.
#[test]
fn an_error_is_stored_up_to_512_characters_and_without_control_characters() {
    let database = Database::new();
    let failing = Dispatch(|message: &Message| {
        let error = "ä\0\x1b".repeat(10_000);
        let failure = Failure::new(ReasonCode::Failed, error);
        if message.topic == "dead" {
            Outcome::Dead(failure)
        } else {
            Outcome::Retry(failure)
        }
    });
    for topic in ["dead", "retry"] {
        database.enqueue(topic, json!(1));
    }
    let relay = database
        .relay()
        .backoff("1h".parse().expect("a backoff"))
        .dispatcher(failing)
        .start()
        .expect("a relay");
    eventually("both messages are settled", || {
        database.count("dead") == 1 && database.count("retrying") == 1
    });
    for table in ["{o}", "{o}_dead"] {
        let error = database
            .text(&format!("SELECT last_error FROM {table}"))
            .expect("an error");
        assert_eq!(error.chars().count(), 512);
        assert!(error.starts_with('ä') && !error.contains(char::is_control));
    }
    assert_eq!(
        database.number("SELECT char_length(error) FROM {o}_ledger"),
        512
    );
    end(&relay);
}

#[test]
fn a_dispatcher_sees_the_message_as_it_was_enqueued() {
    let database = Database::new();
    let (sender, seen) = mpsc::channel();
    let sender = Mutex::new(sender);
    let dispatcher = Dispatch(move |message: &Message| {
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(message.clone()).expect("the test waits");
        delivered()
    });
    let relay = database
        .relay()
        .dispatcher(dispatcher)
        .start()
        .expect("a relay");
    let tenant = uuid::Uuid::now_v7();
    let message = NewMessage::from_json("order.paid", "{ \"n\": 1 }")
        .expect("JSON")
        .destination("billing")
        .idempotency_key("order-1")
        .ordering_key("customer-7")
        .tenant_id(tenant)
        .header("x-shop", "berlin");
    let id = message.message_id();
    let sequence = database.enqueue_message(message);
    let seen = seen
        .recv_timeout(PATIENCE)
        .expect("the message is dispatched");
    assert_eq!(seen.sequence.0, sequence);
    assert_eq!(seen.message_id, id);
    assert_eq!(seen.topic, "order.paid");
    assert_eq!(seen.destination, "billing");
    assert_eq!(seen.payload, "{ \"n\": 1 }");
    assert_eq!(seen.headers.as_deref(), Some(r#"{"x-shop":"berlin"}"#));
    assert_eq!(seen.ordering_key.as_deref(), Some("customer-7"));
    assert_eq!(seen.idempotency_key, "order-1");
    assert_eq!(seen.tenant_id, Some(tenant));
    assert_eq!(seen.attempts, 0);
    end(&relay);
}

#[test]
fn named_destinations_get_their_messages_and_unknown_ones_none() {
    let database = Database::new();
    let (billing, rest) = (Receiver::ok(), Receiver::ok());
    let to = |name: &str| {
        NewMessage::new("order.paid", &name)
            .expect("JSON")
            .destination(name)
    };
    database.enqueue_message(to("billing"));
    database.enqueue_message(to("nobody"));
    database.enqueue("order.paid", json!("rest"));
    let relay = database
        .relay()
        .max_attempts(2)
        .url(&rest.url())
        .destination(Destination::new("billing", &billing.url()).expect("a URL"))
        .start()
        .expect("a relay");
    eventually(
        "the messages with a known destination are delivered",
        || database.count("delivered") == 2 && relay.health().to_string().contains("\"nobody\""),
    );
    assert_eq!(billing.requests()[0].json(), json!("billing"));
    assert_eq!(rest.requests()[0].json(), json!("rest"));
    assert_eq!((billing.count(), rest.count()), (1, 1));
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE destination = 'nobody' AND attempts = 0"),
        1
    );
    end(&relay);
}

// --- Alongside others --------------------------------------------------------------------

#[test]
fn relays_of_several_outboxes_live_in_one_process() {
    let databases = [Database::new(), Database::new(), Database::new()];
    let receivers = [Receiver::ok(), Receiver::ok(), Receiver::ok()];
    let relays: Vec<_> = databases
        .iter()
        .zip(&receivers)
        .map(|(database, receiver)| {
            database
                .relay()
                .url(&receiver.url())
                .start()
                .expect("a relay")
        })
        .collect();
    for (n, database) in databases.iter().enumerate() {
        database.enqueue_many(10 * (n + 1));
    }
    for (n, (database, receiver)) in databases.iter().zip(&receivers).enumerate() {
        let count = 10 * (n + 1);
        eventually("its messages are delivered", || {
            usize::try_from(database.count("delivered")) == Ok(count)
        });
        assert_eq!(receiver.count(), count);
        let source = format!("diesel-outbox/{}", database.name());
        assert!(
            receiver
                .requests()
                .iter()
                .all(|request| request.header("ce-source") == Some(&source))
        );
    }
    // The end of one relay does not end the others.
    relays[0]
        .shutdown(Duration::from_secs(10))
        .expect("a clean shutdown");
    assert!(relays[1].is_healthy() && relays[2].is_healthy());
    databases[1].enqueue("order.paid", json!(1));
    eventually("the message is delivered", || {
        databases[1].count("delivered") == 21
    });
}

#[test]
fn a_relay_takes_no_connection_out_of_the_applications_pool() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let pool = Pool::builder()
        .max_size(1)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool");
    let outbox = database.outbox();
    let mut conn = pool.get().expect("a connection");
    conn.transaction(|conn| outbox.enqueue(conn, NewMessage::new("order.paid", &1).expect("JSON")))
        .expect("enqueued");
    // The only connection is in use, in a transaction, as long as the relay works.
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        let relay = database
            .relay()
            .url(&receiver.url())
            .start()
            .expect("a relay");
        outbox
            .enqueue(conn, NewMessage::new("order.paid", &2).expect("JSON"))
            .expect("enqueued");
        eventually("the first message is delivered", || {
            database.count("delivered") == 1
        });
        end(&relay);
        Ok(())
    })
    .expect("committed");
    assert_eq!(receiver.count(), 1);
    assert_eq!(
        database.count("pending"),
        1,
        "committed after the relay has ended"
    );
}
