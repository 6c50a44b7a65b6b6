//! Rows that a relay knows are gone, and other rows have their sequences, as after a failover to a standby that lacks
//! the last inserts.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel::Connection;
use diesel::connection::SimpleConnection;
use diesel::result::Error;

use crate::support::{Database, Gate, Receiver, eventually, status};

/// G2, G4: sends are in flight while their sequences are given to other messages, which the same lease claims. The
/// responses to the old sends settle none of the new messages.
#[test]
fn a_settle_does_not_take_a_new_message_for_the_old_one_of_its_sequence() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let is_well = Arc::new(AtomicBool::new(false));
    let well = Arc::clone(&is_well);
    let receiver = Receiver::start(move |request, stream| {
        let code = if request.json() == "old" {
            pass();
            200
        } else if well.load(Ordering::SeqCst) {
            200
        } else {
            500
        };
        stream.write_all(&status(code))
    });
    let insert = |text: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload) SELECT 'a', '\"{text}\"' FROM generate_series(1, 3)"
        ));
    };
    let relay = database
        .relay()
        .url(&receiver.url())
        .concurrency(6)
        .send_timeout(Duration::from_secs(20))
        .lease(Duration::from_secs(60))
        .start()
        .expect("the relay starts");
    insert("old");
    receiver.wait_for(3);
    database.execute("TRUNCATE {o} RESTART IDENTITY");
    insert("new");
    assert_eq!(database.number("SELECT max(sequence) FROM {o}"), 3);
    receiver.wait_for(6);
    drop(gate);
    eventually("the old settles have changed nothing", || {
        relay.stats().conflicts == 3
    });
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 3);
    assert_eq!(database.count("delivered"), 0);
    is_well.store(true, Ordering::SeqCst);
    eventually("the new messages are delivered", || {
        database.count("delivered") == 3
    });
    assert_eq!(receiver.ids().len(), 6);
}

/// R12: an operator's transaction, or a relay that was stopped in the middle of its renewal, locks the row of an
/// expired lease. The other relays continue.
#[test]
fn an_open_transaction_on_an_expired_lease_keeps_no_relay_from_claiming() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('dead:1', now() - interval '1 s')",
    );
    let mut operator = database.connect();
    operator
        .transaction::<(), Error, _>(|operator| {
            let hold = format!("SELECT FROM {}_lease FOR UPDATE", database.name());
            operator.batch_execute(&hold)?;
            let _relay = database.relay().url(&receiver.url()).start();
            database.enqueue_many(20);
            receiver.wait_for(20);
            Ok(())
        })
        .expect("an operator's transaction");
}
