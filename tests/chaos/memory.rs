//! A backlog costs disk, not memory.

use std::time::Duration;

use crate::ground::{all_are_delivered, alone, enqueue};
use crate::support::{Database, File, Receiver, Running, eventually};

const MIB: usize = 1024 * 1024;

/// The peak memory of a process, or `None` after the process has ended.
fn peak_bytes(process: u32) -> Option<usize> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Runs a drain and returns its peak memory.
fn peak_of_drain(database: &Database, settings: &[(&str, &str)]) -> usize {
    let mut command = database.binary(&["drain", "--quiet"]);
    command
        .env("OUTBOX_LEASE", "60s")
        .env("OUTBOX_SEND_TIMEOUT", "10s")
        .envs(settings.iter().copied());
    let mut drain = Running::start(command);
    let mut peak = 0;
    while drain.is_running() {
        peak = peak.max(peak_bytes(drain.pid()).unwrap_or_default());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(drain.wait().code(), Some(0), "{}", drain.log());
    assert!(
        peak > MIB,
        "the peak was never read while the drain ran: {peak}"
    );
    eprintln!("peak: {} MiB", peak / MIB);
    peak
}

#[test]
fn a_hundred_thousand_waiting_messages_drain_in_64_mib() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    enqueue(&database, 1, 100_000);
    let peak = peak_of_drain(&database, &[("OUTBOX_URL", &receiver.url())]);
    assert!(peak < 64 * MIB, "{} MiB", peak / MIB);
    all_are_delivered(&database, 100_000);
}

#[test]
fn two_hundred_megabytes_of_payloads_drain_in_200_mib() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let enqueued = database.execute(
        "INSERT INTO {o} (topic, payload, idempotency_key)
         SELECT 'order.paid',
                to_json(repeat(md5(n::text), 31250)),
                'key-' || n
           FROM generate_series(1, 200) AS n",
    );
    assert_eq!(enqueued, 200);
    let peak = peak_of_drain(&database, &[("OUTBOX_URL", &receiver.url())]);
    assert!(peak < 200 * MIB, "{} MiB", peak / MIB);
    all_are_delivered(&database, 200);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 200);
    assert!(
        requests
            .iter()
            .all(|request| request.body.len() == 1_000_002)
    );
}

#[test]
fn three_hundred_megabytes_that_are_fanned_out_drain_in_200_mib() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let enqueued = database.execute(
        "INSERT INTO {o} (topic, payload)
         SELECT 'order.paid', to_json(repeat(md5(n::text), 31250)) FROM generate_series(1, 300) AS n",
    );
    assert_eq!(enqueued, 300);
    let url = receiver.url();
    let settings = File::new(&format!(
        "[destinations.a]\nurl = '{url}'\n[destinations.b]\nurl = '{url}'\n
             [[routes]]\ntopic = '*'\nto = ['a', 'b']\n"
    ));
    let peak = peak_of_drain(&database, &[("OUTBOX_CONFIG", settings.path())]);
    assert_eq!(database.count("delivered"), 600);
    assert!(peak < 200 * MIB, "{} MiB", peak / MIB);
}

/// R48
#[test]
fn payloads_that_grow_without_notice_drain_in_160_mib() {
    for mode in ["binary", "batched"] {
        let _alone = alone();
        let database = Database::new();
        let receiver = Receiver::ok();
        database.execute(
            "INSERT INTO {o} (topic, payload) SELECT 'order.paid', '{}' FROM generate_series(1, 6000)",
        );
        database.execute(
            "INSERT INTO {o} (topic, payload)
             SELECT 'order.paid', to_json(repeat(md5(n::text), 32767)) FROM generate_series(1, 300) AS n",
        );
        let peak = peak_of_drain(
            &database,
            &[("OUTBOX_URL", &receiver.url()), ("OUTBOX_MODE", mode)],
        );
        assert_eq!(database.count("delivered"), 6300);
        assert!(peak < 160 * MIB, "{mode}: {} MiB", peak / MIB);
    }
}

/// R48
#[test]
fn later_messages_of_thousands_of_keys_wait_in_the_database_for_a_destination_that_hangs() {
    let _alone = alone();
    let database = Database::new();
    let (fast, (slow, gate)) = (Receiver::ok(), Receiver::held());
    let settings = File::new(&format!(
        "[destinations.fast]\nurl = '{}'\n[destinations.slow]\nurl = '{}'\n
             [[routes]]\ntopic = 'order.paid'\nto = ['fast']\n
             [[routes]]\ntopic = 'order.sent'\nto = ['slow']\n",
        fast.url(),
        slow.url()
    ));
    const KEYS: i64 = 3_000;
    for (topic, payload) in [
        ("order.paid", "'{}'"),
        ("order.sent", "to_json(repeat(md5(n::text), 3200))"),
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, ordering_key)
             SELECT '{topic}', {payload}, 'key-' || n FROM generate_series(1, {KEYS}) AS n"
        ));
    }
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_CONFIG", settings.path())
        .env("OUTBOX_SEND_TIMEOUT", "60s")
        .env("OUTBOX_LEASE", "300s");
    let relay = Running::start(command);
    eventually("the fast destination has all of its messages", || {
        database.count("delivered") == KEYS
    });
    let peak = peak_bytes(relay.pid()).expect("the relay runs");
    eprintln!("peak: {} MiB", peak / MIB);
    let claimed = database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL");
    assert!(peak < 160 * MIB, "{} MiB, {claimed} claimed", peak / MIB);
    gate.open();
    eventually("all messages are delivered", || {
        database.count("delivered") == 2 * KEYS
    });
    relay.stop();
}
