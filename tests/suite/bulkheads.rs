//! Destinations side by side: pauses, rate limits, circuit breakers. No destination slows another.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::config::{Breaker, Class, Mode, Rate};
use diesel_outbox::{
    Destination, Dispatcher, Failure, Message, Outcome, ReasonCode, RelayBuilder, RelayHandle,
    Response,
};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::support::{Database, PATIENCE, Receiver, end, eventually, status};

fn destination(
    name: &str,
    receiver: &Receiver,
    change: impl FnOnce(&mut Destination),
) -> Destination {
    let mut destination = Destination::new(name, &receiver.url()).expect("a URL");
    change(&mut destination);
    destination
}

/// Routes each topic to the destination of the same name.
fn relay_to(database: &Database, destinations: Vec<Destination>) -> RelayBuilder {
    destinations
        .into_iter()
        .fold(database.relay(), |relay, destination| {
            let name = destination.name.clone();
            relay.destination(destination).route(&name, &name)
        })
}

fn enqueue(database: &Database, topic: &str, count: usize) {
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload) SELECT '{topic}', to_json(n) FROM generate_series(1, {count}) n"
    ));
}

fn resume(database: &Database, name: &str) -> bool {
    let outbox = database.outbox_name();
    admin::resume(
        &mut database.connect(),
        &outbox,
        Pausable::Destination,
        name,
    )
    .expect("SQL works")
}

fn paused(database: &Database) -> Option<String> {
    database.text("SELECT string_agg(kind || ' ' || name || ' ' || reason, ', ') FROM {o}_pause")
}

// --- Pauses -------------------------------------------------------------------------------

/// G6.
#[test]
fn a_destination_that_asks_to_wait_gets_nothing_until_then_and_then_all() {
    let database = Database::new();
    let is_first = AtomicBool::new(true);
    let receiver = Receiver::start(move |_, stream| {
        if is_first.swap(false, Ordering::SeqCst) {
            return stream
                .write_all(b"HTTP/1.1 429 Slow\r\nretry-after: 2\r\ncontent-length: 0\r\n\r\n");
        }
        stream.write_all(&status(200))
    });
    enqueue(&database, "order.paid", 100);
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 100
    });
    end(&relay);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 101);
    let pause = requests[1].at - requests[0].at;
    assert!(pause >= Duration::from_millis(1950), "{pause:?}");
    assert!(pause < Duration::from_millis(3500), "{pause:?}");
    let first = requests[0].id();
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts <> 1"),
        1
    );
    assert_eq!(
        database.number(&format!(
            "SELECT attempts FROM {{o}}_ledger WHERE message_id = '{first}'"
        )),
        2
    );
}

#[test]
fn a_destination_that_is_gone_is_paused_until_an_operator_resumes_it() {
    let database = Database::new();
    let is_gone = Arc::new(AtomicBool::new(true));
    let answer = Arc::clone(&is_gone);
    let receiver = Receiver::answering(move |_| {
        if answer.load(Ordering::SeqCst) {
            410
        } else {
            200
        }
    });
    let other = Receiver::ok();
    enqueue(&database, "billing", 20);
    enqueue(&database, "audit", 5);
    let relay = relay_to(
        &database,
        vec![
            destination("billing", &receiver, |_| {}),
            destination("audit", &other, |_| {}),
        ],
    )
    // Where an operator has to act, even the last attempt does not dead-letter the message.
    .max_attempts(1)
    .start()
    .expect("a relay");
    eventually("the destination is paused", || {
        paused(&database).as_deref() == Some("destination billing GONE")
    });
    eventually("the other destination delivers", || {
        database.count("delivered") == 5
    });
    assert!(
        relay.wait_until_idle(PATIENCE),
        "messages of a paused destination are not due"
    );
    assert_eq!(receiver.count(), 1, "one send was enough");
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts > 0"),
        1
    );
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL"),
        0
    );
    is_gone.store(false, Ordering::SeqCst);
    assert!(resume(&database, "billing"));
    assert!(
        !resume(&database, "billing"),
        "the destination is no longer paused"
    );
    eventually("all messages are delivered", || {
        database.count("delivered") == 25
    });
    end(&relay);
    assert_eq!(database.count("dead"), 0);
}

#[test]
fn a_destination_can_choose_that_gone_is_the_end_of_a_message() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| if request.json() == 1 { 410 } else { 404 });
    enqueue(&database, "billing", 2);
    let relay = relay_to(
        &database,
        vec![destination("billing", &receiver, |destination| {
            for status in [404, 410] {
                destination
                    .policy
                    .classes
                    .set(status, Class::Dead)
                    .expect("a 4xx");
            }
        })],
    )
    .start()
    .expect("a relay");
    eventually("both messages are dead-lettered", || {
        database.count("dead") == 2
    });
    end(&relay);
    assert_eq!(paused(&database), None);
    assert_eq!(
        database
            .text(
                "SELECT string_agg(reason || ' ' || attempts, ', ' ORDER BY sequence) FROM {o}_dead"
            )
            .as_deref(),
        Some("GONE 1, REJECTED 1")
    );
}

#[test]
fn a_pause_of_one_relay_holds_for_another_that_starts_later() {
    let database = Database::new();
    let outbox = database.outbox_name();
    let mut conn = database.connect();
    admin::pause(
        &mut conn,
        &outbox,
        Pausable::Destination,
        "default",
        "OPERATOR",
        None,
    )
    .expect("SQL works");
    let receiver = Receiver::ok();
    enqueue(&database, "order.paid", 3);
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(receiver.count(), 0);
    assert_eq!(relay.stats().claimed, 0);
    assert!(resume(&database, "default"));
    eventually("all messages are delivered", || {
        database.count("delivered") == 3
    });
    end(&relay);
    assert_eq!(
        database.number("SELECT max(attempts) FROM {o}_ledger"),
        1,
        "the pause cost no attempt"
    );
}

#[test]
fn a_paused_topic_waits_and_others_of_its_destination_do_not() {
    let database = Database::new();
    let outbox = database.outbox_name();
    let mut conn = database.connect();
    admin::pause(
        &mut conn,
        &outbox,
        Pausable::Topic,
        "order.paid",
        "OPERATOR",
        None,
    )
    .expect("SQL works");
    let receiver = Receiver::ok();
    enqueue(&database, "order.paid", 3);
    enqueue(&database, "order.sent", 2);
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the other messages are delivered", || {
        database.count("delivered") == 2
    });
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(receiver.count(), 2);
    admin::resume(&mut conn, &outbox, Pausable::Topic, "order.paid").expect("SQL works");
    eventually("all messages are delivered", || {
        database.count("delivered") == 5
    });
    end(&relay);
}

#[test]
fn a_pause_for_a_time_ends_by_itself() {
    let database = Database::new();
    let outbox = database.outbox_name();
    admin::pause(
        &mut database.connect(),
        &outbox,
        Pausable::Destination,
        "default",
        "OPERATOR",
        Some(Duration::from_secs(1)),
    )
    .expect("SQL works");
    let receiver = Receiver::ok();
    enqueue(&database, "order.paid", 1);
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    receiver.wait_for(1);
    end(&relay);
    // Compared by the clock that set the pause: this process's clock may run at another rate.
    let after =
        "SELECT count(*) FROM {o}_ledger l, {o}_pause p WHERE l.settled_at >= p.paused_until";
    assert_eq!(database.number(after), 1);
}

/// G6.
#[test]
fn a_dispatcher_that_says_wait_costs_no_attempt() {
    /// A dispatcher without a route for the first few messages.
    struct NoWayAtFirst(AtomicUsize);
    impl Dispatcher for NoWayAtFirst {
        fn dispatch(&self, _: &Message) -> Outcome {
            if self.0.fetch_add(1, Ordering::SeqCst) < 3 {
                return Outcome::Wait(Failure::new(ReasonCode::Proxy, "no way"));
            }
            Outcome::Delivered(Response::default())
        }
    }
    let database = Database::new();
    enqueue(&database, "order.paid", 1);
    let relay = database
        .relay()
        .max_attempts(1)
        .dispatcher(NoWayAtFirst(AtomicUsize::new(0)))
        .start()
        .expect("a relay");
    eventually(
        "the message waits with its reason and is not a retry",
        || {
            database.text("SELECT status || ' ' || last_error_code FROM {o}_messages")
                == Some("pending PROXY".to_owned())
                || database.count("delivered") == 1
        },
    );
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
}

// --- Circuit breakers ---------------------------------------------------------------------

fn breaker(min_sends: u32, open: Duration) -> Breaker {
    let mut breaker = Breaker::default();
    breaker.min_sends = min_sends;
    breaker.open = open;
    breaker
}

/// G6.
#[test]
fn a_breaker_parks_the_messages_of_a_failing_destination_without_costing_attempts() {
    let database = Database::new();
    let is_broken = Arc::new(AtomicBool::new(true));
    let answer = Arc::clone(&is_broken);
    let receiver = Receiver::answering(move |_| {
        if answer.load(Ordering::SeqCst) {
            500
        } else {
            200
        }
    });
    enqueue(&database, "billing", 300);
    let relay = relay_to(
        &database,
        vec![destination("billing", &receiver, |destination| {
            destination.policy.breaker = Some(breaker(10, Duration::from_millis(300)));
        })],
    )
    .start()
    .expect("a relay");
    eventually("the breaker opens", || {
        paused(&database).as_deref() == Some("destination billing BREAKER_OPEN")
    });
    eventually("the breaker opens again after a probe, for longer", || {
        database.number("SELECT coalesce(max(openings), 0) FROM {o}_pause") >= 2
    });
    let sent = receiver.count();
    assert!(
        sent <= 10 + 4 + 3,
        "{sent} messages were sent to a failing destination"
    );
    eventually("unsent messages keep all their attempts", || {
        let untouched = database.number("SELECT count(*) FROM {o} WHERE attempts = 0");
        usize::try_from(untouched) == Ok(300 - receiver.count())
    });
    is_broken.store(false, Ordering::SeqCst);
    eventually("all messages are delivered", || {
        database.count("delivered") == 300
    });
    eventually("no destination is paused", || paused(&database).is_none());
    end(&relay);
}

#[test]
fn relays_share_a_breaker_and_one_of_them_probes() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    enqueue(&database, "billing", 200);
    let relays: Vec<RelayHandle> = (0..3)
        .map(|_| {
            let settings = destination("billing", &receiver, |destination| {
                destination.policy.breaker = Some(breaker(5, Duration::from_secs(1)));
                destination.policy.concurrency = Some(1);
            });
            relay_to(&database, vec![settings])
                .start()
                .expect("a relay")
        })
        .collect();
    eventually("the breaker is open for the second time", || {
        database.number("SELECT coalesce(max(openings), 0) FROM {o}_pause") >= 2
    });
    let sent = receiver.count();
    // Each relay may count on its own until the first relay opens the breaker. From then on, all relays share one
    // probe.
    assert!(sent <= 3 * 6 + 1, "{sent}");
    for relay in &relays {
        end(relay);
    }
}

/// R50, R54: a person's transaction holds the row of the breaker, and later the row of the pause.
#[test]
fn who_locks_the_row_of_one_pause_holds_up_no_other_destination() {
    let database = Database::new();
    let (broken, good) = (Receiver::answering(|_| 500), Receiver::ok());
    let settings = |open| {
        let failing = destination("broken", &broken, |one| {
            one.policy.breaker = Some(breaker(5, open));
        });
        vec![failing, destination("good", &good, |_| {})]
    };
    let relay = relay_to(&database, settings(Duration::from_millis(200)))
        .start()
        .expect("a relay");
    let mut person = database.connect();
    let mut hold = |sql: &str| {
        let sql = sql.replace("{o}", &database.name());
        person.batch_execute(&sql).expect("held");
    };
    let flows = || {
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            let sent = good.count();
            let began = Instant::now();
            enqueue(&database, "good", 1);
            good.wait_for(sent + 1);
            let took = began.elapsed();
            assert!(took < Duration::from_secs(1), "{took:?}");
        }
    };
    hold(
        "BEGIN; INSERT INTO {o}_pause (kind, name, reason, openings, paused_until)
          VALUES ('destination', 'broken', 'HELD', 0, now())",
    );
    enqueue(&database, "broken", 20);
    broken.wait_for(5);
    flows();
    hold("ROLLBACK");
    eventually("the breaker is recorded once the row is free", || {
        paused(&database).as_deref() == Some("destination broken BREAKER_OPEN")
    });
    hold("BEGIN; SELECT FROM {o}_pause FOR UPDATE");
    let sent = broken.count();
    flows();
    assert!(
        broken.count() <= sent + 1,
        "who holds the row holds the probe"
    );
    hold("ROLLBACK");
    eventually("the probe is made once the row is free", || {
        broken.count() > sent + 1
    });
    end(&relay);
}

// --- Rate and concurrency -----------------------------------------------------------------

#[test]
fn a_destination_gets_no_more_than_its_rate() {
    let database = Database::new();
    let receiver = Receiver::ok();
    enqueue(&database, "billing", 40);
    let relay = relay_to(
        &database,
        vec![destination("billing", &receiver, |destination| {
            destination.policy.rate = Some(Rate::per_second(20.0));
        })],
    )
    .start()
    .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 40
    });
    end(&relay);
    let requests = receiver.requests();
    let took = requests[39].at - requests[0].at;
    // Two messages at once, then one every 50 ms.
    assert!(took >= Duration::from_millis(1850), "{took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_shutdown_does_not_wait_for_a_slow_rate() {
    let database = Database::new();
    let receiver = Receiver::ok();
    enqueue(&database, "billing", 5);
    let relay = relay_to(
        &database,
        vec![destination("billing", &receiver, |destination| {
            destination.policy.rate = Some(Rate::per_second(0.01));
        })],
    )
    .start()
    .expect("a relay");
    receiver.wait_for(1);
    let began = Instant::now();
    end(&relay);
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(database.count("delivered"), 1);
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NULL AND attempts = 0"),
        4,
        "released without an attempt"
    );
}

#[test]
fn a_destination_has_no_more_sends_at_once_than_its_concurrency() {
    let database = Database::new();
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (counting, highest) = (Arc::clone(&now), Arc::clone(&most));
    let receiver = Receiver::answering(move |_| {
        highest.fetch_max(
            counting.fetch_add(1, Ordering::SeqCst) + 1,
            Ordering::SeqCst,
        );
        // Long enough for sends to overlap.
        std::thread::sleep(Duration::from_millis(20));
        counting.fetch_sub(1, Ordering::SeqCst);
        200
    });
    enqueue(&database, "billing", 40);
    let relay = relay_to(
        &database,
        vec![destination("billing", &receiver, |destination| {
            destination.policy.concurrency = Some(3);
        })],
    )
    .start()
    .expect("a relay");
    eventually("all messages are delivered", || {
        database.count("delivered") == 40
    });
    end(&relay);
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

#[test]
fn a_hanging_destination_with_all_its_threads_taken_does_not_slow_the_others() {
    beside_a_hanging_one(|_| {});
}

#[test]
fn a_destination_that_hangs_with_large_requests_delays_no_other() {
    beside_a_hanging_one(|destination| {
        destination.policy.mode = Some(Mode::Batched);
        destination.request_batch.size = 1000;
        destination.request_batch.linger = Duration::from_millis(100);
    });
}

fn beside_a_hanging_one(change: impl FnOnce(&mut Destination)) {
    let database = Database::new();
    let (hanging, gate) = Receiver::held();
    let healthy = Receiver::ok();
    enqueue(&database, "hanging", 8000);
    let relay = relay_to(
        &database,
        vec![
            destination("hanging", &hanging, change),
            destination("healthy", &healthy, |_| {}),
        ],
    )
    .batch(100)
    .send_timeout(Duration::from_secs(20))
    .lease(Duration::from_secs(60))
    .start()
    .expect("a relay");
    hanging.wait_for(4);
    enqueue(&database, "healthy", 2000);
    relay.wake();
    let began = Instant::now();
    eventually("the healthy destination has all its messages", || {
        healthy.count() == 2000
    });
    // One message at a time: the latency is that of the healthy destination alone.
    for n in 1..=20 {
        let began = Instant::now();
        database.enqueue("healthy", json!(n));
        relay.wake();
        healthy.wait_for(2000 + n);
        assert!(began.elapsed() < Duration::from_secs(2), "{n}");
    }
    assert!(
        began.elapsed() < Duration::from_secs(18),
        "before the first timeout"
    );
    assert_eq!(
        hanging.count(),
        4,
        "all threads of the hanging destination are taken"
    );
    gate.open();
    end(&relay);
}

#[test]
fn a_backlog_behind_a_closed_destination_is_not_read() {
    let fresh = FreshDatabase::new();
    let database = Database::at(&fresh.url);
    let (broken, healthy) = (Receiver::answering(|_| 410), Receiver::ok());
    // The same topic: its messages are fanned out, wait for one destination and go to the other.
    for (name, count) in [("broken", 200_000), ("healthy", 2000)] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, destination, payload, available_at)
             SELECT 'order.paid', '{name}', '1', now() - interval '1 h' FROM generate_series(1, {count})"
        ));
    }
    database.execute("ANALYZE {o}");
    let relay = relay_to(
        &database,
        vec![
            destination("broken", &broken, |_| {}),
            destination("healthy", &healthy, |_| {}),
        ],
    )
    .start()
    .expect("a relay");
    eventually("the healthy destination has all its messages", || {
        database.count("delivered") == 2000
    });
    eventually("the other destination is paused", || {
        paused(&database).is_some()
    });
    assert!(relay.wait_until_idle(PATIENCE));
    // The rows read through the claim index and by scans of the table. The janitor uses the primary key.
    let read = || {
        let schema = database.schema();
        database.disconnect();
        fresh.statistic(&format!(
            "SELECT (SELECT idx_tup_read FROM pg_stat_user_indexes
                      WHERE schemaname = '{schema}' AND indexrelname = 'outbox_claim')
                  + (SELECT seq_tup_read FROM pg_stat_user_tables
                      WHERE schemaname = '{schema}' AND relname = 'outbox')"
        ))
    };
    end(&relay);
    let (outbox, before) = (database.name(), read());
    let relay = relay_to(
        &database,
        vec![
            destination("broken", &broken, |_| {}),
            destination("healthy", &healthy, |_| {}),
        ],
    )
    .start()
    .expect("a relay");
    database.execute(&format!(
        "INSERT INTO {outbox} (topic, destination, payload)
         SELECT 'order.paid', 'healthy', '1' FROM generate_series(1, 100)"
    ));
    healthy.wait_for(2100);
    assert!(relay.wait_until_idle(PATIENCE));
    end(&relay);
    // The depth gauges read a sample of the backlog, about 16,000 rows, more than once on a slow machine. A single
    // query for the messages of the closed destination would read all of them.
    let rows = read() - before;
    assert!(
        rows < 150_000,
        "{rows} rows were read for 100 messages next to 200,000"
    );
}

#[test]
fn a_destination_has_attempts_and_delays_of_its_own() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    enqueue(&database, "patient", 1);
    enqueue(&database, "hasty", 1);
    let relay = relay_to(
        &database,
        vec![
            destination("patient", &receiver, |destination| {
                destination.policy.max_attempts = Some(4);
                destination.policy.backoff = Some("10ms".parse().expect("a table"));
            }),
            destination("hasty", &receiver, |destination| {
                destination.policy.max_attempts = Some(1);
            }),
        ],
    )
    .start()
    .expect("a relay");
    eventually("both messages are dead-lettered", || {
        database.count("dead") == 2
    });
    end(&relay);
    assert_eq!(
        database
            .text("SELECT string_agg(topic || ' ' || attempts, ', ' ORDER BY topic) FROM {o}_dead")
            .as_deref(),
        Some("hasty 1, patient 4")
    );
}
