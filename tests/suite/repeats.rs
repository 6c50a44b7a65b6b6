//! Repeats that are not sent, and conflicts: written where one looks for the message.

use diesel_outbox::NewMessage;
use serde_json::json;

use crate::support::{Database, Receiver, end, finish};

/// R68, R20: `enqueue` returned a sequence, so the sequence is found; so is the id of the log line `dedup_hit`.
#[test]
fn a_repeat_that_is_not_sent_is_found_by_its_sequence_or_id_and_names_the_first_delivery() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let paid = |cents: i64| {
        let message = NewMessage::new("order.paid", &json!({ "cents": cents })).expect("JSON");
        database
            .enqueue_message(message.idempotency_key("order-7-paid"))
            .to_string()
    };
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    let wait = || assert!(relay.wait_until_idle(std::time::Duration::from_secs(60)));
    let first = paid(100);
    wait();
    let repeat = paid(100);
    wait();
    let other = paid(999);
    wait();
    end(&relay);
    assert_eq!(receiver.count(), 1);
    assert_ne!(first, repeat);

    let show = |sequence: &str| {
        let shown = finish(database.binary(&["message", "show", sequence]));
        shown.code(0).stdout
    };
    let named = format!("delivered before as {first}");
    let shown = show(&repeat);
    assert!(
        shown.contains("not sent again") && shown.contains(&named),
        "{shown}"
    );
    assert!(show(&other).contains(&named), "{}", show(&other));
    let id = database.text(&format!(
        "SELECT message_id::text FROM {{o}}_attempt WHERE sequence = {repeat}"
    ));
    assert_eq!(show(&id.expect("the repeat's id")), shown);
    let json = finish(database.binary(&["message", "show", &repeat, "--json"]))
        .code(0)
        .json();
    let timeline = json["timeline"].as_array().expect("a timeline");
    assert_eq!(timeline.len(), 1, "{json}");
    let page = crate::page::Page::start(database.binary(&["admin"]));
    let shown = page.get(&format!("/messages?q={repeat}"));
    assert!(shown.body.contains(&named), "{}", shown.body);
    // The first delivery has no part in it, and the ledger has no second delivery.
    assert_eq!(database.count("delivered"), 1);
}

/// R68, R37: the lease of the relay that sends has ended meanwhile.
#[test]
fn a_result_that_is_discarded_leaves_a_row_of_history() {
    let database = Database::new();
    let (receiver, gate) = Receiver::held();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    let sequence = database.enqueue("order.paid", json!({}));
    crate::support::eventually("the request came", || gate.came() > 0);
    // Somebody releases the message.
    database.execute(
        "UPDATE {o} SET locked_by = NULL, locked_at = NULL, available_at = now() + interval '1 h'",
    );
    gate.open();
    crate::support::eventually("the result is recorded", || {
        database.number("SELECT count(*) FROM {o}_attempt WHERE event = 'conflict'") == 1
    });
    end(&relay);
    let shown = finish(database.binary(&["message", "show", &sequence.to_string()]));
    let shown = shown.code(0).stdout;
    assert!(shown.contains("result discarded"), "{shown}");
}
