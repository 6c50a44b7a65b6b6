//! Bursts to many endpoints: the work is done in bounded pieces.

use std::fmt::Write;
use std::time::Duration;

use diesel_outbox::RelayBuilder;
use serde_json::json;

use crate::support::{Database, Receiver, end, eventually};

/// An outbox without statistics: the planner sees empty tables for the whole test.
fn without_statistics(database: &Database) {
    for table in ["", "_dead", "_endpoint", "_lease", "_pause"] {
        database.execute(&format!(
            "ALTER TABLE {{o}}{table} SET (autovacuum_enabled = off)"
        ));
    }
}

/// Registers destinations for `order.*`, each with a path of its own.
fn register(database: &Database, receiver: &Receiver, count: usize) {
    let registered = database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, topics)
         SELECT 'hook-' || n, '{}/' || n, '{{order.*}}' FROM generate_series(1, {count}) AS n",
        receiver.url()
    ));
    assert_eq!(registered, count);
}

fn relay(database: &Database) -> RelayBuilder {
    database
        .relay()
        .endpoint_threads(16)
        .send_timeout(Duration::from_secs(10))
        .configure(|config| config.endpoint_timeout = Duration::from_secs(10))
        .lease(Duration::from_secs(30))
}

fn settled(database: &Database, topic: &str) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM {{o}}_ledger WHERE topic = '{topic}' AND status = 'delivered'"
    ))
}

/// R46: a large message goes to many destinations in several transactions, and another relay continues after the last
/// one. PostgreSQL stores a payload in each row, so each part writes the message's stored bytes once, and not more.
#[test]
fn a_large_message_is_fanned_out_in_pieces_across_a_restart() {
    const DESTINATIONS: usize = 200;

    let database = Database::new();
    without_statistics(&database);
    let (receiver, gate) = Receiver::held();
    register(&database, &receiver, DESTINATIONS);
    // Random digits: PostgreSQL compresses them little.
    let mut random = fastrand::Rng::with_seed(36);
    let mut text = String::new();
    while text.len() < 500_000 {
        let _ = write!(text, "{:016x}", random.u64(..));
    }
    let begin = database.number("SELECT pg_current_wal_lsn() - '0/0'");
    let whole = database.enqueue("order.paid", json!({ "text": text }));
    let stored = database.number("SELECT pg_column_size(payload) FROM {o}");
    assert!(stored > 200_000, "{stored}");
    let first = relay(&database).start().expect("a relay");
    let parts = format!("SELECT count(*) FROM {{o}} WHERE split_from = {whole}");
    eventually("a piece is placed", || database.number(&parts) > 0);
    drop(gate);
    end(&first);
    let progress = database.text(&format!(
        "SELECT split_to FROM {{o}} WHERE sequence = {whole}"
    ));
    eprintln!(
        "the first relay ended after {progress:?}, with {} parts left",
        database.number(&parts)
    );
    let second = relay(&database).start().expect("a relay");
    let all = i64::try_from(DESTINATIONS).expect("some");
    eventually("each destination has the message", || {
        settled(&database, "order.paid") == all
    });
    end(&second);
    assert!(progress.is_some(), "the fan-out ended before the restart");
    let lines: std::collections::HashSet<_> =
        (receiver.requests().into_iter().map(|one| one.line)).collect();
    assert_eq!((receiver.count(), lines.len()), (200, 200), "once each");
    let wal = database.number("SELECT pg_current_wal_lsn() - '0/0'") - begin;
    let needed = stored * (all + 1);
    eprintln!("WAL: {wal} bytes, {needed} of them are payloads of {stored} bytes");
    // Other tests write to the same server.
    assert!(wal < 3 * needed, "{wal} for {needed}");
}
