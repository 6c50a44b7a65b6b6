//! SIGTERM and SIGINT: what a relay leaves behind.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;

use crate::ground::{
    Server, all_are_delivered, all_have_arrived, alone, duplicates, enqueue, relay,
};
use crate::support::{Database, Receiver, Running, eventually, status};

/// A receiver that delays its responses.
fn slow(answer_after: Duration) -> Receiver {
    Receiver::start(move |_, stream| {
        std::thread::sleep(answer_after);
        std::io::Write::write_all(stream, &status(200))
    })
}

/// Sends a signal to a relay with slow sends in flight, and lets another relay deliver the rest.
fn ends_cleanly_by(signal: &str, messages: usize, answer_after: Duration) {
    let _alone = alone();
    let database = Database::new();
    let receiver = slow(answer_after);
    enqueue(&database, 1, messages);
    let settings = [
        ("OUTBOX_CONCURRENCY", "16"),
        ("OUTBOX_LEASE", "600s"),
        ("OUTBOX_SEND_TIMEOUT", "10s"),
    ];
    let mut first = Running::start(relay(&database, &receiver, &settings));
    receiver.wait_for(16);
    eventually("more are claimed than are sent", || {
        database.count("sending") > 16
    });
    first.signal(signal);
    let signalled = Instant::now();
    assert_eq!(first.wait().code(), Some(0), "{}", first.log());
    assert!(
        signalled.elapsed() < Duration::from_secs(30),
        "{:?}",
        signalled.elapsed()
    );

    let sent = receiver.count();
    assert!(
        (16..messages / 2).contains(&sent),
        "{sent} of {messages} were sent"
    );
    let sent = i64::try_from(sent).expect("a small number");
    let unsent = i64::try_from(messages).expect("a small number") - sent;
    assert_eq!(database.count("delivered"), sent);
    assert_eq!(database.count("pending"), unsent);
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o} WHERE attempts = 0 AND locked_by IS NULL AND locked_at IS NULL AND last_error IS NULL"
        ),
        unsent
    );
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
    assert_eq!(
        duplicates(&[&receiver]),
        0,
        "messages in flight were sent once"
    );

    // The second relay does not wait for a lease to expire: that would take ten minutes.
    let quick = Receiver::ok();
    let mut second = Running::start(relay(&database, &quick, &settings));
    eventually("a second relay delivers the rest", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    second.signal(signal);
    assert_eq!(second.wait().code(), Some(0), "{}", second.log());
    all_are_delivered(&database, messages);
    all_have_arrived(&database, &[&receiver, &quick]);
    assert_eq!(duplicates(&[&receiver, &quick]), 0);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

/// R28, G6.
#[test]
fn sigterm_lets_slow_sends_finish_and_releases_the_rest_at_no_cost() {
    ends_cleanly_by("TERM", 2000, Duration::from_secs(1));
}

/// R28.
#[test]
fn sigint_is_like_sigterm() {
    ends_cleanly_by("INT", 400, Duration::from_millis(300));
}

#[test]
fn sends_that_outlast_the_shutdown_are_said_and_are_not_lost() {
    let _alone = alone();
    let database = Database::new();
    let (hanging, gate) = Receiver::held();
    enqueue(&database, 1, 60);
    let mut first = Running::start(relay(
        &database,
        &hanging,
        &[
            ("OUTBOX_CONCURRENCY", "16"),
            ("OUTBOX_LEASE", "20s"),
            ("OUTBOX_SEND_TIMEOUT", "9s"),
            ("OUTBOX_SHUTDOWN_TIMEOUT", "1s"),
        ],
    ));
    hanging.wait_for(16);
    eventually("all messages are claimed", || {
        database.count("sending") == 60
    });
    first.signal("TERM");
    let signalled = Instant::now();
    assert_eq!(first.wait().code(), Some(1), "{}", first.log());
    let took = signalled.elapsed();
    assert!(
        (Duration::from_millis(700)..Duration::from_secs(6)).contains(&took),
        "{took:?}"
    );
    eventually("the log is read to its end", || {
        first.log().contains("16 messages were not settled")
    });

    // Unsent messages are free at once. Messages that may have arrived wait until the lease expires.
    assert_eq!(database.count("pending"), 44);
    assert_eq!(database.count("sending"), 16);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 1);
    gate.open();
    database.execute("UPDATE {o}_lease SET expires_at = clock_timestamp()");
    let quick = Receiver::ok();
    let mut second = Running::start(relay(&database, &quick, &[]));
    eventually("a second relay takes over the messages", || {
        database.count("delivered") == 60
    });
    second.signal("TERM");
    assert_eq!(second.wait().code(), Some(0), "{}", second.log());
    all_are_delivered(&database, 60);
    all_have_arrived(&database, &[&quick]);
    assert_eq!((hanging.count(), quick.count()), (16, 60));
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts = 2"),
        16
    );
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts = 1"),
        44
    );
}

#[test]
fn a_second_signal_ends_the_relay_at_once() {
    let _alone = alone();
    let database = Database::new();
    let (hanging, _gate) = Receiver::held();
    enqueue(&database, 1, 60);
    let mut relay = Running::start(relay(
        &database,
        &hanging,
        &[
            ("OUTBOX_CONCURRENCY", "4"),
            ("OUTBOX_LEASE", "120s"),
            ("OUTBOX_SEND_TIMEOUT", "50s"),
            ("OUTBOX_SHUTDOWN_TIMEOUT", "50s"),
        ],
    ));
    hanging.wait_for(4);
    eventually("all messages are claimed", || {
        database.count("sending") == 60
    });
    relay.signal("TERM");
    relay.wait_for_log("event=signal");
    // The relay is in the middle of its shutdown: unsent messages are released, sends continue.
    eventually("unsent messages are released", || {
        database.count("pending") == 56
    });
    assert!(relay.is_running());
    relay.signal("INT");
    let signalled = Instant::now();
    assert_eq!(relay.wait().code(), Some(1), "{}", relay.log());
    assert!(
        signalled.elapsed() < Duration::from_secs(10),
        "{:?}",
        signalled.elapsed()
    );
    relay.wait_for_log("event=exit_now");
    assert_eq!(database.count("sending"), 4);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 1);
}

#[test]
fn sigterm_without_a_database_ends_within_the_timeout_and_says_what_is_left() {
    let _alone = alone();
    let database = Database::new();
    let server = Server::new();
    let (held, gate) = Receiver::held();
    enqueue(&database, 1, 50);
    let mut first = Running::start(relay(
        &database,
        &held,
        &[
            ("OUTBOX_CONCURRENCY", "4"),
            ("OUTBOX_LEASE", "60s"),
            ("OUTBOX_SEND_TIMEOUT", "20s"),
            ("OUTBOX_SHUTDOWN_TIMEOUT", "2s"),
        ],
    ));
    held.wait_for(4);
    eventually("all messages are claimed", || {
        database.count("sending") == 50
    });
    server.stop("fast");
    gate.open();
    first.signal("TERM");
    let signalled = Instant::now();
    assert_eq!(first.wait().code(), Some(1), "{}", first.log());
    let took = signalled.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    eventually("the log is read to its end", || {
        first.log().contains("50 messages were not settled")
    });

    server.start();
    assert_eq!(database.count("sending"), 50);
    database.execute("UPDATE {o}_lease SET expires_at = clock_timestamp()");
    let quick = Receiver::ok();
    let _second = Running::start(relay(&database, &quick, &[]));
    eventually("a second relay takes over all messages", || {
        database.count("delivered") == 50
    });
    all_are_delivered(&database, 50);
    all_have_arrived(&database, &[&quick]);
}

#[test]
fn sigterm_of_an_idle_relay_without_a_database_is_quick() {
    let _alone = alone();
    let database = Database::new();
    let server = Server::new();
    let receiver = Receiver::ok();
    enqueue(&database, 1, 1);
    let mut relay = Running::start(relay(
        &database,
        &receiver,
        &[("OUTBOX_SHUTDOWN_TIMEOUT", "20s")],
    ));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    server.stop("immediate");
    relay.wait_for_log("event=db_error");
    relay.signal("TERM");
    let signalled = Instant::now();
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    assert!(
        signalled.elapsed() < Duration::from_secs(10),
        "{:?}",
        signalled.elapsed()
    );
    eventually("the log says that the lease is left", || {
        relay.log().contains("event=lease_left")
    });
}

#[test]
fn a_claim_that_outlasts_the_shutdown_does_not_outlast_its_lease() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    // A claim that has begun waits in the server until the test releases the lock.
    database
        .connect()
        .batch_execute(&format!(
            "CREATE FUNCTION {schema}.wait() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_advisory_xact_lock(77); RETURN new; END $$;
             CREATE TRIGGER wait BEFORE UPDATE ON {name} FOR EACH ROW
                 WHEN (new.locked_by IS NOT NULL) EXECUTE FUNCTION {schema}.wait()",
            schema = database.schema(),
            name = database.name(),
        ))
        .expect("a trigger");
    let settings = [
        ("OUTBOX_LEASE", "3s"),
        ("OUTBOX_SEND_TIMEOUT", "1s"),
        ("OUTBOX_SHUTDOWN_TIMEOUT", "1s"),
    ];
    // The other relay's janitor has already checked for abandoned leases and will not check again soon. The relay is
    // stopped until the first relay has ended.
    let other = Running::start(relay(&database, &receiver, &[("OUTBOX_LEASE", "60s")]));
    eventually("the other relay has polled", || {
        database.number(
            "SELECT count(*) FROM pg_stat_activity
              WHERE application_name IN ('diesel-outbox janitor', 'diesel-outbox claimer')
                AND state = 'idle'",
        ) == 2
    });
    other.stop();
    let mut holder = database.connect();
    holder
        .batch_execute("SELECT pg_advisory_lock(77)")
        .expect("a lock");
    let mut first = Running::start(relay(&database, &receiver, &settings));
    first.wait_for_log("event=relay_started");
    enqueue(&database, 1, 1);
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = 'advisory'";
    eventually("a claim waits", || database.number(waiting) > 0);
    first.signal("TERM");
    assert_eq!(first.wait().code(), Some(1), "{}", first.log());
    holder
        .batch_execute("SELECT pg_advisory_unlock(77)")
        .expect("unlocked");
    other.signal("CONT");
    eventually("the message is taken over after the lease expires", || {
        database.count("delivered") == 1
    });
    all_are_delivered(&database, 1);
}
