//! What commands, pages and the guide say that will happen, and what then happens.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::endpoints::{Endpoint, Recover};
use diesel_outbox::{Backoff, NewMessage};
use serde_json::json;

use crate::page::Page;
use crate::support::{Database, Receiver, end, eventually, finish};

fn put(db: &Database, name: &str, receiver: &Receiver) {
    let hook = Endpoint::new(name, receiver.url());
    let put = db.outbox().endpoints().put(&mut db.connect(), &hook);
    put.expect("put");
}

fn run(db: &Database, arguments: &[&str]) -> String {
    finish(db.binary(arguments)).code(0).stdout
}

/// R46: `endpoint enable`.
#[test]
fn after_enable_a_failed_message_keeps_its_time_and_the_named_command_sends_it() {
    let db = Database::new();
    let came = AtomicUsize::new(0);
    let receiver = Receiver::answering(move |_| match came.fetch_add(1, Ordering::Relaxed) {
        0 => 500,
        1 => 410,
        _ => 200,
    });
    put(&db, "acme", &receiver);
    let relay = db.keeping_relay().configure(|config| {
        let hour = Duration::from_secs(3600);
        config.endpoint_backoff = Backoff::Table(vec![Duration::from_millis(1), hour]);
        config.endpoint_max_attempts = 5;
    });
    let relay = relay.start().expect("a relay");
    db.enqueue("order.paid", json!(1));
    eventually("the destination is disabled", || {
        db.number("SELECT count(*) FROM {o}_endpoint WHERE NOT enabled") == 1
    });
    let said = run(&db, &["endpoint", "enable", "acme"]);
    let (_, command) = said.split_once("`diesel-outbox ").expect("a command");
    let (command, does) = command.split_once('`').expect("a command");
    assert_eq!(does, " sends them now.\n");
    assert!(relay.wait_until_idle(Duration::from_secs(60)));
    let list = run(&db, &["message", "list"]);
    assert!(list.contains("not due until"), "{list}");
    assert_eq!(receiver.count(), 2);
    let mut command: Vec<&str> = command.split(' ').collect();
    command.push("--yes");
    run(&db, &command);
    eventually("it is delivered", || db.count("delivered") == 1);
    end(&relay);
}

/// R55: the guide on webhooks, about a destination that is restored.
#[test]
fn a_recovery_since_the_removal_sends_only_what_came_after_it_and_an_earlier_one_all() {
    let db = Database::new();
    let (receiver, other) = (Receiver::ok(), Receiver::ok());
    let before = SystemTime::now();
    put(&db, "acme", &receiver);
    put(&db, "other", &other);
    let relay = db.keeping_relay().start().expect("a relay");
    db.enqueue("order.paid", json!("delivered"));
    receiver.wait_for(1);
    end(&relay);
    run(&db, &["pause", "destination", "acme"]);
    // It reads the pause before it claims.
    let relay = db.keeping_relay().start().expect("a relay");
    db.enqueue("order.paid", json!("waits"));
    eventually("one waits for acme", || {
        db.number("SELECT count(*) FROM {o} WHERE destination = 'acme'") == 1
    });
    let removal = SystemTime::now();
    run(&db, &["endpoint", "remove", "acme", "--yes"]);
    eventually("the waiting message ends", || {
        db.number("SELECT count(*) FROM {o}_ledger WHERE reason = 'DESTINATION_REMOVED'") == 1
    });
    db.enqueue("order.paid", json!("missed"));
    other.wait_for(3);
    eventually("all is settled", || {
        db.number("SELECT count(*) FROM {o}") == 0
    });
    run(&db, &["resume", "destination", "acme"]);
    put(&db, "acme", &receiver);
    let recover = |since| {
        let (outbox, conn, note) = (db.outbox(), &mut db.connect(), Note::new("alice", ""));
        let (what, bulk) = (Recover::AndMissed, Bulk::new(&note));
        let done = outbox.endpoints().recover(conn, "acme", since, what, bulk);
        done.expect("recovered").expect("the destination").changed
    };
    assert_eq!(recover(removal), 1);
    assert_eq!(receiver.wait_for(2)[1].json(), "missed");
    assert_eq!(recover(before), 2);
    let all = receiver.wait_for(4);
    let mut again: Vec<_> = all[2..].iter().map(|one| one.json()).collect();
    again.sort_by_key(ToString::to_string);
    assert_eq!(again, [json!("delivered"), json!("waits")]);
    end(&relay);
}

/// R46: the page of a destination counts what it has given up, which is more than its dead letters.
#[test]
fn a_cancelled_message_is_given_up_and_no_dead_letter() {
    let db = Database::new();
    let receiver = Receiver::answering(|_| 400);
    put(&db, "acme", &receiver);
    let later = NewMessage::new("order.paid", &json!(1))
        .expect("JSON")
        .destination("acme")
        .delay(Duration::from_secs(3600));
    let later = db.enqueue_message(later).to_string();
    let relay = db.keeping_relay().start().expect("a relay");
    for number in [2, 3] {
        db.enqueue("order.paid", json!(number));
    }
    eventually("two are dead letters", || db.count("dead") == 2);
    run(&db, &["message", "cancel", &later]);
    let page = Page::start(db.binary(&["admin"]));
    let body = page.get("/endpoints?name=acme").body;
    let (_, figure) = body.split_once("Given up").expect("the figure");
    let (_, value) = figure.split_once("class=\"value\">").expect("a value");
    assert!(value.starts_with("3<"), "{body}");
    assert!(
        body.contains("dead-lettered, expired or cancelled"),
        "{body}"
    );
    let letters = finish(db.binary(&["dead", "list", "--json"]))
        .code(0)
        .json();
    assert_eq!(letters.as_array().map(Vec::len), Some(2), "{letters}");
    end(&relay);
}

/// R46: a 500 without Retry-After asks for nothing.
#[test]
fn a_failing_destination_is_said_to_have_answered_5xx() {
    let db = Database::new();
    let receiver = Receiver::answering(|_| 500);
    put(&db, "acme", &receiver);
    let relay = db.keeping_relay().start().expect("a relay");
    db.enqueue("order.paid", json!(1));
    eventually("it is failing", || {
        db.number("SELECT count(*) FROM {o}_endpoint WHERE failing_since IS NOT NULL") == 1
    });
    end(&relay);
    db.execute("UPDATE {o}_endpoint SET failing = true");
    let page = Page::start(db.binary(&["admin"]));
    for said in [
        run(&db, &["endpoint", "list"]),
        run(&db, &["endpoint", "show", "acme"]),
        page.get("/endpoints?name=acme").body,
    ] {
        assert!(
            said.contains("SERVER_ERROR (the receiver answered 5xx)"),
            "{said}"
        );
        assert!(!said.contains("asked to wait"), "{said}");
    }
}
