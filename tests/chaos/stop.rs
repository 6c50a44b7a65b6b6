//! SIGSTOP: relays that are stopped past the end of their lease and then continue.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::unbounded;

use crate::ground::{
    all_are_delivered, all_have_arrived, alone, duplicates, enqueue, leases_of, let_pass,
    lines_with, relay,
};
use crate::support::{Database, Gate, Receiver, Running, eventually, status};

const LEASE: Duration = Duration::from_secs(3);
const SETTINGS: &[(&str, &str)] = &[
    ("OUTBOX_CONCURRENCY", "4"),
    ("OUTBOX_BATCH", "100"),
    ("OUTBOX_LEASE", "3s"),
    ("OUTBOX_SEND_TIMEOUT", "1s"),
];

/// Everything that a settle writes, as one text.
fn ledger(database: &Database) -> String {
    database
        .text("SELECT string_agg(l::text, E'\\n' ORDER BY sequence) FROM {o}_ledger l")
        .unwrap_or_default()
}

#[test]
fn a_relay_that_wakes_after_its_lease_changes_nothing_that_another_has_settled() {
    let _alone = alone();
    let database = Database::new();
    let (first, gate) = Receiver::held();
    let second = Receiver::ok();
    enqueue(&database, 1, 30);
    let mut sleeper = Running::start(relay(&database, &first, SETTINGS));
    first.wait_for(4);
    sleeper.stop();
    assert_eq!(
        database.count("sending"),
        30,
        "the first claim takes all messages"
    );
    // The responses arrive while the relay is stopped: it will have four deliveries to settle.
    gate.open();

    let mut other = Running::start(relay(&database, &second, SETTINGS));
    eventually("the other relay has settled all messages", || {
        database.count("delivered") == 30
    });
    assert_eq!(first.count(), 4, "the sleeper was stopped in time");
    let before = ledger(&database);
    other.signal("TERM");
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());

    sleeper.signal("CONT");
    sleeper.wait_for_log("event=lease_lost");
    eventually("every settle of the stopped relay is refused", || {
        lines_with(&sleeper, "event=conflict") == 30
    });
    sleeper.wait_for_log("event=lease_registered");
    assert_eq!(ledger(&database), before);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts = 2"),
        30
    );
    assert_eq!(first.count(), 4, "nothing queued was sent after the lease");
    assert_eq!(second.count(), 30);

    enqueue(&database, 31, 50);
    eventually("the relay works again under a new lease", || {
        database.count("delivered") == 50
    });
    assert_eq!(first.count(), 4 + 20);
    sleeper.signal("TERM");
    assert_eq!(sleeper.wait().code(), Some(0), "{}", sleeper.log());
    all_are_delivered(&database, 50);
    all_have_arrived(&database, &[&first, &second]);
}

/// A relay is stopped while it sends the first of `messages`, and continues when another relay is sending all of
/// them. `expire` ends the lease of the stopped relay.
fn leaves_to_the_other(messages: usize, settings: &[(&str, &str)], expire: impl Fn(&Database)) {
    let _alone = alone();
    let database = Database::new();
    let (first, first_gate) = Receiver::held();
    let (second, second_gate) = Receiver::held();
    let count = i64::try_from(messages).expect("a small number");
    enqueue(&database, 1, messages);
    let mut command = relay(&database, &first, settings);
    command.env("OUTBOX_CONCURRENCY", "1");
    let sleeper = Running::start(command);
    first.wait_for(1);
    sleeper.stop();
    assert_eq!(
        database.count("sending"),
        count,
        "the first claim takes all messages"
    );
    first_gate.open();
    expire(&database);
    let other = Running::start(relay(
        &database,
        &second,
        &[("OUTBOX_LEASE", "60s"), ("OUTBOX_SEND_TIMEOUT", "20s")],
    ));
    second.wait_for(messages);

    sleeper.signal("CONT");
    eventually("every settle of the stopped relay is refused", || {
        lines_with(&sleeper, "event=conflict") == messages
    });
    let leases = leases_of(&database, other.pid());
    let its_own = format!("SELECT count(*) FROM {{o}} WHERE locked_by = ANY({leases})");
    assert_eq!(database.number(&its_own), count);
    assert_eq!(database.count("delivered"), 0);

    second_gate.open();
    eventually("the other relay settles all messages", || {
        database.count("delivered") == count
    });
    all_are_delivered(&database, messages);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts = 2"),
        count
    );
    assert_eq!((first.count(), second.count()), (1, messages));
    assert_eq!(lines_with(&other, "event=conflict"), 0, "{}", other.log());
}

#[test]
fn failed_and_unsent_messages_of_an_ended_lease_stay_with_the_relay_that_has_them() {
    // The response to the send in flight arrived while the relay was stopped; the other messages are unsent.
    leaves_to_the_other(4, SETTINGS, |_| let_pass(LEASE));
}

#[test]
fn a_delivery_of_an_ended_lease_stays_with_the_relay_that_has_it() {
    // When the relay continues, the send in flight is still within its timeout and has its response.
    let settings = [("OUTBOX_LEASE", "60s"), ("OUTBOX_SEND_TIMEOUT", "20s")];
    leaves_to_the_other(1, &settings, |database| {
        database.execute("UPDATE {o}_lease SET expires_at = clock_timestamp()");
    });
}

/// R14.
#[test]
fn messages_queued_before_a_sleep_are_sent_under_the_new_lease_only() {
    let _alone = alone();
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let (arrival, arrivals) = unbounded();
    let receiver = Receiver::start(move |_, stream| {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("after 1970");
        arrival.send(now).expect("the test listens");
        pass();
        std::io::Write::write_all(stream, &status(200))
    });
    enqueue(&database, 1, 30);
    let mut sleeper = Running::start(relay(&database, &receiver, SETTINGS));
    receiver.wait_for(4);
    sleeper.stop();
    assert_eq!(
        database.count("sending"),
        30,
        "the first claim takes all messages"
    );
    let old = database.number("SELECT id FROM {o}_lease");
    drop(gate);
    let_pass(LEASE + Duration::from_millis(200));
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_lease WHERE expires_at > clock_timestamp()"),
        0
    );
    assert_eq!(receiver.count(), 4, "the sleeper was stopped in time");

    sleeper.signal("CONT");
    eventually("all messages are settled", || {
        database.count("delivered") == 30
    });
    sleeper.wait_for_log("event=lease_lost");
    let new_lease_micros = database.number(&format!(
        "SELECT min(extract(epoch FROM started_at) * 1000000) FROM {{o}}_lease WHERE id <> {old}"
    ));
    let late: Vec<i64> = arrivals
        .try_iter()
        .skip(4)
        .map(|at| i64::try_from(at.as_micros()).expect("this millennium"))
        .collect();
    assert!(late.len() >= 26, "{} arrived after the sleep", late.len());
    for at in late {
        assert!(
            at >= new_lease_micros,
            "sent {} µs before the new lease began",
            new_lease_micros - at
        );
    }
    all_are_delivered(&database, 30);
    all_have_arrived(&database, &[&receiver]);
    // Only the four messages whose responses came while the relay was stopped may be sent again.
    assert!(duplicates(&[&receiver]) <= 4);
    assert!(database.number("SELECT max(attempts) FROM {o}_ledger") <= 2);
    sleeper.signal("TERM");
    assert_eq!(sleeper.wait().code(), Some(0), "{}", sleeper.log());
}

/// R9, R13: each insert notifies while a session holds the lock of a sleeping relay.
#[test]
fn a_relay_that_is_stopped_asleep_keeps_its_lock_no_longer_than_its_lease() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let settings = [("OUTBOX_LEASE", "3s"), ("OUTBOX_POLL_INTERVAL", "600s")];
    let mut sleeper = Running::start(relay(&database, &receiver, &settings));
    eventually("the relay sleeps", || database.is_relay_asleep());
    sleeper.stop();
    let mut other = relay(&database, &receiver, SETTINGS);
    other.env("OUTBOX_LISTENER", "false");
    let mut other = Running::start(other);
    let began = Instant::now();
    eventually("the lock is free", || !database.is_relay_asleep());
    let took = began.elapsed();
    assert!(took < Duration::from_secs(15), "{took:?}: {}", other.log());
    assert_eq!(lines_with(&other, "event=sleep_lock_kept"), 0);

    sleeper.signal("CONT");
    sleeper.wait_for_log("event=lease_registered");
    other.signal("TERM");
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());
    eventually("the relay sleeps again", || database.is_relay_asleep());
    enqueue(&database, 1, 1);
    receiver.wait_for(1);
    sleeper.signal("TERM");
    assert_eq!(sleeper.wait().code(), Some(0), "{}", sleeper.log());
}

/// R62, G2: a relay that sleeps quietly beside one that works finds messages without it, and then sleeps with the lock:
/// the session that says that the other works ends with the lease of the other.
#[test]
fn a_relay_that_is_stopped_at_work_keeps_no_other_quiet_for_longer_than_its_lease() {
    let _alone = alone();
    let database = Database::new();
    let awake = "SELECT count(*) FROM pg_locks
        WHERE locktype = 'advisory' AND classid = '{o}'::regclass::oid AND objid <> 1 AND objsubid = 2
          AND mode = 'ShareLock' AND granted";
    let slow = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(2));
        200
    });
    let settings = [
        ("OUTBOX_CONCURRENCY", "1"),
        ("OUTBOX_LEASE", "20s"),
        ("OUTBOX_POLL_INTERVAL", "600s"),
    ];
    enqueue(&database, 1, 2_000);
    let sleeper = Running::start(relay(&database, &slow, &settings));
    eventually("the relay says that it works", || {
        database.number(awake) == 1
    });
    sleeper.stop();
    let _other = Running::start(relay(&database, &slow, &settings));
    eventually("the other relay has delivered what is free", || {
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NULL") == 0
            && database.number(awake) == 1
    });
    assert!(!database.is_relay_asleep(), "inserts notify");
    enqueue(&database, 2_001, 2_001);
    let began = Instant::now();
    eventually(
        "a message is delivered, of which nobody was notified",
        || {
            let delivered = "SELECT count(*) FROM {o}_ledger WHERE idempotency_key = 'key-2001'";
            database.number(delivered) == 1
        },
    );
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    eventually(
        "the other relay takes over, and sleeps with the lock",
        || database.number("SELECT count(*) FROM {o}") == 0 && database.is_relay_asleep(),
    );
    assert_eq!(database.number(awake), 0);
}

/// R15, G6: responses that arrived while the process was stopped count.
#[test]
fn answers_that_came_while_a_relay_was_stopped_count_however_long_it_was() {
    let _alone = alone();
    let database = Database::new();
    let (receiver, gate) = Receiver::held();
    enqueue(&database, 1, 16);
    let settings = [
        ("OUTBOX_CONCURRENCY", "16"),
        ("OUTBOX_LEASE", "60s"),
        ("OUTBOX_SEND_TIMEOUT", "2s"),
    ];
    let mut sleeper = Running::start(relay(&database, &receiver, &settings));
    receiver.wait_for(16);
    sleeper.stop();
    gate.open();
    let_pass(Duration::from_secs(3));
    sleeper.signal("CONT");
    eventually("all messages are settled", || {
        database.count("delivered") == 16
    });
    assert_eq!(receiver.count(), 16, "{}", sleeper.log());
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE attempts = 1"),
        16
    );
    sleeper.signal("TERM");
    assert_eq!(sleeper.wait().code(), Some(0), "{}", sleeper.log());
}
