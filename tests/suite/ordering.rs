//! Delivery in order of the key.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::admin;
use diesel_outbox::{
    Destination, Dispatcher, Message, NewMessage, Outcome, RelayBuilder, Response,
};
use serde_json::json;

use crate::support::{
    Database, PATIENCE, Receiver, Request, Running, end, eventually, finish, status,
};

/// A poll interval that no message of these tests may wait for.
const NEVER: Duration = Duration::from_secs(600);

fn keyed(topic: &str, key: &str, n: usize) -> NewMessage {
    NewMessage::new(topic, &json!({ "key": key, "n": n }))
        .expect("JSON")
        .ordering_key(key)
}

/// Enqueues `each` messages for each of `keys` keys, in turn.
fn enqueue(database: &Database, topics: &[&str], keys: usize, each: usize) {
    let outbox = database.outbox();
    let messages: Vec<NewMessage> = (0..keys * each)
        .map(|n| {
            keyed(
                topics[n % topics.len()],
                &format!("key-{}", n % keys),
                n / keys,
            )
        })
        .collect();
    outbox
        .enqueue_batch(&mut database.connect(), messages)
        .expect("enqueued");
}

fn number(request: &Request) -> (String, u64) {
    let body = request.json();
    let key = body["key"].as_str().expect("a key").to_owned();
    (key, body["n"].as_u64().expect("a number"))
}

/// The numbers of each key in the order of their arrival.
fn by_key(requests: &[Request]) -> BTreeMap<String, Vec<u64>> {
    let mut keys: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for request in requests {
        let (key, n) = number(request);
        keys.entry(key).or_default().push(n);
    }
    keys
}

/// Fails unless each key has its numbers in order. A number may repeat until a later number of its key has come.
#[track_caller]
fn assert_in_order(requests: &[Request], each: u64) {
    for (key, mut numbers) in by_key(requests) {
        numbers.dedup();
        assert_eq!(numbers, (0..each).collect::<Vec<_>>(), "{key}");
    }
}

/// A receiver that records the most concurrent requests of one key.
fn watching(status_of: impl Fn(&Request) -> u16 + Send + Sync + 'static) -> (Receiver, Watch) {
    let watch = Watch::default();
    let seen = watch.clone();
    let receiver = Receiver::answering(move |request| {
        let (key, _) = number(request);
        let is_alone = seen
            .busy
            .lock()
            .expect("no panic holds it")
            .insert(key.clone());
        if !is_alone {
            seen.overlaps.fetch_add(1, Ordering::SeqCst);
        }
        // Long enough for a concurrent request to arrive.
        std::thread::sleep(Duration::from_millis(2));
        let status = status_of(request);
        seen.busy.lock().expect("no panic holds it").remove(&key);
        status
    });
    (receiver, watch)
}

#[derive(Default, Clone)]
struct Watch {
    busy: Arc<Mutex<HashSet<String>>>,
    overlaps: Arc<AtomicUsize>,
}

impl Watch {
    #[track_caller]
    fn assert_never_two_at_once(&self) {
        assert_eq!(self.overlaps.load(Ordering::SeqCst), 0);
    }
}

/// G5: order is kept through failures and retries, with two relays, across topics.
#[test]
fn a_key_keeps_its_order_through_retries_and_across_relays_and_topics() {
    let database = Database::new();
    let failures: Mutex<HashMap<(String, u64), u32>> = Mutex::default();
    let (receiver, watch) = watching(move |request| {
        let this = number(request);
        let mut failures = failures.lock().expect("no panic holds it");
        let failed = failures.entry(this.clone()).or_default();
        // Every fifth message fails twice.
        if (this.1 + this.0.len() as u64).is_multiple_of(5) && *failed < 2 {
            *failed += 1;
            return 500;
        }
        200
    });
    enqueue(&database, &["order.created", "order.paid"], 20, 20);
    let relays: Vec<_> = (0..2)
        .map(|_| {
            let mut destination =
                Destination::new("receiver", &receiver.url()).expect("a destination");
            destination.policy.breaker = None;
            let relay = database.relay().destination(destination);
            relay
                .route("*", "receiver")
                .start()
                .expect("the relay starts")
        })
        .collect();
    eventually("all messages are delivered", || {
        database.count("delivered") == 400
    });
    drop(relays);
    watch.assert_never_two_at_once();
    assert_in_order(&receiver.requests(), 20);
}

/// G5: keys do not wait for one another, and a key continues right after a settle.
#[test]
fn keys_run_beside_each_other_and_continue_at_once() {
    let database = Database::new();
    let (receiver, watch) = watching(|_| 200);
    enqueue(&database, &["order.paid"], 4, 50);
    let relay = database
        .relay()
        // Long enough that no key continues by polling.
        .poll_interval(Duration::from_secs(30))
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    receiver.wait_for(200);
    eventually("all messages are settled", || {
        relay.stats().delivered == 200
    });
    let stats = relay.stats();
    drop(relay);
    watch.assert_never_two_at_once();
    assert_in_order(&receiver.requests(), 50);
    assert!(
        diesel_outbox::program::statements(&stats).continued >= 190,
        "each message but the first of its key was claimed by the settle before it: {stats:?}"
    );
}

/// G5, T-6: relays are killed while messages of each key are in flight.
#[test]
fn a_key_keeps_its_order_when_relays_are_killed() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(1));
        200
    });
    enqueue(&database, &["order.paid"], 30, 20);
    let run = || {
        let mut command = database.binary(&["run", "--url", &receiver.url()]);
        command.env("OUTBOX_LEASE", "2s");
        command.env("OUTBOX_SEND_TIMEOUT", "500ms");
        Running::start(command)
    };
    for round in 1..=3 {
        let (first, second) = (run(), run());
        receiver.wait_for(round * 120);
        first.kill();
        second.kill();
    }
    let last = run();
    eventually("all messages are delivered", || {
        database.count("delivered") == 600
    });
    drop(last);
    assert_in_order(&receiver.requests(), 20);
}

/// Holds the response to a request until the test opens it.
#[derive(Default)]
struct Hold {
    is_open: Mutex<bool>,
    changed: Condvar,
}

impl Hold {
    fn wait(&self) {
        let is_open = self.is_open.lock().expect("no panic holds it");
        let (_open, timeout) = self
            .changed
            .wait_timeout_while(is_open, PATIENCE, |is_open| !*is_open)
            .expect("no panic holds it");
        assert!(!timeout.timed_out(), "the test opens it");
    }

    fn open(&self) {
        *self.is_open.lock().expect("no panic holds it") = true;
        self.changed.notify_all();
    }
}

/// A relay whose send timeout is longer than the test holds responses.
fn patient(database: &Database) -> RelayBuilder {
    database
        .relay()
        .send_timeout(Duration::from_secs(20))
        .lease(Duration::from_secs(60))
}

/// G5: a message that is committed late waits until the later message of its key, already in flight, is settled. No
/// relay could know of the late message.
#[test]
fn a_message_that_is_committed_late_is_not_sent_beside_a_later_one() {
    let database = Database::new();
    let hold = Arc::new(Hold::default());
    let held = Arc::clone(&hold);
    let receiver = Receiver::answering(move |request| {
        if number(request).1 == 2 {
            held.wait();
        }
        200
    });
    let mut late = database.connect();
    late.batch_execute("BEGIN").expect("a transaction");
    let outbox = database.outbox();
    outbox
        .enqueue(&mut late, keyed("order.paid", "a", 1))
        .expect("enqueued");
    database.enqueue_message(keyed("order.paid", "a", 2));
    let relays = [0, 1].map(|_| {
        let relay = patient(&database).url(&receiver.url());
        relay.start().expect("the relay starts")
    });
    receiver.wait_for(1);
    late.batch_execute("COMMIT").expect("committed");
    database.enqueue_message(keyed("order.paid", "b", 1));
    // The relays claim again, but nothing of this key.
    receiver.wait_for(2);
    for relay in &relays {
        relay.wake();
    }
    eventually("the relays have polled", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.count("sending"), 1);
    assert_eq!(database.count("pending"), 1);
    hold.open();
    receiver.wait_for(3);
    eventually("all messages are delivered", || {
        database.count("delivered") == 3
    });
    drop(relays);
    let order: Vec<u64> = by_key(&receiver.requests())["a"].clone();
    assert_eq!(order, [2, 1]);
}

/// G5: a dead letter lets the later messages of its key continue, unless the destination says otherwise.
#[test]
fn a_dead_message_lets_its_key_continue() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| if number(request).1 == 0 { 422 } else { 200 });
    enqueue(&database, &["order.paid"], 3, 3);
    let relay = database.relay().url(&receiver.url()).start();
    eventually("the other messages are delivered", || {
        database.count("delivered") == 6
    });
    drop(relay);
    assert_eq!(database.count("dead"), 3);
    assert_in_order(&receiver.requests(), 3);
}

/// G5: with `on_dead = "block"`, requeueing delivers the dead letter first; discarding lets the later messages
/// continue.
#[test]
fn a_dead_message_can_hold_its_key_until_somebody_acts() {
    let database = Database::new();
    let refuses = Arc::new(AtomicBool::new(true));
    let is_refused = Arc::clone(&refuses);
    let receiver = Receiver::answering(move |request| {
        let (key, n) = number(request);
        let is_refused = n == 0 && key != "key-2" && is_refused.load(Ordering::SeqCst);
        if is_refused { 422 } else { 200 }
    });
    enqueue(&database, &["order.paid"], 3, 3);
    let run = || {
        let mut command = database.binary(&["run", "--url", &receiver.url()]);
        command.env("OUTBOX_ON_DEAD", "block");
        Running::start(command)
    };
    let relay = run();
    eventually("the key without a dead letter is delivered", || {
        database.count("delivered") == 3 && database.count("dead") == 2
    });
    // A message that is enqueued later waits as well.
    database.enqueue_message(keyed("order.paid", "key-0", 3));
    let status = finish(database.binary(&["status", "--json"]))
        .code(0)
        .json();
    let blocked = status["blocked_keys"].as_array().expect("a list");
    let of = |key: &str| {
        blocked
            .iter()
            .find(|row| row["ordering_key"] == key)
            .unwrap_or_else(|| panic!("{key} is not in {blocked:?}"))
    };
    assert_eq!(blocked.len(), 2, "{blocked:?}");
    assert_eq!(of("key-0")["waiting"], 3);
    assert_eq!(of("key-0")["status"], "dead");
    assert_eq!(of("key-1")["waiting"], 2);
    let text = finish(database.binary(&["status"])).code(0).stdout;
    assert!(text.contains("key-0"), "{text}");

    refuses.store(false, Ordering::SeqCst);
    let sequence = |key: &str| {
        let n = database.number(&format!(
            "SELECT sequence FROM {{o}}_dead WHERE ordering_key = '{key}'"
        ));
        n.to_string()
    };
    finish(database.binary(&["dead", "requeue", &sequence("key-0")])).code(0);
    eventually("the requeued message and the ones behind it", || {
        database.count("delivered") == 7
    });
    finish(database.binary(&["dead", "discard", &sequence("key-1")])).code(0);
    eventually("the messages behind the discarded one", || {
        database.count("delivered") == 9
    });
    drop(relay);
    let requests = receiver.requests();
    let order = by_key(&requests);
    assert_eq!(order["key-0"], [0, 0, 1, 2, 3]);
    assert_eq!(order["key-1"], [0, 1, 2]);
    assert_eq!(order["key-2"], [0, 1, 2]);
}

/// G5: a key that waits for the retry of its first message is shown.
#[test]
fn status_shows_keys_that_wait_for_a_retry() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| {
        if number(request).0 == "key-1" {
            500
        } else {
            200
        }
    });
    enqueue(&database, &["order.paid"], 2, 5);
    let mut command = database.binary(&["run", "--url", &receiver.url()]);
    command.env("OUTBOX_BACKOFF", "1h");
    let relay = Running::start(command);
    eventually("the other key is delivered", || {
        database.count("delivered") == 5
    });
    eventually("the first message waits", || {
        database.count("retrying") == 1
    });
    drop(relay);
    let status = finish(database.binary(&["status", "--json"]))
        .code(0)
        .json();
    let blocked = &status["blocked_keys"][0];
    assert_eq!(blocked["ordering_key"], "key-1");
    assert_eq!(blocked["status"], "retrying");
    assert_eq!(blocked["reason"], "SERVER_ERROR");
    assert_eq!(blocked["waiting"], 4);
    assert_eq!(status["blocked_keys"].as_array().map(Vec::len), Some(1));
}

/// G5: the parts of a fan-out keep the position of the whole message, and a destination that hangs delays no other
/// destination's parts.
#[test]
fn the_parts_of_a_fan_out_keep_the_order_at_each_destination() {
    let database = Database::new();
    let hold = Arc::new(Hold::default());
    let held = Arc::clone(&hold);
    let slow = Receiver::answering(move |_| {
        held.wait();
        200
    });
    let (receiver, watch) = watching(|_| 200);
    enqueue(&database, &["order.created", "order.paid"], 5, 8);
    let relay = patient(&database)
        .destination(Destination::new("a", &receiver.url()).expect("a destination"))
        .destination(Destination::new("b", &slow.url()).expect("a destination"))
        .route_to_each("*", &["a", "b"])
        .start()
        .expect("the relay starts");
    receiver.wait_for(40);
    hold.open();
    slow.wait_for(40);
    eventually("all parts are delivered", || {
        database.count("delivered") == 80
    });
    drop(relay);
    watch.assert_never_two_at_once();
    assert_in_order(&receiver.requests(), 8);
    assert_in_order(&slow.requests(), 8);
}

/// G5: messages without a destination share one order with the parts of a fan-out. No message of a key waits for a
/// poll when the key moves between the two.
#[test]
fn a_key_continues_at_once_from_one_of_its_orders_to_the_other() {
    let database = Database::new();
    let (receiver, _) = watching(|_| 200);
    // Every second message goes to two destinations, the others to one of them.
    enqueue(&database, &["order.created", "order.paid"], 3, 10);
    let relay = database
        .relay()
        .poll_interval(NEVER)
        .destination(Destination::new("a", &receiver.url()).expect("a destination"))
        .destination(Destination::new("b", &receiver.url().replace("events", "b")).expect("one"))
        .route_to_each("order.created", &["a", "b"])
        .route("order.paid", "a")
        .start()
        .expect("the relay starts");
    eventually("all parts are delivered", || {
        database.count("delivered") == 45
    });
    drop(relay);
    let requests = receiver.requests().into_iter();
    let at_a: Vec<Request> = requests
        .filter(|request| request.line.contains("/events"))
        .collect();
    assert_in_order(&at_a, 10);
}

/// G5, R50: a role that may connect can take any advisory lock, and nothing else.
#[test]
fn a_stranger_holds_up_no_keyed_message_with_the_locks_that_anybody_may_take() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut stranger = database.connect();
    let role = format!("stranger_{}", database.schema());
    let lock = |n| {
        let outbox = format!(
            "'{}'::regclass::oid::bigint::bit(32)::integer",
            database.name()
        );
        format!("SELECT pg_advisory_lock({outbox}, {n})")
    };
    stranger
        .batch_execute(&format!(
            "{}; {}; CREATE ROLE {role}; SET ROLE {role}",
            lock(1),
            lock(2)
        ))
        .expect("locked");
    let row = format!("SELECT FROM {}_lock FOR UPDATE", database.name());
    assert!(
        stranger.batch_execute(&row).is_err(),
        "the role has no right"
    );
    let relay = patient(&database).url(&receiver.url());
    let relay = relay.start().expect("the relay starts");
    for n in 0..20 {
        database.enqueue_message(keyed("order.paid", "key", n));
    }
    eventually("all messages are settled", || relay.stats().delivered == 20);
    assert_in_order(&receiver.requests(), 20);

    database.execute("DELETE FROM {o}_lock");
    database.enqueue_message(keyed("order.paid", "other", 0));
    eventually("a missing row is inserted", || {
        relay.stats().delivered == 21
    });
    stranger
        .batch_execute(&format!("RESET ROLE; DROP ROLE {role}"))
        .expect("dropped");
}

/// R9, G5: a message that is committed while the one before it is being settled is found at once, although the
/// claimer has passed it.
#[test]
fn a_message_enqueued_while_its_key_is_settled_does_not_wait_for_a_poll() {
    let database = Database::new();
    let receiver = Receiver::ok();
    // No settle ends while a session holds the lock.
    let lock = format!("hashtext('{}')", database.schema());
    let mut holder = database.connect();
    holder
        .batch_execute(&format!(
            "CREATE FUNCTION {s}.hold() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN PERFORM pg_advisory_xact_lock_shared({lock}); RETURN NULL; END $$;
             CREATE CONSTRAINT TRIGGER hold AFTER DELETE ON {o} DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW WHEN (OLD.ordering_key IS NOT NULL) EXECUTE FUNCTION {s}.hold();
             SELECT pg_advisory_lock({lock})",
            s = database.schema(),
            o = database.name()
        ))
        .expect("a trigger");
    let relay = patient(&database).poll_interval(NEVER);
    let relay = relay
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    database.enqueue_message(keyed("order.paid", "key", 0));
    let waits = format!(
        "SELECT count(*) FROM pg_locks
          WHERE locktype = 'advisory' AND NOT granted
            AND ((classid::bigint << 32) | objid::bigint) = {lock}::bigint"
    );
    eventually("the settle waits for the lock", || {
        database.number(&waits) == 1
    });
    database.enqueue_message(keyed("order.paid", "key", 1));
    // When the second of these arrives, the claimer has passed everything from before the first.
    for n in 0..2 {
        database.enqueue("order.created", json!({ "key": "none", "n": n }));
        receiver.wait_for(n + 2);
    }
    eventually("these messages are settled", || {
        relay.stats().delivered == 2
    });
    holder
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .expect("unlocked");
    receiver.wait_for(4);
    eventually("all messages are settled", || relay.stats().delivered == 4);
    assert_in_order(&receiver.requests(), 2);
}

/// Makes every claim of a message with this number fail.
fn refuse_claims_of(database: &Database, n: u64) {
    let refuse = format!(
        "CREATE FUNCTION {s}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
            IF NEW.locked_by IS NOT NULL AND NEW.payload->>'n' = '{n}' THEN
                RAISE EXCEPTION 'not now';
            END IF;
            RETURN NEW;
         END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON {o} FOR EACH ROW EXECUTE FUNCTION {s}.refuse()",
        s = database.schema(),
        o = database.name()
    );
    let mut conn = database.connect();
    conn.batch_execute(&refuse).expect("a trigger");
}

/// G2: messages without a key have a claim statement of their own, which succeeds when the statement for keys fails.
#[test]
fn a_failed_claim_of_keys_does_not_lose_the_messages_claimed_beside_it() {
    let database = Database::new();
    let receiver = Receiver::ok();
    refuse_claims_of(&database, 7);
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("the relay starts");
    database
        .outbox()
        .enqueue_batch(
            &mut database.connect(),
            [
                keyed("order.paid", "key", 7),
                NewMessage::new("order.paid", &json!({ "key": "none", "n": 1 })).expect("JSON"),
            ],
        )
        .expect("enqueued");
    receiver.wait_for(1);
    database.execute("DROP TRIGGER refuse ON {o}");
    eventually("both messages are delivered", || {
        relay.stats().delivered == 2
    });
}

/// G2: a message that cannot be claimed does not affect the message before it.
#[test]
fn a_settle_works_where_the_next_of_its_key_cannot_be_claimed() {
    let database = Database::new();
    let receiver = Receiver::ok();
    refuse_claims_of(&database, 1);
    enqueue(&database, &["order.paid"], 1, 2);
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("the relay starts");
    receiver.wait_for(1);
    eventually("the message is settled", || relay.stats().delivered == 1);
    database.execute("DROP TRIGGER refuse ON {o}");
    eventually("both messages are delivered", || {
        relay.stats().delivered == 2
    });
    assert_in_order(&receiver.requests(), 2);
}

/// R9: a walk over many waiting keys takes seconds; due messages do not wait for its end.
#[test]
fn keys_that_wait_hold_no_message_of_others() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at)
         SELECT 'order.paid', '1', 'key-' || n, now() + interval '1 hour'
           FROM generate_series(1, 200000) n",
    );
    let receiver = Receiver::ok();
    // Each poll begins a walk over all keys unless the last walk is recent.
    let relay = database.relay().poll_interval(Duration::from_millis(1));
    let relay = relay
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    let mut times = Vec::new();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(10) {
        let enqueued = Instant::now();
        database.enqueue("order.created", json!({ "n": times.len() }));
        receiver.wait_for(times.len() + 1);
        times.push(enqueued.elapsed());
    }
    // The 90th percentile, not the maximum: the machine may be busy. A walk would delay nearly all messages.
    times.sort();
    let most = times[times.len() * 9 / 10];
    assert!(most < Duration::from_millis(700), "{most:?}");
    drop(relay);
}

/// G2: constant fan-outs and releases do not restart the walk each time.
#[test]
fn a_key_at_the_end_has_its_turn_while_others_are_split() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at)
         SELECT 'order.paid', '1', 'key-' || n, now() + interval '1 hour'
           FROM generate_series(1, 40000) n",
    );
    database.execute(
        "INSERT INTO {o} (topic, payload) SELECT 'both', '2' FROM generate_series(1, 10000)",
    );
    // Due before the floor, the index position where the lane's next claim starts.
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at)
         VALUES ('order.paid', '3', 'last', now() - interval '1 hour')",
    );
    // A small batch makes many claims.
    let mut relay = database.relay().batch(20);
    for name in ["a", "b", "c"] {
        let destination = Destination::new(name, &receiver.url()).expect("a destination");
        relay = relay.destination(destination);
    }
    let relay = relay.route_to_each("both", &["a", "b"]);
    let relay = relay
        .route("order.paid", "c")
        .start()
        .expect("the relay starts");
    let is_last = |request: &Request| request.json() == json!(3);
    eventually("the last key has arrived", || {
        receiver.requests().iter().any(is_last)
    });
    let before = receiver.count();
    assert!(
        before < 10_000,
        "the last key waited for {before} other messages"
    );
    drop(relay);
}

/// A dispatcher that takes no time and records the numbers of each key.
#[derive(Default, Clone)]
struct Sent(Arc<Mutex<HashMap<String, Vec<u64>>>>);

impl Dispatcher for Sent {
    fn dispatch(&self, message: &Message) -> Outcome {
        let payload: serde_json::Value = serde_json::from_str(&message.payload).expect("JSON");
        let key = payload["key"].as_str().expect("a key").to_owned();
        let n = payload["n"].as_u64().expect("a number");
        let mut sent = self.0.lock().expect("no panic holds it");
        sent.entry(key).or_default().push(n);
        Outcome::Delivered(Response::default())
    }
}

/// G5: many keys continue at once, by two settlers, while other keys are claimed. Messages without room in the queue
/// wait for room and are not released.
#[test]
fn keys_continue_while_others_are_claimed_and_nothing_is_released() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key)
         SELECT 'order.paid', json_build_object('key', key, 'n', n), key
           FROM generate_series(0, 2) n, (SELECT 'key-' || k AS key FROM generate_series(1, 6000) k) keys
          ORDER BY n",
    );
    let sent = Sent::default();
    let relay = database
        .relay()
        .dispatcher(sent.clone())
        .start()
        .expect("the relay starts");
    eventually("all messages are delivered", || {
        relay.stats().delivered == 18_000
    });
    assert_eq!(relay.stats().released, 0);
    let sent = sent.0.lock().expect("no panic holds it");
    assert_eq!(sent.len(), 6000);
    assert!(sent.values().all(|numbers| numbers == &[0, 1, 2]));
    drop(sent);
    drop(relay);
}

/// G5, R14: a lease can end early, by a step of the database's clock or by hand. Another relay may take its messages
/// at once, so the first relay sends none of them any more. `sql` ends all leases.
fn no_send_begins_under_a_lease_that_ended_early(sql: &str) {
    let mut tries = 0;
    while !is_other_relay_first(sql) {
        tries += 1;
        assert!(
            tries < 10,
            "the relay always claims again before another one"
        );
    }
}

/// `false`: under its new lease the first relay has claimed messages again before the other one took them over.
fn is_other_relay_first(sql: &str) -> bool {
    let database = Database::new();
    let (first, gate) = Receiver::held();
    let second = Receiver::ok();
    enqueue(&database, &["a"], 10, 2);
    let slow = database.relay().url(&first.url()).concurrency(1);
    let slow = slow
        .lease(Duration::from_secs(600))
        .send_timeout(Duration::from_secs(120))
        .start()
        .expect("the relay starts");
    first.wait_for(1);
    eventually("the relay holds the first message of each key", || {
        database.count("sending") == 10
    });
    database.execute(sql);
    let other = database.relay().url(&second.url());
    let other = other.start().expect("the relay starts");
    eventually("the relay has noticed the lost lease", || {
        slow.stats().leases_lost == 1
    });
    let has_claimed_again = || slow.stats().claimed > 10;
    eventually(
        "the other relay has sent all, or the first has some",
        || second.count() == 20 || has_claimed_again(),
    );
    let is_other_first = !has_claimed_again();
    gate.open();
    end(&slow);
    end(&other);
    if is_other_first {
        assert_eq!(first.count(), 1, "only the message in flight was sent");
        assert_in_order(&second.requests(), 2);
    }
    is_other_first
}

#[test]
fn after_a_step_of_the_databases_clock_no_older_message_comes_after_a_later_one() {
    no_send_begins_under_a_lease_that_ended_early(
        "UPDATE {o}_lease SET expires_at = clock_timestamp() - interval '1 s'",
    );
}

#[test]
fn when_a_lease_is_removed_by_hand_no_older_message_comes_after_a_later_one() {
    no_send_begins_under_a_lease_that_ended_early("DELETE FROM {o}_lease");
}

/// G5, R48: a message that the settler has claimed without room for it is released, and claimed again when there is
/// room.
#[test]
fn a_key_whose_messages_are_larger_than_their_share_continues_at_once() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut relay = database.relay().poll_interval(NEVER);
    for n in 0..40 {
        let name = format!("destination-{n}");
        let destination = Destination::new(&name, &receiver.url()).expect("a URL");
        relay = relay.destination(destination);
    }
    database.execute(
        "INSERT INTO {o} (topic, destination, payload, ordering_key)
         SELECT 'large', 'destination-1', to_json(repeat('x', 1000000)), 'key' FROM generate_series(1, 30)",
    );
    let relay = relay.start().expect("the relay starts");
    receiver.wait_for(1);
    let began = Instant::now();
    receiver.wait_for(30);
    // A walk over all keys starts every second; no message needs one.
    assert!(began.elapsed() < Duration::from_secs(15));
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(relay.stats().delivered, 30);
}

/// R11, R48: keys that wait for room do not keep a relay busy when their destination is paused.
#[test]
fn keys_that_waited_for_room_at_a_destination_that_was_closed_are_not_due() {
    let database = Database::new();
    let is_slow = Arc::new(AtomicBool::new(true));
    let slow = Arc::clone(&is_slow);
    let receiver = Receiver::start(move |_, stream| {
        if slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(300));
        }
        stream.write_all(&status(200))
    });
    let destination = Destination::new("slow", &receiver.url()).expect("a URL");
    let relay = database.relay().destination(destination);
    let relay = relay.route("slow", "slow").url(&receiver.url());
    enqueue(&database, &["slow"], 300, 3);
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at)
         VALUES ('other', '1', 'other', now() + interval '1 hour')",
    );
    // With a limit, no settler continues a key.
    let relay = relay.limit(1_000_000).start().expect("the relay starts");
    receiver.wait_for(40);
    let name = database.name().parse().expect("a name");
    let which = admin::Pausable::Destination;
    let mut conn = database.connect();
    admin::pause(&mut conn, &name, which, "slow", "manual", None).expect("paused");
    assert!(relay.wait_until_idle(PATIENCE), "nothing is due");
    is_slow.store(false, Ordering::Relaxed);
    admin::resume(&mut conn, &name, which, "slow").expect("resumed");
    receiver.wait_for(900);
    assert!(
        relay.wait_until_idle(PATIENCE),
        "all messages are delivered"
    );
    assert_in_order(&receiver.requests(), 3);
}
