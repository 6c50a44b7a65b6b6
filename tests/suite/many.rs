//! Many messages at once: retried, cancelled, recovered for a destination, and sent to a new one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diesel_outbox::NewMessage;
use diesel_outbox::admin::{self, Bulk, Bulked, Note, Selection};
use diesel_outbox::endpoints::{Endpoint, Recover};
use serde_json::json;
use uuid::Uuid;

use crate::page::Page;
use crate::support::{Database, Finished, Receiver, Running, end, eventually, finish};

fn alice() -> Note {
    Note::new("alice", "it works again")
}

fn run(db: &Database, arguments: &[&str]) -> Finished {
    let mut command = db.binary(arguments);
    command.env("USER", "bob");
    finish(command)
}

/// Carries out a change that is stopped after its first transaction, twice, and then to its end. Returns how many
/// messages each call has changed.
fn interrupted_twice(mut change: impl FnMut(Bulk<'_>) -> Bulked) -> [u64; 3] {
    let note = alice();
    let mut first = || change(Bulk::new(&note).progress(|_| false)).changed;
    let (one, two) = (first(), first());
    [one, two, change(Bulk::new(&note)).changed]
}

/// 2,500 messages that wait for a retry at `billing`, and messages that nobody retries.
fn waiting(db: &Database) {
    db.execute(
        "INSERT INTO {o} (topic, destination, payload, attempts, available_at, idempotency_key)
         SELECT 't', 'billing', '1', 1, now() + interval '1 hour', 'k' || n FROM generate_series(1, 2500) n",
    );
    db.execute(
        "INSERT INTO {o} (topic, destination, payload, attempts, available_at, locked_by)
         VALUES ('t', 'billing', '1', 0, now() + interval '1 hour', NULL),
                ('t', 'billing', '1', 1, now(), 7),
                ('t', 'shipping', '1', 1, now() + interval '1 hour', NULL)",
    );
}

const DUE: &str = "SELECT count(*) FROM {o} WHERE available_at <= now() AND locked_by IS NULL";

/// R55: messages that wait for a retry become due, each once, however often the command is interrupted. Delayed
/// messages, messages in flight and those of others keep their time.
#[test]
fn many_messages_are_retried_in_steps_and_interrupted_without_doubling() {
    let db = Database::new();
    waiting(&db);
    let conn = &mut db.connect();
    let filter = Selection::default().destination("billing".to_owned());
    let retried = interrupted_twice(|bulk| {
        admin::retry_all(conn, &db.outbox_name(), &filter, bulk).expect("retried")
    });
    assert_eq!(retried, [1000, 1000, 500]);
    assert_eq!(db.number(DUE), 2500);
    let noted = "SELECT count(DISTINCT sequence) || ' of ' || count(*) FROM {o}_attempt
                  WHERE event = 'retried' AND operator = 'alice: it works again'";
    assert_eq!(db.text(noted).as_deref(), Some("2500 of 2500"));
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 2503);
}

/// R55: cancelled messages are in the ledger with who and why, and a second run finds only what is left.
#[test]
fn many_messages_are_cancelled_in_steps_and_interrupted_without_doubling() {
    let db = Database::new();
    waiting(&db);
    let conn = &mut db.connect();
    let filter = Selection::default().destination("billing".to_owned());
    let cancelled = interrupted_twice(|bulk| {
        admin::cancel_all(conn, &db.outbox_name(), &filter, bulk).expect("cancelled")
    });
    assert_eq!(cancelled, [1000, 1000, 501]);
    let ended = "SELECT count(DISTINCT sequence) || ' of ' || count(*) FROM {o}_ledger
                  WHERE status = 'dead' AND reason = 'CANCELLED' AND error = 'alice: it works again'";
    assert_eq!(db.text(ended).as_deref(), Some("2501 of 2501"));
    assert_eq!(
        db.number("SELECT count(*) FROM {o}"),
        2,
        "in flight, and of others"
    );
}

/// R55: the commands count, ask, and select by each filter.
#[test]
fn the_commands_for_many_count_ask_and_select() {
    let db = Database::new();
    let tenant = Uuid::now_v7().to_string();
    db.execute(&format!(
        "INSERT INTO {{o}} (topic, destination, payload, attempts, available_at, ordering_key, tenant_id, created_at,
                            last_error_code)
         VALUES ('a', '', '1', 1, now() + interval '1 hour', NULL, NULL, now() - interval '3 hours', 'TIMEOUT'),
                ('b', 'x', '1', 1, now() + interval '1 hour', 'k', NULL, now() - interval '1 hour', NULL),
                ('b', '', '1', 1, now() + interval '1 hour', NULL, '{tenant}', now(), NULL)"
    ));
    let counted = |flags: &[&str]| {
        let retry = [&["message", "retry", "--dry-run", "--json"], flags].concat();
        run(&db, &retry).code(0).json()["matched"].clone()
    };
    for (flags, count) in [
        (&["--topic", "b"] as &[&str], 2),
        (&["--destination", "x"], 1),
        (&["--key", "k"], 1),
        (&["--tenant", &tenant], 1),
        (&["--since", "2h"], 2),
        (&["--until", "30min"], 2),
        (&["--since", "2h", "--until", "30min", "--topic", "b"], 1),
        (&["--since", "9999d"], 3),
        (&["--topic", "c"], 0),
        (&["--topic", "*"], 3),
        (&["--topic", "b*", "--status", "retrying"], 2),
        (&["--reason", "timeout"], 1),
    ] {
        assert_eq!(counted(flags), json!(count), "{flags:?}");
    }
    assert_eq!(db.number(DUE), 0, "a dry run changes nothing");
    let refused = run(&db, &["message", "retry", "--topic", "b"]).code(1);
    assert!(refused.stderr.contains("--yes"), "{}", refused.stderr);
    for bad in [
        &["message", "retry"] as &[&str],
        &["message", "cancel", "--yes"],
        &["message", "retry", "--since", "yesterday"],
        &["message", "cancel", "--tenant", "acme"],
        &["message", "cancel", "1", "--topic", "b"],
        &["message", "retry", "--since", "1h", "--until", "2h"],
    ] {
        run(&db, bad).code(2);
    }
    let done = run(
        &db,
        &[
            "message", "retry", "--topic", "b", "--yes", "--why", "fixed",
        ],
    )
    .code(0);
    let told = "retried 2 waiting messages";
    assert!(done.stdout.starts_with(told), "{}", done.stdout);
    let noted =
        "SELECT string_agg(DISTINCT operator, ',') FROM {o}_attempt WHERE event = 'retried'";
    assert_eq!(db.text(noted).as_deref(), Some("bob: fixed"));
    let done = run(
        &db,
        &["message", "cancel", "--since", "9999d", "--yes", "--json"],
    )
    .code(0);
    assert_eq!(done.json()["changed"], json!(3));
}

/// R55, R39: one message is retried by its name, with who and why.
#[test]
fn one_message_is_retried_by_its_key() {
    let db = Database::new();
    waiting(&db);
    let done = run(
        &db,
        &["message", "retry", "k7", "--why", "fixed", "--who", "eve"],
    )
    .code(0);
    assert!(
        done.stdout.contains("7 for billing: retried"),
        "{}",
        done.stdout
    );
    let noted =
        db.text("SELECT sequence || ' ' || operator FROM {o}_attempt WHERE event = 'retried'");
    assert_eq!(noted.as_deref(), Some("7 eve: fixed"));
    assert_eq!(db.number(DUE), 1);
    let shown = run(&db, &["message", "show", "k7"]).code(0).stdout;
    assert!(
        shown.contains("retried for billing by eve: fixed"),
        "{shown}"
    );
}

/// R55: a paced change takes its time, in steps of a second.
#[test]
fn a_paced_change_is_no_faster_than_its_rate() {
    let db = Database::new();
    waiting(&db);
    let (note, began, mut steps) = (alice(), Instant::now(), Vec::new());
    let filter = Selection::default().until(SystemTime::now());
    let bulk = Bulk::new(&note).rate(2000).progress(|so_far| {
        steps.push(so_far.changed);
        true
    });
    let done = admin::retry_all(&mut db.connect(), &db.outbox_name(), &filter, bulk);
    assert_eq!(done.expect("retried").changed, 2501);
    assert_eq!(steps, [1000, 2000, 2501]);
    assert!(began.elapsed() >= Duration::from_millis(1250));
}

fn put(db: &Database, hook: &Endpoint) {
    let put = db.outbox().endpoints().put(&mut db.connect(), hook);
    put.expect("put");
}

/// What `acme` gets since this time, with a call that is interrupted twice.
fn recovered(db: &Database, since: SystemTime, what: Recover) -> [u64; 3] {
    let (conn, outbox) = (&mut db.connect(), db.outbox());
    interrupted_twice(|bulk| {
        let done = outbox.endpoints().recover(conn, "acme", since, what, bulk);
        done.expect("recovered").expect("the destination")
    })
}

/// R55, R52: the dead letters of a destination since a time are sent again, each once, in the order of their keys.
#[test]
fn dead_letters_since_a_time_are_recovered_in_the_order_of_keys() {
    const KEYS: i64 = 50;
    let db = Database::new();
    let receiver = Receiver::ok();
    put(&db, &Endpoint::new("acme", receiver.url()));
    let id = "(SELECT id FROM {o}_endpoint WHERE name = 'acme')";
    let insert = |what: &str| {
        db.execute(&format!(
            "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, named_destination, payload, ordering_key,
                available_at, created_at, attempts, reason, dead_lettered_at, registration) {what}"
        ));
    };
    // The last sequence died first.
    insert(&format!(
        "SELECT n, gen_random_uuid(), 'order.paid', 'acme', 'acme', to_json(n), 'key ' || n % {KEYS},
                now(), now(), 1, 'TIMEOUT', now() - n * interval '1 ms', {id} FROM generate_series(1, 2500) n"
    ));
    insert(&format!(
        "VALUES (8001, gen_random_uuid(), 'order.paid', 'acme', 'acme', '0', NULL, now(), now(), 1, 'TIMEOUT',
                 now() - interval '1 day', {id}),
                (8002, gen_random_uuid(), 'order.paid', 'other', 'other', '0', NULL, now(), now(), 1, 'TIMEOUT', now(), NULL),
                (8003, gen_random_uuid(), 'order.paid', 'acme', 'acme', '0', NULL, now(), now(), 1, 'TIMEOUT', now(),
                 gen_random_uuid())"
    ));
    let since = SystemTime::now() - Duration::from_secs(3600);
    assert_eq!(
        recovered(&db, since, Recover::DeadLetters),
        [1000, 1000, 500]
    );
    let relay = db.keeping_relay().start().expect("a relay");
    eventually("all are delivered", || db.count("delivered") == 2500);
    end(&relay);
    let mut of_keys: HashMap<String, Vec<i64>> = HashMap::new();
    for request in receiver.requests() {
        let number = request.json().as_i64().expect("a number");
        let key = request.header("ce-partitionkey").expect("a key").to_owned();
        of_keys.entry(key).or_default().push(number);
    }
    assert_eq!(of_keys.len(), KEYS as usize);
    for (key, numbers) in of_keys {
        assert_eq!(numbers.len(), 50, "{key}");
        assert!(numbers.is_sorted(), "{key}: {numbers:?}");
    }
    assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 3);
    let noted = "SELECT count(*) FROM {o}_attempt WHERE event = 'requeued' AND operator = 'alice: it works again'";
    assert_eq!(db.number(noted), 2500);
}

fn message(topic: &str, n: i64) -> NewMessage {
    NewMessage::new(topic, &json!({ "euro": n })).expect("JSON")
}

/// The numbers that a receiver got, in order, and the id of each.
fn got(receiver: &Receiver) -> Vec<(i64, String)> {
    let of = |request: &crate::support::Request| {
        (
            request.json()["euro"].as_i64().expect("a number"),
            request.id(),
        )
    };
    receiver.requests().iter().map(of).collect()
}

/// R55: a destination that is enabled while a fan-out has passed its name gets nothing of it, unless it is recovered.
#[test]
fn a_destination_misses_what_a_fan_out_in_flight_has_passed() {
    let db = Database::new();
    for name in ["acme", "beta", "zeta"] {
        put(&db, &Endpoint::new(name, "http://127.0.0.1:9/"));
    }
    let whole = db.enqueue_message(message("order.paid", 1));
    db.execute(&format!(
        "INSERT INTO {{o}} (message_id, topic, payload, destination, split_from)
         SELECT message_id, topic, payload, 'beta', sequence FROM {{o}} WHERE sequence = {whole}"
    ));
    db.execute(&format!(
        "UPDATE {{o}} SET split_to = 'beta' WHERE sequence = {whole}"
    ));
    let missed = |name| {
        let (outbox, note) = (db.outbox(), alice());
        let since = SystemTime::now() - Duration::from_secs(3600);
        let bulk = Bulk::new(&note).dry_run();
        let done =
            outbox
                .endpoints()
                .recover(&mut db.connect(), name, since, Recover::AndMissed, bulk);
        done.expect("recovered").expect("the destination").changed
    };
    assert_eq!(["acme", "beta", "zeta"].map(missed), [1, 0, 0]);
}

/// R55, R52: a destination that was disabled for a day gets what it wanted meanwhile, and nothing else: once, as the
/// messages that others got, in the order of their key.
#[test]
fn a_disabled_destination_recovers_exactly_what_it_missed() {
    let db = Database::new();
    let (acme, other) = (Receiver::ok(), Receiver::ok());
    let tenant = Uuid::now_v7();
    let hook = Endpoint::new("acme", acme.url()).tenant(tenant);
    let hook = hook
        .topics(["order.*"])
        .filter(json!({"euro": [{"numeric": [">=", 100]}]}));
    put(&db, &hook);
    put(&db, &Endpoint::new("other", other.url()));
    let started = db.keeping_relay().start().expect("a relay");
    let since = SystemTime::now();
    let at = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let wanted = |n: i64| {
        let message = message("order.paid", n).tenant_id(tenant).ordering_key("k");
        let message = message.header("x-shop", "berlin").occurred_at(at);
        message.idempotency_key(format!("order-{n}"))
    };
    db.enqueue_message(wanted(100));
    eventually("both have it", || db.count("delivered") == 2);

    let destinations = db.outbox();
    let destinations = destinations.endpoints();
    let disabled = destinations.disable(&mut db.connect(), "acme", "a day off");
    assert!(disabled.expect("disabled"));
    end(&started);
    let relay = db.keeping_relay().start().expect("a relay");
    for n in [101, 102, 103] {
        db.enqueue_message(wanted(n));
    }
    db.enqueue_message(wanted(50));
    db.enqueue_message(message("order.paid", 104));
    db.enqueue_message(message("invoice.paid", 105).tenant_id(tenant));
    db.enqueue_message(
        message("order.paid", 106)
            .tenant_id(tenant)
            .destination("other"),
    );
    eventually("the other has all", || {
        db.number("SELECT count(*) FROM {o}") == 0
    });
    db.execute(
        "UPDATE {o}_ledger SET payload = NULL, headers = NULL WHERE idempotency_key = 'order-103'",
    );

    let enabled = destinations.enable(&mut db.connect(), "acme");
    assert!(enabled.expect("enabled"));
    let recover = |bulk| {
        let what = Recover::AndMissed;
        let done = destinations.recover(&mut db.connect(), "acme", since, what, bulk);
        done.expect("recovered").expect("the destination")
    };
    let counts = |done: Bulked| (done.changed, done.skipped, done.without_payload);
    let note = alice();
    assert_eq!(counts(recover(Bulk::new(&note).dry_run())), (2, 0, 1));
    assert_eq!(counts(recover(Bulk::new(&note))), (2, 0, 1));
    assert_eq!(counts(recover(Bulk::new(&note))), (0, 0, 1));
    acme.wait_for(3);
    eventually("all are settled", || {
        db.number("SELECT count(*) FROM {o}") == 0
    });
    assert_eq!(counts(recover(Bulk::new(&note))), (0, 0, 1));
    end(&relay);

    let numbers: Vec<i64> = got(&acme).iter().map(|(n, _)| *n).collect();
    assert_eq!(numbers, [100, 101, 102]);
    let of_other: BTreeMap<i64, String> = got(&other).into_iter().collect();
    let same = [
        "ce-time",
        "ce-type",
        "x-shop",
        "idempotency-key",
        "ce-partitionkey",
    ];
    for (request, (n, id)) in acme.requests().iter().zip(got(&acme)) {
        assert_eq!(of_other.get(&n), Some(&id));
        let theirs = other.requests();
        let theirs = theirs.iter().find(|one| one.id() == id).expect("the same");
        assert_eq!(request.body, theirs.body);
        for header in same {
            assert_eq!(request.header(header), theirs.header(header), "{header}");
        }
    }
    let noted =
        "SELECT count(*) FROM {o}_attempt WHERE event = 'replayed' AND destination = 'acme'";
    assert_eq!(db.number(noted), 2);
}

/// R55: what still waits for another customer, whose endpoint is down, is recovered from the outbox: with its headers,
/// times and place, also without payloads in the ledger, and once, whether it is settled meanwhile or not.
#[test]
fn messages_that_wait_for_another_customer_are_recovered() {
    let db = Database::new();
    let is_up = Arc::new(AtomicBool::new(false));
    let is_up_now = Arc::clone(&is_up);
    let status = move |_: &_| if is_up_now.load(Relaxed) { 200 } else { 503 };
    let (acme, down) = (Receiver::ok(), Receiver::answering(status));
    let hook = Endpoint::new("acme", acme.url());
    put(
        &db,
        &hook
            .topics(["order.*"])
            .filter(json!({"euro": [{"numeric": [">=", 100]}]})),
    );
    for name in ["down", "other"] {
        put(&db, &Endpoint::new(name, down.url()));
    }
    let outbox = db.outbox();
    let destinations = outbox.endpoints();
    let disabled = destinations.disable(&mut db.connect(), "acme", "a day off");
    assert!(disabled.expect("disabled"));
    let since = SystemTime::now();
    let at = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let wanted = |n| {
        let message = message("order.paid", n).ordering_key("k").occurred_at(at);
        message.header("x-shop", "berlin")
    };
    for n in [100, 101, 50] {
        db.enqueue_message(wanted(n));
    }
    db.enqueue_message(message("invoice.paid", 105));
    let relay = db
        .relay()
        .endpoint_threads(4)
        .configure(|config| config.endpoint_max_attempts = 1000);
    let relay = relay.start().expect("a relay");
    eventually("all are fanned out", || {
        db.number("SELECT count(*) FROM {o} WHERE split_from IS NOT NULL") == 8
    });
    let enabled = destinations.enable(&mut db.connect(), "acme");
    assert!(enabled.expect("enabled"));
    assert_eq!(recovered(&db, since, Recover::AndMissed), [2, 0, 0]);
    acme.wait_for(2);
    eventually("the found ones are delivered", || {
        db.count("delivered") == 2
    });
    assert_eq!(recovered(&db, since, Recover::AndMissed), [0, 0, 0]);
    is_up.store(true, Relaxed);
    eventually("all are settled", || {
        db.execute("UPDATE {o} SET available_at = now() WHERE available_at > now()");
        db.number("SELECT count(*) FROM {o}") == 0
    });
    assert_eq!(recovered(&db, since, Recover::AndMissed), [0, 0, 0]);
    end(&relay);
    let theirs: BTreeMap<i64, String> = got(&down).into_iter().collect();
    let numbers: Vec<i64> = got(&acme).iter().map(|(n, _)| *n).collect();
    assert_eq!(numbers, [100, 101]);
    for (request, (n, id)) in acme.requests().iter().zip(got(&acme)) {
        assert_eq!(theirs.get(&n), Some(&id));
        assert_eq!(request.header("x-shop"), Some("berlin"));
        assert_eq!(
            request.header("ce-time"),
            Some("2023-11-14T22:13:20.000000Z")
        );
    }
}

/// R55: a missed message has its place in its key: before later messages that wait for the destination.
#[test]
fn a_missed_message_is_sent_before_later_messages_of_its_key() {
    let db = Database::new();
    let receiver = Receiver::ok();
    put(&db, &Endpoint::new("acme", receiver.url()));
    db.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, named_destination, ordering_key, status,
            attempts, payload, created_at, split_from)
         VALUES (0, 12, gen_random_uuid(), 't', 'other', 'other', 'k', 'delivered', 1, '{\"euro\":1}', now(), 10)",
    );
    db.execute(
        "INSERT INTO {o} (sequence, topic, destination, ordering_key, payload) OVERRIDING SYSTEM VALUE
         VALUES (20, 't', 'acme', 'k', '{\"euro\":2}'), (9, 't', 'acme', 'k', '{\"euro\":0}')",
    );
    db.execute("SELECT setval(pg_get_serial_sequence('{o}', 'sequence'), 100)");
    let since = SystemTime::now() - Duration::from_secs(60);
    assert_eq!(recovered(&db, since, Recover::AndMissed), [1, 0, 0]);
    let relay = db.keeping_relay().start().expect("a relay");
    receiver.wait_for(3);
    end(&relay);
    let numbers: Vec<i64> = got(&receiver).iter().map(|(n, _)| *n).collect();
    assert_eq!(numbers, [0, 1, 2]);
}

/// Ledger entries of 2,500 messages that went to another destination, of 50 keys.
fn delivered_to_another(db: &Database) {
    db.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, named_destination, ordering_key,
            idempotency_key, status, attempts, payload, created_at, settled_at, split_from)
         SELECT 0, 2 * n + 1, gen_random_uuid(), 'order.paid', 'other', 'other', 'key ' || n % 50,
                CASE n % 2 WHEN 0 THEN 'k' || n END, 'delivered', 1, to_json(n), now() - interval '1 hour',
                now() - n * interval '1 s', 2 * n FROM generate_series(1, 2500) n",
    );
    db.execute("SELECT setval(pg_get_serial_sequence('{o}', 'sequence'), 10000)");
}

/// R55: a new destination gets the messages since a time, in order, with a command that is killed and repeated.
#[test]
fn a_killed_backfill_continues_and_doubles_nothing() {
    let db = Database::new();
    put(&db, &Endpoint::new("acme", "https://acme.example"));
    delivered_to_another(&db);
    let arguments = [
        "endpoint", "backfill", "acme", "--since", "2h", "--yes", "--rate", "400",
    ];
    let live = || db.number("SELECT count(*) FROM {o}");
    let mut command = Running::start(db.binary(&arguments));
    eventually("it has begun", || live() > 0);
    command.signal("INT");
    assert_eq!(command.wait().code(), Some(1));
    assert!(
        command.log().contains("repeat the command"),
        "{}",
        command.log()
    );
    let begun = live();
    assert!((1..2500).contains(&begun), "{begun}");
    let command = Running::start(db.binary(&arguments));
    eventually("it continues", || live() > begun);
    command.kill();
    // A killed client's last transaction may commit.
    let rest = [
        "endpoint", "backfill", "acme", "--since", "2h", "--yes", "--json",
    ];
    let done = run(&db, &rest).code(0).json();
    assert_eq!(done["changed"], done["matched"], "{done}");
    assert_eq!(done["skipped"], json!(0), "{done}");
    let placed = "SELECT count(DISTINCT message_id) || ' of ' || count(*) FROM {o} WHERE destination = 'acme'
                     AND payload::text::int * 2 = split_from AND registration IS NOT NULL";
    assert_eq!(db.text(placed).as_deref(), Some("2500 of 2500"));

    // What `recover` leaves alone, it names.
    db.execute(
        "UPDATE {o} SET attempts = 1, available_at = now() + interval '1 hour' WHERE payload::text::int <= 3",
    );
    let recover = ["endpoint", "recover", "acme", "--since", "2h", "--dry-run"];
    let waiting =
        "Also retrying: 3 messages, due now with `diesel-outbox message retry --destination acme`";
    let told = run(&db, &recover).code(0).stdout;
    assert!(told.contains(waiting), "{told}");
    let out_of_order =
        "SELECT count(*) FROM (SELECT split_from - lag(split_from) OVER (ORDER BY sequence) AS step
                          FROM {o}) s WHERE step < 0";
    assert_eq!(db.number(out_of_order), 0);
    let unknown = run(
        &db,
        &["endpoint", "backfill", "acne", "--since", "2h", "--yes"],
    )
    .code(1);
    assert!(unknown.stderr.contains("acne"), "{}", unknown.stderr);
}

/// R55: a name that is registered again is another destination: it can get what the old one got.
#[test]
fn a_destination_that_is_registered_again_can_get_what_the_old_one_got() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let since = SystemTime::now();
    put(&db, &Endpoint::new("acme", receiver.url()));
    put(&db, &Endpoint::new("other", receiver.url()));
    let relay = db.keeping_relay().start().expect("a relay");
    for n in [1, 2] {
        db.enqueue_message(message("t", n).idempotency_key(format!("k{n}")));
    }
    eventually("both have both", || db.count("delivered") == 4);
    let (outbox, conn, note) = (db.outbox(), &mut db.connect(), alice());
    let backfill = |conn: &mut _| {
        let done = outbox
            .endpoints()
            .backfill(conn, "acme", since, Bulk::new(&note));
        done.expect("sent").map(|done| done.changed)
    };
    assert_eq!(backfill(conn), Some(0));
    let removed = outbox.endpoints().remove(conn, "acme");
    assert!(removed.expect("removed"));
    assert_eq!(backfill(conn), None);
    put(&db, &Endpoint::new("acme", receiver.url()));
    assert_eq!(backfill(conn), Some(2));
    assert_eq!(backfill(conn), Some(0));
    receiver.wait_for(6);
    eventually("all are settled", || db.count("delivered") == 6);
    assert_eq!(backfill(conn), Some(0));
    end(&relay);
    assert!(receiver.arrivals().values().all(|count| *count == 3));
}

/// R55: what operators do is recorded with who and why, in the transaction that does it, and kept as long as the ledger.
#[test]
fn acts_of_operators_are_recorded_with_who_and_why() {
    let db = Database::new();
    waiting(&db);
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, available_at, created_at, attempts, reason)
         VALUES (9001, gen_random_uuid(), 't', 'acme', '1', now(), now(), 1, 'TIMEOUT'),
                (9002, gen_random_uuid(), 't', '', '1', now(), now(), 1, 'TIMEOUT'),
                (9003, gen_random_uuid(), 't', '', '1', now(), now(), 1, 'TIMEOUT')",
    );
    db.execute("INSERT INTO {o}_topic VALUES ('old.*', 'route', now(), now())");
    let act = |command: &str| {
        let arguments: Vec<&str> = command.split(' ').collect();
        run(
            &db,
            &[&arguments[..], &["--why", "because", "--who", "eve"]].concat(),
        )
        .code(0);
    };
    for command in [
        "endpoint put acme https://acme.example --topic nothing",
        "endpoint disable acme",
        "endpoint enable acme",
        "endpoint rotate acme",
        "endpoint recover acme --since 1h --yes",
        "endpoint backfill acme --since 1h --yes",
        "pause topic t",
        "resume topic t",
        "message retry k1",
        "message reschedule k1 --now",
        "message cancel k1",
        "message settle k2 --delivered",
        "message retry --key nothing --yes",
        "message retry --destination shipping --yes",
        "dead requeue 9002",
        "dead discard 9003",
        "topics forget old.* --yes",
        "endpoint remove acme --yes",
        "forget --yes --tenant 00000000-0000-0000-0000-000000000007",
    ] {
        act(command);
    }
    // Nothing has changed, so nothing is recorded.
    run(&db, &["endpoint", "enable", "acme"]).code(1);
    run(&db, &["message", "cancel", "k1"]).code(0);
    let acts = "SELECT string_agg(act || ' ' || regexp_replace(target, '^900(.)[.].*', '900\\1'), ', ' ORDER BY at) FROM {o}_audit
                 WHERE who = 'eve' AND why = 'because'";
    let expected = "endpoint put acme, endpoint disable acme, endpoint enable acme, endpoint rotate acme, \
        endpoint recover acme, pause t, resume t, message retry 1, message reschedule 1, message cancel 1, message settle 2, \
        message retry destination shipping, dead requeue 9002, dead discard 9003, topics forget old.*, endpoint remove acme, forget a tenant";
    assert_eq!(db.text(acts).as_deref(), Some(expected));
    assert_eq!(db.number("SELECT count(*) FROM {o}_audit"), 17);
    db.number("SELECT emptied FROM {o}_rotate('1 hour')");
    db.execute("UPDATE {o}_audit SET at = now() - interval '2 hours' WHERE act = 'pause'");
    db.number("SELECT emptied FROM {o}_rotate('1 hour')");
    assert_eq!(db.number("SELECT count(*) FROM {o}_audit"), 16);
}

/// R55: the page shows the count before it retries, cancels or recovers many.
#[test]
fn the_page_asks_with_the_count_before_it_changes_many() {
    let db = Database::new();
    waiting(&db);
    put(&db, &Endpoint::new("acme", "https://acme.example"));
    delivered_to_another(&db);
    let page = Page::start(db.binary(&["admin"]));
    let send = |from: &str, path: &str, fields: &str| {
        let token = page.get(from).form_token();
        page.post(path, "", &format!("form_token={token}&{fields}"))
    };
    let list = "/messages?destination=billing";
    let asked = send(list, "/messages/retry", "destination=billing&why=fixed");
    assert!(
        asked.body.contains("Retry 2,500 waiting messages?"),
        "{}",
        asked.body
    );
    assert!(asked.body.contains("destination billing"), "{}", asked.body);
    assert_eq!(db.number(DUE), 0);
    let done = send(
        list,
        "/messages/retry",
        "destination=billing&why=fixed&sure=2500",
    );
    let to = done.header("location").expect("a redirect");
    assert_eq!(to, "/messages?destination=billing&done=retried&count=2500");
    assert!(
        page.get(to)
            .body
            .contains("2,500 waiting messages were retried.")
    );
    assert_eq!(db.number(DUE), 2500);
    let why = "SELECT string_agg(DISTINCT why, ',') FROM {o}_audit WHERE act = 'message retry'";
    assert_eq!(db.text(why).as_deref(), Some("fixed"));

    let one = "/endpoints?name=acme";
    let asked = send(one, "/endpoint/recover", "name=acme&since=2h&missing=yes");
    assert!(
        asked.body.contains("Recover 2,500 messages for acme?"),
        "{}",
        asked.body
    );
    let done = send(one, "/endpoint/backfill", "name=acme&since=2h&sure=yes");
    let to = done.header("location").expect("a redirect");
    assert_eq!(to, "/endpoints?name=acme&done=recovered&count=2500");
    let bad = send(one, "/endpoint/recover", "name=acme&since=yesterday");
    assert_eq!(bad.status, 400);

    let done = send(list, "/messages/cancel", "destination=acme&sure=2500");
    let to = done.header("location").expect("a redirect");
    assert_eq!(to, "/messages?destination=acme&done=cancelled&count=2500");
}
