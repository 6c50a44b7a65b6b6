//! The history of a message: every failed attempt, and every operator's act.

use diesel_outbox::{Answer, Sequence};
use serde_json::json;

use crate::page::Page;
use crate::support::{Database, Receiver, end, eventually, finish};

fn text(database: &Database, what: &str) -> Option<String> {
    database.text(&format!(
        "SELECT string_agg({what}, ' ' ORDER BY happened_at) FROM {{o}}_attempt"
    ))
}

/// R42: the whole history, from the failed attempts to the delivery after an operator requeued the message.
#[test]
fn failed_attempts_and_who_requeued_or_discarded_a_message_are_written_down() {
    let database = Database::new();
    let sequence = database.enqueue("order.paid", json!({ "n": 1 }));
    let failing = Receiver::answering(|_| 500);
    let relay = database
        .relay()
        .url(&failing.url())
        .max_attempts(2)
        .start()
        .expect("a relay");
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    let told = "event || ':' || attempt || ':' || reason || ':' || http_status || ':' || (took IS NOT NULL)
        || ':' || (relay <> '') || ':' || (destination <> '')";
    assert_eq!(
        text(&database, told).as_deref(),
        Some("failed:1:SERVER_ERROR:500:true:true:true failed:2:SERVER_ERROR:500:true:true:true")
    );
    let id = sequence.to_string();
    let requeue = [
        "dead",
        "requeue",
        &id,
        "--who",
        "alice",
        "--why",
        "it is mended",
    ];
    finish(database.binary(&requeue)).code(0);
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(
        text(&database, "event || coalesce(':' || operator, '')").as_deref(),
        Some("failed failed requeued:alice: it is mended"),
        "no entries of the message that was delivered at once"
    );
    let shown = finish(database.binary(&["message", "show", &id]))
        .code(0)
        .stdout;
    let at = |what: &str| {
        shown
            .find(what)
            .unwrap_or_else(|| panic!("{what}: {shown}"))
    };
    let steps = [
        "attempt 1 failed",
        "attempt 2 failed",
        "dead-lettered",
        "requeued",
        "by alice: it is mended",
        "delivered for",
    ];
    let places = steps.map(at);
    assert!(places.is_sorted(), "{places:?}: {shown}");

    let other = database.enqueue("order.paid", json!({ "n": 2 }));
    let relay = database
        .relay()
        .url(&failing.url())
        .max_attempts(1)
        .start()
        .expect("a relay");
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    let discard = ["dead", "discard", &other.to_string(), "--who", "bob"];
    finish(database.binary(&discard)).code(0);
    let discarded = "SELECT operator FROM {o}_attempt WHERE event = 'discarded'";
    assert_eq!(database.text(discarded).as_deref(), Some("bob"));
}

/// R42: the first delivery, who replayed the message, and the second delivery, under the same id or a new one.
#[test]
fn who_replayed_a_message_is_written_down() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let drain = || {
        let mut drain = database.binary(&["drain", "--quiet"]);
        drain
            .env("OUTBOX_URL", receiver.url())
            .env("OUTBOX_LEDGER_PAYLOAD", "true");
        finish(drain).code(0);
    };
    let first = database.enqueue("order.paid", json!({ "n": 1 }));
    drain();
    let id = receiver.requests()[0].id();
    let replay = |more: &[&str]| {
        let replay = ["replay", &id, "--yes", "--who", "alice"];
        finish(database.binary(&[&replay, more].concat())).code(0);
    };
    let run = ["--run", "lost", "--why", "billing lost a day"];
    replay(&run);
    replay(&run);
    drain();
    replay(&["--new-ids"]);
    drain();
    assert_eq!(
        text(&database, "event || ':' || operator").as_deref(),
        Some("replayed:alice: billing lost a day replayed:alice"),
        "a message that the run already replayed adds no entry"
    );
    let of_messages = "SELECT count(*) FROM {o}_attempt a
          JOIN {o}_ledger l ON l.sequence = a.sequence AND l.message_id = a.message_id";
    assert_eq!(database.number(of_messages), 2);
    let shown = finish(database.binary(&["message", "show", &id]))
        .code(0)
        .stdout;
    let told = shown.rsplit("\n\n").next().expect("a timeline");
    let told: Vec<&str> = told
        .lines()
        .filter_map(|line| line.split_once("  ").map(|(_, what)| what.trim()))
        .collect();
    let replays = database
        .text("SELECT string_agg(sequence::text, ' ' ORDER BY happened_at) FROM {o}_attempt");
    let replays = replays.expect("replays");
    let (second, third) = replays.split_once(' ').expect("two");
    let delivered = "delivered for default after 1 attempt";
    assert_eq!(
        told,
        [
            &format!("enqueued for default as {first}"),
            delivered,
            &format!("replayed as {second} by alice: billing lost a day"),
            delivered,
            &format!("replayed as {third} by alice"),
            delivered,
        ],
        "{shown}"
    );
    let page = Page::start(database.binary(&["admin"]));
    let page = page.get(&format!("/messages?q={id}")).body;
    let told = format!("Replayed as {second} by alice: billing lost a day");
    assert!(page.contains(&told), "{page}");
    assert!(!page.contains("Enqueued again"), "{page}");
}

/// R42: a cancellation by the application names no operator.
#[test]
fn a_message_that_the_application_has_cancelled_says_so() {
    let database = Database::new();
    let sequence = database.enqueue("order.paid", json!({ "n": 1 }));
    let cancelled = database
        .outbox()
        .cancel(&mut database.connect(), Sequence(sequence));
    assert_eq!(cancelled.expect("an answer").answer(), Answer::Done);
    let shown = finish(database.binary(&["message", "show", &sequence.to_string()])).code(0);
    let told = "cancelled after 0 attempts, by the application";
    assert!(shown.stdout.contains(told), "{}", shown.stdout);
    let page = Page::start(database.binary(&["admin"]));
    let page = page.get(&format!("/messages?q={sequence}")).body;
    assert!(page.contains("<p>the application</p>"), "{page}");
}
