//! The acceptance scenarios W-101 to W-105 and T-1 to T-7: each is the test of that name.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::{Connection, RunQueryDsl, sql_query};
use diesel_outbox::{Backoff, Message, NewMessage};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::support::{
    Database, Dispatch, Gate, Receiver, Running, delivered, end, eventually, finish,
};

/// R7, R18, R19.
#[test]
fn w_101_pending_then_sending_then_delivered() {
    let database = Database::new();
    let sequence = database.enqueue("order.paid", json!({ "n": 1 }));
    assert_eq!(database.count("pending"), 1);

    let (receiver, gate) = Receiver::held();
    let relay = database
        .relay()
        .lease(Duration::from_secs(60))
        .send_timeout(Duration::from_secs(20))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    receiver.wait_for(1);
    assert_eq!(database.count("sending"), 1);
    // The relay keeps no transaction open while it sends. Its other threads open and close short transactions.
    let now = database.text("SELECT clock_timestamp()").expect("a time");
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity
          WHERE state LIKE 'idle in transaction%' AND query LIKE '%{}%' AND xact_start <= '{now}'",
        database.schema()
    );
    eventually("no transaction is left from that moment", || {
        database.number(&open) == 0
    });
    gate.open();
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });

    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(database.number("SELECT sequence FROM {o}_ledger"), sequence);
    assert_eq!(database.number("SELECT http_status FROM {o}_ledger"), 200);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
    end(&relay);
}

/// R7: when the receiver gets a message, its claim is visible to others, and no lock is left on its row. Of a message
/// without a key, of keys, of a dead relay, and of claims that have to count their bytes.
#[test]
fn each_kind_of_claim_is_a_transaction_that_ends_before_a_send() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('dead:1', now() - interval '1 s')",
    );
    for (topic, key, payload, lease) in [
        ("plain", "NULL", "'1'", "NULL"),
        ("keyed", "'k' || n % 3", "'1'", "NULL"),
        ("taken.over", "NULL", "'1'", "(SELECT id FROM {o}_lease)"),
        (
            "keyed.taken.over",
            "'l' || n",
            "'1'",
            "(SELECT id FROM {o}_lease)",
        ),
        ("large", "NULL", "to_json(repeat('x', 1000000))", "NULL"),
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, ordering_key, payload, locked_by, locked_at)
             SELECT '{topic}', {key}, {payload}, {lease}, CASE WHEN {lease} IS NOT NULL THEN now() END
               FROM generate_series(1, 20) n"
        ));
    }
    let table = database.name();
    let conn = Mutex::new(database.connect());
    let receiver = Receiver::answering(move |request| {
        let (conn, id) = (&mut *conn.lock().expect("no panic"), request.id());
        let found = sql_query(format!(
            "SELECT FROM {table} WHERE message_id = '{id}' AND locked_by IS NOT NULL FOR UPDATE SKIP LOCKED"
        ));
        match found.execute(conn) {
            Ok(1) => 200,
            found => {
                eprintln!("{id}: {found:?}");
                422
            }
        }
    });
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    eventually("all messages have ended", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!((database.count("delivered"), receiver.count()), (100, 100));
}

/// R18: of a message that ends, the outbox, the ledger and the dead letters change in one transaction.
#[test]
fn each_kind_of_settle_is_one_commit() {
    let database = Database::new();
    database.execute("CREATE TABLE {o}_seen (place text, sequence bigint, transaction text)");
    database.execute(
        "CREATE FUNCTION {o}_see() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO {o}_seen VALUES (TG_ARGV[0],
                 CASE TG_OP WHEN 'DELETE' THEN OLD.sequence ELSE NEW.sequence END, pg_current_xact_id());
             RETURN NULL;
         END $$",
    );
    for (place, act) in [("", "DELETE"), ("_ledger", "INSERT"), ("_dead", "INSERT")] {
        database.execute(&format!(
            "CREATE TRIGGER see AFTER {act} ON {{o}}{place} FOR EACH ROW EXECUTE FUNCTION {{o}}_see('{{o}}{place}')"
        ));
    }
    let receiver = Receiver::answering(|request| match request.json()["n"] == 1 {
        true => 200,
        false => 422,
    });
    for key in ["NULL", "'k'"] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, ordering_key, expires_at)
             SELECT 't', json_build_object('n', n), {key}, CASE n WHEN 3 THEN now() END FROM generate_series(1, 3) n"
        ));
    }
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    eventually("all messages have ended", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(
        (database.count("delivered"), database.count("dead")),
        (2, 4)
    );
    let seen = database.text(
        "SELECT string_agg(changes || ' in ' || transactions, ', ' ORDER BY sequence) FROM
            (SELECT sequence, count(*) AS changes, count(DISTINCT transaction) AS transactions
               FROM {o}_seen GROUP BY 1) s",
    );
    let expected = "2 in 1, 3 in 1, 3 in 1, 2 in 1, 3 in 1, 3 in 1";
    assert_eq!(seen.as_deref(), Some(expected));
}

#[test]
fn w_102_a_timeout_then_success_on_the_second_attempt() {
    let database = Database::new();
    let calls = AtomicUsize::new(0);
    let (_silent, wait) = Gate::new();
    let receiver = Receiver::start(move |_, stream| {
        if calls.fetch_add(1, Ordering::SeqCst) == 0 {
            wait();
        }
        std::io::Write::write_all(stream, &crate::support::status(200))
    });
    database.enqueue("order.paid", json!({ "n": 1 }));
    let relay = database
        .relay()
        .lease(Duration::from_secs(60))
        .send_timeout(Duration::from_secs(2))
        .backoff(Backoff::Table(vec![Duration::from_secs(3600)]))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the first attempt fails", || {
        database.count("retrying") == 1
    });
    assert_eq!(
        database.text("SELECT last_error_code FROM {o}").as_deref(),
        Some("TIMEOUT")
    );
    database.execute("UPDATE {o} SET available_at = now()");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 2);
    let requests = receiver.requests();
    assert_eq!(requests[0].header("outbox-attempt"), Some("1"));
    assert_eq!(requests[1].header("outbox-attempt"), Some("2"));
    assert_eq!(requests[0].id(), requests[1].id());
    drop(relay);
}

#[test]
fn w_103_the_relay_is_killed_and_another_delivers_after_its_lease() {
    let database = Database::new();
    let hangs = Receiver::start(|_, _| {
        std::thread::sleep(Duration::from_secs(600));
        Ok(())
    });
    database.enqueue("order.paid", json!({ "n": 1 }));
    let mut first = database.binary(&["run"]);
    first
        .env("OUTBOX_URL", hangs.url())
        .env("OUTBOX_LEASE", "2500ms");
    let first = Running::start(first);
    hangs.wait_for(1);
    first.kill();
    assert_eq!(database.count("sending"), 1);

    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    // One attempt for the dead relay, one for the relay that delivered.
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 2);
    assert_eq!(relay.stats().taken_over, 1);
    end(&relay);
}

#[test]
fn w_104_max_attempts_then_dead_then_requeued_then_delivered() {
    let database = Database::new();
    let failing = Receiver::answering(|_| 500);
    let sequence = database.enqueue("order.paid", json!({ "n": 1 }));
    let relay = database
        .relay()
        .max_attempts(3)
        .url(&failing.url())
        .start()
        .expect("a relay");
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    assert_eq!(failing.count(), 3);
    assert_eq!(database.number("SELECT attempts FROM {o}_dead"), 3);
    assert_eq!(
        database.text("SELECT reason FROM {o}_dead").as_deref(),
        Some("SERVER_ERROR")
    );
    assert_eq!(
        database.text("SELECT status FROM {o}_ledger").as_deref(),
        Some("dead")
    );

    finish(database.binary(&["dead", "requeue", &sequence.to_string()])).code(0);
    assert_eq!(database.count("pending"), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}"), 0);
    assert_eq!(database.number("SELECT sequence FROM {o}"), sequence);

    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);
    assert_eq!(database.count("dead"), 0);
    let entries = "SELECT string_agg(status, ' ' ORDER BY settled_at) FROM {o}_ledger";
    assert_eq!(database.text(entries).as_deref(), Some("dead delivered"));
}

/// R20.
#[test]
fn w_105_a_message_that_the_ledger_has_as_delivered_is_settled_without_sending() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let message = |n: i32| {
        NewMessage::new("order.paid", &json!({ "n": n }))
            .expect("JSON")
            .idempotency_key("order-1")
    };
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    database.enqueue_message(message(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });

    // The same key and content again, by the library and by plain SQL.
    database.enqueue_message(message(1));
    eventually("the message is settled", || relay.stats().deduplicated == 1);
    database.execute("INSERT INTO {o} (topic, payload, idempotency_key) VALUES ('order.paid', '{\"n\":1}', 'order-1')");
    eventually("the message is settled", || relay.stats().deduplicated == 2);
    assert_eq!(receiver.count(), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);

    // The same key with other content.
    database.enqueue_message(message(2));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    assert_eq!(
        database.text("SELECT reason FROM {o}_dead").as_deref(),
        Some("IDEMPOTENCY_CONFLICT")
    );
    let entries = "SELECT string_agg(status, ' ' ORDER BY settled_at) FROM {o}_ledger";
    assert_eq!(database.text(entries).as_deref(), Some("delivered dead"));
    assert_eq!(receiver.count(), 1);
    end(&relay);
}

/// R1, G1.
#[test]
fn t_1_a_rollback_leaves_nothing() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    let outbox = database.outbox();
    database.execute(&format!(
        "CREATE TABLE {}.orders (id int)",
        database.schema()
    ));
    let result = database
        .connect()
        .transaction::<(), diesel::result::Error, _>(|conn| {
            sql_query(format!(
                "INSERT INTO {}.orders VALUES (1)",
                database.schema()
            ))
            .execute(conn)?;
            let message = NewMessage::new("order.paid", &1).expect("JSON");
            outbox.enqueue(conn, message).expect("enqueued");
            Err(diesel::result::Error::RollbackTransaction)
        });
    assert!(result.is_err());
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(
        database.number(&format!(
            "SELECT count(*) FROM {}.orders",
            database.schema()
        )),
        0
    );
    // Only the message committed afterwards arrives.
    database.enqueue("order.shipped", json!(2));
    let requests = receiver.wait_for(1);
    end(&relay);
    assert_eq!(requests[0].header("ce-type"), Some("order.shipped"));
    assert_eq!(receiver.count(), 1);
}

/// R8.
#[test]
fn t_2_two_relays_never_claim_one_message_twice() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue_many(3000);
    let relays: Vec<_> = (0..2)
        .map(|_| {
            database
                .relay()
                .batch(50)
                .url(&receiver.url())
                .start()
                .expect("a relay")
        })
        .collect();
    eventually("all messages are delivered", || {
        database.count("delivered") == 3000
    });
    relays.iter().for_each(end);
    // A relay counts a message after the commit that the test has seen.
    let delivered: Vec<u64> = relays.iter().map(|relay| relay.stats().delivered).collect();
    for relay in &relays {
        assert_eq!(relay.stats().conflicts, 0);
    }
    assert_eq!(receiver.count(), 3000, "no message was sent twice");
    assert_eq!(receiver.ids().len(), 3000);
    assert_eq!(delivered.iter().sum::<u64>(), 3000);
    assert!(
        delivered.iter().all(|count| *count > 0),
        "both relays delivered: {delivered:?}"
    );
}

/// R12.
#[test]
fn t_3_an_expired_lease_releases_its_messages() {
    let database = Database::new();
    // A dead relay: its lease has expired and had claimed two messages. One of them was abandoned once before.
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('dead:1', now() - interval '1 s')",
    );
    let lease = database.number("SELECT id FROM {o}_lease");
    for (n, code) in [(1, "NULL"), (2, "'ABANDONED'")] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, locked_by, locked_at, last_error_code) VALUES ('order.paid', '{n}', {lease}, now(), {code})"
        ));
    }
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .backoff(diesel_outbox::Backoff::Table(vec![Duration::from_secs(
            3600,
        )]))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the first message is delivered at once", || {
        database.count("delivered") == 1
    });
    // The second message was abandoned before: it waits as after any failed attempt.
    eventually("the second message waits", || {
        database.count("retrying") == 1
    });
    end(&relay);
    assert_eq!(receiver.requests()[0].body, b"1");
    assert_eq!(receiver.count(), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}"), 1);
    assert_eq!(
        database.text("SELECT last_error_code FROM {o}").as_deref(),
        Some("ABANDONED")
    );
}

/// R21.
#[test]
fn t_4_backoff_then_dead_and_still_readable() {
    let database = Database::new();
    let receiver = Receiver::start(|_, stream| {
        std::io::Write::write_all(
            stream,
            b"HTTP/1.1 500 No\r\ncontent-length: 8\r\n\r\nnot\0now\n",
        )
    });
    let sequence = database.enqueue("order.paid", json!({ "secret": "sauce" }));
    let delays = [100, 300].map(Duration::from_millis).to_vec();
    let relay = database
        .relay()
        .max_attempts(3)
        .backoff(diesel_outbox::Backoff::Table(delays))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    let at: Vec<_> = receiver
        .requests()
        .iter()
        .map(|request| request.at)
        .collect();
    assert_eq!(at.len(), 3);
    assert!(at[1] - at[0] >= Duration::from_millis(100));
    assert!(at[2] - at[1] >= Duration::from_millis(300));

    let shown = finish(database.binary(&["dead", "show", &sequence.to_string(), "--json"]))
        .code(0)
        .json();
    let by_message_id =
        finish(database.binary(&["dead", "show", &receiver.requests()[0].id(), "--json"]));
    assert_eq!(by_message_id.code(0).json(), shown);
    assert_eq!(shown["payload"]["secret"], "sauce");
    assert_eq!(shown["reason"], "SERVER_ERROR");
    assert_eq!(shown["http_status"], 500);
    assert_eq!(shown["attempts"], 3);
    // Characters that PostgreSQL cannot store, or that a terminal would obey, are not stored.
    assert_eq!(shown["response"], "not\u{fffd}now\n");
    assert!(!shown["last_error"].to_string().contains("sauce"));
}

/// R26.
#[test]
fn t_5_the_cleaner_removes_only_old_settled_rows() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
             status, attempts, created_at, settled_at)
         SELECT (n <= 2500)::int, n::text, '', n, gen_random_uuid(), 't', '', 'delivered', 1, now(),
                CASE WHEN n <= 2500 THEN now() - interval '3 h' ELSE now() END
           FROM generate_series(1, 2600) n",
    );
    database.number("SELECT emptied FROM {o}_rotate('30 days')");
    database.execute(
        "UPDATE {o}_part SET opened_at = now() - interval '4 h', closed_at = now() - interval '2 h'
          WHERE part = 1",
    );
    // Just as old, but not settled: one waiting message, one dead letter.
    database.execute(
        "INSERT INTO {o} (topic, payload, created_at, available_at)
         VALUES ('t', '1', now() - interval '2 h', now() + interval '1 h')",
    );
    database.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
             available_at, created_at, attempts, reason, dead_lettered_at)
         VALUES (1000000, gen_random_uuid(), 't', '', '1', 'k', now(), now(), 1, 'GONE', now() - interval '2 h')",
    );
    let relay = database
        .relay()
        .url("http://127.0.0.1:9/")
        .retention(None)
        .start()
        .expect("a relay");
    assert!(relay.wait_until_idle(Duration::from_secs(10)));
    end(&relay);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger"),
        2600,
        "a disabled cleaner removed entries"
    );

    let relay = database
        .relay()
        .retention(Some(Duration::from_secs(3600)))
        .url("http://127.0.0.1:9/")
        .start()
        .expect("a relay");
    eventually("old entries are removed", || {
        database.number("SELECT count(*) FROM {o}_ledger") == 100
    });
    end(&relay);
    assert_eq!(database.number("SELECT count(*) FROM {o}_ledger"), 100);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_dead"), 1);
    let in_use = "SELECT count(*) FROM {o}_part WHERE opened_at IS NOT NULL";
    assert_eq!(
        database.number(in_use),
        1,
        "the emptied part can be used again"
    );
}

/// R19: the ledger shows the end of each message, by its key: with and without a key of the application; delivered,
/// dead after a refusal, expired.
#[test]
fn the_ledger_says_what_became_of_each_message() {
    let database = Database::new();
    let receiver = Receiver::start(|request, stream| {
        let (status, body) = match request.json()["n"].as_i64() {
            Some(1) => ("201 Created", "thanks"),
            _ => ("422 Unprocessable", "never"),
        };
        let length = body.len();
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
        std::io::Write::write_all(stream, answer.as_bytes())
    });
    let payload = |n: i64| json!({ "n": n });
    let message = |n: i64| NewMessage::new("order.paid", &payload(n)).expect("JSON");
    database.enqueue_message(message(1).idempotency_key("one"));
    database.enqueue_message(message(2).idempotency_key("two"));
    database.execute(
        "INSERT INTO {o} (topic, payload, expires_at) VALUES ('order.paid', '{\"n\":3}', now() - interval '1 s')",
    );
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}_ledger") == 3
    });
    end(&relay);
    let row = |n: i64| {
        database.text(&format!(
            "SELECT format('%s|%s|%s|%s|%s|%s', status, http_status, response, reason, attempts,
                           encode(digest, 'hex'))
               FROM {{o}}_ledger WHERE sequence = {n}"
        ))
    };
    // Only a message with a key has a digest, for comparison with later messages of the key.
    let digest = |n: i64| {
        let digest = Sha256::digest(format!("order.paid\n{}", payload(n)));
        digest
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    assert_eq!(
        row(1),
        Some(format!("delivered|201|thanks||1|{}", digest(1)))
    );
    assert_eq!(
        row(2),
        Some(format!("dead|422|never|REJECTED|1|{}", digest(2)))
    );
    assert_eq!(row(3).as_deref(), Some("dead|||EXPIRED|0|"));
    let keys =
        "SELECT string_agg(coalesce(idempotency_key, '-'), ',' ORDER BY sequence) FROM {o}_ledger";
    assert_eq!(database.text(keys).as_deref(), Some("one,two,-"));
}

/// R26
#[test]
fn a_retention_of_any_length_is_kept() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_ledger (part, idempotency_key, destination, sequence, message_id, topic, digest,
             status, attempts, created_at, settled_at)
         SELECT part, part::text, '', 1, gen_random_uuid(), 't', '', 'delivered', 1, now(), time::timestamptz
           FROM (VALUES (1, '-infinity'), (2, '1900-01-01')) AS v (part, time)",
    );
    database.number("SELECT emptied FROM {o}_rotate('30 days')");
    database.execute(
        "UPDATE {o}_part AS p SET (opened_at, closed_at) = (v.time::timestamptz, v.time::timestamptz)
           FROM (VALUES (1, '-infinity'), (2, '1900-01-01')) AS v (part, time) WHERE v.part = p.part",
    );
    let relay = database
        .relay()
        .retention(Some(Duration::MAX))
        .url("http://127.0.0.1:9/")
        .start()
        .expect("a relay");
    eventually("the cleaner has worked", || {
        database.number("SELECT count(*) FROM {o}_ledger") == 1
    });
    end(&relay);
}

/// The claim waits for a lock that the test holds. The process is stopped and then killed before it learns that the
/// claim has committed.
#[test]
fn t_6_a_crash_just_before_the_send_is_sent_after_the_restart() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let lock = database.number("SELECT '{o}'::regclass::oid::bigint");
    let schema = database.schema();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.hold() RETURNS trigger LANGUAGE plpgsql
             AS $$ BEGIN PERFORM pg_advisory_xact_lock({lock}); RETURN NULL; END $$"
    ));
    database.execute(&format!(
        "CREATE CONSTRAINT TRIGGER hold AFTER UPDATE ON {{o}} DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION {schema}.hold()"
    ));
    let mut holder = database.connect();
    let mut hold = |lock_or_unlock: &str| {
        holder
            .batch_execute(&format!("SELECT pg_advisory_{lock_or_unlock}({lock})"))
            .expect("the lock is ours");
    };
    hold("lock");
    database.enqueue("order.paid", json!({ "n": 1 }));
    let relay = || {
        let mut relay = database.binary(&["run"]);
        relay.env("OUTBOX_URL", receiver.url());
        Running::start(relay)
    };
    let crashing = relay();
    eventually("the claim is about to be committed", || {
        database.number(&format!(
            "SELECT count(*) FROM pg_locks
              WHERE locktype = 'advisory' AND (classid::bigint << 32) + objid::bigint = {lock} AND NOT granted"
        )) == 1
    });
    crashing.stop();
    hold("unlock");
    eventually("the claim is committed", || database.count("sending") == 1);
    crashing.kill();
    assert_eq!(receiver.count(), 0, "nothing was sent");

    let _restarted = relay();
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(receiver.requests()[0].json(), json!({ "n": 1 }));
    assert_eq!(receiver.count(), 1);
}

/// R13, G4.
#[test]
fn t_7_a_stale_relays_settle_changes_nothing() {
    let database = Database::new();
    database.enqueue("order.paid", json!({ "n": 1 }));
    let (gate, pass) = Gate::new();
    let stale = database
        .relay()
        .dispatcher(Dispatch(move |_: &Message| {
            pass();
            delivered()
        }))
        .start()
        .expect("a relay");
    eventually("the stale relay sends", || gate.came() == 1);
    // The lease expires, as after a long pause of the process, and another relay takes over.
    database.execute("UPDATE {o}_lease SET expires_at = now() - interval '1 s'");
    let failing = Receiver::answering(|_| 400);
    let relay = database
        .relay()
        .url(&failing.url())
        .start()
        .expect("a relay");
    eventually("the other relay has settled the message", || {
        database.count("dead") == 1
    });
    gate.open();
    eventually("the stale relay's settle is refused", || {
        stale.stats().conflicts == 1
    });
    assert_eq!(database.count("dead"), 1);
    assert_eq!(database.count("delivered"), 0);
    assert_eq!(stale.stats().delivered, 0);
    eventually("the stale relay knows that its lease is lost", || {
        stale.stats().leases_lost == 1
    });
    end(&relay);
    end(&stale);
}
