//! The secret is rotated while messages flow, in the order that README describes.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use crate::example::{Example, Library, NEW_SECRET, OLD_SECRET, running, stop};
use crate::support::{Database, eventually};
use crate::with_each_library;

with_each_library! {
    a_rotation_fails_no_verification,
    a_change_to_an_asymmetric_secret_fails_no_verification,
}

/// A private key from the tests of Svix's server, and its public half.
const PRIVATE_KEY: &str =
    "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
const PUBLIC_KEY: &str = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=";

/// The number of messages delivered with each setting.
const PER_STEP: usize = 30;
/// The most messages that wait, so that each setting meets messages of the one before.
const BACKLOG: i64 = 20;

fn a_rotation_fails_no_verification(library: Library) {
    rotate_to(library, NEW_SECRET, NEW_SECRET);
}

/// R47: Python's and Node's cryptography verifies the signatures, independent of ours.
fn a_change_to_an_asymmetric_secret_fails_no_verification(library: Library) {
    rotate_to(library, PRIVATE_KEY, PUBLIC_KEY);
}

/// Rotates to the secret that the relay signs with and the one that receivers verify with.
fn rotate_to(library: Library, signs: &str, verifies: &str) {
    let both_sign = format!("{signs},{OLD_SECRET}");
    let both_verify = format!("{verifies},{OLD_SECRET}");
    let database = Database::new();
    let mut receiver = Example::start(library, OLD_SECRET);
    let url = receiver.url();
    let start = |secrets: &str| running(&database, &url, "structured", secrets);
    let has_ended = AtomicBool::new(false);

    let enqueued = std::thread::scope(|scope| {
        let enqueuer = scope.spawn(|| enqueue_until(&database, &has_ended));
        let _over = OnDrop(&has_ended);

        let relay = start(OLD_SECRET);
        flow(&database);
        // The relay first: the relay signs with both secrets, and receivers know the old one.
        stop(relay);
        let relay = start(&both_sign);
        flow(&database);
        receiver.restart(&both_verify);
        flow(&database);
        // Every receiver knows the new secret by now: the old one is dropped.
        receiver.restart(verifies);
        flow(&database);
        stop(relay);
        let _relay = start(signs);
        flow(&database);

        has_ended.store(true, Ordering::Release);
        let enqueued = enqueuer.join().expect("the enqueuer ends");
        eventually("all messages are delivered", || {
            database.count("delivered") == enqueued
        });
        enqueued
    });

    assert_eq!(receiver.refusals(401), 0, "{}", receiver.errors());
    let stored = receiver.stored();
    assert_eq!(stored.len() as i64, enqueued, "no message is lost");
    assert!(
        stored.values().all(|times| *times == 1),
        "no message is stored twice"
    );
}

/// Keeps a few messages waiting. Returns how many messages it enqueued.
fn enqueue_until(database: &Database, has_ended: &AtomicBool) -> i64 {
    let mut enqueued = 0;
    while !has_ended.load(Ordering::Acquire) {
        eventually("there is room for another", || {
            has_ended.load(Ordering::Acquire)
                || database.number("SELECT count(*) FROM {o}") < BACKLOG
        });
        database.enqueue("order.paid", json!({ "n": enqueued }));
        enqueued += 1;
    }
    enqueued
}

/// Waits until newly enqueued messages are delivered.
fn flow(database: &Database) {
    let before = database.count("delivered");
    eventually("messages flow", || {
        database.count("delivered") >= before + PER_STEP as i64
    });
}

/// Ends the enqueuer even if the test fails; otherwise the scope would wait forever.
struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
