//! The next message of a key, and the lock of keyed claims.

use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::result::Error;

use super::*;
use crate::store::relay::settle;
use crate::store::tests::Outbox;

#[test]
fn a_key_continues_with_a_message_enqueued_during_the_settle_of_its_first() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let (mut relay, mut application) = (outbox.connect(), outbox.connect());
    let mut enqueue = || {
        let insert = format!(
            "INSERT INTO {} (topic, payload, ordering_key) VALUES ('topic', '1', 'key')",
            name.outbox()
        );
        application.batch_execute(&insert).expect("enqueued");
    };
    enqueue();
    let lease = outbox.lease(&mut relay);
    let claimant = Claimant {
        lease,
        expired: &[],
        max_attempts: 3,
        bytes: usize::MAX,
        runs: None,
    };
    let first = claim_one(&mut relay, name, lease, &[]).expect("a claim");
    let first = first.expect("a message").message;
    let next = relay.transaction::<_, Error, _>(|conn| {
        let claim = settle::Claim {
            sequence: first.sequence.0,
            at: first.claimed_at,
        };
        settle::deduplicated(conn, name, lease, &[claim])?;
        enqueue();
        let keys: Vec<Key> = Key::of(&first).into_iter().collect();
        claim_next(conn, name, claimant, &keys, &[])
    });
    assert_eq!(next.expect("a claim").claimed.len(), 1);
}

/// G5, R8: the server frees the lock of keyed claims within seconds.
#[test]
fn a_relay_that_stops_in_the_middle_of_a_keyed_claim_does_not_stop_the_others() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let (mut stopped, mut other) = (outbox.connect_as_relay(), outbox.connect_as_relay());
    let claimant = Claimant {
        lease: LeaseId(1),
        expired: &[],
        max_attempts: 3,
        bytes: usize::MAX,
        runs: None,
    };
    let is_free = |conn: &mut PgConnection| {
        claim(conn, name, claimant, &[])
            .expect("an answer")
            .is_some()
    };
    AnsiTransactionManager::begin_transaction(&mut stopped).expect("a transaction");
    assert!(is_free(&mut stopped));
    let began = Instant::now();
    assert!(!is_free(&mut other));
    while !is_free(&mut other) {
        assert!(began.elapsed() < Duration::from_secs(10), "still locked");
        std::thread::sleep(Duration::from_millis(50));
    }
    let late = AnsiTransactionManager::commit_transaction(&mut stopped);
    assert!(late.is_err(), "the claim is lost");
}
