//! What is sent again is the same message: requeues, replays and "send again".

use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use diesel_outbox::endpoints::{DeliveryFilter, Endpoint};
use diesel_outbox::{DecodeError, Event, NewMessage, Status};
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

use crate::page::Page;
use crate::support::{Database, Gate, PATIENCE, Receiver, Request, end, eventually, finish};

/// Headers that belong to the attempt; `docs/requests.md` lists them.
const OF_THE_ATTEMPT: [&str; 5] = [
    "webhook-timestamp",
    "webhook-signature",
    "outbox-attempt",
    "traceparent",
    "ce-sequence",
];

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// What must be equal in two requests for one message.
fn same(request: &Request) -> (String, Vec<(String, String)>, String) {
    let headers = request.headers();
    // Receivers of a test differ in their port.
    let kept = headers.filter(|(name, _)| !OF_THE_ATTEMPT.contains(name) && *name != "host");
    let mut kept: Vec<(String, String)> = kept
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    kept.sort();
    let mut body = String::from_utf8(request.body.clone()).expect("UTF-8");
    // In structured mode, the attributes of the attempt are members of the document.
    let document: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    for name in ["sequence", "traceparent"] {
        if let Some(value) = document[name].as_str() {
            body = body.replacen(&format!("\"{name}\":\"{value}\""), "", 1);
            kept.retain(|(name, _)| name != "content-length");
        }
    }
    (request.line.clone(), kept, body)
}

/// Messages that differ in all that decides what is sent.
fn messages() -> Vec<NewMessage> {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_micros(1_600_000_000_123_456);
    let message =
        || NewMessage::from_json("order.paid", "{\"b\":  1.50, \"a\":\"é\"}").expect("JSON");
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    vec![
        message(),
        message().idempotency_key("order-7"),
        message().idempotency_key("k".repeat(255)),
        message()
            .ordering_key("order-7 é")
            .header("x-shop", "berlin")
            .header("ce-dataversion", "2")
            .header("ce-subject", "order/7 é")
            .trace_context(trace, Some("vendor=1"))
            .tenant_id(Uuid::now_v7())
            .occurred_at(long_ago),
        message()
            .header("ce-dataversion", "3")
            .expires_after(Duration::from_secs(3600)),
    ]
}

fn drain(db: &Database, receiver: &Receiver, mode: &str) {
    let mut command = db.binary(&["drain", "--quiet"]);
    command
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_MODE", mode)
        .env("OUTBOX_SECRET", SECRET)
        .env("OUTBOX_MAX_ATTEMPTS", "1")
        .env("OUTBOX_LEDGER_PAYLOAD", "true");
    finish(command);
}

/// The requests for each message, in the order of `messages`.
fn by_id(requests: &[Request], ids: &[Uuid]) -> Vec<Vec<Request>> {
    let of = |id: &Uuid| {
        let is_of_it = |request: &&Request| request.id() == id.to_string();
        requests.iter().filter(is_of_it).cloned().collect()
    };
    ids.iter().map(of).collect()
}

fn assert_sent_again(db: &Database, mode: &str, times: usize, requests: &[Request], ids: &[Uuid]) {
    for (n, of_one) in by_id(requests, ids).iter().enumerate() {
        assert_eq!(of_one.len(), times, "message {n} in mode {mode}");
        for again in &of_one[1..] {
            assert_eq!(same(again), same(&of_one[0]), "message {n} in mode {mode}");
        }
    }
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 0);
}

/// R52: a replay, and a replay of the replay, send what the first delivery sent.
#[test]
fn a_replay_sends_what_the_first_delivery_sent() {
    for mode in ["binary", "structured"] {
        let db = Database::new();
        let receiver = Receiver::ok();
        let all = messages();
        let ids: Vec<Uuid> = all.iter().map(NewMessage::message_id).collect();
        for message in all {
            db.enqueue_message(message);
        }
        drain(&db, &receiver, mode);
        for run in ["first", "second"] {
            let replay = ["replay", "--since", "1h", "--yes", "--run", run];
            finish(db.binary(&replay)).code(0);
            drain(&db, &receiver, mode);
        }
        assert_sent_again(&db, mode, 3, &receiver.requests(), &ids);
    }
}

/// R52: a requeued dead letter sends what its first attempt sent, and so does its replay.
#[test]
fn a_requeue_sends_what_the_first_attempt_sent() {
    for mode in ["binary", "structured"] {
        let db = Database::new();
        let receiver = Receiver::ok();
        let refusing = Receiver::answering(|_| 422);
        let all = messages();
        let ids: Vec<Uuid> = all.iter().map(NewMessage::message_id).collect();
        for message in all {
            db.enqueue_message(message);
        }
        drain(&db, &refusing, mode);
        assert_eq!(db.count("dead"), 5);
        finish(db.binary(&["dead", "requeue", "--all", "--yes"])).code(0);
        drain(&db, &receiver, mode);
        finish(db.binary(&["replay", "--since", "1h", "--yes"])).code(0);
        drain(&db, &receiver, mode);
        let mut requests = refusing.requests();
        requests.extend(receiver.requests());
        assert_sent_again(&db, mode, 3, &requests, &ids);
    }
}

/// R52: "send again" of an endpoint sends what the destination got.
#[test]
fn send_again_sends_what_the_destination_got() {
    for mode in ["binary", "structured"] {
        let db = Database::new();
        let receiver = Receiver::ok();
        let outbox = db.outbox();
        let destinations = outbox.endpoints();
        let conn = &mut db.connect();
        let hook = Endpoint::new("acme", receiver.url());
        destinations.put(conn, &hook).expect("put");
        let all = messages();
        let ids: Vec<Uuid> = all.iter().map(NewMessage::message_id).collect();
        for message in all {
            db.enqueue_message(message);
        }
        let drain = || {
            let mut command = db.binary(&["drain", "--quiet"]);
            command
                .env("OUTBOX_MODE", mode)
                .env("OUTBOX_LEDGER_PAYLOAD", "true")
                .env("OUTBOX_ENDPOINT_THREADS", "2")
                .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
                .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
            finish(command);
        };
        drain();
        let delivered = destinations
            .deliveries(conn, "acme", &DeliveryFilter::default(), 100)
            .expect("deliveries");
        assert_eq!(delivered.rows.len(), 5);
        for one in delivered.rows {
            assert_eq!(one.state, Status::Delivered);
            let again = destinations.send_again(conn, "acme", one.message_id);
            assert!(again.expect("sent again"));
        }
        drain();
        assert_sent_again(&db, mode, 2, &receiver.requests(), &ids);
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Paid {
    cents: u64,
}

impl Event for Paid {
    const TOPIC: &'static str = "order.paid";
    const VERSION: u32 = 2;

    fn decode(version: u32, json: &str) -> Result<Self, DecodeError> {
        let paid: Self = serde_json::from_str(json)?;
        Ok(match version {
            1 => Self {
                cents: paid.cents * 100,
            },
            _ => paid,
        })
    }
}

/// R52: a handler sees the version, the time, the key and the headers of the first delivery.
#[test]
fn a_handler_sees_the_replayed_message_as_it_was() {
    let db = Database::new();
    let (heard, hear) = mpsc::channel();
    let mut config = diesel_outbox::config::Config::default();
    for (setting, value) in [
        ("DATABASE_URL", db.url.as_str()),
        ("OUTBOX_TABLE", &db.name()),
        ("OUTBOX_LEDGER_PAYLOAD", "true"),
        ("OUTBOX_POLL_INTERVAL", "20ms"),
    ] {
        config.set(setting, value).expect(setting);
    }
    let relay = diesel_outbox::Relay::from_config(config)
        .on::<Paid>(move |paid, context| {
            let message = context.message();
            let key = message.idempotency_key.clone();
            let seen = (paid.cents, message.version(), message.time(), key);
            heard.send((seen, message.message_id, message.headers.clone()))?;
            Ok(())
        })
        .start()
        .expect("a relay");
    let message = NewMessage::of(&Paid { cents: 4200 }).expect("JSON");
    db.enqueue_message(message.header("x-shop", "berlin"));
    let first = hear.recv_timeout(PATIENCE).expect("the first delivery");
    assert_eq!((first.0.0, first.0.1), (4200, 2));
    eventually("delivered", || db.count("delivered") == 1);
    finish(db.binary(&["replay", "--since", "1h", "--yes"])).code(0);
    let again = hear.recv_timeout(PATIENCE).expect("the replay");
    assert_eq!(again, first);
    end(&relay);
}

/// R52: with new ids, a replay is another message: also its idempotency key differs.
#[test]
fn a_replay_with_new_ids_has_new_keys() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let message = |n: i32| NewMessage::new("order.paid", &json!(n)).expect("JSON");
    db.enqueue_message(message(1));
    db.enqueue_message(message(2).idempotency_key("order-7"));
    drain(&db, &receiver, "binary");
    finish(db.binary(&["replay", "--since", "1h", "--yes", "--new-ids"])).code(0);
    drain(&db, &receiver, "binary");
    let requests = receiver.requests();
    let mut keys: Vec<_> = (requests.iter())
        .filter_map(|request| request.header("idempotency-key"))
        .collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4, "{keys:?}");
    assert_eq!(receiver.ids().len(), 4);
}

/// R52: two messages with one id are two messages, also while the handler of the first still runs.
#[test]
fn each_of_two_messages_with_one_id_is_handled() {
    let db = Database::new();
    let (gate, pass) = Gate::new();
    let (heard, hear) = mpsc::channel();
    let relay = db
        .relay()
        .on_topic("order.paid", move |message, _| {
            heard.send((message.sequence.0, message.payload.clone()))?;
            pass();
            Ok(())
        })
        .start()
        .expect("a relay");
    let id = Uuid::now_v7();
    db.execute(&format!(
        "INSERT INTO {{o}} (message_id, topic, payload)
         SELECT '{id}', 'order.paid', to_json(n) FROM generate_series(1, 2) n"
    ));
    let mut seen: Vec<(i64, String)> = (0..2)
        .map(|_| {
            hear.recv_timeout(PATIENCE)
                .expect("each message is handled")
        })
        .collect();
    gate.open();
    eventually("both are delivered", || db.count("delivered") == 2);
    seen.sort();
    assert_eq!(seen, [(1, "1".to_owned()), (2, "2".to_owned())]);
    end(&relay);
}

/// The next messages get sequences that earlier messages had.
fn use_sequences_again(db: &Database) {
    db.execute("SELECT setval(pg_get_serial_sequence('{o}', 'sequence'), 1, false)");
}

/// Two messages with the same sequence, each sent before the next is enqueued.
fn two_of_a_sequence(db: &Database, receiver: &Receiver) {
    for round in 1..=2 {
        use_sequences_again(db);
        db.enqueue("order.paid", json!({ "round": round }));
        drain(db, receiver, "binary");
    }
}

/// R52: the refusal of a message is settled, although an old dead letter has its sequence.
#[test]
fn a_refusal_is_settled_beside_an_old_dead_letter() {
    let db = Database::new();
    let receiver = Receiver::answering(|_| 422);
    two_of_a_sequence(&db, &receiver);
    drain(&db, &receiver, "binary");
    assert_eq!(receiver.count(), 2, "each message is sent once");
    let dead =
        "SELECT string_agg(sequence || ' ' || payload, ', ' ORDER BY payload::text) FROM {o}_dead";
    let all = "1 {\"round\":1}, 1 {\"round\":2}";
    assert_eq!(db.text(dead).as_deref(), Some(all));
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 0);
}

/// R52: dead letters whose sequences have other messages by now are requeued, and so are all others.
#[test]
fn a_requeue_of_many_passes_sequences_that_are_used_again() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let refusing = Receiver::answering(|_| 422);
    db.enqueue_many(20);
    drain(&db, &refusing, "binary");
    use_sequences_again(&db);
    db.enqueue("order.sent", json!({ "is_new": true }));
    let done = finish(db.binary(&["dead", "requeue", "--all", "--yes", "--json"])).code(0);
    assert_eq!(done.json()["changed"], 20, "{}", done.stdout);
    drain(&db, &receiver, "binary");
    let refused = refusing.ids();
    let mut delivered = receiver.ids();
    assert_eq!(delivered.len(), 21);
    delivered.retain(|id| refused.contains(id));
    assert_eq!(delivered.len(), 20);
    assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 0);
}

/// R52: a person who looks for a sequence is shown every message that has it, also those that are only in the ledger.
#[test]
fn a_settled_message_is_shown_beside_a_waiting_one_of_its_sequence() {
    let db = Database::new();
    let receiver = Receiver::ok();
    db.enqueue("order.paid", json!({ "round": 1 }));
    drain(&db, &receiver, "binary");
    use_sequences_again(&db);
    db.enqueue("order.sent", json!({ "round": 2 }));
    let shown = finish(db.binary(&["message", "show", "1"])).code(0).stdout;
    for text in ["order.paid", "order.sent", "2 messages have the sequence 1"] {
        assert!(shown.contains(text), "no {text}: {shown}");
    }
}

const IDS_OF_DEAD: &str =
    "SELECT string_agg('1.' || message_id, ' ' ORDER BY payload::text) FROM {o}_dead";

/// R52: a person who names a sequence that several messages have learns that, and nothing is changed by a guess.
#[test]
fn a_sequence_of_several_messages_is_no_name() {
    let db = Database::new();
    let receiver = Receiver::answering(|_| 422);
    two_of_a_sequence(&db, &receiver);
    let run = |arguments: &[&str]| finish(db.binary(arguments));
    let ids = db.text(IDS_OF_DEAD).expect("two letters");
    let (first, second) = ids.split_once(' ').expect("two letters");
    let says_both = |text: &str| {
        let has_both = text.contains(first) && text.contains(second);
        assert!(has_both && text.contains("several dead letters"), "{text}");
    };
    says_both(&run(&["dead", "show", "1"]).code(0).stdout);
    for verb in ["requeue", "discard"] {
        says_both(&run(&["dead", verb, "1"]).code(1).stderr);
    }
    let shown = run(&["message", "show", "1"]).code(0).stdout;
    assert!(shown.contains("2 messages have the sequence 1"), "{shown}");
    let settle = ["message", "settle", "1", "--delivered", "--why", "by fax"];
    let settled = run(&settle).code(1).stderr;
    assert!(settled.contains("several messages"), "{settled}");
    assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 2);

    // The page.
    let page = Page::start(db.binary(&["admin"]));
    let several = page.get("/dead/1").body;
    for letter in [first, second] {
        let link = format!("href=\"/dead/{letter}\"");
        assert!(several.contains(&link), "{several}");
    }
    let one = page.get(&format!("/dead/{second}"));
    assert!(
        one.body.contains(&format!("value=\"{second}\"")),
        "{}",
        one.body
    );
    let token = one.form_token();
    let discard = format!("form_token={token}&letter={second}&sure=1");
    assert_eq!(page.post("/dead/discard", "", &discard).status, 303);
    assert_eq!(db.text(IDS_OF_DEAD).as_deref(), Some(first));

    // A live message is the one that an application means.
    use_sequences_again(&db);
    db.enqueue("order.paid", json!({ "round": 3 }));
    let cancelled = run(&["message", "cancel", "1"]).code(0).stdout;
    assert_eq!(cancelled, "1: cancelled\n");
    assert_eq!(db.text(IDS_OF_DEAD).as_deref(), Some(first));
    run(&["dead", "requeue", first]).code(0);
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 1);
}
