//! `drain`.

use super::*;

// --- drain --------------------------------------------------------------------------------

/// Two delivered messages, one that waits for its next attempt, one dead letter.
fn four_messages(database: &Database) -> Receiver {
    for status in [200, 200, 500, 400] {
        database.enqueue("order.paid", json!(status));
    }
    Receiver::answering(|request| {
        let status = request.json().as_u64().expect("a status");
        u16::try_from(status).expect("a status")
    })
}

fn drain(database: &Database, receiver: &Receiver, arguments: &[&str]) -> Finished {
    finish(
        database
            .binary(&[&["drain"], arguments].concat())
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_BACKOFF", "1h"),
    )
}

/// R11.
#[test]
fn drain_says_what_it_did() {
    let database = Database::new();
    let receiver = four_messages(&database);
    let text = drain(&database, &receiver, &[]).code(0).stdout;
    assert!(
        text.starts_with("processed 4, failed 2 (1 will be retried, 1 dead), "),
        "{text}"
    );
    assert!(text.contains(" messages/s in "), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let text = drain(&database, &receiver, &[]).code(0).stdout;
    assert!(text.starts_with("processed 0, failed 0 "), "{text}");
}

#[test]
fn drain_says_what_it_did_as_json() {
    let database = Database::new();
    let receiver = four_messages(&database);
    let shown = drain(&database, &receiver, &["--json"]).code(0).json();
    for (key, count) in [
        ("processed", 4),
        ("delivered", 2),
        ("deduplicated", 0),
        ("failed", 2),
        ("retrying", 1),
        ("dead", 1),
    ] {
        assert_eq!(shown[key], count, "{key}: {shown}");
    }
    assert!(shown["seconds"].as_f64().is_some_and(|s| s > 0.0));
    assert!(
        shown["messages_per_second"]
            .as_f64()
            .is_some_and(|m| m > 0.0)
    );
}

/// R11.
#[test]
fn drain_stops_after_max_messages_and_leaves_the_others() {
    let database = Database::new();
    let receiver = Receiver::ok();
    database.enqueue_many(10);
    for (most, left) in [("3", 7), ("0", 7), ("7", 0)] {
        let shown = drain(&database, &receiver, &["--max-messages", most, "--json"])
            .code(0)
            .json();
        assert_eq!(shown["processed"].to_string(), most);
        assert_eq!(database.count("pending"), left);
    }
    assert_eq!(receiver.count(), 10);
    database.enqueue_many(1);
    for n in 0..3 {
        let keyed = NewMessage::new("order.paid", &n).expect("JSON");
        database.enqueue_message(keyed.ordering_key("k"));
    }
    let text = drain(&database, &receiver, &["--max-messages", "0"])
        .code(0)
        .stdout;
    for line in [
        "4 due messages are left",
        "2 behind another message of the same ordering key",
        "2 held back by a pause, --max-messages or a signal",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
}

/// R40: a job for some topics claims, counts and reports only these.
#[test]
fn drain_of_a_topic_leaves_the_others() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for topic in ["order.paid", "invoice.sent", "invoice.late", "mail"] {
        database.enqueue(topic, json!(1));
        database.enqueue_message(
            NewMessage::new(topic, &2)
                .expect("JSON")
                .ordering_key(format!("key of {topic}")),
        );
    }
    let topics = ["--topic", "invoice.*", "--topic", "mail"];
    let shown = drain(
        &database,
        &receiver,
        &[&topics, ["--json"].as_slice()].concat(),
    );
    let shown = shown.code(0).json();
    assert_eq!(
        (&shown["processed"], &shown["left_due"]),
        (&json!(6), &json!(0))
    );
    assert_eq!(shown["left"], json!([]));
    assert_eq!(
        database.text("SELECT string_agg(topic || attempts, ' ') FROM {o}"),
        Some("order.paid0 order.paid0".to_owned())
    );
    let shown = drain(&database, &receiver, &["--topic", "order.piad"]);
    assert!(shown.code(0).stdout.starts_with("processed 0, "));
    refused(database.binary(&["drain", "--topic", ""]), &["--topic"]);
    let shown = drain(&database, &receiver, &["--json"]).code(0).json();
    assert_eq!(shown["processed"], 2);
}

/// R10, R40: otherwise the drain would wait as long as the other relay lives.
#[test]
fn drain_beside_an_active_relay_says_so_and_ends() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let single = |arguments: &[&str]| {
        database
            .binary(arguments)
            .with("OUTBOX_URL", &receiver.url())
            .with("OUTBOX_SINGLE_ACTIVE", "true")
    };
    let mut active = Running::start(single(&["run"]));
    active.wait_for_log("relay started");
    for arguments in [["drain"].as_slice(), &["drain", "--max-messages", "0"]] {
        let finished = finish(single(arguments)).code(1);
        for part in ["another relay", "is active", "nothing was drained"] {
            assert!(finished.stderr.contains(part), "{}", finished.stderr);
        }
    }
    active.signal("TERM");
    active.wait();
    database.enqueue("order.paid", json!(1));
    let text = finish(single(&["drain"])).code(0).stdout;
    assert!(text.starts_with("processed 1, "), "{text}");
}

/// R11: a job that delivered nothing and failed at something has not done its work.
#[test]
fn a_drain_of_which_every_send_failed_ends_with_1() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    database.enqueue_many(2);
    let finished = drain(&database, &receiver, &[]).code(1);
    assert!(finished.stdout.starts_with("processed 2, failed 2 "));
    assert!(finished.stderr.contains("no message was delivered"));
    // No message is due any more: nothing has failed in this run.
    drain(&database, &receiver, &[]).code(0);
}

/// R11, R16: the drain reports which messages it leaves, and why.
#[test]
fn drain_reports_messages_without_a_route_and_messages_that_wait_for_their_key() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    for n in 0..3 {
        let message = NewMessage::new("order.paid", &n).expect("JSON");
        database.enqueue_message(message.ordering_key("k"));
        let unrouted = NewMessage::new("member.joined", &n).expect("JSON");
        database.enqueue_message(unrouted.ordering_key("member"));
    }
    let file = File::new(&format!(
        "[destinations.billing]\nurl = '{}'\n[[routes]]\ntopic = 'order.*'\nto = 'billing'\n",
        receiver.url()
    ));
    let drain = |arguments: &[&str]| {
        finish(
            database
                .binary(&[&["drain"], arguments].concat())
                .with("OUTBOX_CONFIG", file.path())
                .with("OUTBOX_BACKOFF", "1h"),
        )
    };
    let text = drain(&[]).code(1).stdout;
    for line in [
        "5 due messages are left",
        "3 of member.joined: NO_ROUTE, no relay serves them",
        "2 behind another message of the same ordering key",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
    assert!(!text.contains("held back"), "{text}");
    let shown = drain(&["--json"]).code(0).json();
    assert_eq!(
        shown["left"],
        json!([
            { "topic": "member.joined", "destination": "", "due": 3, "behind_their_key": 2, "no_route": true,
              "unserved": "no active relay has a route or a handler for this topic" },
            { "topic": "order.paid", "destination": "", "due": 2, "behind_their_key": 2, "no_route": false,
              "unserved": null },
        ])
    );
}

#[test]
fn drain_does_not_wait_for_messages_that_are_not_due() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let later = NewMessage::new("order.paid", &1)
        .expect("JSON")
        .delay(Duration::from_secs(3600));
    database.enqueue_message(later);
    database.enqueue("order.paid", json!(2));
    let shown = drain(&database, &receiver, &["--json"]).code(0).json();
    assert_eq!(shown["delivered"], 1);
    assert_eq!(database.count("pending"), 1);
}
