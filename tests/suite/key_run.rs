//! Runs of a key: several due messages of a key are claimed, sent one after the other and settled together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::config::{Breaker, Config, Mode};
use diesel_outbox::{
    Destination, Dispatcher, Failure, Message, NewMessage, Outcome, ProblemKind, ReasonCode, Relay,
    RelayHandle, Response,
};
use serde_json::{Value, json};

use crate::support::{Database, File, Gate, Receiver, Request, Running, end, eventually, finish};

fn message(n: u64) -> NewMessage {
    let topic = ["order.created", "order.paid"][usize::from(n % 2 == 1)];
    let message = NewMessage::new(topic, &json!({ "n": n })).expect("JSON");
    message.ordering_key("order-7")
}

/// Enqueues the messages 0, 1, … of one key.
fn enqueue(database: &Database, count: u64) {
    let conn = &mut database.connect();
    let messages: Vec<NewMessage> = (0..count).map(message).collect();
    let enqueued = database.outbox().enqueue_batch(conn, messages);
    enqueued.expect("enqueued");
}

fn number(request: &Request) -> u64 {
    request.json()["n"].as_u64().expect("a number")
}

/// The numbers of a batched request.
fn numbers(request: &Request) -> Vec<u64> {
    let body = request.json();
    let events = body.as_array().expect("an array").iter();
    let number = |event: &Value| event["data"]["n"].as_u64().expect("a number");
    events.map(number).collect()
}

/// The numbers in the order of their arrival.
fn arrived(receiver: &Receiver) -> Vec<u64> {
    receiver.requests().iter().map(number).collect()
}

fn destination(receiver: &Receiver, key_run: usize) -> Destination {
    let destination = Destination::new("receiver", &receiver.url()).expect("a destination");
    destination.configure(|destination| {
        destination.policy.key_run = key_run;
        destination.policy.breaker = None;
    })
}

fn started(database: &Database, destination: Destination) -> RelayHandle {
    let relay = database.relay().send_timeout(Duration::from_secs(20));
    let relay = relay
        .lease(Duration::from_secs(60))
        .destination(destination);
    relay.route("*", "receiver").start().expect("a relay")
}

/// How many transactions have recorded the results.
fn settles(database: &Database) -> i64 {
    database.number("SELECT count(DISTINCT xmin::text) FROM {o}_ledger")
}

#[track_caller]
fn all_delivered(database: &Database, count: i64) {
    eventually("all messages are delivered", || {
        database.count("delivered") == count
    });
}

/// The number of messages that the receiver of [`holding`] does not accept.
const FAILS: u64 = 500;

/// A receiver that holds its responses to message `n` until the gate is opened.
fn holding(n: u64) -> (Receiver, Gate) {
    let (gate, pass) = Gate::new();
    let receiver = Receiver::answering(move |request| match number(request) {
        FAILS => 500,
        one if one == n => {
            pass();
            200
        }
        _ => 200,
    });
    (receiver, gate)
}

/// R61: across topics, one at a time, and with one commit.
#[test]
fn a_run_is_sent_in_order_and_settled_together() {
    for (key_run, transactions) in [(1, 20), (50, 1)] {
        let database = Database::new();
        let busy = AtomicUsize::new(0);
        let receiver = Receiver::answering(move |_| {
            let is_alone = busy.fetch_add(1, Ordering::SeqCst) == 0;
            busy.fetch_sub(1, Ordering::SeqCst);
            if is_alone { 200 } else { 500 }
        });
        enqueue(&database, 20);
        let relay = started(&database, destination(&receiver, key_run));
        all_delivered(&database, 20);
        end(&relay);
        assert_eq!(arrived(&receiver), (0..20).collect::<Vec<_>>());
        assert_eq!(settles(&database), transactions, "key_run {key_run}");
    }
}

/// R61: the messages before the failed one are delivered, and those behind it wait without an attempt.
#[test]
fn a_message_that_fails_ends_its_run() {
    let database = Database::new();
    let fails = AtomicUsize::new(2);
    let receiver = Receiver::answering(move |request| {
        let fail = |left: usize| left.checked_sub(1);
        let is_failing = number(request) == 3
            && fails
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, fail)
                .is_ok();
        if is_failing { 503 } else { 200 }
    });
    enqueue(&database, 7);
    let relay = started(&database, destination(&receiver, 50));
    all_delivered(&database, 7);
    end(&relay);
    assert_eq!(arrived(&receiver), [0, 1, 2, 3, 3, 3, 4, 5, 6]);
    let attempts = "SELECT string_agg(attempts::text, ' ' ORDER BY sequence) FROM {o}_ledger";
    assert_eq!(database.text(attempts).as_deref(), Some("1 1 1 3 1 1 1"));
}

/// R61: a dead letter ends the run, too, and the key continues behind it.
#[test]
fn a_dead_letter_ends_its_run_and_not_its_key() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| if number(request) == 1 { 422 } else { 200 });
    enqueue(&database, 4);
    let relay = started(&database, destination(&receiver, 50));
    all_delivered(&database, 3);
    end(&relay);
    assert_eq!(arrived(&receiver), [0, 1, 2, 3]);
    assert_eq!(database.count("dead"), 1);
}

/// R61: HTTP has one response for all. After a refusal the messages are sent alone, in order.
#[test]
fn a_run_in_batched_mode_is_one_request() {
    let database = Database::new();
    let receiver = Receiver::answering(move |request| match numbers(request).contains(&3) {
        true => 422,
        false => 200,
    });
    enqueue(&database, 10);
    let relay = started(
        &database,
        destination(&receiver, 50)
            .configure(|destination| destination.policy.mode = Some(Mode::Batched)),
    );
    all_delivered(&database, 9);
    end(&relay);
    let requests: Vec<Vec<u64>> = receiver.requests().iter().map(numbers).collect();
    let all: Vec<u64> = (0..10).collect();
    let alone = [0, 1, 2, 3].map(|n| vec![n]);
    let expected = [vec![all.clone()], alone.to_vec(), vec![all[4..].to_vec()]].concat();
    assert_eq!(requests, expected);
    assert_eq!(database.count("dead"), 1);
}

/// R61: a request that fails counts for the first message alone, which is then sent alone.
#[test]
fn a_run_in_batched_mode_fails_as_a_whole() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match numbers(request).len() {
        10 => 503,
        _ => 200,
    });
    enqueue(&database, 10);
    let relay = started(
        &database,
        destination(&receiver, 50)
            .configure(|destination| destination.policy.mode = Some(Mode::Batched)),
    );
    all_delivered(&database, 10);
    end(&relay);
    let requests: Vec<Vec<u64>> = receiver.requests().iter().map(numbers).collect();
    let all: Vec<u64> = (0..10).collect();
    assert_eq!(requests, [all.clone(), vec![0], all[1..].to_vec()]);
    let attempts = "SELECT string_agg(attempts::text, ' ' ORDER BY sequence) FROM {o}_ledger";
    let attempts = database.text(attempts);
    assert_eq!(attempts.as_deref(), Some("2 1 1 1 1 1 1 1 1 1"));
}

/// A broker that has an outcome for each message, and keeps the numbers of what it has taken.
#[derive(Clone, Default)]
struct Broker(Arc<Mutex<Vec<Vec<u64>>>>);

impl Broker {
    fn take(&self, messages: &[Message]) -> Vec<Outcome> {
        let mut taken = Vec::new();
        let mut continues = true;
        let outcomes = messages.iter().map(|message| {
            let payload: Value = serde_json::from_str(&message.payload).expect("JSON");
            let n = payload["n"].as_u64().expect("a number");
            let mut failure = Failure::new(ReasonCode::Rejected, "no");
            failure.response.status = Some(422);
            let outcome = match n {
                _ if !continues => Outcome::Wait(Failure::new(ReasonCode::Failed, "not sent")),
                3 => Outcome::Dead(failure),
                6 if message.attempts == 0 => Outcome::Retry(failure),
                _ => Outcome::Delivered(Response::default()),
            };
            continues = matches!(outcome, Outcome::Delivered(_));
            taken.extend(continues.then_some(n));
            outcome
        });
        let outcomes = outcomes.collect();
        let mut all = self.0.lock().expect("no panic holds it");
        all.extend((!taken.is_empty()).then_some(taken));
        outcomes
    }
}

impl Dispatcher for Broker {
    fn dispatch(&self, message: &Message) -> Outcome {
        self.take(std::slice::from_ref(message)).remove(0)
    }

    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        self.take(messages)
    }
}

/// A broker without requests for several messages.
struct OneByOne(Broker);

impl Dispatcher for OneByOne {
    fn dispatch(&self, message: &Message) -> Outcome {
        self.0.dispatch(message)
    }
}

/// R61: the default of `dispatch_batch` sends nothing behind a message that is not delivered.
#[test]
fn a_dispatcher_of_single_messages_keeps_the_order_of_a_run() {
    let database = Database::new();
    enqueue(&database, 10);
    let broker = Broker::default();
    let destination = Destination::new("broker", "http://broker.test/").expect("a destination");
    let relay = database.relay().dispatcher(OneByOne(broker.clone()));
    let relay = relay.destination(destination.configure(|destination| {
        destination.policy.key_run = 50;
        destination.policy.mode = Some(Mode::Batched);
    }));
    let relay = relay.route("*", "broker").start().expect("a relay");
    all_delivered(&database, 9);
    end(&relay);
    let taken = broker.0.lock().expect("no panic holds it").concat();
    assert_eq!(taken, [0, 1, 2, 4, 5, 6, 7, 8, 9]);
}

/// The mode holds for a dispatcher of the application without any destination, too.
#[test]
fn a_dispatcher_without_destinations_gets_many_messages_in_batched_mode() {
    let database = Database::new();
    for n in 0..50 {
        database.enqueue("t", json!({ "n": 100 + n }));
    }
    let broker = Broker::default();
    let mut config = Config::default();
    for (setting, value) in [
        ("DATABASE_URL", database.url.as_str()),
        ("OUTBOX_TABLE", &database.name()),
        ("OUTBOX_MODE", "batched"),
    ] {
        config.set(setting, value).expect(setting);
    }
    let relay = Relay::from_config(config).dispatcher(broker.clone());
    let relay = relay.start().expect("a relay");
    all_delivered(&database, 50);
    end(&relay);
    let taken = broker.0.lock().expect("no panic holds it");
    assert!(taken.iter().any(|one| one.len() > 1), "{taken:?}");
}

/// R61: a message that cannot be sent keeps those behind it out of the request.
#[test]
fn a_batched_request_ends_before_what_cannot_be_sent() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let conn = &mut database.connect();
    let large = NewMessage::new("order.paid", &"x".repeat(1_000)).expect("JSON");
    let messages = vec![message(0), large.ordering_key("order-7"), message(2)];
    database
        .outbox()
        .enqueue_batch(conn, messages)
        .expect("enqueued");
    let mut destination = destination(&receiver, 50)
        .configure(|destination| destination.policy.mode = Some(Mode::Batched));
    destination.max_payload_bytes = Some(100);
    let relay = started(&database, destination);
    all_delivered(&database, 2);
    end(&relay);
    let numbers: Vec<Value> = (receiver.requests().iter())
        .flat_map(|request| request.json().as_array().expect("an array").clone())
        .map(|event| event["data"]["n"].clone())
        .collect();
    assert_eq!(numbers, [json!(0), json!(2)]);
}

/// R61: the beginning of a run that a dispatcher has delivered stays delivered, and comes once. The rest goes back.
#[test]
fn a_dispatcher_has_an_outcome_for_each_message_of_a_run() {
    let database = Database::new();
    enqueue(&database, 10);
    let broker = Broker::default();
    let destination = Destination::new("broker", "http://broker.test/").expect("a destination");
    let relay = database.relay().dispatcher(broker.clone());
    let relay = relay.destination(destination.configure(|destination| {
        destination.policy.key_run = 50;
        destination.policy.mode = Some(Mode::Batched);
    }));
    let relay = relay.route("*", "broker").start().expect("a relay");
    all_delivered(&database, 9);
    end(&relay);
    let taken = broker.0.lock().expect("no panic holds it").clone();
    let rest = vec![vec![6], vec![7, 8, 9]];
    assert_eq!(taken, [vec![vec![0, 1, 2], vec![4, 5]], rest].concat());
    let attempts = "SELECT string_agg(attempts::text, ' ' ORDER BY sequence) FROM {o}_ledger";
    assert_eq!(
        database.text(attempts).as_deref(),
        Some("1 1 1 1 1 1 2 1 1 1")
    );
    assert_eq!(database.count("dead"), 1);
}

/// R61: a message that is not due, locked or of another destination is not left out.
#[test]
fn a_run_has_no_gap() {
    let database = Database::new();
    let receiver = Receiver::ok();
    enqueue(&database, 6);
    let third = "SELECT sequence FROM {o} ORDER BY sequence OFFSET 2 LIMIT 1";
    let sequence = database.number(third);
    let mut person = database.connect();
    AnsiTransactionManager::begin_transaction(&mut person).expect("a transaction");
    let lock = format!(
        "SELECT FROM {} WHERE sequence = {sequence} FOR UPDATE",
        database.name()
    );
    person.batch_execute(&lock).expect("locked");
    let relay = started(&database, destination(&receiver, 50));
    all_delivered(&database, 2);
    let delay = "UPDATE {o} SET available_at = now() + interval '1 hour' WHERE sequence = ";
    database.execute(&format!("{delay}{}", sequence + 2));
    AnsiTransactionManager::commit_transaction(&mut person).expect("unlocked");
    all_delivered(&database, 4);
    assert_eq!(arrived(&receiver), [0, 1, 2, 3]);
    database.execute("UPDATE {o} SET available_at = now()");
    all_delivered(&database, 6);
    end(&relay);
    assert_eq!(arrived(&receiver), [0, 1, 2, 3, 4, 5]);
}

/// R61: the option of a row, set by a flag.
#[test]
fn an_endpoint_has_runs_by_its_policy() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let put = |key_run: &str| {
        let arguments = [
            "endpoint",
            "put",
            "acme",
            &receiver.url(),
            "--key-run",
            key_run,
        ];
        finish(database.binary(&arguments))
    };
    let refused = put("501").code(2).stderr;
    assert!(
        refused.contains("--key-run") && refused.contains("500"),
        "{refused}"
    );
    put("5").code(0);
    let policy = "SELECT policy->>'key_run' FROM {o}_endpoint";
    assert_eq!(database.text(policy).as_deref(), Some("5"));
    let conn = &mut database.connect();
    let messages: Vec<NewMessage> = (0..10).map(|n| message(n).destination("acme")).collect();
    database
        .outbox()
        .enqueue_batch(conn, messages)
        .expect("enqueued");
    let relay = database.relay().endpoint_threads(4);
    let relay = relay.start().expect("a relay");
    all_delivered(&database, 10);
    end(&relay);
    assert_eq!(arrived(&receiver), (0..10).collect::<Vec<_>>());
    assert_eq!(settles(&database), 2);
}

/// R61: an endpoint gets one message at a time, in batched mode as an array.
#[test]
fn a_run_to_an_endpoint_in_batched_mode_is_a_request_for_each_message() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let put = ["endpoint", "put", "acme", &receiver.url()];
    let policy = ["--key-run", "5", "--mode", "batched"];
    finish(database.binary(&[put.as_slice(), &policy].concat())).code(0);
    enqueue(&database, 5);
    let relay = database.relay().endpoint_threads(4);
    let relay = relay.start().expect("a relay");
    all_delivered(&database, 5);
    end(&relay);
    let requests: Vec<Vec<u64>> = receiver.requests().iter().map(numbers).collect();
    assert_eq!(requests, [0, 1, 2, 3, 4].map(|n| vec![n]));
}

/// R61: the option of a configured destination is refused outside its range.
#[test]
fn a_run_has_at_most_500_messages() {
    let database = Database::new();
    for key_run in [0, 501] {
        let destination = Destination::new("a", "http://a.test/").expect("a destination");
        let relay = database
            .relay()
            .destination(destination.configure(|destination| destination.policy.key_run = key_run));
        let error = relay.start().expect_err("out of range").to_string();
        assert!(
            error.contains("key_run") && error.contains("500"),
            "{error}"
        );
    }
}

/// R61: after a crash, the run comes again from its beginning.
#[test]
fn a_relay_that_is_killed_in_a_run_repeats_it_from_the_beginning() {
    let database = Database::new();
    let (receiver, gate) = holding(2);
    enqueue(&database, 5);
    let settings = File::new(&format!(
        "[destinations.receiver]\nurl = \"{}\"\ninternal = true\nkey_run = 50\n\
         [[routes]]\ntopic = \"*\"\nto = \"receiver\"\n",
        receiver.url()
    ));
    let run = || Running::start(database.binary(&["run", "--config", settings.path()]));
    let first = run();
    receiver.wait_for(3);
    first.kill();
    gate.open();
    let second = run();
    all_delivered(&database, 5);
    drop(second);
    assert_eq!(arrived(&receiver), [0, 1, 2, 0, 1, 2, 3, 4]);
}

/// R61: the message that is being sent ends, and the rest goes back without an attempt.
#[test]
fn a_relay_that_stops_in_a_run_releases_the_rest() {
    let database = Database::new();
    let (receiver, gate) = holding(1);
    enqueue(&database, 5);
    let relay = started(&database, destination(&receiver, 50));
    receiver.wait_for(2);
    let is_stopping = || {
        let health = relay.health();
        let mut problems = health.problems().iter();
        problems.any(|one| one.kind == ProblemKind::Stopping)
    };
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| end(&relay));
        eventually("the relay stops", is_stopping);
        gate.open();
        stopping.join().expect("a clean shutdown");
    });
    assert_eq!(arrived(&receiver), [0, 1]);
    assert_eq!(database.count("delivered"), 2);
    let free = "SELECT count(*) FROM {o} WHERE locked_by IS NULL AND attempts = 0";
    assert_eq!(database.number(free), 3);
}

/// Enqueues five messages of one key, and has `close` end their run during the second send. The rest is free again, and
/// no attempt of it was counted.
fn ended_in_a_run(
    destination: impl FnOnce(Destination) -> Destination,
    close: impl FnOnce(&Database),
) -> (Database, Receiver, RelayHandle) {
    let database = Database::new();
    let (receiver, gate) = holding(1);
    enqueue(&database, 5);
    let relay = started(&database, destination(self::destination(&receiver, 50)));
    receiver.wait_for(2);
    close(&database);
    gate.open();
    eventually("the run has ended", || {
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL") == 0
    });
    assert_eq!(of_the_key(&receiver), [0, 1]);
    let free = "SELECT count(*) FROM {o} WHERE attempts = 0 AND ordering_key = 'order-7'";
    assert_eq!(database.number(free), 3);
    (database, receiver, relay)
}

/// The numbers of the five messages in the order of their arrival, without those of other messages.
fn of_the_key(receiver: &Receiver) -> Vec<u64> {
    let arrived = arrived(receiver).into_iter();
    arrived.filter(|n| *n < 5).collect()
}

/// Waits until the relay leaves a message of this topic alone.
fn until_paused(database: &Database, topic: &str) {
    eventually("the relay knows of the pause", || {
        let sequence = database.enqueue(topic, json!({ "n": 100 }));
        let is_left = || {
            let left = "SELECT count(*) FROM {o} WHERE locked_by IS NULL AND sequence = ";
            database.number(&format!("{left}{sequence}")) == 1
        };
        let until = Instant::now() + Duration::from_secs(2);
        while is_left() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        is_left()
    });
}

/// R61: an operator pauses the destination, or the topic of a message of the run.
#[test]
fn a_pause_ends_a_run() {
    for (kind, name) in [
        (Pausable::Destination, "receiver"),
        (Pausable::Topic, "order.created"),
    ] {
        let pause = |database: &Database| {
            let (conn, outbox) = (&mut database.connect(), database.outbox_name());
            admin::pause(conn, &outbox, kind, name, "a test", None).expect("paused");
            until_paused(database, "order.created");
        };
        let (database, receiver, relay) = ended_in_a_run(|destination| destination, pause);
        let (conn, outbox) = (&mut database.connect(), database.outbox_name());
        admin::resume(conn, &outbox, kind, name).expect("resumed");
        eventually("all is delivered", || {
            database.number("SELECT count(*) FROM {o}") == 0
        });
        end(&relay);
        assert_eq!(of_the_key(&receiver), (0..5).collect::<Vec<_>>());
    }
}

/// R61: messages of others open the circuit breaker of the destination.
#[test]
fn an_open_breaker_ends_a_run() {
    let mut breaker = Breaker::default();
    breaker.min_sends = 3;
    breaker.open = Duration::from_secs(2);
    let (database, receiver, relay) = ended_in_a_run(
        |destination| {
            destination.configure(|destination| destination.policy.breaker = Some(breaker))
        },
        |database| {
            (0..3).for_each(|_| {
                database.enqueue("order.paid", json!({ "n": FAILS }));
            });
            eventually("the breaker is open", || {
                database.number("SELECT count(*) FROM {o}_pause") == 1
            });
            database.execute("DELETE FROM {o} WHERE ordering_key IS NULL");
        },
    );
    all_delivered(&database, 5);
    end(&relay);
    assert_eq!(of_the_key(&receiver), (0..5).collect::<Vec<_>>());
}

/// R61: a relay that has lost its lease sends no more of a run. The rest is claimed again.
#[test]
fn a_lost_lease_ends_a_run() {
    let database = Database::new();
    let (receiver, gate) = holding(1);
    enqueue(&database, 5);
    let relay = started(&database, destination(&receiver, 50));
    receiver.wait_for(2);
    database.execute("UPDATE {o}_lease SET expires_at = clock_timestamp()");
    eventually("the relay has another lease", || {
        database.number("SELECT count(*) FROM {o}_lease WHERE expires_at > clock_timestamp()") == 1
    });
    gate.open();
    all_delivered(&database, 5);
    end(&relay);
    assert!(settles(&database) > 1, "the run had one end");
    // The messages in flight may have been taken over before their settle.
    let arrived = arrived(&receiver);
    assert!(arrived.ends_with(&[2, 3, 4]), "{arrived:?}");
    assert!(arrived.starts_with(&[0, 1]), "{arrived:?}");
}

/// R61: an expired message is dead-lettered unsent, and ends the run.
#[test]
fn a_message_that_expires_in_a_run_is_not_sent() {
    let database = Database::new();
    let (receiver, gate) = holding(1);
    let brief = message(2).expires_after(Duration::from_millis(500));
    let messages = vec![message(0), message(1), brief, message(3), message(4)];
    let conn = &mut database.connect();
    database
        .outbox()
        .enqueue_batch(conn, messages)
        .expect("enqueued");
    let relay = started(&database, destination(&receiver, 50));
    receiver.wait_for(2);
    eventually("the message has expired", || {
        database.number("SELECT count(*) FROM {o} WHERE expires_at < clock_timestamp()") == 1
    });
    gate.open();
    all_delivered(&database, 4);
    end(&relay);
    assert_eq!(arrived(&receiver), [0, 1, 3, 4]);
    let dead = "SELECT reason || ' ' || attempts FROM {o}_dead";
    assert_eq!(database.text(dead).as_deref(), Some("EXPIRED 0"));
}

/// R61, R48: the limits of a claim count for the whole run.
#[test]
fn a_run_is_limited_in_bytes() {
    let database = Database::new();
    let (receiver, gate) = holding(0);
    let large = "x".repeat(900_000);
    let conn = &mut database.connect();
    for n in 0..40 {
        let message = NewMessage::new("order.paid", &json!({ "n": n, "text": large }));
        let message = message.expect("JSON").ordering_key("order-7");
        database.outbox().enqueue(conn, message).expect("enqueued");
    }
    let relay = started(&database, destination(&receiver, 500));
    receiver.wait_for(1);
    let held = database.number("SELECT count(*) FROM {o} WHERE locked_by IS NOT NULL");
    assert!((2..=20).contains(&held), "16 MiB: {held}");
    gate.open();
    all_delivered(&database, 40);
    end(&relay);
    assert_eq!(arrived(&receiver), (0..40).collect::<Vec<_>>());
}
