//! A catalogue of events, compared with stored messages.

use std::time::Duration;

use diesel::Connection;
use diesel_outbox::catalogue::Catalogue;
use diesel_outbox::{Event, NewMessage, catalogue};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::support::{Database, File, Finished, Receiver, Running, eventually, finish};

/// A customer has paid an order, as the type was when the messages were written.
#[derive(Serialize, JsonSchema)]
struct OrderPaid {
    order_id: i64,
    cents: u64,
    coupon: Option<String>,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

fn check(database: &Database, catalogue: &Catalogue) -> Finished {
    let file = File::new(&serde_json::to_string(catalogue).expect("JSON"));
    let mut command = database.binary(&["check", "--json", "--url", "http://127.0.0.1:9/"]);
    command.arg("--catalogue").arg(file.path());
    finish(command)
}

/// The findings about the catalogue.
fn found(finished: &Finished) -> Vec<(String, String)> {
    let json = finished.json();
    let all = json["findings"].as_array().expect("an array").iter();
    let text = |one: &Value, key: &str| one[key].as_str().expect("a text").to_owned();
    all.filter(|one| one["what"] == "catalogue")
        .map(|one| (text(one, "level"), text(one, "detail")))
        .collect()
}

/// R64: a breaking change of a type is found against 10,000 stored messages, wherever they are.
#[test]
fn stored_messages_that_do_not_fit_the_types_are_found() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.json()["order_id"].as_i64() {
        Some(9_990..) => 422,
        _ => 200,
    });
    let mut relay = database.binary(&["run"]);
    relay
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_LEDGER_PAYLOAD", "true");
    let mut relay = Running::start(relay);
    let paid = |order_id, coupon: Option<&str>| OrderPaid {
        order_id,
        cents: 4_200,
        coupon: coupon.map(str::to_owned),
    };
    let conn = &mut database.connect();
    let (last, first): (Vec<_>, Vec<_>) = (0..10_000)
        .map(|n| paid(n, Some("SECRET")))
        .partition(|one| one.order_id < 90);
    let outbox = database.outbox();
    conn.transaction(|conn| outbox.enqueue_bulk(conn, &first))
        .expect("enqueued");
    eventually("they are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    relay.signal("TERM");
    assert_eq!(relay.wait().code(), Some(0), "{}", relay.log());
    for one in &last {
        let message = NewMessage::of(one)
            .expect("JSON")
            .delay(Duration::from_secs(3600));
        database.enqueue_message(message);
    }
    let future = NewMessage::new("order.paid", &json!({})).expect("JSON");
    database.enqueue_message(future.header("ce-dataversion", "2"));
    database.enqueue("order.packed", json!({}));

    let now = catalogue![OrderPaid];
    let finished = check(&database, &now);
    let levels: Vec<_> = found(&finished)
        .into_iter()
        .map(|(level, _)| level)
        .collect();
    assert_eq!(levels, ["warning", "skipped", "ok"], "{}", finished.stdout);
    let details = found(&finished);
    assert!(
        details[0]
            .1
            .starts_with("1 stored message of order.paid version 2"),
        "{details:?}"
    );
    assert_eq!(
        details[1].1,
        "topics that the catalogue lacks: order.packed (1)"
    );
    assert_eq!(details[2].1, "10000 stored messages fit the catalogue");
    finished.code(0);

    // The coupon is removed, and the cents become a text.
    let mut next = now.clone();
    let schema = &mut next.events[0].schema;
    schema["properties"]["cents"]["type"] = json!("string");
    let properties = schema["properties"].as_object_mut().expect("properties");
    properties.remove("coupon").expect("a field");
    schema["required"] = json!(["order_id", "cents"]);
    let finished = check(&database, &next);
    let details = found(&finished);
    let places = "90 waiting, 10 dead, 9900 in the ledger; for example ";
    for (index, what) in [
        "cents: want string, but got integer",
        "coupon is not in the type any more: was it removed or renamed?",
    ]
    .iter()
    .enumerate()
    {
        let begin = format!("10000 stored messages of order.paid {what} ({places}");
        let (level, detail) = &details[index];
        assert!(
            level == "problem" && detail.starts_with(&begin),
            "{details:?}"
        );
    }
    assert!(!finished.stdout.contains("SECRET"));
    finished.code(1);
}

#[test]
fn a_file_that_is_no_catalogue_is_named() {
    let database = Database::new();
    for (text, why) in [
        ("{}", "missing field `events`"),
        (
            r#"{"events":[{"topic":"t","name":"T","schema":{"type":"nothing"}}]}"#,
            "the schema of t is not valid",
        ),
    ] {
        let file = File::new(text);
        let mut command = database.binary(&["check"]);
        command.arg("--catalogue").arg(file.path());
        let finished = finish(command).code(2);
        assert!(finished.stderr.contains(file.path()), "{}", finished.stderr);
        assert!(finished.stderr.contains(why), "{}", finished.stderr);
    }
}
