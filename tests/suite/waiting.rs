//! Waiting messages: listed, cancelled, rescheduled and settled by hand, by the library, the commands and the page.

use std::time::{Duration, Instant, SystemTime};

use diesel::connection::SimpleConnection;
use diesel::result::Error;
use diesel::{Connection, PgConnection};
use diesel_outbox::admin::{self, Note, Selection, Verdict};
use diesel_outbox::program::{self, MessageKey};
use diesel_outbox::{
    Answer, Changed, Destination, Due, Enqueued, MessageRef, NewMessage, PartState, Sequence,
    Status,
};
use serde_json::json;
use uuid::Uuid;

use crate::page::Page;
use crate::support::{Database, Finished, Receiver, end, eventually, finish, message};

const HOUR: Duration = Duration::from_secs(3600);

fn reminder(key: &str) -> NewMessage {
    message("reminder").idempotency_key(key).delay(HOUR)
}

fn enqueue(db: &Database, message: NewMessage) -> Enqueued {
    let enqueued = db.outbox().enqueue(&mut db.connect(), message);
    enqueued.expect("enqueued")
}

fn cancel(db: &Database, which: impl Into<MessageRef>) -> Changed {
    let changed = db.outbox().cancel(&mut db.connect(), which);
    changed.expect("an answer")
}

fn note() -> Note {
    Note::new("alice", "sent by fax")
}

fn settle(db: &Database, which: impl Into<MessageRef>, verdict: Verdict) -> Changed {
    let changed = admin::settle(
        &mut db.connect(),
        &db.outbox_name(),
        &which.into(),
        verdict,
        &note(),
    );
    changed.expect("an answer")
}

/// `a Done`: the destination and state of each part.
fn parts(changed: &Changed) -> Vec<String> {
    let part = |part: &diesel_outbox::Part| format!("{} {:?}", part.destination, part.state);
    changed.parts.iter().map(part).collect()
}

/// Status, reason and error of the ledger's latest row.
fn ledger(db: &Database) -> Option<String> {
    db.text("SELECT concat_ws(' ', status, reason, error) FROM {o}_ledger ORDER BY settled_at DESC LIMIT 1")
}

/// R39, G1: cancelled in the caller's transaction, and only if that transaction commits.
#[test]
fn a_cancelled_message_is_not_sent_and_the_ledger_keeps_that_it_was_cancelled() {
    let db = Database::new();
    enqueue(&db, reminder("r-1"));
    let mut conn = db.connect();
    let rolled_back = conn.transaction::<(), Error, _>(|conn| {
        let changed = db.outbox().cancel(conn, MessageRef::key("r-1"))?;
        assert_eq!(changed.answer(), Answer::Done);
        Err(Error::RollbackTransaction)
    });
    assert_eq!(rolled_back, Err(Error::RollbackTransaction));
    assert_eq!((db.count("pending"), ledger(&db)), (1, None));

    let changed = conn
        .transaction(|conn| db.outbox().cancel(conn, MessageRef::key("r-1")))
        .expect("an answer");
    assert_eq!(changed.answer(), Answer::Done);
    assert_eq!(ledger(&db).as_deref(), Some("dead CANCELLED"));
    assert_eq!((db.count("pending"), db.count("dead")), (0, 1), "G2");
    assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 0, "no alarm");
    assert_eq!(
        cancel(&db, MessageRef::key("r-1")).answer(),
        Answer::Cancelled
    );

    // The key is free: a new message under it is sent.
    assert!(enqueue(&db, message("reminder").idempotency_key("r-1")).is_new);
    let receiver = Receiver::ok();
    let relay = db
        .relay()
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    receiver.wait_for(1);
    eventually("the message is settled", || relay.stats().delivered == 1);
    assert_eq!(
        cancel(&db, MessageRef::key("r-1")).answer(),
        Answer::Delivered
    );
    assert_eq!(receiver.count(), 1);
}

/// R39: a message is cancelled by each of its names, and never another message of the same key.
#[test]
fn a_message_is_cancelled_by_sequence_id_and_key() {
    let db = Database::new();
    let first = enqueue(&db, reminder("r-1")).sequence;
    assert_eq!(cancel(&db, first).answer(), Answer::Done);
    enqueue(&db, reminder("r-1"));
    assert_eq!(cancel(&db, first).answer(), Answer::Cancelled);
    assert_eq!(
        db.count("pending"),
        1,
        "the new message with the same key stays"
    );
    let id = db.text("SELECT message_id::text FROM {o}").expect("an id");
    let id: Uuid = id.parse().expect("an id");
    let elsewhere = MessageRef::from(id).at("billing");
    assert_eq!(cancel(&db, elsewhere).answer(), Answer::Unknown);
    assert_eq!(cancel(&db, id).answer(), Answer::Done);
    for unknown in [
        MessageRef::key("r-2"),
        MessageRef::from(Sequence(i64::MAX)),
        MessageRef::from(Uuid::now_v7()),
    ] {
        assert_eq!(cancel(&db, unknown.clone()).answer(), Answer::Unknown);
        let later = db
            .outbox()
            .reschedule(&mut db.connect(), unknown, Due::Now)
            .expect("an answer");
        assert_eq!(later.answer(), Answer::Unknown);
    }
}

/// R39, R13: a message that a relay holds or another transaction has locked stays unchanged, and nothing waits for it.
#[test]
fn messages_in_flight_are_skipped_at_once() {
    let db = Database::new();
    let claimed = enqueue(&db, message("t").idempotency_key("claimed")).sequence;
    db.execute("UPDATE {o} SET locked_by = 7, locked_at = now()");
    let locked = enqueue(&db, message("t").idempotency_key("locked")).sequence;
    let mut other = db.connect();
    other
        .batch_execute(&format!(
            "BEGIN; SELECT FROM {} WHERE sequence = {locked} FOR NO KEY UPDATE",
            db.name()
        ))
        .expect("locked");
    let mut conn = db.connect();
    conn.batch_execute("SET statement_timeout = '10s'")
        .expect("set");
    let (outbox, name) = (db.outbox(), db.outbox_name());
    for which in [claimed, locked] {
        let changed = outbox.cancel(&mut conn, which).expect("an answer");
        assert_eq!(changed.answer(), Answer::InFlight);
        let changed = outbox.reschedule(&mut conn, which, Due::Now);
        assert_eq!(changed.expect("an answer").answer(), Answer::InFlight);
    }
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 2);

    // An operator may settle a message in flight only after its lease has expired.
    db.execute(
        "INSERT INTO {o}_lease (id, relay, expires_at) OVERRIDING SYSTEM VALUE
         VALUES (7, 'r', now() + interval '1 hour')",
    );
    let which = MessageRef::from(claimed);
    let mut settle = || {
        let verdict = Verdict::Delivered;
        admin::settle(&mut conn, &name, &which, verdict, &note()).expect("an answer")
    };
    assert_eq!(settle().answer(), Answer::InFlight);
    db.execute("UPDATE {o}_lease SET expires_at = now()");
    assert_eq!(settle().answer(), Answer::Done);
    assert_eq!(
        ledger(&db).as_deref(),
        Some("delivered BY_HAND alice: sent by fax")
    );
}

/// R39, R12: a lease that is being renewed holds its messages, although its row still says that it has expired.
#[test]
fn a_message_under_a_lease_that_is_being_renewed_is_not_settled() {
    let db = Database::new();
    let sequence = enqueue(&db, message("t")).sequence;
    db.execute(
        "INSERT INTO {o}_lease (id, relay, expires_at) OVERRIDING SYSTEM VALUE
         VALUES (7, 'r', clock_timestamp() + interval '1 hour')",
    );
    db.execute("UPDATE {o} SET locked_by = 7, locked_at = now()");
    let mut relay = db.connect();
    db.execute("UPDATE {o}_lease SET expires_at = clock_timestamp()");
    relay
        .batch_execute(&format!(
            "BEGIN; UPDATE {}_lease SET expires_at = clock_timestamp() + interval '1 hour'",
            db.name()
        ))
        .expect("a renewal that has not committed");
    let settled = settle(&db, sequence, Verdict::NotToBeSent);
    assert_eq!(settled.answer(), Answer::InFlight);
    relay.batch_execute("COMMIT").expect("renewed");
    let settled = settle(&db, sequence, Verdict::NotToBeSent);
    assert_eq!(settled.answer(), Answer::InFlight);
    assert_eq!(db.number("SELECT count(*) FROM {o} WHERE locked_by = 7"), 1);

    // A settled message ends the expired lease, so that a renewal that comes later finds no lease to renew.
    db.execute("UPDATE {o}_lease SET expires_at = clock_timestamp()");
    let settled = settle(&db, sequence, Verdict::NotToBeSent);
    assert_eq!(settled.answer(), Answer::Done);
    assert_eq!(db.number("SELECT count(*) FROM {o}_lease WHERE ended"), 1);
}

/// R39: each part of a fan-out has its own answer.
#[test]
fn the_parts_of_a_fan_out_are_distinguished() {
    let db = Database::new();
    let (fast, slow) = (Receiver::ok(), Receiver::answering(|_| 503));
    let relay = db
        .relay()
        .backoff(diesel_outbox::Backoff::Table(vec![HOUR]))
        .destination(Destination::new("fast", &fast.url()).expect("a URL"))
        .destination(Destination::new("slow", &slow.url()).expect("a URL"))
        .route_to_each("t", &["fast", "slow"])
        .start()
        .expect("the relay starts");
    let whole = enqueue(&db, message("t").idempotency_key("k")).sequence;
    fast.wait_for(1);
    eventually("one part is delivered, one waits", || {
        (db.count("delivered"), db.count("retrying")) == (1, 1)
    });
    end(&relay);
    let later = db
        .outbox()
        .reschedule(&mut db.connect(), whole, Due::After(HOUR))
        .expect("an answer");
    let expected = ["fast Delivered", "slow Done"];
    assert_eq!(
        (parts(&later), later.answer()),
        (expected.map(String::from).to_vec(), Answer::Partly)
    );
    let changed = cancel(&db, MessageRef::key("k").at("fast"));
    assert_eq!(parts(&changed), ["fast Delivered"]);
    // The sequence of a part is this part alone.
    let slow_one = later.parts[1].sequence;
    let now = ["message", "reschedule", &slow_one.to_string(), "--now"];
    finish(db.binary(&now)).code(0);
    let changed = cancel(&db, whole);
    assert_eq!(parts(&changed), expected);
    assert_eq!(changed.parts[1].state, PartState::Done);
    let changed = cancel(&db, MessageRef::key("k"));
    assert_eq!(parts(&changed), ["fast Delivered", "slow Cancelled"]);
    assert_eq!(changed.answer(), Answer::Delivered);
}

/// R39: the sequence of a part is this part alone, also once the part is delivered or dead.
#[test]
fn the_sequence_of_a_settled_part_changes_no_other_part() {
    let db = Database::new();
    let (fast, slow) = (Receiver::ok(), Receiver::answering(|_| 503));
    let refuses = Receiver::answering(|_| 400);
    let relay = db
        .relay()
        .backoff(diesel_outbox::Backoff::Table(vec![HOUR]))
        .destination(Destination::new("fast", &fast.url()).expect("a URL"))
        .destination(Destination::new("refuses", &refuses.url()).expect("a URL"))
        .destination(Destination::new("slow", &slow.url()).expect("a URL"))
        .route_to_each("t", &["fast", "refuses", "slow"])
        .start()
        .expect("the relay starts");
    let whole = enqueue(&db, message("t")).sequence;
    eventually("each part has its result", || {
        ["delivered", "dead", "retrying"].map(|status| db.count(status)) == [1, 1, 1]
    });
    end(&relay);
    let of = |name: &str| {
        let sequence = format!("SELECT sequence FROM {{o}}_ledger WHERE destination = '{name}'");
        Sequence(db.number(&sequence))
    };
    let (delivered, dead) = (of("fast"), of("refuses"));
    assert_eq!(parts(&cancel(&db, delivered)), ["fast Delivered"]);
    let later = (db.outbox()).reschedule(&mut db.connect(), dead, Due::After(HOUR));
    assert_eq!(parts(&later.expect("an answer")), ["refuses Dead"]);
    let settled = settle(&db, dead, Verdict::Delivered);
    assert_eq!(parts(&settled), ["refuses Done"]);
    assert_eq!((db.count("retrying"), db.count("dead")), (1, 0));
    let all = ["fast Delivered", "refuses Delivered", "slow Done"];
    assert_eq!(parts(&cancel(&db, whole)), all);
}

/// R39, R9: the message becomes due sooner. The claims have passed its position in the lane, and no relay polls.
#[test]
fn a_message_that_is_rescheduled_to_now_is_sent_at_once() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let keyed = message("t").ordering_key("k").delay(HOUR);
    let plain = message("t").delay(HOUR);
    let sequences = [plain, keyed].map(|message| enqueue(&db, message).sequence);
    let relay = db.sleeper(db.relay().url(&receiver.url()));
    let long_ago = Due::At(SystemTime::now() - 24 * HOUR);
    for (count, (sequence, due)) in (1..).zip(sequences.into_iter().zip([Due::Now, long_ago])) {
        eventually("the relay sleeps", || db.is_relay_asleep());
        let changed = db.outbox().reschedule(&mut db.connect(), sequence, due);
        assert_eq!(changed.expect("an answer").answer(), Answer::Done);
        receiver.wait_for(count);
        eventually("the message is settled", || {
            relay.stats().delivered == count as u64
        });
    }
}

/// R39: the message becomes due later.
#[test]
fn a_message_that_is_put_off_is_sent_at_its_new_time() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let relay = db
        .relay()
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    let began = Instant::now();
    let sequence = enqueue(&db, message("t").delay(Duration::from_millis(700))).sequence;
    let later = Duration::from_millis(1500);
    let changed = db
        .outbox()
        .reschedule(&mut db.connect(), sequence, Due::After(later))
        .expect("an answer");
    assert_eq!(changed.answer(), Answer::Done);
    receiver.wait_for(1);
    assert!(began.elapsed() >= later, "{:?}", began.elapsed());
    eventually("the message is settled", || relay.stats().delivered == 1);
}

/// R39, G5: the key continues, and a sleeping relay is notified.
#[test]
fn a_cancelled_first_message_frees_its_key_at_once() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let keyed = |n: u64| {
        NewMessage::new("t", &json!({ "n": n }))
            .expect("JSON")
            .ordering_key("k")
    };
    let first = enqueue(&db, keyed(1).delay(HOUR)).sequence;
    enqueue(&db, keyed(2));
    enqueue(&db, keyed(3));
    let relay = db.sleeper(db.relay().url(&receiver.url()));
    assert_eq!(cancel(&db, first).answer(), Answer::Done);
    let numbers: Vec<_> = receiver
        .wait_for(2)
        .iter()
        .map(|request| request.json()["n"].as_u64())
        .collect();
    assert_eq!(numbers, [Some(2), Some(3)]);
    eventually("both messages are settled", || relay.stats().delivered == 2);
}

fn bury(db: &Database) {
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, ordering_key,
            idempotency_key, available_at, created_at, attempts, reason, blocks_key)
         VALUES (-1, gen_random_uuid(), 't', 'billing', '1', 'k', 'dead-1', now(), now(), 3, 'REJECTED', true)",
    );
    db.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
            status, reason, attempts, created_at)
         SELECT 0, idempotency_key, destination, sequence, message_id, topic, '', 'dead', reason, 3, now()
           FROM {o}_dead",
    );
}

/// R39: a dead letter was delivered by other means, or must not be sent; its key is free.
#[test]
fn a_dead_letter_is_settled_by_hand() {
    for (verdict, row) in [
        (Verdict::Delivered, "delivered BY_HAND alice: sent by fax"),
        (Verdict::NotToBeSent, "dead CANCELLED alice: sent by fax"),
    ] {
        let db = Database::new();
        bury(&db);
        assert_eq!(
            cancel(&db, MessageRef::key("dead-1")).answer(),
            Answer::Dead
        );
        let behind = message("t").ordering_key("k").idempotency_key("behind");
        enqueue(&db, behind.destination("billing"));
        let receiver = Receiver::ok();
        let billing = Destination::new("billing", &receiver.url()).expect("a URL");
        let relay = db.sleeper(db.relay().destination(billing));
        let changed = settle(&db, Sequence(-1), verdict);
        assert_eq!(parts(&changed), ["billing Done"]);
        assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 0);
        receiver.wait_for(1);
        eventually("the next message is settled", || {
            relay.stats().delivered == 1
        });
        db.execute("DELETE FROM {o}_ledger WHERE idempotency_key = 'behind'");
        assert_eq!(ledger(&db).as_deref(), Some(row));
        let key = MessageKey::Key("dead-1".to_owned());
        let records =
            program::message(&mut db.connect(), &db.outbox_name(), &key).expect("a search");
        let last = records.rows.last().expect("an entry");
        let error = last.last_error.as_deref();
        assert_eq!(error, Some("alice: sent by fax"));
    }
}

/// R39.
#[test]
fn a_change_reaches_no_other_message_of_the_same_id() {
    let db = Database::new();
    // Enqueued twice without a key; the first of the two is delivered.
    let twice = message("t").delay(HOUR);
    let first = enqueue(&db, twice.clone());
    let second = enqueue(&db, twice);
    assert_eq!(first.message_id, second.message_id);
    settle(&db, first.sequence, Verdict::Delivered);
    assert_eq!(cancel(&db, first.sequence).answer(), Answer::Delivered);
    assert_eq!(db.count("pending"), 1);

    // Delivered, and its replay is a dead letter.
    let db = Database::new();
    let delivered = enqueue(&db, reminder("order-1"));
    settle(&db, delivered.sequence, Verdict::Delivered);
    db.execute(&format!(
        "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, payload, idempotency_key, available_at,
             created_at, attempts, reason)
         VALUES (-1, '{}', 'reminder', '', '1', 'order-1#replay-r', now(), now(), 1, 'REJECTED')",
        delivered.message_id
    ));
    settle(&db, MessageRef::key("order-1"), Verdict::NotToBeSent);
    assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 1);
}

/// A version 7 id that was made this long ago.
fn id_of(ago: Duration) -> Uuid {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let at = now.expect("after 1970").saturating_sub(ago);
    Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, at.as_secs(), 0))
}

/// R39: parts without a key are found by their id alone. A message that was delayed for a day is fanned out among
/// today's rows.
#[test]
fn a_part_that_waits_is_found_by_its_id_whatever_became_of_the_other() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, payload, created_at)
         SELECT 't', '1', now() - g * interval '1 second' FROM generate_series(100000, 1, -1) g",
    );
    let random = || {
        let id = db.text("SELECT gen_random_uuid()").expect("an id");
        id.parse().expect("an id")
    };
    let fates = [
        ("'delivered', NULL", "Delivered"),
        ("'dead', 'REJECTED'", "Dead"),
        ("'dead', 'CANCELLED'", "Cancelled"),
    ];
    for (fate, told) in fates {
        for (id, settled_at) in [
            (id_of(27 * HOUR), 1),
            (id_of(27 * HOUR), -1),
            (id_of(Duration::ZERO), 1),
            (random(), 1),
            (random(), -1),
        ] {
            db.execute(&format!(
                "WITH waiting AS (
                    INSERT INTO {{o}} (message_id, topic, destination, payload, available_at, split_from)
                    VALUES ('{id}', 't', 'b', '1', now() + interval '1 hour', 5) RETURNING sequence)
                 INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, named_destination, status,
                    reason, attempts, created_at)
                 SELECT 0, sequence + {settled_at}, '{id}', 't', 'a', 'a', {fate}, 1, now() FROM waiting"
            ));
            let of_a = format!("a {told}");
            let all = |b: &str| vec![of_a.clone(), format!("b {b}")];
            assert_eq!(parts(&cancel(&db, id)), all("Done"), "{id} {fate}");
            let again = cancel(&db, id);
            assert_eq!((parts(&again), again.is_complete), (all("Cancelled"), true));
        }
    }
    // Plain SQL used an id twice: the first message was delivered.
    let id: Uuid = random();
    db.execute(&format!(
        "INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, status, attempts, created_at)
         VALUES (0, 7, '{id}', 't', '', 'delivered', 1, now())"
    ));
    assert_eq!(parts(&cancel(&db, id)), [" Delivered"]);
    db.execute(&format!(
        "INSERT INTO {{o}} (message_id, topic, payload) VALUES ('{id}', 't', '1')"
    ));
    assert_eq!(parts(&cancel(&db, id)), [" Done"]);
}

/// R25, G5: the key continues, and a sleeping relay is notified.
#[test]
fn a_discarded_dead_letter_frees_its_key_at_once() {
    let db = Database::new();
    bury(&db);
    for n in 1..=2 {
        let behind = NewMessage::new("t", &n).expect("JSON").ordering_key("k");
        enqueue(&db, behind.destination("billing"));
    }
    let receiver = Receiver::ok();
    let billing = Destination::new("billing", &receiver.url()).expect("a URL");
    let relay = db.sleeper(db.relay().destination(billing));
    let all = admin::Selection::default();
    let letters = admin::matching_dead_letters(&mut db.connect(), &db.outbox_name(), &all);
    let letters = letters.expect("letters");
    assert_eq!(letters.len(), 1);
    let discarded = admin::discard(
        &mut db.connect(),
        &db.outbox_name(),
        &letters,
        &admin::Note::new("alice", ""),
    );
    assert_eq!(discarded.expect("an answer"), 1);
    let numbers: Vec<_> = receiver.wait_for(2).iter().map(|one| one.json()).collect();
    assert_eq!(numbers, [json!(1), json!(2)]);
    eventually("both messages are settled", || relay.stats().delivered == 2);
    let again = admin::discard(
        &mut db.connect(),
        &db.outbox_name(),
        &letters,
        &admin::Note::new("alice", ""),
    );
    assert_eq!(again.expect("an answer"), 0);
}

/// R2, R20: a message settled as delivered by hand is not sent when it is enqueued again, and the entry stays.
#[test]
fn a_message_marked_as_delivered_by_hand_counts_as_delivered() {
    let db = Database::new();
    let waiting = || message("t").idempotency_key("k");
    enqueue(&db, waiting());
    let which = || MessageRef::key("k");
    assert_eq!(
        settle(&db, which(), Verdict::Delivered).answer(),
        Answer::Done
    );
    assert_eq!(
        settle(&db, which(), Verdict::NotToBeSent).answer(),
        Answer::Delivered
    );
    enqueue(&db, waiting());
    let receiver = Receiver::ok();
    let relay = db
        .relay()
        .url(&receiver.url())
        .start()
        .expect("the relay starts");
    eventually("the message is settled", || {
        db.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(receiver.count(), 0);
    assert_eq!(
        ledger(&db).as_deref(),
        Some("delivered BY_HAND alice: sent by fax")
    );
}

fn list(conn: &mut PgConnection, db: &Database, filter: &Selection, limit: i64) -> Vec<String> {
    let found = program::waiting(conn, &db.outbox_name(), filter, limit).expect("a list");
    assert!(found.is_complete);
    let keys = found.rows.iter().map(|row| row.idempotency_key.clone());
    keys.collect()
}

fn fill_list(db: &Database) {
    db.execute(
        "INSERT INTO {o} (topic, destination, ordering_key, tenant_id, idempotency_key, payload, attempts,
                locked_by, available_at)
         VALUES ('a', '', NULL, NULL, 'a-retrying', '1', 2, NULL, now() + interval '3 min'),
                ('a', 'one', 'k', NULL, 'a-one-keyed', '1', 0, NULL, now() + interval '1 min'),
                ('b', '', 'k', '00000000-0000-0000-0000-000000000007', 'b-keyed', '1', 0, 5, now()),
                ('b', 'one', NULL, '00000000-0000-0000-0000-000000000007', 'b-one', '1', 0, NULL,
                 now() + interval '2 min')",
    );
}

/// R39, R36
#[test]
fn waiting_messages_are_listed_by_topic_destination_tenant_key_and_state() {
    let db = Database::new();
    fill_list(&db);
    let mut conn = db.connect();
    let all = Selection::default();
    let in_order = ["b-keyed", "a-one-keyed", "b-one", "a-retrying"];
    assert_eq!(list(&mut conn, &db, &all, 10), in_order);
    assert_eq!(list(&mut conn, &db, &all, 2), in_order[..2]);
    let topic = |topic: &str| all.clone().topic(topic.to_owned());
    let destination = all.clone().destination("one".to_owned());
    let tenant = all.clone().tenant_id(Uuid::from_u128(7));
    let key = all.clone().ordering_key("k".to_owned());
    let in_state = |status| all.clone().status(status);
    let both = tenant.clone().status(Status::Pending);
    let key_at = key.clone().destination(String::new());
    for (filter, expected) in [
        (topic("a"), vec!["a-one-keyed", "a-retrying"]),
        (topic("c"), vec![]),
        (destination, vec!["a-one-keyed", "b-one"]),
        (tenant, vec!["b-keyed", "b-one"]),
        (key, vec!["b-keyed", "a-one-keyed"]),
        (key_at, vec!["b-keyed"]),
        (in_state(Status::Pending), vec!["a-one-keyed", "b-one"]),
        (in_state(Status::Retrying), vec!["a-retrying"]),
        (in_state(Status::Sending), vec!["b-keyed"]),
        (both, vec!["b-one"]),
    ] {
        assert_eq!(list(&mut conn, &db, &filter, 10), expected, "{filter:?}");
    }
    // Page by page.
    let mut seen = Vec::new();
    let mut filter = all.clone();
    loop {
        let page = program::waiting(&mut conn, &db.outbox_name(), &filter, 1).expect("a list");
        let Some(row) = page.rows.first() else {
            break;
        };
        seen.push(row.idempotency_key.clone());
        filter = program::behind(filter, row.place());
    }
    assert_eq!(seen, in_order);
}

/// R39: even with more topics than one statement reads, and with many messages of the same time.
#[test]
fn the_pages_of_many_topics_are_one_list() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, destination, ordering_key, idempotency_key, payload, available_at)
         SELECT 't-' || n * 7 % 23, CASE n % 2 WHEN 0 THEN 'one' ELSE '' END,
                CASE n % 5 WHEN 0 THEN 'k' || n % 4 END, n::text, '1', now() + n * 13 % 11 * interval '1 min'
           FROM generate_series(1, 500) n",
    );
    let in_order =
        db.text("SELECT string_agg(idempotency_key, ' ' ORDER BY available_at, sequence) FROM {o}");
    let mut conn = db.connect();
    for limit in [11, 90, 500] {
        let (mut seen, mut filter) = (Vec::new(), Selection::default());
        loop {
            let page = program::waiting(&mut conn, &db.outbox_name(), &filter, limit);
            let page = page.expect("a list").rows;
            assert!(i64::try_from(page.len()).is_ok_and(|length| length <= limit));
            let Some(last) = page.last() else {
                break;
            };
            filter = program::behind(filter, last.place());
            seen.extend(page.into_iter().map(|row| row.idempotency_key));
        }
        assert_eq!(Some(seen.join(" ")), in_order, "{limit}");
    }
}

/// R39: a list reads only what it shows, however many messages wait.
#[test]
fn a_list_of_many_reads_an_index_and_no_table() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, destination, ordering_key, payload)
         SELECT 't-' || n % 3, '', CASE n % 2 WHEN 0 THEN 'k' || n END, '1'
           FROM generate_series(1, 30000) n",
    );
    db.execute("ANALYZE {o}");
    let mut conn = db.connect();
    let reads = |db: &Database| {
        db.number(
            "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_all_tables
              WHERE relid = '{o}'::regclass",
        )
    };
    drop(list(&mut conn, &db, &Selection::default(), 20));
    // A connection reports its reads when it closes.
    drop(conn);
    eventually("the statistics are recorded", || reads(&db) > 0);
    let before = reads(&db);
    let mut conn = db.connect();
    for filter in [
        Selection::default(),
        Selection::default().topic("t-1".to_owned()),
        Selection::default().ordering_key("k1000".to_owned()),
    ] {
        assert!(!list(&mut conn, &db, &filter, 20).is_empty(), "{filter:?}");
    }
    drop(conn);
    eventually("the statistics are recorded", || reads(&db) > before);
    let read = reads(&db) - before;
    assert!(read < 3_000, "{read} rows were read");
}

/// Many lanes whose messages are due at the same time, as after a bulk import.
#[test]
fn a_list_of_many_lanes_reads_little_of_each_and_a_rare_state_no_index() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         SELECT 't-' || n % 60, '1', '2026-01-01' FROM generate_series(1, 30000) n",
    );
    db.execute("ANALYZE {o}");
    let scans = |what: &str| {
        db.number(&format!(
            "SELECT coalesce({what}, 0) FROM pg_stat_all_tables WHERE relid = '{{o}}'::regclass"
        ))
    };
    let mut conn = db.connect();
    let all = Selection::default();
    assert_eq!(list(&mut conn, &db, &all, 200).len(), 200);
    let rare = all.status(Status::Retrying);
    assert!(list(&mut conn, &db, &rare, 200).is_empty());
    // A connection reports its reads when it closes.
    drop(conn);
    eventually("the statistics are recorded", || scans("idx_tup_fetch") > 0);
    let read = scans("idx_tup_fetch");
    assert!(read < 10_000, "{read} rows were read by an index");
}

fn run(db: &Database, arguments: &[&str]) -> Finished {
    let mut command = db.binary(&[&["message"], arguments].concat());
    command.env("USER", "bob");
    finish(command)
}

/// R39
#[test]
fn the_command_lists_cancels_reschedules_and_settles() {
    let db = Database::new();
    fill_list(&db);
    let listed = run(&db, &["list", "--topic", "a", "--json"]).code(0).json();
    let keys: Vec<_> = listed["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|row| row["idempotency_key"].as_str())
        .collect();
    assert_eq!(keys, ["a-one-keyed", "a-retrying"]);
    assert_eq!(listed["complete"], true);
    let listed = run(&db, &["list", "--limit", "1"]).code(0).stdout;
    assert!(listed.contains("more: --after "), "{listed}");
    let place = listed.rsplit(' ').next().expect("a place").trim();
    let next = run(&db, &["list", "--limit", "1", "--after", place]).code(0);
    assert!(next.stdout.contains("one"), "{}", next.stdout);
    run(&db, &["list", "--status", "dead"]).code(2);
    run(&db, &["list", "--tenant", "7"]).code(2);

    let moved = run(&db, &["reschedule", "a-retrying", "--in", "2h", "--json"]);
    let moved = moved.code(0).json();
    assert_eq!(moved["answer"], "done");
    assert_eq!(
        db.number("SELECT count(*) FROM {o} WHERE available_at > now() + interval '1 hour'"),
        1
    );
    run(&db, &["reschedule", "a-retrying"]).code(2);
    run(&db, &["reschedule", "a-retrying", "--at", "soon"]).code(2);
    let moved = run(
        &db,
        &["reschedule", "a-retrying", "--at", "2099-01-01T00:00:00Z"],
    );
    assert!(moved.code(0).stdout.contains("rescheduled"));

    let why = ["--why", "the order is cancelled"];
    let done = run(&db, &[["cancel", "a-retrying"], why].concat()).code(0);
    assert!(done.stdout.contains("cancelled"), "{}", done.stdout);
    let shown = run(&db, &["show", "a-retrying"]).code(0).stdout;
    assert!(
        shown.contains("cancelled after 2 attempts: bob: the order is cancelled"),
        "{shown}"
    );
    let again = run(&db, &["cancel", "a-retrying"]).code(0);
    assert!(again.stdout.contains("already"), "{}", again.stdout);
    let busy = run(&db, &["cancel", "b-keyed"]).code(1);
    assert!(busy.stderr.contains("in flight"), "{}", busy.stderr);
    let unknown = run(&db, &["cancel", "nothing", "--json"]).code(1);
    assert_eq!(unknown.json()["messages"][0]["answer"], "unknown");

    bury(&db);
    run(&db, &["settle", "dead-1", "--delivered"]).code(2);
    let arguments = ["--delivered", "--why", "by fax", "--who", "alice", "--json"];
    let settled = run(&db, &[["settle", "dead-1"].as_slice(), &arguments].concat());
    assert_eq!(settled.code(0).json()["parts"][0]["state"], "done");
    let shown = run(&db, &["show", "dead-1"]).code(0).stdout;
    assert!(
        shown.contains("delivered by hand for billing after 3 attempts: alice: by fax"),
        "{shown}"
    );
    let arguments = ["settle", "b-one", "--never", "--why", "wrong"];
    run(&db, &arguments).code(0);
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 2);
}

/// R39, and the audit line of each change.
#[test]
fn the_page_lists_cancels_reschedules_and_settles() {
    let db = Database::new();
    fill_list(&db);
    bury(&db);
    let page = Page::start(db.binary(&["admin"]));
    let list = page.get("/messages?topic=a").body;
    let sequence = |key: &str| {
        db.number(&format!(
            "SELECT sequence FROM {{o}} WHERE idempotency_key = '{key}'"
        ))
    };
    let has = |key: &str| list.contains(&format!("/messages?q={}\"", sequence(key)));
    assert!(has("a-one-keyed") && has("a-retrying"), "{list}");
    assert!(!has("b-one"), "{list}");
    let bad = page.get("/messages?tenant=x");
    assert_eq!(bad.status, 400);

    let token = page.get("/messages?q=a-retrying").form_token();
    let send =
        |path: &str, fields: &str| page.post(path, "", &format!("form_token={token}&{fields}"));
    let retrying = sequence("a-retrying");
    let fields = format!("sequence={retrying}&key=a-retrying");
    let answer = send("/message/reschedule", &format!("{fields}&in=2h"));
    assert_eq!(answer.status, 303, "{answer:?}");
    assert_eq!(
        db.number("SELECT count(*) FROM {o} WHERE available_at > now() + interval '1 hour'"),
        1
    );
    assert_eq!(
        send("/message/reschedule", &format!("{fields}&in=x")).status,
        400
    );
    let answer = send("/message/cancel", &format!("{fields}&why=wrong+order"));
    let next = answer.header("location").expect("a way").to_owned();
    assert!(page.get(&next).body.contains("was cancelled"), "{next}");
    let claimed = sequence("b-keyed");
    let answer = send(
        "/message/cancel",
        &format!("sequence={claimed}&key=b-keyed"),
    );
    let next = answer.header("location").expect("a way").to_owned();
    assert!(page.get(&next).body.contains("in flight"), "{next}");
    // Settling needs a reason, and the page shows that.
    let letter = "sequence=-1&destination=billing&key=dead-1&verdict=delivered";
    assert_eq!(send("/message/settle", letter).status, 400);
    assert_eq!(
        send("/message/settle", &format!("{letter}&why=by+fax")).status,
        303
    );
    let shown = page.get("/messages?q=dead-1").body;
    assert!(shown.contains("by fax"), "{shown}");
    let log = page.process.log();
    for event in ["admin_cancel", "admin_reschedule", "admin_settle"] {
        assert!(log.contains(event), "{event}: {log}");
    }
}
