//! PostgreSQL goes away under load, in every way, and comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::{EnqueueError, NewMessage, Outbox};
use serde_json::json;

use crate::ground::{
    Server, all_are_delivered, all_have_arrived, alone, attempts, duplicates, enqueue, let_pass,
    lines_with, relay,
};
use crate::support::{Database, Receiver, Running, eventually, status};

/// Threads that place orders, each with its message in one transaction, during outages too. Each thread retries an
/// order until it knows that the transaction has committed.
struct Producers {
    stopping: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<usize>>,
}

impl Producers {
    fn start(database: &Database, count: usize) -> Self {
        database.execute(&format!(
            "CREATE TABLE {}.orders (key text PRIMARY KEY)",
            database.schema()
        ));
        let stopping = Arc::new(AtomicBool::new(false));
        let threads = (0..count)
            .map(|producer| {
                let (url, outbox) = (database.url.clone(), database.outbox());
                let orders = format!("{}.orders", database.schema());
                let stopping = Arc::clone(&stopping);
                std::thread::spawn(move || {
                    let mut conn = None;
                    let mut placed = 0;
                    while !stopping.load(Ordering::Acquire) {
                        let key = format!("{producer}-{placed}");
                        while place(&mut conn, &url, &outbox, &orders, &key).is_err() {
                            conn = None;
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        placed += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    placed
                })
            })
            .collect();
        Self { stopping, threads }
    }

    /// Stops the threads and returns the number of orders placed.
    fn stop(self) -> usize {
        self.stopping.store(true, Ordering::Release);
        self.threads
            .into_iter()
            .map(|thread| thread.join().expect("a producer"))
            .sum()
    }
}

/// Places an order. If the connection broke during the commit, the existing order shows that the commit succeeded.
fn place(
    conn: &mut Option<PgConnection>,
    url: &str,
    outbox: &Outbox,
    orders: &str,
    key: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let conn = match conn {
        Some(conn) => conn,
        none => none.insert(PgConnection::establish(url)?),
    };
    conn.transaction(|conn| {
        let placed = sql_query(format!(
            "INSERT INTO {orders} VALUES ('{key}') ON CONFLICT DO NOTHING"
        ))
        .execute(conn)?;
        if placed == 1 {
            let message = NewMessage::new("order.placed", &json!({ "key": key }))
                .expect("JSON")
                .idempotency_key(key);
            outbox.enqueue(conn, message)?;
        }
        Ok::<(), EnqueueError>(())
    })?;
    Ok(())
}

/// Fails unless every order has its message in the ledger as delivered, and the ledger has no other message.
#[track_caller]
fn ledger_equals_orders(database: &Database, placed: usize) {
    let placed = i64::try_from(placed).expect("a small number");
    let orders = format!("{}.orders", database.schema());
    assert_eq!(
        database.number(&format!("SELECT count(*) FROM {orders}")),
        placed
    );
    assert_eq!(database.count("delivered"), placed);
    assert_eq!(
        database.number(&format!(
            "SELECT count(*) FROM {orders} o JOIN {{o}}_ledger l ON l.idempotency_key = o.key"
        )),
        placed
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_dead"), 0);
}

/// Runs a relay and producers through outages. The lease is longer than every outage, so there is no reason for a
/// duplicate or a second attempt.
fn survives(outages: usize, mut outage: impl FnMut(&Database, &Server, usize)) {
    let _alone = alone();
    let database = Database::new();
    let server = Server::new();
    let receiver = Receiver::ok();
    let mut relay = Running::start(relay(
        &database,
        &receiver,
        &[
            ("OUTBOX_CONCURRENCY", "4"),
            ("OUTBOX_BATCH", "50"),
            ("OUTBOX_LEASE", "60s"),
        ],
    ));
    let producers = Producers::start(&database, 4);
    for number in 0..outages {
        // Messages flow before and after each outage, so the relay has recovered on its own each time.
        let before = receiver.count();
        eventually("messages flow", || receiver.count() >= before + 200);
        outage(&database, &server, number);
    }
    let before = receiver.count();
    eventually("messages flow again", || receiver.count() >= before + 200);
    let placed = producers.stop();
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    eventually("the relay knows that the database is back", || {
        lines_with(&relay, "event=db_recovered") == lines_with(&relay, "event=db_error")
    });

    let log = relay.log();
    let errors = lines_with(&relay, "event=db_error");
    assert!((1..=outages).contains(&errors), "{errors} lines: {log}");
    let complaints = log
        .lines()
        .filter(|line| line.contains(" WARN ") || line.contains(" ERROR "))
        .count();
    assert!(
        complaints <= 2 * outages,
        "{complaints} warnings and errors: {log}"
    );
    assert_eq!(lines_with(&relay, "lease_lost"), 0, "{log}");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());

    ledger_equals_orders(&database, placed);
    all_have_arrived(&database, &[&receiver]);
    assert_eq!(duplicates(&[&receiver]), 0);
    assert!(attempts(&database).values().all(|made| *made == 1));
    // If the server may still have been running a claim, the relay ended its own lease and took another.
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_lease WHERE NOT ended"),
        0
    );
}

/// R23.
#[test]
fn restarts_of_the_server_lose_nothing_and_double_nothing() {
    survives(4, |_, server, number| {
        server.restart(if number % 2 == 0 { "fast" } else { "immediate" });
    });
}

#[test]
fn terminated_connections_lose_nothing_and_double_nothing() {
    survives(20, |database, _, _| {
        let terminated = database.number(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
              WHERE application_name LIKE 'diesel-outbox%'",
        );
        assert!(terminated > 0);
    });
}

#[test]
fn connections_that_are_terminated_without_pause_make_no_flood_of_lines() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut relay = Running::start(relay(
        &database,
        &receiver,
        &[("OUTBOX_BATCH", "200"), ("OUTBOX_LEASE", "60s")],
    ));
    relay.wait_for_log("event=relay_started");
    enqueue(&database, 1, 4000);
    let mut conn = database.connect();
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        conn.batch_execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
              WHERE application_name LIKE 'diesel-outbox%'",
        )
        .expect("terminated");
        std::thread::sleep(Duration::from_millis(fastrand::u64(..20)));
    }
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    let log = relay.log();
    let complaints = log
        .lines()
        .filter(|line| line.contains(" WARN ") || line.contains(" ERROR "))
        .count();
    assert!(complaints <= 10, "{complaints} warnings and errors: {log}");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    all_are_delivered(&database, 4000);
    all_have_arrived(&database, &[&receiver]);
    assert_eq!(duplicates(&[&receiver]), 0);
}

#[test]
fn nothing_is_sent_after_the_lease_while_the_database_is_gone_and_all_is_sent_later() {
    const LEASE: Duration = Duration::from_secs(2);
    const SEND_TIMEOUT: Duration = Duration::from_millis(500);

    let _alone = alone();
    let database = Database::new();
    let server = Server::new();
    // At first sends are so slow that the queue outlasts the lease.
    let is_slow = Arc::new(AtomicBool::new(true));
    let slow = Arc::clone(&is_slow);
    let receiver = Receiver::start(move |_, stream| {
        if slow.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(300));
        }
        std::io::Write::write_all(stream, &status(200))
    });
    enqueue(&database, 1, 600);
    let mut relay = Running::start(relay(
        &database,
        &receiver,
        &[
            ("OUTBOX_CONCURRENCY", "2"),
            ("OUTBOX_BATCH", "200"),
            ("OUTBOX_LEASE", "2s"),
            ("OUTBOX_SEND_TIMEOUT", "500ms"),
        ],
    ));
    eventually("the queue is full", || {
        database.count("sending") >= 40 && receiver.count() >= 4
    });
    server.stop("fast");
    let gone = Instant::now();
    let_pass(2 * LEASE);
    let back = Instant::now();
    assert!(
        receiver.count() < 40,
        "the queue emptied before the lease expired"
    );
    is_slow.store(false, Ordering::Release);
    server.start();

    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    // The last renewal may have succeeded just before the outage. Sends that begin must end before the lease expires.
    let last = gone + LEASE - SEND_TIMEOUT + Duration::from_millis(100);
    let late = receiver
        .requests()
        .iter()
        .filter(|request| request.at > last && request.at < back)
        .count();
    assert_eq!(late, 0, "sent without a lease");
    relay.wait_for_log("event=db_recovered");
    let log = relay.log();
    assert_eq!(lines_with(&relay, "event=lease_lost"), 1, "{log}");
    assert_eq!(lines_with(&relay, "event=lease_registered"), 1, "{log}");
    assert_eq!(lines_with(&relay, "event=db_error"), 1, "{log}");
    assert_eq!(lines_with(&relay, "event=db_recovered"), 1, "{log}");
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    all_are_delivered(&database, 600);
    all_have_arrived(&database, &[&receiver]);
    assert!(attempts(&database).values().all(|made| *made <= 2));
}
