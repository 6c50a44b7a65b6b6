//! Finding a message by any of its names, the ledger in pages, and the messages of a key.

use std::time::{Duration, Instant, SystemTime};

use diesel_outbox::admin::{Place, Selection};
use diesel_outbox::program::{self, MessageKey, MessageRecord, Searched};
use diesel_outbox::{Sequence, Status};
use uuid::Uuid;

use crate::support::Database;

fn find(db: &Database, key: &MessageKey) -> Vec<MessageRecord> {
    let found = program::message(&mut db.connect(), &db.outbox_name(), key).expect("a search");
    assert!(found.is_complete);
    found.rows
}

fn text(text: &str) -> MessageKey {
    MessageKey::Text(text.to_owned())
}

/// `live pending a`: the table, the state and the destination.
fn shown(records: &[MessageRecord]) -> Vec<String> {
    let line = |r: &MessageRecord| format!("{} {} {}", r.kept_in, r.status, r.destination);
    records.iter().map(line).collect()
}

/// Inserts a message for three destinations, delivered to one, dead for another and retrying at the third, and its
/// replay. Adds `others` live messages and as many ledger entries.
fn fill(db: &Database, id: Uuid, others: usize) {
    db.execute(&format!(
        "INSERT INTO {{o}} (topic, payload) SELECT 't', '1' FROM generate_series(1, {others})"
    ));
    db.execute(&format!(
        "INSERT INTO {{o}} (message_id, topic, destination, payload, headers, idempotency_key, attempts,
                last_error_code, split_from)
         VALUES ('{id}', 't', 'c', '{{\"a\": 1}}', '{{\"x\": \"y\"}}', 'order-1', 1, 'TIMEOUT', 7),
                ('{id}', 't', 'a', '2', NULL, 'order-1#replay-20261121T101500-abcdef', 0, NULL, NULL)"
    ));
    db.execute(&format!(
        "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
            available_at, created_at, attempts, reason)
         VALUES (-1, '{id}', 't', 'b', '1', 'order-1', now(), now(), 3, 'REJECTED')"
    ));
    db.execute(&format!(
        "INSERT INTO {{o}}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, attempts, created_at)
         SELECT 0, 'other-' || g, '', -100 - g, gen_random_uuid(), 't', '', 'delivered', 1, now()
           FROM generate_series(1, {others}) g
         UNION ALL VALUES (0, 'order-1', 'a', -2, '{id}'::uuid, 't', ''::bytea, 'delivered', 1, now()),
                          (0, 'order-1', 'b', -1, '{id}', 't', '', 'dead', 3, now())"
    ));
    db.execute("ANALYZE {o}");
    db.execute("ANALYZE {o}_ledger");
}

const ALL: [&str; 5] = [
    "ledger delivered a",
    "ledger dead b",
    "dead dead b",
    "live retrying c",
    "live pending a",
];

/// R42: any name that a receiver or a log gives for a message leads to all its rows.
#[test]
fn a_message_is_found_by_sequence_id_and_key_with_all_its_parts_and_replays() {
    let db = Database::new();
    let id = Uuid::now_v7();
    fill(&db, id, 100);
    let live = db.number("SELECT sequence FROM {o} WHERE idempotency_key = 'order-1'");
    for key in [
        MessageKey::Id(id),
        MessageKey::Key("order-1".to_owned()),
        MessageKey::Sequence(live),
        MessageKey::Sequence(-1),
        MessageKey::Sequence(-2),
        text("order-1"),
        text(" order-1#replay-20261121T101500-abcdef "),
        text(&id.to_string()),
        text(&live.to_string()),
    ] {
        let records = find(&db, &key);
        assert_eq!(shown(&records), ALL, "{key:?}");
        let retrying = &records[3];
        assert_eq!(retrying.payload.as_deref(), Some("{\"a\": 1}"));
        assert_eq!(retrying.headers.as_deref(), Some("{\"x\": \"y\"}"));
        assert_eq!(retrying.reason.as_deref(), Some("TIMEOUT"));
        assert_eq!(retrying.split_from, Some(Sequence(7)));
        assert_eq!(records[4].replay_of(), Some("order-1"));
        assert!(records[0].settled_at.is_some() && records[0].payload.is_none());
    }
}

#[test]
fn a_message_of_plain_sql_is_found_by_its_id_wherever_it_is() {
    let db = Database::new();
    fill(&db, Uuid::now_v7(), 10);
    for table in ["{o}", "{o}_ledger"] {
        let id = db.text(&format!(
            "SELECT message_id::text FROM {table} WHERE topic = 't' LIMIT 1"
        ));
        let records = find(&db, &text(&id.expect("an id")));
        assert!(!records.is_empty());
    }
}

#[test]
fn a_missing_message_is_not_found() {
    let db = Database::new();
    fill(&db, Uuid::now_v7(), 10);
    for unknown in [
        MessageKey::Id(Uuid::now_v7()),
        MessageKey::Id(Uuid::from_u128(5)),
        MessageKey::Sequence(i64::MAX),
        MessageKey::Sequence(i64::MIN),
        MessageKey::Key("order".to_owned()),
        text(""),
        text("%"),
        text("'; DROP TABLE x"),
        text("99999999999999999999999"),
    ] {
        assert_eq!(find(&db, &unknown).len(), 0, "{unknown:?}");
    }
}

/// R32: finding one message among many does not read all of them.
#[test]
fn an_id_of_the_librarys_is_found_among_many() {
    let db = Database::new();
    let id = Uuid::now_v7();
    fill(&db, id, 100_000);
    db.execute("DELETE FROM {o}_dead");
    let before = Instant::now();
    assert_eq!(find(&db, &MessageKey::Id(id)).len(), 4);
    let took = before.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    // Settled days after it was enqueued.
    db.execute("DELETE FROM {o} WHERE idempotency_key LIKE 'order-1%'");
    db.execute(
        "UPDATE {o}_ledger SET settled_at = now() + interval '3 days' WHERE idempotency_key = 'order-1'",
    );
    assert_eq!(find(&db, &MessageKey::Id(id)).len(), 2);
}

fn ledger(db: &Database, selection: &Selection, limit: i64) -> Searched<MessageRecord> {
    program::ledger(&mut db.connect(), &db.outbox_name(), selection, limit).expect("the ledger")
}

/// R32: the ledger in pages, the latest entry first, whatever the time between entries.
#[test]
fn the_ledger_is_read_by_pages_and_each_row_is_on_one() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, attempts, created_at, settled_at)
         SELECT 0, 'k' || g, '', g, gen_random_uuid(), 't' || g % 2, '', 'delivered', 1, now(),
                now() - (g / 3) * (g / 3) * interval '3 hours'
           FROM generate_series(1, 100) g",
    );
    let (mut seen, mut before): (Vec<i64>, Option<Place>) = (Vec::new(), None);
    loop {
        let filter = program::behind(Selection::default(), before);
        let page = ledger(&db, &filter, 7);
        assert!(page.is_complete);
        let Some(last) = page.rows.last() else { break };
        before = Some(last.place());
        seen.extend(page.rows.iter().map(|row| row.sequence.0));
    }
    let mut all: Vec<i64> = (1..=100).collect();
    all.sort_by_key(|sequence| (sequence / 3, -sequence));
    assert_eq!(seen, all);
}

#[test]
fn the_ledger_is_searched_by_time_topic_destination_state_and_key() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, reason, attempts, created_at, settled_at, ordering_key, payload)
         VALUES (0, 'a', 'x', 1, gen_random_uuid(), 't', '', 'delivered', NULL, 1, now(),
                 now() - interval '1 day', 'k', NULL),
                (0, 'b', 'y', 2, gen_random_uuid(), 't', '', 'dead', 'TIMEOUT', 1, now(),
                 now() - interval '1 hour', NULL, '1'),
                (0, 'c', 'x', 3, gen_random_uuid(), 'u', '', 'delivered', NULL, 1, now(), now(), NULL, NULL)",
    );
    let ago = |seconds| SystemTime::now().checked_sub(Duration::from_secs(seconds));
    let all = Selection::default;
    let found = |selection: Selection| -> Vec<i64> {
        let rows = ledger(&db, &selection, 10).rows;
        rows.iter().map(|row| row.sequence.0).collect()
    };
    assert_eq!(found(all()), [3, 2, 1]);
    assert_eq!(found(all().topic("t".to_owned())), [2, 1]);
    assert_eq!(found(all().destination("x".to_owned())), [3, 1]);
    assert_eq!(found(all().status(Status::Dead)), [2]);
    assert_eq!(found(all().ordering_key("k".to_owned())), [1]);
    assert_eq!(found(all().since(ago(7200))), [3, 2]);
    assert_eq!(found(all().until(ago(1800))), [2, 1]);
    assert_eq!(found(all().since(ago(7200)).until(ago(1800))), [2]);
    assert_eq!(found(all().since(ago(1800)).until(ago(7200))), [0; 0]);
    let dead = ledger(&db, &all().status(Status::Dead), 10);
    assert!(dead.rows[0].has_payload && dead.rows[0].reason.as_deref() == Some("TIMEOUT"));
}

#[test]
fn the_messages_of_a_key_come_in_their_order_with_its_dead_letters() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, payload, ordering_key) SELECT 't', '1', 'k' || g % 2
           FROM generate_series(1, 6) g",
    );
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
            ordering_key, available_at, created_at, attempts, reason, blocks_key)
         VALUES (0, gen_random_uuid(), 't', '', '1', 'd', 'k1', now(), now(), 3, 'REJECTED', true)",
    );
    let of = |limit| {
        let records = program::key_messages(&mut db.connect(), &db.outbox_name(), "k1", limit);
        let records = records.expect("messages");
        let line = |r: &MessageRecord| (r.sequence.0, r.status, r.blocks_key);
        records.iter().map(line).collect::<Vec<_>>()
    };
    let pending = |sequence| (sequence, Status::Pending, false);
    let dead = (0, Status::Dead, true);
    assert_eq!(of(10), [dead, pending(1), pending(3), pending(5)]);
    assert_eq!(of(2), [dead, pending(1)]);
}

/// R32: waiting keys are found through the message that blocks them, and the count behind a key has a limit.
#[test]
fn blocked_keys_are_found_among_many_that_are_not_blocked() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, attempts, available_at, locked_by)
         SELECT 't' || g % 3, '1'::json, 'free-' || g % 5000, 0, now(), NULL::bigint FROM generate_series(1, 50000) g",
    );
    db.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, attempts, available_at, locked_by) VALUES
            ('t', '1', 'hot', 1, now() + interval '1 hour', NULL),
            ('t', '1', 'delayed', 0, now() + interval '2 hours', NULL),
            ('t', '1', 'delayed', 0, now(), NULL),
            ('t', '1', 'on-its-way', 1, now() + interval '1 hour', 7),
            ('t', '1', 'on-its-way', 0, now(), NULL),
            ('t', '1', 'alone', 1, now() + interval '1 hour', NULL),
            ('t', '1', 'first-is-free', 0, now(), NULL),
            ('t', '1', 'first-is-free', 1, now() + interval '1 hour', NULL),
            ('t', '1', 'dead', 0, now(), NULL)",
    );
    db.execute(
        "INSERT INTO {o} (topic, payload, ordering_key) SELECT 't', '1', 'hot' FROM generate_series(1, 3000)",
    );
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
            ordering_key, available_at, created_at, attempts, reason, blocks_key)
         SELECT -g, gen_random_uuid(), 't', '', '1', 'd' || g, CASE WHEN g = 5 THEN 'dead' ELSE 'gone' || g END,
                now(), now(), 3, 'REJECTED', true
           FROM generate_series(1, 1000) g",
    );
    let blocked = |limit| {
        let before = Instant::now();
        let keys =
            program::blocked_keys(&mut db.connect(), &db.outbox_name(), limit).expect("keys");
        assert!(
            before.elapsed() < Duration::from_secs(1),
            "{:?}",
            before.elapsed()
        );
        let shown = |key: &program::BlockedKey| {
            (
                key.ordering_key.clone(),
                key.status,
                key.waiting,
                key.waiting_is_capped,
            )
        };
        keys.iter().map(shown).collect::<Vec<_>>()
    };
    let key = |key: &str, status, waiting, is_capped| (key.to_owned(), status, waiting, is_capped);
    assert_eq!(
        blocked(100),
        [
            key("hot", Status::Retrying, 2000, true),
            key("dead", Status::Dead, 1, false),
            key("delayed", Status::Pending, 1, false),
        ]
    );
    assert_eq!(blocked(1), [key("hot", Status::Retrying, 3000, false)]);
}
