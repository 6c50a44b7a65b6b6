//! `diesel-outbox tail`: what is delivered, as lines, and again at another receiver.

use diesel_outbox::{NewMessage, RelayHandle};
use serde_json::{Value, json};

use crate::support::{Database, Receiver, Request, Running, end, eventually, finish};

/// A tail that writes its lines where the tests read them.
fn tail(database: &Database, arguments: &[&str]) -> Running {
    let binary = database.binary(&[]);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", r#"exec "$0" tail "$@" >&2"#]);
    command.arg(binary.get_program()).args(arguments);
    let set = binary
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    command.envs(set);
    let running = Running::start(command);
    running.wait_for_log("following the ledger of ");
    running
}

fn lines(tail: &Running) -> Vec<Value> {
    let log = tail.log();
    log.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// Waits for so many lines, then ends the tail with this signal, which is a success.
fn lines_until(mut tail: Running, count: usize, signal: &str) -> Vec<Value> {
    eventually("the lines are printed", || lines(&tail).len() >= count);
    tail.signal(signal);
    assert_eq!(tail.wait().code(), Some(0));
    lines(&tail)
}

fn deliver(database: &Database, relay: &RelayHandle, topics: &[&str]) {
    for topic in topics {
        let message = NewMessage::new(*topic, &json!({ "n": 1.50 })).expect("JSON");
        let message = message.ordering_key("k").header("x-shop", "berlin");
        database.enqueue_message(message);
    }
    let count = i64::try_from(topics.len()).expect("a number");
    eventually("all are settled", || {
        relay.wake();
        database.number("SELECT count(*) FROM {o}_ledger") >= count
    });
}

#[test]
fn each_settled_message_is_a_line_and_dead_letters_have_their_reason() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.header("ce-type") {
        Some("order.bad") => 400,
        _ => 200,
    });
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    let all = tail(&database, &["--json"]);
    let some = tail(
        &database,
        &["--json", "--topic", "order.p*", "--destination", "default"],
    );
    let topics = ["order.paid", "member.joined", "order.bad", "order.packed"];
    deliver(&database, &relay, &topics);
    let of = |lines: Vec<Value>, member: &str| -> Vec<Value> {
        lines.iter().map(|line| line[member].clone()).collect()
    };
    let all = lines_until(all, 4, "INT");
    assert_eq!(of(all.clone(), "topic"), topics);
    assert_eq!(
        of(all.clone(), "status"),
        ["delivered", "delivered", "dead", "delivered"]
    );
    assert_eq!(all[2]["reason"], "REJECTED");
    assert_eq!(all[0]["ordering_key"], "k");
    assert_eq!(
        of(lines_until(some, 2, "TERM"), "topic"),
        ["order.paid", "order.packed"]
    );
    // What was settled before is shown on request, also for people.
    let mut before = tail(&database, &["--since", "1h"]);
    before.wait_for_log("order.packed  default  delivered  200  key=k  ");
    before.signal("INT");
    assert_eq!(before.wait().code(), Some(0));
    end(&relay);
}

/// Method and target, the headers that a repetition shares, and the body.
fn content(request: &Request) -> (String, Vec<(String, String)>, Vec<u8>) {
    let differs = [
        "host",
        "webhook-timestamp",
        "webhook-signature",
        "outbox-attempt",
        "x-secret",
    ];
    let headers = request
        .headers()
        .filter(|(name, _)| !differs.contains(name));
    let mut headers: Vec<(String, String)> = headers
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    headers.sort();
    (request.line.clone(), headers, request.body.clone())
}

/// Both modes, and an endpoint with a secret of its own.
#[test]
fn a_forwarded_message_is_the_delivered_one_and_nothing_is_written() {
    let database = Database::new();
    let (first, second) = (Receiver::ok(), Receiver::ok());
    for mode in ["binary", "structured"] {
        let mut put = database.binary(&["endpoint", "put", mode, &first.url(), "--topic", mode]);
        put.args(["--mode", mode, "--header", "x-secret: hunter2"]);
        put.env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
            .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
        finish(put).code(0);
    }
    let relay = database.keeping_relay().start().expect("a relay");
    let forwarding = tail(&database, &["--json", "--forward-to", &second.url()]);
    deliver(&database, &relay, &["binary", "structured"]);
    let rows = || {
        let count = "SELECT (SELECT count(*) FROM {o}_ledger) * 1000 + (SELECT count(*) FROM {o}_attempt) * 100
            + (SELECT count(*) FROM {o}_audit) * 10 + (SELECT count(*) FROM {o})";
        database.number(count)
    };
    let before = rows();
    let lines = lines_until(forwarding, 2, "INT");
    end(&relay);
    for line in &lines {
        assert_eq!(line["forwarded"]["http_status"], 200, "{line}");
    }
    let sorted = |receiver: &Receiver| {
        let mut all: Vec<_> = receiver.requests().iter().map(content).collect();
        all.sort_by_key(|one| one.2.len());
        all
    };
    assert_eq!(sorted(&second), sorted(&first));
    assert_eq!(second.count(), 2);
    for request in second.requests() {
        assert!(request.header("webhook-signature").is_some());
        assert_eq!(
            request.header("x-secret"),
            None,
            "it is for the first receiver only"
        );
    }
    assert_eq!(rows(), before);
}

#[test]
fn a_message_that_cannot_be_forwarded_says_so_and_the_next_one_follows() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let other = Receiver::answering(|request| match request.header("ce-type") {
        Some("order.paid") => 503,
        _ => 200,
    });
    let forwarding = tail(&database, &["--json", "--forward-to", &other.url()]);
    let relay = database.relay().url(&receiver.url());
    let forgetful = relay.start().expect("a relay");
    deliver(&database, &forgetful, &["order.paid"]);
    end(&forgetful);
    let mut keeping = database.binary(&["run", "--url", &receiver.url()]);
    keeping.env("OUTBOX_LEDGER_PAYLOAD", "true");
    let keeping = Running::start(keeping);
    for topic in ["order.paid", "order.packed"] {
        database.enqueue(topic, json!({}));
    }
    let lines = lines_until(forwarding, 3, "TERM");
    drop(keeping);
    let of = |topic: &str, number: usize| -> Value {
        let mut all = lines.iter().filter(|line| line["topic"] == topic);
        all.nth(number).expect("a line")["forwarded"].clone()
    };
    let why = of("order.paid", 0);
    assert_eq!(why["error"], "the ledger has not kept the payload");
    assert_eq!(of("order.paid", 1)["http_status"], 503);
    assert_eq!(of("order.packed", 0)["http_status"], 200);
    assert_eq!(other.count(), 2, "a refused message is not sent again");
}

#[test]
fn a_lost_database_is_reported_and_found_again() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    let tail = tail(&database, &["--json"]);
    deliver(&database, &relay, &["order.paid"]);
    eventually("it is shown", || lines(&tail).len() == 1);
    // The same as a lost connection: a query fails, and the connection is dropped.
    database.execute("ALTER TABLE {o}_ledger RENAME TO gone");
    tail.wait_for_log("cannot read the ledger, trying again");
    let schema = database.schema();
    database.execute(&format!(
        "ALTER TABLE {schema}.gone RENAME TO outbox_ledger"
    ));
    deliver(&database, &relay, &["order.packed"]);
    let lines = lines_until(tail, 2, "INT");
    assert_eq!(lines.len(), 2);
    end(&relay);
}

#[test]
fn a_database_that_is_lost_while_messages_are_forwarded_costs_none_of_them() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut keeping = database.binary(&["run", "--url", &receiver.url()]);
    keeping.env("OUTBOX_LEDGER_PAYLOAD", "true");
    let keeping = Running::start(keeping);
    for topic in ["order.paid", "order.packed"] {
        database.enqueue(topic, json!({}));
    }
    eventually("both are delivered", || database.count("delivered") == 2);
    drop(keeping);
    let (other, gate) = Receiver::held();
    let tail = tail(
        &database,
        &["--json", "--since", "1h", "--forward-to", &other.url()],
    );
    eventually("the first is sent", || gate.came() == 1);
    database.execute("ALTER TABLE {o}_ledger RENAME TO gone");
    gate.open();
    tail.wait_for_log("cannot read the ledger, trying again");
    let schema = database.schema();
    database.execute(&format!(
        "ALTER TABLE {schema}.gone RENAME TO outbox_ledger"
    ));
    let lines = lines_until(tail, 2, "INT");
    for line in &lines {
        assert_eq!(line["forwarded"]["http_status"], 200, "{line}");
    }
    assert_eq!((lines.len(), other.count()), (2, 2));
}

#[test]
fn a_url_that_is_none_is_refused() {
    let database = Database::new();
    let bad = database.binary(&["tail", "--forward-to", "nowhere"]);
    let finished = finish(bad).code(2);
    assert!(
        finished.stderr.contains("--forward-to"),
        "{}",
        finished.stderr
    );
}
