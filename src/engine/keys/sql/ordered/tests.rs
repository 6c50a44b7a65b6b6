//! The next message of a key, and the lock of keyed claims.

use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::result::Error;

use super::*;
use crate::engine::claim::sql::claim::KnownDelivery;
use crate::engine::settle::sql::settle;
use crate::sql::table::{ledger, outbox};
use crate::sql::tests::Outbox;

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
    let claimant = Claimant::of(lease);
    let first = claim_one(&mut relay, name, lease, &[]).expect("a claim");
    let first = first.expect("a message").message;
    let next = relay.transaction::<_, Error, _>(|conn| {
        let claim = settle::Claim {
            sequence: first.sequence.0,
            at: first.claimed_at,
        };
        settle::deduplicated(conn, name, lease, &[(claim, 1)])?;
        enqueue();
        let keys: Vec<Key> = Key::of(&first).into_iter().collect();
        claim_next(conn, name, claimant, &keys, &[])
    });
    assert_eq!(next.expect("a claim").claimed.len(), 1);
}

/// G3: a key continues with its next message if its first one was recorded, and waits otherwise: for the claim of another
/// relay, for parts elsewhere, for dead letters, and for messages that are not due or of topics that are closed.
#[test]
fn recording_deliveries_and_claiming_the_next_is_one_statement() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let conn = &mut outbox.connect();
    let insert = format!(
        "INSERT INTO {} (topic, destination, payload, ordering_key, available_at) VALUES
            ('t', '', '1', 'continues', now()), ('t', '', '2', 'lost', now()), ('t', '', '3', NULL, now()),
            ('t', '', '4', 'closed', now()), ('t', '', '5', 'not due', now()), ('t', '', '6', 'elsewhere', now()),
            ('t', 'd', '7', 'part', now()), ('t', '', '8', 'last', now()),
            ('t', '', '9', 'continues', now()), ('t', '', '10', 'continues', now()), ('t', '', '11', 'lost', now()),
            ('closed', '', '12', 'closed', now()), ('t', '', '13', 'closed', now()),
            ('t', '', '14', 'not due', now() + interval '1 hour'), ('t', 'd', '15', 'elsewhere', now()),
            ('t', '', '16', 'elsewhere', now()), ('t', 'd', '17', 'part', now()), ('t', '', '18', 'part', now())",
        name.outbox()
    );
    conn.batch_execute(&insert).expect("enqueued");
    let lease = outbox.lease(conn);
    let mut held: Vec<_> = (0..8)
        .map(|_| {
            let one = claim_one(conn, name, lease, &[]).expect("a claim");
            one.expect("a message").message
        })
        .collect();
    held.sort_by_key(|message| message.sequence);
    let lost = format!(
        "UPDATE {} SET locked_at = locked_at + interval '1 s' WHERE sequence = {}",
        name.outbox(),
        held[1].sequence
    );
    conn.batch_execute(&lost).expect("lost");
    let delivered: Vec<_> = (held.iter())
        .map(|message| settle::Delivered {
            claim: settle::Claim::of(message),
            destination: "d".into(),
            registration: None,
            http_status: Some(200),
            response: None,
        })
        .collect();
    let keys = held.iter();
    let keys = keys.filter_map(|one| Some((one.sequence.0, Key::of(one)?)));
    let closed = ["closed".to_owned()];
    let claimant = Claimant::of(lease);
    let done = deliver_and_claim_next(
        conn,
        name,
        claimant,
        (&delivered, false),
        &keys.collect(),
        &closed,
    );
    let (mut recorded, next) = done.expect("done");
    recorded.sort_unstable();
    assert_eq!(recorded, [1, 3, 4, 5, 6, 7, 8]);
    let payloads = next.claimed.iter().map(|one| one.message.payload.as_str());
    assert_eq!(payloads.collect::<Vec<_>>(), ["9", "17"]);
    assert!(
        next.claimed
            .iter()
            .all(|one| one.known == KnownDelivery::No)
    );
    let left: i64 = outbox::table(name.outbox())
        .count()
        .get_result(conn)
        .expect("a count");
    assert_eq!(left, 11);
    let settled: i64 = ledger::table(name.ledger())
        .count()
        .get_result(conn)
        .expect("a count");
    assert_eq!(settled, 7);
}

/// G5, R8: the server frees the lock of keyed claims within seconds.
#[test]
fn a_relay_that_stops_in_the_middle_of_a_keyed_claim_does_not_stop_the_others() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let (mut stopped, mut other) = (outbox.connect_as_relay(), outbox.connect_as_relay());
    let claimant = Claimant::of(LeaseId(1));
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
