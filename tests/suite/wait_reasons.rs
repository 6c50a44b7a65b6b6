//! Why a message waits, and until when: one answer in library, commands, page and tests.

use std::time::Duration;

use diesel::Connection;
use diesel_outbox::admin::{self, Blocker, Pausable, Unserved, WaitReason};
use diesel_outbox::program::{self, MessageKey};
use diesel_outbox::testing::TestRelay;
use diesel_outbox::{Destination, ReasonCode, Relay, Sequence};
use serde_json::{Value, json};

use crate::page::Page;
use crate::support::{Database, Gate, Receiver, Running, end, eventually, finish, message};

/// Both ways to ask agree, as soon as the message has not moved between the two.
fn waits(db: &Database, sequence: i64) -> WaitReason {
    let mut conn = db.connect();
    let outbox = db.outbox_name();
    let mut reason = None;
    eventually("both ways to ask agree", || {
        let key = MessageKey::Sequence(sequence);
        let found = program::message(&mut conn, &outbox, &key).expect("a message");
        let found = program::wait_reasons_of(&mut conn, &outbox, &found.rows).expect("reasons");
        let found = found.into_iter().flatten().next();
        let found = found.expect("the message is live");
        let asked = [Sequence(sequence), Sequence(0)];
        let again = admin::wait_reasons(&mut conn, &outbox, &asked).expect("reasons");
        let again = again.iter().map(|one| one.as_ref().map(WaitReason::as_str));
        let is_same = again.eq([Some(found.as_str()), None]);
        reason = Some(found);
        is_same
    });
    reason.expect("a reason")
}

fn pause(db: &Database, kind: Pausable, name: &str, time: Option<Duration>) {
    admin::pause(
        &mut db.connect(),
        &db.outbox_name(),
        kind,
        name,
        "upgrade",
        time,
    )
    .expect("paused");
}

/// R54
#[test]
fn every_live_message_has_one_reason_why_it_waits() {
    let db = Database::new();
    let plain = db.enqueue("order.paid", json!(1));
    let (disabled, silent) = (None, None);
    assert_eq!(waits(&db, plain), WaitReason::NoRelay { disabled, silent });

    let (gate, pass) = Gate::new();
    let relay = db.relay().on_topic("order.paid", move |_, _| {
        pass();
        Ok(())
    });
    let relay = relay.start().expect("a relay");
    eventually("the message is in flight", || db.count("sending") == 1);
    let reason = waits(&db, plain);
    assert!(
        matches!(&reason, WaitReason::Sending { has_expired: false, silent: None, since, rate: None } if since.starts_with("20")),
        "{reason}"
    );

    let later = db.enqueue_message(message("order.paid").delay(Duration::from_secs(3600)));
    assert!(matches!(
        waits(&db, later),
        WaitReason::NotDue { until: Some(_) }
    ));
    let nobodys = db.enqueue("order.piad", json!(1));
    let not_served = |why| WaitReason::NotServed { why };
    assert_eq!(waits(&db, nobodys), not_served(Unserved::NoRoute));
    let named = db.enqueue_message(message("order.paid").destination("billing"));
    let why = waits(&db, named).to_string();
    assert!(
        why.contains("no active relay has the destination \"billing\"")
            && !why.contains("add a route"),
        "{why}"
    );

    let head = db.enqueue_message(message("order.piad").ordering_key("k"));
    let second = db.enqueue_message(message("order.paid").ordering_key("k"));
    let behind = |blocker| WaitReason::BehindKey {
        sequence: Sequence(head),
        blocker,
    };
    assert_eq!(waits(&db, second), behind(Blocker::Due));
    db.execute(&format!(
        "UPDATE {{o}} SET available_at = now() + interval '1 h' WHERE sequence = {head}"
    ));
    assert_eq!(waits(&db, second), behind(Blocker::NotDue));
    db.execute(&format!(
        "UPDATE {{o}} SET attempts = 1 WHERE sequence = {head}"
    ));
    assert_eq!(waits(&db, second), behind(Blocker::Retrying));

    pause(&db, Pausable::Topic, "order.late", None);
    let paused = db.enqueue("order.late", json!(1));
    assert_eq!(
        waits(&db, paused).to_string(),
        "topic paused until resumed: upgrade"
    );
    pause(
        &db,
        Pausable::Destination,
        "billing",
        Some(Duration::from_secs(600)),
    );
    let reason = waits(&db, named).to_string();
    assert!(
        reason.starts_with("destination paused until 20") && reason.ends_with(": billing: upgrade"),
        "{reason}"
    );
    gate.open();
    end(&relay);
}

/// R54: also what a person has to mend elsewhere, and that an expired message is held up.
#[test]
fn the_reason_that_holds_up_a_message_is_named() {
    let db = Database::new();
    let paid = db.enqueue("order.paid", json!(1));
    let lease = |serves: &str| {
        db.execute("DELETE FROM {o}_lease");
        db.execute(&format!(
            "INSERT INTO {{o}}_lease (relay, expires_at, serves)
             VALUES ('another', now() + interval '1 min', {serves})"
        ));
    };
    lease("NULL");
    assert_eq!(
        waits(&db, paid).to_string(),
        "no relay: OUTBOX_ENABLED is false at another"
    );
    lease(r#"'{"routes":[["order.*",["billing"]]],"destinations":["billing"]}'"#);
    let destination = "billing".to_owned();
    let rate = None;
    assert_eq!(waits(&db, paid), WaitReason::NoRoom { destination, rate });
    db.execute("UPDATE {o} SET last_error_code = 'PROXY', last_error = 'no tunnel'");
    let destination = "billing".to_owned();
    let reason = ReasonCode::Proxy;
    assert_eq!(
        waits(&db, paid),
        WaitReason::Held {
            destination,
            reason
        }
    );

    lease(r#"'{"destinations":["billing"]}'"#);
    let overview =
        program::exact_overview(&mut db.connect(), &db.outbox_name()).expect("an overview");
    let reasons = overview.troubles.iter().map(|one| one.reason.as_str());
    assert_eq!(reasons.collect::<Vec<_>>(), ["NO_ROUTE"]);

    pause(&db, Pausable::Topic, "order.paid", None);
    db.execute("UPDATE {o} SET expires_at = now() - interval '1 s'");
    let expired = waits(&db, paid);
    assert_eq!(expired.as_str(), "expired");
    let expired = expired.to_string();
    assert!(
        expired.starts_with("topic paused") && expired.contains("(EXPIRED)"),
        "{expired}"
    );
}

/// R54: the lease of a killed relay is valid for a while. Meanwhile no relay sends what the relay held, and what is due.
#[test]
fn the_messages_of_a_killed_relay_say_so_before_its_lease_expires() {
    let db = Database::new();
    let (receiver, _gate) = Receiver::held();
    let mut command = db.binary(&["run"]);
    command
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_LEASE", "60s")
        .env("OUTBOX_SEND_TIMEOUT", "30s");
    let relay = Running::start(command);
    let held = db.enqueue("order.paid", json!(1));
    eventually("the message is in flight", || db.count("sending") == 1);
    eventually("the session holds the lock of the lease", || {
        db.number("SELECT count(*) FROM {o}_lease WHERE takeover_after IS NOT NULL") == 1
    });
    assert_eq!(waits(&db, held).as_str(), "sending");
    assert!(!waits(&db, held).to_string().contains("heartbeat"));
    relay.kill();
    let due = db.enqueue("order.paid", json!(2));
    let is_silent = "the heartbeat of ";
    eventually("the session of the relay is gone", || {
        waits(&db, due)
            .to_string()
            .starts_with(&format!("no relay: {is_silent}"))
    });
    let sends = waits(&db, held);
    assert_eq!(sends.as_str(), "sending");
    assert!(sends.to_string().contains(is_silent), "{sends}");
    for command in ["status", "leases"] {
        let shown = finish(db.binary(&[command])).code(0).stdout;
        assert!(
            shown.contains("no relay is running: the heartbeats have stopped"),
            "{shown}"
        );
    }
    let checked = finish(db.binary(&["check"])).stdout;
    assert!(
        checked.contains("warning leases") && checked.contains(is_silent),
        "{checked}"
    );

    // A machine that hangs keeps its session. Its lease has missed two renewals.
    db.execute(
        "UPDATE {o}_lease SET takeover_after = NULL, renewed_at = now(), expires_at = now() + interval '1 min'",
    );
    assert_eq!(waits(&db, due).as_str(), "no_room");
    db.execute(
        "UPDATE {o}_lease SET renewed_at = now() - interval '41 s', expires_at = now() + interval '19 s'",
    );
    let shown = waits(&db, due).to_string();
    assert!(shown.contains("the last one was 4"), "{shown}");
}

/// R54: a relay holds the second message until the rate limit allows the send.
#[test]
fn a_message_that_waits_for_its_rate_limit_says_so() {
    let db = Database::new();
    let receiver = Receiver::ok();
    let mut destination = Destination::new("slow", &receiver.url()).expect("a URL");
    destination.policy.rate = Some("1/h".parse().expect("a rate"));
    let relay = db.relay().destination(destination).route("*", "slow");
    let relay = relay.start().expect("a relay");
    db.enqueue("order.paid", json!(1));
    receiver.wait_for(1);
    let (held, due) = (
        db.enqueue("order.paid", json!(2)),
        db.enqueue("order.paid", json!(3)),
    );
    for sequence in [held, due] {
        eventually("the reason is the rate limit", || {
            waits(&db, sequence).to_string().contains("rate limit")
        });
        let reason = waits(&db, sequence).to_string();
        assert!(reason.ends_with("1/h"), "{reason}");
    }
    end(&relay);
}

/// R54: `status` says why the messages of a disabled endpoint wait, as `message show` does.
#[test]
fn due_messages_of_a_disabled_destination_are_a_trouble() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o}_endpoint (name, url, enabled, disabled_reason)
         VALUES ('acme', 'https://a.example/', false, 'OPERATOR')",
    );
    let named = db.enqueue_message(message("order.paid").destination("acme"));
    let overview =
        program::exact_overview(&mut db.connect(), &db.outbox_name()).expect("an overview");
    let [trouble] = overview.troubles.as_slice() else {
        panic!("{:?}", overview.troubles);
    };
    assert_eq!((trouble.reason.as_str(), trouble.count), ("DISABLED", 1));
    assert_eq!(trouble.example, Some(waits(&db, named).to_string()));
}

/// R54
#[test]
fn a_dead_letter_that_blocks_its_key_is_the_reason() {
    let db = Database::new();
    let second = db.enqueue_message(message("t").ordering_key("k"));
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, ordering_key,
            available_at, created_at, attempts, reason, blocks_key)
         VALUES (-1, gen_random_uuid(), 't', '', '1', 'k', now(), now(), 3, 'REJECTED', true)",
    );
    let reason = WaitReason::BehindKey {
        sequence: Sequence(-1),
        blocker: Blocker::Dead,
    };
    assert_eq!(waits(&db, second), reason);
}

/// R54
#[test]
fn commands_and_page_say_why_a_message_waits() {
    let db = Database::new();
    let head = db.enqueue_message(
        message("t")
            .ordering_key("k")
            .delay(Duration::from_secs(3600)),
    );
    let second = db.enqueue_message(message("t").ordering_key("k"));
    let text = format!("behind {head} of its key (not due)");
    let run = |arguments: &[&str]| finish(db.binary(arguments)).code(0);
    let name = second.to_string();
    let shown = run(&["message", "show", &name]).stdout;
    assert!(
        shown.contains(&format!("waits             {text}")),
        "{shown}"
    );
    let listed = run(&["message", "list"]).stdout;
    assert!(listed.contains(&text), "{listed}");
    let records = run(&["message", "list", "--json"]).json();
    let of = |sequence: i64| -> Value {
        let mut all = records["messages"].as_array().expect("messages").iter();
        let found = all.find(|one| one["sequence"] == sequence);
        found.expect("the message").clone()
    };
    assert_eq!(of(second)["waits"], text);
    assert_eq!(of(second)["wait_reason"], "behind_key");
    assert_eq!(of(head)["wait_reason"], "not_due");

    // The change of the time alone does not send the message.
    let rescheduled = run(&["message", "reschedule", &name, "--now"]).stdout;
    assert!(
        rescheduled.contains(&format!("{second} still waits: {text}")),
        "{rescheduled}"
    );

    let page = Page::start(db.binary(&["admin"]));
    for path in ["/messages".to_owned(), format!("/messages?q={second}")] {
        let body = page.get(&path).body;
        assert!(body.contains(&text), "{path}: {body}");
    }
}

/// R54, R32: a message without a route holds its key as a delayed one does.
#[test]
fn a_key_behind_a_message_that_no_relay_serves_is_blocked() {
    let db = Database::new();
    let relay = db
        .relay()
        .on_topic("order.paid", |_, _| Ok(()))
        .start()
        .expect("a relay");
    let head = db.enqueue_message(message("order.piad").ordering_key("k"));
    db.enqueue_message(message("order.paid").ordering_key("k"));
    let mut keys = Vec::new();
    eventually("the key is blocked", || {
        keys = program::blocked_keys(&mut db.connect(), &db.outbox_name(), 10).expect("keys");
        !keys.is_empty()
    });
    assert_eq!(keys.len(), 1);
    assert_eq!((keys[0].sequence, keys[0].waiting), (Sequence(head), 1));
    let why = keys[0].waits.as_deref().unwrap_or_default();
    assert!(why.starts_with("no relay serves it: "), "{why}");
    let shown = finish(db.binary(&["keys"])).code(0).stdout;
    assert!(shown.contains("pending, no relay serves it"), "{shown}");
    end(&relay);
}

/// R54
#[test]
fn a_due_message_behind_a_delayed_one_of_its_key_fails_the_assertion_of_a_test() {
    let db = Database::new();
    let conn = &mut db.connect();
    conn.begin_test_transaction().expect("a transaction");
    let relay = Relay::in_test().outbox(&db.name());
    let relay = TestRelay::new(relay.on_topic("t", |_, _| Ok(()))).expect("a relay");
    let outbox = db.outbox();
    let delayed = message("t")
        .ordering_key("k")
        .delay(Duration::from_secs(3600));
    let head = outbox.enqueue(conn, delayed).expect("enqueued");
    relay.drain(conn).expect("drained").assert_all_delivered();

    let due = message("t").ordering_key("k");
    outbox.enqueue(conn, due).expect("enqueued");
    let drained = relay.drain(conn).expect("drained");
    assert_eq!(drained.waiting.len(), 1);
    let text = std::panic::catch_unwind(|| drained.assert_all_delivered())
        .expect_err("a due message was not delivered");
    let text = text.downcast::<String>().expect("a text");
    let reason = format!("behind {} of its key (not due)", head.sequence);
    assert!(text.contains(&reason), "{text}");
}
