//! The number of waiting messages: exact for small outboxes, cheap and roughly right for large ones.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use diesel::Connection;
use diesel::connection::SimpleConnection;
use diesel_outbox::Status;
use diesel_outbox::admin::{self, Depths};
use diesel_outbox::handlers::Handlers;
use diesel_outbox::program;

use crate::support::Database;

fn depths(db: &Database) -> Depths {
    admin::depths(&mut db.connect(), &db.outbox_name()).expect("depths")
}

/// The test's own counts: pending, sending, retrying, dead.
type Counts = BTreeMap<(String, String), [i64; 4]>;

fn as_counts(depths: &Depths) -> Counts {
    let mut counts = Counts::new();
    for lane in &depths.lanes {
        let lane_of = (lane.topic.clone(), lane.destination.clone());
        counts.entry(lane_of).or_default()[..3].copy_from_slice(&[
            lane.pending,
            lane.sending,
            lane.retrying,
        ]);
    }
    for lane in &depths.dead {
        let lane_of = (lane.topic.clone(), lane.destination.clone());
        counts.entry(lane_of).or_default()[3] = lane.count;
    }
    counts
}

/// Inserts a message in one of four states and counts it.
fn insert(sql: &mut String, counts: &mut Counts, o: &str, n: usize) {
    let topic = format!("t{}", fastrand::u8(0..4));
    let destination = ["", "a", "b"][fastrand::usize(0..3)].to_owned();
    let key = ["NULL", "'k'"][fastrand::usize(0..2)];
    let state = fastrand::usize(0..4);
    let (attempts, locked) = [("0", "NULL"), ("1", "7"), ("2", "NULL"), ("0", "NULL")][state];
    if state == 3 {
        sql.push_str(&format!(
            "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload,
                idempotency_key, available_at, created_at, attempts, reason)
             VALUES (-{n}, gen_random_uuid(), '{topic}', '{destination}', '1', 'd{n}', now(), now(), 1,
                'FAILED');"
        ));
    } else {
        sql.push_str(&format!(
            "INSERT INTO {o} (topic, destination, payload, ordering_key, attempts, locked_by)
             VALUES ('{topic}', '{destination}', '1', {key}, {attempts}, {locked});"
        ));
    }
    counts.entry((topic, destination)).or_default()[state] += 1;
}

/// R29: the counts of a small outbox are exact.
#[test]
fn a_small_outbox_is_counted_exactly() {
    for _ in 0..10 {
        let db = Database::new();
        let (mut sql, mut counts) = (String::new(), Counts::new());
        for n in 0..fastrand::usize(1..200) {
            insert(&mut sql, &mut counts, &db.name(), n);
        }
        db.connect().batch_execute(&sql).expect("inserted");
        let depths = depths(&db);
        assert_eq!(as_counts(&depths), counts);
        assert!(!depths.is_estimate);
        let all = program::exact_overview(&mut db.connect(), &db.outbox_name())
            .expect("counted")
            .depths;
        assert_eq!(as_counts(&all), counts);
    }
}

#[test]
fn the_age_of_the_oldest_due_message_is_that_of_its_lane() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, payload, available_at, locked_by) VALUES
            ('old', '1', now() - interval '100 s', NULL), ('old', '1', now(), NULL),
            ('claimed', '1', now() - interval '200 s', 3),
            ('later', '1', now() + interval '100 s', NULL),
            ('never', '1', '-infinity', NULL)",
    );
    let depths = depths(&db);
    let ages: Vec<(&str, Option<i64>)> = depths
        .lanes
        .iter()
        .map(|lane| {
            #[allow(clippy::cast_possible_truncation, reason = "seconds")]
            let age = lane.oldest_due_seconds.map(|age| (age / 50.0) as i64);
            (lane.topic.as_str(), age)
        })
        .collect();
    let expected = [
        ("claimed", None),
        ("later", None),
        ("never", None),
        ("old", Some(2)),
    ];
    assert_eq!(ages, expected);
    assert!(depths.oldest_due_seconds().is_some_and(|age| age > 99.0));
}

/// 300,000 messages: two long lanes, one behind the other in the table, and some short lanes.
fn fill(db: &Database) {
    db.execute(
        "INSERT INTO {o} (topic, destination, payload, attempts, available_at)
         SELECT CASE WHEN g % 3 = 0 THEN 'half' ELSE 'whole' END, '', '1', (g % 10 = 0)::int,
                now() - interval '1 hour'
           FROM generate_series(1, 240000) g",
    );
    db.execute(
        "INSERT INTO {o} (topic, payload) SELECT 'late', '1' FROM generate_series(1, 60000)",
    );
    db.execute(
        "INSERT INTO {o} (topic, destination, payload, ordering_key, attempts, locked_by)
         SELECT 'short', 'd' || g % 5, '1', CASE WHEN g % 2 = 0 THEN 'k' END, (g % 3 = 0)::int,
                CASE WHEN g % 4 = 0 THEN 9 END
           FROM generate_series(1, 500) g",
    );
    db.execute("ANALYZE {o}");
}

fn is_near(estimate: i64, truth: i64) -> bool {
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    let share = estimate as f64 / truth as f64;
    (0.8..=1.2).contains(&share)
}

/// R29: the cost of the gauges does not grow with the backlog, and short lanes are exact alongside long ones.
#[test]
fn long_lanes_are_estimated_and_short_ones_beside_them_are_exact() {
    let db = Database::new();
    fill(&db);
    let before = Instant::now();
    let estimated = depths(&db);
    let took = before.elapsed();
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert!(estimated.is_estimate);
    let exact = program::exact_overview(&mut db.connect(), &db.outbox_name())
        .expect("counted")
        .depths;
    assert_eq!(estimated.lanes.len(), exact.lanes.len());
    for (about, truth) in estimated.lanes.iter().zip(&exact.lanes) {
        assert_eq!(
            (&about.topic, &about.destination),
            (&truth.topic, &truth.destination)
        );
        if truth.topic == "short" {
            let counts = |lane: &admin::LaneDepth| (lane.pending, lane.sending, lane.retrying);
            assert_eq!(counts(about), counts(truth));
            assert!(!about.is_estimate);
            continue;
        }
        assert!(about.is_estimate, "{about:?}");
        assert!(is_near(about.pending, truth.pending), "{about:?} {truth:?}");
        assert!(
            truth.retrying == 0 || is_near(about.retrying, truth.retrying),
            "{about:?} {truth:?}"
        );
        let age = |lane: &admin::LaneDepth| lane.oldest_due_seconds.expect("due");
        assert!(
            (age(about) - age(truth)).abs() < 30.0,
            "{about:?} {truth:?}"
        );
    }
}

/// R29: a held snapshot keeps delivered rows in the indexes; the queries stay fast.
#[test]
fn dead_entries_under_a_held_snapshot_cost_little() {
    let db = Database::new();
    fill(&db);
    let mut holder = db.connect();
    holder
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM pg_class LIMIT 1")
        .expect("held");
    db.execute("DELETE FROM {o} WHERE topic IN ('half', 'whole')");
    let before = Instant::now();
    let depths = depths(&db);
    let took = before.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    let late = depths.lanes.iter().find(|lane| lane.topic == "late");
    assert!(
        is_near(late.expect("it is there").pending, 60_000),
        "{depths:?}"
    );
}

#[test]
fn many_dead_letters_are_estimated_and_the_latest_are_seen() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
            available_at, created_at, attempts, reason, response)
         SELECT g, gen_random_uuid(), CASE WHEN g > 99990 THEN 'new' ELSE 'old' END, '', '1', 'k' || g,
                now(), now(), 1, 'FAILED', repeat('x', 200)
           FROM generate_series(1, 100000) g",
    );
    let depths = depths(&db);
    assert!(depths.is_estimate);
    let count = |topic: &str| {
        let lane = depths.dead.iter().find(|lane| lane.topic == topic);
        lane.map(|lane| lane.count)
    };
    assert!(is_near(count("old").expect("old"), 99_990), "{depths:?}");
    assert!(count("new").is_some_and(|new| new >= 10), "{depths:?}");
}

#[test]
fn looking_changes_no_setting_of_the_connection_and_nothing_of_an_open_transaction() {
    let db = Database::new();
    let mut conn = db.connect();
    conn.batch_execute("SET jit = on").expect("set");
    conn.transaction(|conn| {
        conn.batch_execute("CREATE TEMP TABLE mine (n int)")?;
        admin::depths(conn, &db.outbox_name()).expect("depths");
        program::blocked_keys(conn, &db.outbox_name(), 10).expect("keys");
        conn.batch_execute(
            "INSERT INTO mine VALUES (1);
             DO $$ BEGIN ASSERT current_setting('jit') = 'on'; END $$",
        )
    })
    .expect("as before");
}

/// R29: rates cover the whole outbox, whichever relay does the work.
#[test]
fn activity_counts_what_comes_in_and_what_is_settled() {
    let db = Database::new();
    let first = program::activity(&mut db.connect(), &db.outbox_name()).expect("activity");
    db.enqueue_many(30);
    crate::support::eventually("thirty messages have come in", || {
        let now = program::activity(&mut db.connect(), &db.outbox_name()).expect("activity");
        let rates = now.since(&first).expect("time has passed");
        now.enqueued - first.enqueued == 30 && rates.enqueued > 0.0 && rates.dead_lettered == 0.0
    });
}

/// R29: a fan-out counts as its parts, neither as the message besides nor as the message alone.
#[test]
fn a_fan_out_comes_in_once_for_each_destination() {
    let db = Database::new();
    let relay = db
        .relay()
        .handlers("a", Handlers::new().on_topic("t", |_, _| Ok(())))
        .handlers("b", Handlers::new().on_topic("t", |_, _| Ok(())))
        .start()
        .expect("a relay");
    let first = program::activity(&mut db.connect(), &db.outbox_name()).expect("activity");
    // Before PostgreSQL 15, a session that becomes idle tells its last numbers when it ends.
    let enqueue = format!(
        "INSERT INTO {} (topic, payload) SELECT 't', '1' FROM generate_series(1, 10)",
        db.name()
    );
    db.connect().batch_execute(&enqueue).expect("messages");
    crate::support::eventually("twenty parts were settled", || {
        relay.stats().delivered == 20
    });
    crate::support::end(&relay);
    crate::support::eventually("twenty parts have come in and were settled", || {
        let now = program::activity(&mut db.connect(), &db.outbox_name()).expect("activity");
        (now.enqueued - first.enqueued, now.settled - first.settled) == (20, 20)
    });
}

/// A ledger that is estimated: messages without a subscriber are no delivered ones.
#[test]
fn a_large_ledger_has_messages_without_a_subscriber_apart() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_ledger (part, destination, sequence, message_id, topic, status, attempts, created_at, response)
         SELECT 0, '', -n, gen_random_uuid(), 't', CASE WHEN n % 4 = 0 THEN 'no_subscriber' ELSE 'delivered' END,
                1, now(), repeat('x', 1000)
           FROM generate_series(1, 20000) n",
    );
    db.execute("ANALYZE {o}_ledger");
    let overview = program::overview(&mut db.connect(), &db.outbox_name()).expect("an overview");
    for (status, truth) in [(Status::Delivered, 15_000), (Status::NoSubscriber, 5_000)] {
        let row = overview.counts.iter().find(|row| row.status == status);
        let row = row.unwrap_or_else(|| panic!("no {status}: {:?}", overview.counts));
        assert!(row.is_estimate && is_near(row.count, truth), "{row:?}");
    }
}
