//! The libraries read exactly what was enqueued, in every CloudEvents mode.

use diesel_outbox::NewMessage;
use serde_json::{Value, json};

use crate::example::{Example, Library, OLD_SECRET, relay};
use crate::support::{Database, finish};
use crate::with_each_library;

with_each_library! {
    binary_mode_is_verified_and_read,
    structured_mode_is_verified_and_read,
    batched_mode_is_verified_and_read,
    text_that_is_not_ascii_is_the_same_in_each_mode,
    a_source_of_ones_own_arrives,
}

const TOPIC: &str = "Bestellung.bezahlt:100%:東京";
const KEY: &str = "Kunde \"Müller\"/€";
const SUBJECT: &str = "Rechnung für Ölmühle 7";
const REGION: &str = "北海道 (Süd), \"50%\" %41";

fn binary_mode_is_verified_and_read(library: Library) {
    is_verified_and_read(library, "binary");
}

fn structured_mode_is_verified_and_read(library: Library) {
    is_verified_and_read(library, "structured");
}

fn batched_mode_is_verified_and_read(library: Library) {
    is_verified_and_read(library, "batched");
}

fn is_verified_and_read(library: Library, mode: &str) {
    let database = Database::new();
    let receiver = Example::start(library, OLD_SECRET);
    let payloads = [
        json!({ "order_id": 7, "euro": 42.5, "paid": true, "note": null }),
        json!({ "käufer": "Ärger & Söhne \"KG\"", "zeichen": "\u{0}\n\t🙂\u{2028}" }),
        json!([{ "n": 9_007_199_254_740_991_i64 }, [], {}, ""]),
        json!("a text"),
        json!("{\"looks\":\"like JSON\"}"),
        json!(""),
        json!(0),
        json!(-1.5),
        json!(false),
        json!(null),
    ];
    let expected: Vec<Value> = payloads
        .iter()
        .enumerate()
        .map(|(n, payload)| {
            let topic = format!("order.paid.{n}");
            let message = NewMessage::new(&topic, payload)
                .expect("JSON")
                .ordering_key(format!("order-{n}"));
            let id = message.message_id();
            let sequence = database.enqueue_message(message);
            json!({
                "id": id.to_string(),
                "type": topic,
                "source": format!("diesel-outbox/{}", database.name()),
                "time": time(&database, sequence),
                "sequence": sequence.to_string(),
                "partitionkey": format!("order-{n}"),
                "mode": mode,
                "data": payload,
                "extensions": {},
            })
        })
        .collect();

    drain(&database, &receiver, mode);
    assert_eq!(receiver.handled(), expected);
}

fn text_that_is_not_ascii_is_the_same_in_each_mode(library: Library) {
    for mode in ["binary", "structured", "batched"] {
        let database = Database::new();
        let receiver = Example::start(library, OLD_SECRET);
        let message = NewMessage::new(TOPIC, &json!({ "ort": "東京" }))
            .expect("JSON")
            .ordering_key(KEY)
            .header("ce-subject", SUBJECT)
            .header("ce-region", REGION);
        database.enqueue_message(message);
        // A message without an ordering key and attributes: missing attributes stay missing.
        database.enqueue("plain", json!({}));

        drain(&database, &receiver, mode);
        let [event, plain] = &receiver.handled()[..] else {
            panic!("two events: {:?}", receiver.handled());
        };
        assert_eq!(event["type"], TOPIC, "in {mode} mode");
        assert_eq!(event["partitionkey"], KEY, "in {mode} mode");
        assert_eq!(event["subject"], SUBJECT, "in {mode} mode");
        assert_eq!(
            event["extensions"],
            json!({ "region": REGION }),
            "in {mode} mode"
        );
        assert_eq!(event["data"], json!({ "ort": "東京" }), "in {mode} mode");
        assert_eq!(plain.get("partitionkey"), None, "in {mode} mode");
        assert_eq!(plain.get("subject"), None, "in {mode} mode");
        assert_eq!(plain["extensions"], json!({}), "in {mode} mode");
    }
}

fn a_source_of_ones_own_arrives(library: Library) {
    let source = "https://shop.example/orders";
    let receiver = Example::start(library, OLD_SECRET);
    let modes = ["binary", "structured", "batched"];
    for (index, mode) in modes.into_iter().enumerate() {
        let database = Database::new();
        database.enqueue("order.paid", json!({}));
        let mut relay = relay(&database, "drain", &receiver.url(), mode, OLD_SECRET);
        relay.env("OUTBOX_SOURCE", source);
        finish(relay).code(0);
        receiver.wait_for(index + 1);
    }
    for event in receiver.handled() {
        assert_eq!(event["source"], source, "in {} mode", event["mode"]);
    }
}

/// Delivers every message by its first attempt.
fn drain(database: &Database, receiver: &Example, mode: &str) {
    let total = database.number("SELECT count(*) FROM {o}");
    finish(relay(database, "drain", &receiver.url(), mode, OLD_SECRET)).code(0);
    assert_eq!(database.count("delivered"), total, "{}", receiver.errors());
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    receiver.wait_for(total.try_into().expect("a count"));
    assert_eq!(receiver.errors(), "", "nothing was refused");
}

/// The time when the message was enqueued, in RFC 3339 with microseconds.
fn time(database: &Database, sequence: i64) -> String {
    database
        .text(&format!(
            "SELECT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') \
             FROM {{o}} WHERE sequence = {sequence}"
        ))
        .expect("it is there")
}
