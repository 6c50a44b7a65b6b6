//! Several relays for one outbox, and several outboxes in one process.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use diesel_outbox::config::Config;
use diesel_outbox::{Relay, RelayHandle};
use serde_json::json;

use crate::support::{Database, Receiver, Running, eventually, finish};

fn single(database: &Database, receiver: &Receiver, listens: bool) -> RelayHandle {
    let mut config = Config::default();
    config.listener = listens;
    for (variable, value) in [
        ("DATABASE_URL", database.url.as_str()),
        ("OUTBOX_TABLE", &database.name()),
        ("OUTBOX_SINGLE_ACTIVE", "true"),
        ("OUTBOX_URL", &receiver.url()),
        // A relay that stands by must not wait for its poll.
        ("OUTBOX_POLL_INTERVAL", "600s"),
        ("OUTBOX_SEND_TIMEOUT", "500ms"),
        ("OUTBOX_LEASE", "3s"),
    ] {
        config.set(variable, value).expect("a good setting");
    }
    Relay::from_config(config)
        .start()
        .expect("the relay starts")
}

/// R10: one relay is active, the rest stand by; the next relay takes over when the active one ends.
#[test]
fn one_of_several_single_active_relays_works() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut relays: Vec<RelayHandle> = (0..3).map(|_| single(&database, &receiver, true)).collect();
    let mut count = 0;
    while !relays.is_empty() {
        database.enqueue_many(50);
        count += 50;
        receiver.wait_for(count);
        eventually("all messages are settled", || {
            database.count("delivered") == i64::try_from(count).expect("few")
        });
        let delivered =
            || -> Vec<u64> { relays.iter().map(|relay| relay.stats().delivered).collect() };
        // A relay counts a settle a moment after it commits.
        eventually("the first relay has delivered all messages", || {
            delivered()[0] == 50
        });
        let delivered = delivered();
        assert!(delivered[1..].iter().all(|n| *n == 0), "{delivered:?}");
        let status = finish(database.binary(&["status", "--json"]))
            .code(0)
            .json();
        let stand_by: Vec<bool> = status["relays"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|relay| relay["stands_by"].as_bool().expect("a bool"))
            .collect();
        let expected: Vec<bool> = (0..relays.len()).map(|n| n > 0).collect();
        assert_eq!(stand_by, expected);
        relays.remove(0);
    }
}

/// R10: a relay that stands by sees that it is its turn, also without notifications.
#[test]
fn a_relay_that_hears_nothing_takes_its_turn() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let [first, second] = [(); 2].map(|()| single(&database, &receiver, false));
    eventually("the second relay stands by", || second.stands_by());
    first
        .shutdown(Duration::from_secs(10))
        .expect("the relay ends");
    eventually("it is the turn of the second", || !second.stands_by());
}

/// R10, R12: the active relay is killed. Another relay takes over its messages within a lease, and no message is
/// lost.
#[test]
fn another_single_active_relay_takes_over_within_a_lease() {
    let database = Database::new();
    let answered = AtomicUsize::new(0);
    let receiver = Receiver::answering(move |_| {
        answered.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(3));
        200
    });
    let run = || {
        let mut command = database.binary(&["run", "--url", &receiver.url()]);
        command.env("OUTBOX_SINGLE_ACTIVE", "true");
        command.env("RUST_LOG", "info");
        Running::start(command)
    };
    let first = run();
    first.wait_for_log("relay started");
    let second = run();
    second.wait_for_log("standing by");
    database.enqueue_many(2000);
    receiver.wait_for(50);
    first.kill();
    let killed = Instant::now();
    second.wait_for_log("this relay is active now");
    let waited = killed.elapsed();
    // The relay's lease of 3 s, and a poll.
    assert!(waited < Duration::from_secs(8), "{waited:?}");
    eventually("all messages are delivered", || {
        database.count("delivered") == 2000
    });
    drop(second);
    assert_eq!(receiver.ids().len(), 2000);
}

/// R10, R12: a relay that shuts down releases messages that another relay sends at once, and not at its next poll.
#[test]
fn messages_of_a_relay_that_is_shut_down_do_not_wait_for_a_poll() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(100));
        200
    });
    let sleeping = database.sleeper(database.relay().url(&receiver.url()));
    database.execute("ALTER TABLE {o} DISABLE TRIGGER USER");
    database.enqueue_many(200);
    let busy = database.relay().url(&receiver.url()).start();
    let busy = busy.expect("the relay starts");
    receiver.wait_for(1);
    busy.shutdown(Duration::from_secs(10))
        .expect("the relay ends");
    eventually("all messages are delivered", || {
        database.count("delivered") == 200
    });
    assert!(sleeping.stats().delivered > 100);
    assert_eq!(receiver.count(), 200, "no message came twice");
}

/// R8: relays share the work, and no message is sent twice.
#[test]
fn two_relays_share_what_is_there_fairly() {
    let database = Database::new();
    // Slow enough that one relay could hold all messages in its queue.
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(40));
        200
    });
    let relay = || database.relay().url(&receiver.url()).start();
    let first = relay().expect("the relay starts");
    database.enqueue_many(600);
    receiver.wait_for(50);
    let second = relay().expect("the relay starts");
    eventually("all messages are delivered", || {
        database.count("delivered") == 600
    });
    let shares = [first.stats().delivered, second.stats().delivered];
    drop((first, second));
    assert_eq!(receiver.count(), 600, "no message came twice");
    assert!(shares[1] >= 150, "{shares:?}");
}

/// R3: several outboxes in one process, each with its own relays, leases and destinations.
#[test]
fn one_process_serves_several_outboxes() {
    let (org, hrm) = (Database::new(), Database::new());
    let (to_org, to_hrm) = (Receiver::ok(), Receiver::ok());
    let relays = [(&org, &to_org), (&hrm, &to_hrm)].map(|(database, receiver)| {
        let relay = database.relay().poll_interval(Duration::from_secs(600));
        relay
            .url(&receiver.url())
            .start()
            .expect("the relay starts")
    });
    for n in 0..100 {
        org.enqueue("org.joined", json!({ "org": n }));
        hrm.enqueue("hrm.hired", json!({ "hrm": n }));
    }
    to_org.wait_for(100);
    to_hrm.wait_for(100);
    eventually("all messages are settled", || {
        relays.iter().all(|relay| relay.stats().delivered == 100)
    });
    drop(relays);
    assert!(
        to_org
            .requests()
            .iter()
            .all(|r| r.json().get("org").is_some())
    );
    assert!(
        to_hrm
            .requests()
            .iter()
            .all(|r| r.json().get("hrm").is_some())
    );
}
