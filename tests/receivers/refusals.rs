//! Requests that a receiver refuses, and what happens to their messages.

use serde_json::json;

use crate::example::{Example, Library, NEW_SECRET, OLD_SECRET, relay, run, running, stop};
use crate::support::{Database, Running, eventually, finish};
use crate::with_each_library;

with_each_library! {
    a_wrong_secret_is_refused_and_the_message_waits_for_the_right_one,
    a_request_without_a_signature_is_refused,
    a_body_that_is_too_large_is_refused_and_its_message_dead,
    a_store_that_fails_loses_nothing,
    without_a_secret_it_does_not_start,
}

fn a_wrong_secret_is_refused_and_the_message_waits_for_the_right_one(library: Library) {
    for mode in ["binary", "structured", "batched"] {
        let database = Database::new();
        let mut receiver = Example::start(library, NEW_SECRET);
        database.enqueue_many(3);
        let relay = running(&database, &receiver.url(), mode, OLD_SECRET);
        eventually("all messages were refused twice", || {
            database.number("SELECT count(*) FROM {o} WHERE attempts >= 2") == 3
        });
        assert!(receiver.refusals(401) > 0);
        assert_eq!(
            database.number("SELECT count(*) FROM {o} WHERE last_error LIKE '%401%'"),
            3,
            "the reason is kept: {:?}",
            database.text("SELECT last_error FROM {o} LIMIT 1")
        );
        assert!(
            receiver.stored().is_empty(),
            "a refused message was handled"
        );
        receiver.restart(OLD_SECRET);
        eventually("all messages are delivered", || {
            database.count("delivered") == 3
        });
        stop(relay);
        assert_eq!(receiver.stored().len(), 3);
    }
}

fn a_request_without_a_signature_is_refused(library: Library) {
    let database = Database::new();
    let receiver = Example::start(library, OLD_SECRET);
    database.enqueue("order.paid", json!({}));
    let mut unsigned = relay(&database, "run", &receiver.url(), "binary", OLD_SECRET);
    unsigned.env_remove("OUTBOX_SECRET");
    let relay = Running::start(unsigned);
    eventually("the request was refused", || receiver.refusals(401) > 0);
    stop(relay);
    assert!(receiver.stored().is_empty());
    assert_eq!(database.count("dead"), 0);
}

fn a_body_that_is_too_large_is_refused_and_its_message_dead(library: Library) {
    // In a batch, the large body does not delay the other messages.
    for mode in ["binary", "structured", "batched"] {
        let database = Database::new();
        let variables = [("WEBHOOK_SECRET", OLD_SECRET), ("MAX_BODY_BYTES", "100000")];
        let receiver = Example::with(library, &variables);
        let before = database.enqueue("order.paid", json!("fits"));
        database.enqueue("order.paid", json!("x".repeat(700_000)));
        let after = database.enqueue("order.paid", json!("x".repeat(50_000)));
        let url = receiver.url();
        finish(relay(&database, "drain", &url, mode, OLD_SECRET));
        assert_eq!(database.count("dead"), 1, "the response arrived, in {mode}");
        assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 1);
        assert!(receiver.refusals(413) > 0);
        let handled = receiver.wait_for(2);
        assert_eq!(handled[0]["sequence"], before.to_string());
        assert_eq!(handled[1]["sequence"], after.to_string());
    }
}

fn a_store_that_fails_loses_nothing(library: Library) {
    let database = Database::new();
    let receiver = Example::start(library, OLD_SECRET);
    let (inbox, away) = (receiver.inbox(), receiver.inbox().with_extension("away"));
    std::fs::rename(&inbox, &away).expect("moved away");
    std::fs::create_dir(&inbox).expect("in its place");
    database.enqueue_many(3);
    let relay = running(&database, &receiver.url(), "binary", OLD_SECRET);
    eventually("the receiver reports that its store fails", || {
        receiver.refusals(503) >= 3
    });
    assert!(receiver.handled().is_empty());
    std::fs::remove_dir(&inbox).expect("removed");
    std::fs::rename(&away, &inbox).expect("moved back");
    eventually("all messages are delivered", || {
        database.count("delivered") == 3
    });
    stop(relay);
    assert_eq!(receiver.stored().len(), 3);
}

fn without_a_secret_it_does_not_start(library: Library) {
    for variables in [
        &[][..],
        &[("WEBHOOK_SECRET", " , ")],
        &[("WEBHOOK_SECRET", "whsec_")],
    ] {
        let ended = run(library, variables).code(2);
        assert!(ended.stderr.contains("WEBHOOK_SECRET"), "{}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
}
