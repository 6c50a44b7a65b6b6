//! Relays are killed with SIGKILL, again and again.

use std::collections::HashMap;

use crate::ground::{
    all_are_delivered, all_have_arrived, alone, attempts, duplicates, enqueue, leases_of,
    lines_with, relay,
};
use crate::support::{Database, File, Receiver, Running, eventually};

const MESSAGES: usize = 20_000;
const KILLS: usize = 10;
const BATCH: usize = 50;
const CONCURRENCY: usize = 8;

/// The most messages that a relay can hold: the queue, its senders, two batches about to be settled, and a claim
/// whose response the relay has not seen.
const MOST_HELD: usize = 2 * BATCH + CONCURRENCY + 2 * BATCH + BATCH;

/// The connections that claim and settle.
const WORKING: &str = "application_name IN ('diesel-outbox claimer', 'diesel-outbox settler')";

/// G2, G3.
#[test]
fn kills_lose_nothing_and_repeat_only_what_the_killed_relays_held() {
    let _alone = alone();
    let database = Database::new();
    let receiver = Receiver::ok();
    let batch = BATCH.to_string();
    let concurrency = CONCURRENCY.to_string();
    let start = || {
        Running::start(relay(
            &database,
            &receiver,
            &[
                ("OUTBOX_BATCH", &batch),
                ("OUTBOX_CONCURRENCY", &concurrency),
                ("OUTBOX_LEASE", "2s"),
                ("OUTBOX_SEND_TIMEOUT", "500ms"),
            ],
        ))
    };

    // The two surviving relays connect before the first kill. All other connections are then those of the victim.
    let mut beside = [start(), start()];
    let warm_up = MESSAGES / 20;
    enqueue(&database, 1, warm_up);
    let working = format!("SELECT count(*) FROM pg_stat_activity WHERE {WORKING}");
    eventually("two relays claim and settle", || {
        database.number(&working) == 4
    });
    let stable = database
        .text(&format!(
            "SELECT array_agg(pid) FROM pg_stat_activity WHERE {WORKING}"
        ))
        .expect("four connections");
    let of_the_victim = format!("{working} AND pid <> ALL('{stable}'::int[])");
    enqueue(&database, warm_up + 1, MESSAGES);

    let mut total = MESSAGES;
    let mut victim = start();
    let mut held_at_kills = 0;
    for kill in 0..KILLS {
        let part = MESSAGES / (KILLS + 2);
        let moment = part * (kill + 1) + fastrand::usize(..part / 2);
        eventually("messages arrive", || receiver.count() >= moment);
        eventually("the victim is at work", || {
            // The other relays may have finished the work before the victim started.
            if database.number("SELECT count(*) FROM {o} WHERE locked_by IS NULL") == 0 {
                enqueue(&database, total + 1, total + 1000);
                total += 1000;
            }
            database.number(&of_the_victim) == 2
        });
        let process = victim.pid();
        let leases = leases_of(&database, process);
        victim.kill();

        // Statements that the server has received from the victim still run to their end.
        let held = format!("SELECT count(*) FROM {{o}} WHERE locked_by = ANY({leases})");
        let mut most_held = 0;
        eventually("the victim's statements have ended", || {
            let has_ended = database.number(&of_the_victim) == 0;
            most_held = most_held.max(database.number(&held));
            has_ended
        });
        let most_held = usize::try_from(most_held).expect("a count");
        assert!(
            most_held <= MOST_HELD,
            "the victim held {most_held} messages"
        );
        held_at_kills += most_held;
        victim = start();
    }
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    for relay in beside.iter_mut().chain([&mut victim]) {
        assert_eq!(
            (
                lines_with(relay, "lease_lost"),
                lines_with(relay, "conflict")
            ),
            (0, 0),
            "a surviving relay lost its lease or a message: {}",
            relay.log()
        );
        relay.signal("TERM");
        assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    }

    assert!(held_at_kills > 0, "no kill hit a relay with messages");
    all_are_delivered(&database, total);
    all_have_arrived(&database, &[&receiver]);
    let duplicates = duplicates(&[&receiver]);
    assert!(
        duplicates <= held_at_kills,
        "{duplicates} duplicates, {held_at_kills} messages held at kills"
    );
    let attempts = attempts(&database);
    let extra: usize = attempts.values().map(|made| made - 1).sum();
    assert!(
        extra <= held_at_kills,
        "{extra} extra attempts, {held_at_kills} messages held at kills"
    );
    eprintln!("held at kills: {held_at_kills}, extra attempts: {extra}, duplicates: {duplicates}");
    for (id, arrivals) in receiver.arrivals() {
        assert!(
            arrivals <= attempts[&id],
            "{id} arrived {arrivals} times and counts {} attempts",
            attempts[&id]
        );
    }
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_lease"),
        i64::try_from(KILLS).expect("a small number"),
        "exactly the killed relays' leases remain"
    );
}

/// R61, G5: one message at a time and in order for each key, also where three relays are killed in turn. A killed relay
/// repeats at most the message that it was sending, and with `key_run` at most its run, from the beginning.
#[test]
fn kills_leave_no_gap_in_a_key_and_repeat_at_most_a_run() {
    const KEYS: usize = 100;
    const OF_EACH: usize = 60;
    let _alone = alone();
    for key_run in [1, 20] {
        let database = Database::new();
        let receiver = Receiver::ok();
        let settings = File::new(&format!(
            "[destinations.receiver]\nurl = \"{}\"\ninternal = true\nkey_run = {key_run}\n\
             [[routes]]\ntopic = \"*\"\nto = \"receiver\"\n",
            receiver.url()
        ));
        let start = || {
            let mut command = database.binary(&["run", "--config", settings.path()]);
            command.env("OUTBOX_LEASE", "2s");
            command.env("OUTBOX_SEND_TIMEOUT", "500ms");
            Running::start(command)
        };
        let mut relays = [start(), start(), start()];
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, ordering_key)
             SELECT 'a', json_build_object('key', key, 'n', n), key
               FROM generate_series(1, {OF_EACH}) AS n, generate_series(1, {KEYS}) AS key ORDER BY n, key"
        ));
        for kill in 0..KILLS {
            let moment = KEYS * OF_EACH * (kill + 1) / (KILLS + 2);
            eventually("messages arrive", || receiver.count() >= moment);
            let victim = std::mem::replace(&mut relays[kill % 3], start());
            victim.kill();
        }
        eventually("all messages are settled", || {
            database.number("SELECT count(*) FROM {o}") == 0
        });

        // Per key: the last arrival, and the last message that has arrived.
        let mut keys = HashMap::<u64, (u64, u64)>::new();
        let mut repeats = 0;
        for request in receiver.requests() {
            let payload = request.json();
            let number = |name: &str| payload[name].as_u64().expect("a number");
            let (key, n) = (number("key"), number("n"));
            let (before, most) = keys.entry(key).or_default();
            let is_repeat = n <= *before && n + key_run > *most;
            assert!(
                n == *before + 1 || is_repeat,
                "key {key}: {n} after {before}, with {most} the last, key_run {key_run}"
            );
            repeats += usize::from(is_repeat);
            (*before, *most) = (n, n.max(*most));
        }
        eprintln!("key_run {key_run}: {repeats} repeats");
        assert_eq!(keys.len(), KEYS);
        assert!(keys.values().all(|(last, _)| *last == OF_EACH as u64));
        let delivered = "SELECT count(*) FROM {o}_ledger WHERE status = 'delivered'";
        assert_eq!(database.number(delivered), (KEYS * OF_EACH) as i64);
    }
}
