//! People change endpoints while relays with different settings deliver: customers add, change, disable
//! and remove endpoints, operators pause, requeue and recover.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use diesel_outbox::admin::{self, Bulk, Note, Pausable, Selection};
use diesel_outbox::endpoints::{Endpoint, Recover};
use diesel_outbox::{Backoff, Destination, NewMessage, RelayHandle};
use fastrand::Rng;
use serde_json::json;
use uuid::Uuid;

use crate::ground::{alone, let_pass};
use crate::support::{Database, Receiver, end, eventually};

const LASTS: Duration = Duration::from_secs(8);
const DESTINATIONS: usize = 4;
const TOPICS: [&str; 3] = ["order.paid", "order.sent", "member.joined"];
/// A busy receiver, one that is gone, and one that refuses a message. Most answers are 200.
const ANSWERS: [u16; 12] = [200, 200, 200, 200, 200, 200, 200, 200, 500, 503, 410, 400];

fn soon() -> Backoff {
    Backoff::Table(vec![Duration::from_millis(50)])
}

/// A relay with threads for endpoints, or with a route.
fn relay(database: &Database, receiver: &Receiver, threads: usize) -> RelayHandle {
    let relay = database
        .keeping_relay()
        .endpoint_threads(threads)
        .send_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(3))
        .configure(|config| config.backoff = soon())
        .configure(|config| config.endpoint_backoff = soon());
    let relay = match threads {
        0 => {
            let billing = Destination::new("billing", &receiver.url()).expect("a URL");
            relay.destination(billing).route("order.*", "billing")
        }
        _ => relay,
    };
    relay.start().expect("a relay")
}

fn hook(receiver: &Receiver, rng: &mut Rng) -> Endpoint {
    let name = format!("hook-{}", rng.usize(..DESTINATIONS));
    let url = format!("{}/{}", receiver.url(), rng.u8(..2));
    let hook = Endpoint::new(name, url);
    match rng.u8(..3) {
        0 => hook,
        1 => hook.topics(["order.*"]),
        _ => hook
            .topics(["member.*", "order.paid"])
            .filter(json!({"n": [{"numeric": [">", 20]}]})),
    }
}

fn message(rng: &mut Rng) -> NewMessage {
    let topic = TOPICS[rng.usize(..TOPICS.len())];
    let message = NewMessage::new(topic, &json!({ "n": rng.u8(..100) })).expect("JSON");
    let message = match rng.u8(..3) {
        0 => message.ordering_key(rng.u8(..4).to_string()),
        _ => message,
    };
    match rng.u8(..6) {
        0 => message.destination(format!("hook-{}", rng.usize(..DESTINATIONS))),
        _ => message,
    }
}

/// One act of a person.
fn act(database: &Database, receiver: &Receiver, rng: &mut Rng) {
    let (outbox, name) = (database.outbox(), database.outbox_name());
    let (conn, note) = (&mut database.connect(), Note::new("alice", ""));
    let all = outbox.endpoints();
    let one = hook(receiver, rng);
    match rng.u8(..8) {
        0 => all.put(conn, &one).expect("put"),
        1 => drop(all.disable(conn, &one.name, "").expect("disabled")),
        2 => drop(all.enable(conn, &one.name).expect("enabled")),
        3 | 4 => {
            all.remove(conn, &one.name).expect("removed");
            let_pass(Duration::from_millis(rng.u64(..500)));
            all.put(conn, &one).expect("put again");
        }
        5 => {
            let time = Some(Duration::from_millis(500));
            admin::pause(conn, &name, Pausable::Destination, &one.name, "x", time).expect("paused");
        }
        6 => {
            let letters = admin::matching_dead_letters(conn, &name, &Selection::default());
            let mut letters = letters.expect("dead letters");
            rng.shuffle(&mut letters);
            letters.truncate(10);
            admin::requeue(conn, &name, &letters, &note).expect("requeued");
        }
        _ => {
            let since = SystemTime::now() - Duration::from_secs(5);
            let what = Recover::AndMissed;
            let done = all.recover(conn, &one.name, since, what, Bulk::new(&note));
            done.expect("recovered");
        }
    }
}

/// G2
#[test]
fn no_act_of_people_leaves_a_message_behind() {
    let _alone = alone();
    let database = Database::new();
    let has_ended = AtomicBool::new(false);
    let receiver = Receiver::answering(|_| ANSWERS[fastrand::usize(..ANSWERS.len())]);
    let seed = fastrand::u64(..);
    let mut rng = Rng::with_seed(seed);
    let relays = [0, 4].map(|threads| relay(&database, &receiver, threads));
    let conn = &mut database.connect();
    for _ in 0..2 * DESTINATIONS {
        let destinations = database.outbox();
        let put = destinations
            .endpoints()
            .put(conn, &hook(&receiver, &mut rng));
        put.expect("put");
    }
    let enqueued: HashSet<Uuid> = std::thread::scope(|scope| {
        for _ in 0..2 {
            let (mut rng, database, receiver) = (rng.fork(), &database, &receiver);
            let has_ended = &has_ended;
            scope.spawn(move || {
                while !has_ended.load(Ordering::Acquire) {
                    act(database, receiver, &mut rng);
                }
            });
        }
        let until = SystemTime::now() + LASTS;
        let mut enqueued = HashSet::new();
        while SystemTime::now() < until {
            let message = message(&mut rng);
            enqueued.insert(message.message_id());
            database.enqueue_message(message);
        }
        has_ended.store(true, Ordering::Release);
        enqueued
    });
    eventually(&format!("no message is left after the seed {seed}"), || {
        // Receivers that are gone disable their destinations, and others ask to wait.
        database.execute("UPDATE {o}_endpoint SET enabled = true WHERE NOT enabled");
        database.execute("DELETE FROM {o}_pause WHERE kind = 'destination'");
        database.number("SELECT count(*) FROM {o}") == 0
    });
    relays.iter().for_each(end);
    let settled =
        database.text("SELECT string_agg(DISTINCT message_id::text, ' ') FROM {o}_ledger");
    let settled = settled.unwrap_or_default();
    let settled: HashSet<Uuid> = (settled.split(' ').map(str::parse))
        .collect::<Result<_, _>>()
        .expect("ids");
    assert_eq!(enqueued.difference(&settled).count(), 0);
}
