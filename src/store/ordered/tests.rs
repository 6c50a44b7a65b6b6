//! Keys that go on.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::result::Error;

use super::*;
use crate::store::model::database::Outbox;
use crate::store::{lease, settle};

#[test]
fn a_key_goes_on_with_what_was_enqueued_while_its_first_message_was_settled() {
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
    let lease = lease::register(&mut relay, name, "test", Duration::from_secs(60), false);
    let lease = lease.expect("a lease");
    let claimant = Claimant {
        lease,
        expired: &[],
        max_attempts: 3,
    };
    let first = claim_one(&mut relay, name, lease, &[]).expect("a claim");
    let first = first.expect("a message").message;
    let next = relay.transaction::<_, Error, _>(|conn| {
        settle::deduplicated(conn, name, lease, &[first.sequence.0])?;
        enqueue();
        let keys: Vec<Key> = Key::of(&first).into_iter().collect();
        claim_next(conn, name, claimant, &keys, &[])
    });
    assert_eq!(next.expect("a claim").len(), 1);
}
