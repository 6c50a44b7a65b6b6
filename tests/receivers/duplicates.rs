//! A message that arrives twice is handled once.

use std::collections::BTreeSet;

use crate::example::{Example, Library, OLD_SECRET, running, stop};
use crate::proxy::Proxy;
use crate::support::{Database, eventually};
use crate::with_each_library;

with_each_library! {
    a_message_whose_answer_was_lost_is_handled_once,
    a_batch_whose_answer_was_lost_is_handled_once,
    a_receiver_that_is_killed_handles_each_message_once,
}

const MESSAGES: usize = 20;

fn a_message_whose_answer_was_lost_is_handled_once(library: Library) {
    let lost = lose_the_first_answers(library, "binary", 3);
    assert_eq!(lost.len(), 3, "one message for each lost answer: {lost:?}");
}

fn a_batch_whose_answer_was_lost_is_handled_once(library: Library) {
    let lost = lose_the_first_answers(library, "batched", 1);
    assert!(lost.len() > 1, "a batch was lost: {lost:?}");
}

/// Sends messages in this mode while `answers` responses are lost. Returns the ids that arrived twice.
fn lose_the_first_answers(library: Library, mode: &str, answers: usize) -> BTreeSet<String> {
    let database = Database::new();
    let receiver = Example::start(library, OLD_SECRET);
    let proxy = Proxy::losing(answers, receiver.port());
    database.enqueue_many(MESSAGES);
    let relay = running(&database, &proxy.url(), mode, OLD_SECRET);
    eventually("all messages are delivered", || {
        database.count("delivered") == MESSAGES as i64
    });
    assert_eq!(proxy.left(), 0, "all responses were lost");
    let handled = receiver.wait_for(MESSAGES);
    stop(relay);

    let ids: BTreeSet<_> = handled.iter().map(|event| event["id"].as_str()).collect();
    assert_eq!(ids.len(), MESSAGES, "every message was handled");
    assert_eq!(handled.len(), MESSAGES, "no message was handled twice");
    assert!(receiver.stored().values().all(|times| *times == 1));
    let repeated = receiver.duplicates();
    let lost: BTreeSet<_> = repeated.iter().cloned().collect();
    assert_eq!(
        lost.len(),
        repeated.len(),
        "every lost message came again once"
    );
    let sent_twice = database.number("SELECT count(*) FROM {o}_ledger WHERE attempts = 2");
    assert_eq!(sent_twice, lost.len() as i64);
    lost
}

fn a_receiver_that_is_killed_handles_each_message_once(library: Library) {
    const MESSAGES: usize = 600;
    let database = Database::new();
    let mut receiver = Example::start(library, OLD_SECRET);
    database.enqueue_many(MESSAGES);
    let relay = running(&database, &receiver.url(), "structured", OLD_SECRET);
    for quarter in 1..=3 {
        receiver.wait_for(quarter * MESSAGES / 5);
        receiver.restart(OLD_SECRET);
    }
    eventually("all messages are delivered", || {
        database.count("delivered") == MESSAGES as i64
    });
    stop(relay);
    let stored = receiver.stored();
    assert_eq!(stored.len(), MESSAGES, "no message is lost");
    assert!(
        stored.values().all(|times| *times == 1),
        "no message is stored twice"
    );
}
