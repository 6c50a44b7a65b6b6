//! A tenant is forgotten: all its data is removed, and the data of other tenants stays.

use std::time::Duration;

use diesel_outbox::admin::{self, Bulk, Forgotten, Note, Subject};
use diesel_outbox::config::{LedgerPayload, OnDead};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{Backoff, Destination, NewMessage};
use serde_json::json;
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually, finish};

const AT_ONCE: Duration = Duration::ZERO;
const TABLES: [&str; 8] = [
    "",
    "_ledger",
    "_attempt",
    "_dead",
    "_endpoint",
    "_pause",
    "_audit",
    "_request",
];

fn forget(database: &Database, tenant: Uuid, patience: Duration) -> Forgotten {
    let conn = &mut database.connect();
    admin::forget(
        conn,
        &database.outbox_name(),
        tenant,
        patience,
        &note(),
        |_| true,
    )
    .expect("forgotten")
}

fn note() -> Note {
    Note::new("eve", "the contract has ended")
}

/// A message with the tenant's mark in every part.
fn message(topic: &str, tenant: Uuid, mark: &str) -> NewMessage {
    NewMessage::new(topic, &json!({ "who": mark }))
        .expect("JSON")
        .tenant_id(tenant)
        .idempotency_key(format!("key-{topic}-{mark}"))
        .ordering_key(format!("order-{topic}-{mark}"))
        .header("x-who", mark)
}

/// In each table, the number of rows that contain this text.
fn rows_with(database: &Database, text: &str) -> [i64; 8] {
    TABLES.map(|table| {
        let rows = format!("SELECT count(*) FROM {{o}}{table} r WHERE r::text LIKE '%{text}%'");
        database.number(&rows)
    })
}

/// Gives each of the two tenants rows in every table.
fn two_tenants(database: &Database, mine: Uuid, other: Uuid) {
    let receiver = Receiver::start(|request, stream| {
        let body = String::from_utf8_lossy(&request.body);
        let (code, mark) = match request.header("ce-type") {
            Some("order.lost") => (400, &body),
            Some("order.late") => (500, &body),
            _ => (200, &body),
        };
        let answer = format!(
            "HTTP/1.1 {code} Reason\r\ncontent-length: {}\r\n\r\n{mark}",
            mark.len()
        );
        std::io::Write::write_all(stream, answer.as_bytes())
    });
    let conn = &mut database.connect();
    for (tenant, mark) in [(mine, "alice"), (other, "bob")] {
        let hook = Endpoint::new(format!("hook-of-{mark}"), receiver.url());
        let outbox = database.outbox();
        let destinations = outbox.endpoints();
        destinations.put(conn, &hook.tenant(tenant)).expect("put");
        for topic in ["order.paid", "order.lost", "order.late"] {
            database.enqueue_message(message(topic, tenant, mark));
        }
    }
    let relay = database
        .relay()
        .endpoint_threads(8)
        .configure(|config| {
            config.endpoint_backoff = Backoff::Table(vec![Duration::from_secs(3600)])
        })
        .start()
        .expect("a relay");
    eventually("all messages are in their final state", || {
        ["delivered", "dead", "retrying"].map(|status| database.count(status)) == [2, 2, 2]
    });
    end(&relay);
    for mark in ["alice", "bob"] {
        let pause = format!(
            "INSERT INTO {{o}}_pause (kind, name, reason) VALUES ('destination', 'hook-of-{mark}', 'OPERATOR')"
        );
        database.execute(&pause);
        // As with OUTBOX_LEDGER_PAYLOAD.
        let kept = format!(
            "UPDATE {{o}}_ledger SET payload = '{{\"who\":\"{mark}\"}}' WHERE destination = 'hook-of-{mark}'"
        );
        database.execute(&kept);
        let tenant = if mark == "alice" { mine } else { other };
        let acts = format!(
            "INSERT INTO {{o}}_audit (who, act, target, why) VALUES
                ('eve', 'endpoint put', 'hook-of-{mark}', 'asked for by {mark}'), ('eve', 'message retry', 'tenant {tenant}', '')"
        );
        database.execute(&acts);
        let answer = format!(r#"{{"name":"hook-of-{mark}","tenant":"{tenant}"}}"#);
        let requests = format!(
            "INSERT INTO {{o}}_request (caller, key, digest, status, answer) VALUES
                ('tenant {tenant}', '{mark}', '', 200, ''), ('operator eve', '{mark}', '', 200, '{answer}')"
        );
        database.execute(&requests);
    }
}

#[test]
fn nothing_of_a_tenant_is_left_and_all_of_another_one() {
    let database = Database::new();
    let (mine, other) = (Uuid::now_v7(), Uuid::now_v7());
    two_tenants(&database, mine, other);
    assert_eq!(rows_with(&database, "alice"), [1, 2, 2, 1, 1, 1, 1, 2]);
    let bobs = rows_with(&database, "bob");
    let ids =
        "SELECT string_agg(message_id || topic || status, ',' ORDER BY settled_at) FROM {o}_ledger";
    let before = database.text(ids).expect("entries");

    let arguments = ["forget", "--tenant", &mine.to_string(), "--yes", "--json"];
    let done = finish(database.binary(&arguments)).code(0).json();
    assert_eq!(
        done,
        json!({ "messages": 1, "dead_letters": 1, "attempts": 2, "ledger_entries": 3, "feed_events": 0, "endpoints": 1, "left": 0 })
    );
    assert_eq!(rows_with(&database, "alice"), [0; 8]);
    assert_eq!(rows_with(&database, &mine.to_string()), [0; 8]);
    assert_eq!(rows_with(&database, "bob"), bobs);
    // Settled entries remain known, and the waiting message is cancelled.
    let after = database.text(ids).expect("entries");
    assert!(after.starts_with(&before), "{before}\n{after}");
    let statuses = ["delivered", "dead", "retrying"].map(|status| database.count(status));
    assert_eq!(statuses, [2, 2, 1]);
    assert_eq!(
        database
            .text("SELECT reason FROM {o}_ledger WHERE sequence NOT IN (SELECT sequence FROM {o}_dead) AND status = 'dead' AND tenant_id IS NULL AND http_status IS NULL")
            .as_deref(),
        Some("CANCELLED")
    );
    // The acts remain, without what they were for.
    let acts = "SELECT string_agg(act, ', ' ORDER BY at) FROM {o}_audit WHERE target = '' OR act = 'forget'";
    assert_eq!(
        database.text(acts).as_deref(),
        Some("endpoint put, message retry, forget")
    );
    assert_eq!(forget(&database, mine, AT_ONCE), Forgotten::default());
}

/// A key often identifies a person, so it is forgotten too.
#[test]
fn a_key_that_was_forgotten_is_that_of_a_new_message() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    let receiver = Receiver::ok();
    database.enqueue_message(message("order.paid", tenant, "alice"));
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    receiver.wait_for(1);
    eventually("the message is settled", || {
        database.count("delivered") == 1
    });
    forget(&database, tenant, AT_ONCE);
    database.enqueue_message(message("order.paid", tenant, "alice"));
    receiver.wait_for(2);
    eventually("the message is settled", || {
        database.count("delivered") == 2
    });
    end(&relay);
}

#[test]
fn messages_in_flight_are_waited_for_and_their_destination_kept() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    let (receiver, gate) = Receiver::held();
    let hook = Endpoint::new("hook-of-alice", receiver.url()).tenant(tenant);
    let outbox = database.outbox();
    let conn = &mut database.connect();
    outbox.endpoints().put(conn, &hook).expect("put");
    database.enqueue_message(message("order.paid", tenant, "alice"));
    let relay = database
        .relay()
        .endpoint_threads(8)
        .send_timeout(Duration::from_secs(30))
        .configure(|config| config.endpoint_timeout = Duration::from_secs(30))
        .lease(Duration::from_secs(100))
        .start()
        .expect("a relay");
    receiver.wait_for(1);
    let cut = forget(&database, tenant, Duration::from_millis(300));
    assert_eq!((cut.left, cut.messages, cut.endpoints), (1, 0, 0));
    let tenants = tenant.to_string();
    let arguments = ["forget", "--tenant", &tenants, "--yes", "--wait", "0s"];
    let failed = finish(database.binary(&arguments)).code(1).stderr;
    assert!(
        failed.contains("still in flight: 1 message of the tenant"),
        "{failed}"
    );

    let done = std::thread::scope(|scope| {
        let forgetting = scope.spawn(|| forget(&database, tenant, Duration::from_secs(60)));
        // The call is waiting already or starts later: the result is the same.
        std::thread::sleep(Duration::from_millis(300));
        gate.open();
        forgetting.join().expect("the call ends")
    });
    end(&relay);
    assert_eq!((done.left, done.endpoints), (0, 1));
    assert_eq!(database.count("delivered"), 1);
    assert_eq!(rows_with(&database, "alice"), [0; 8]);
}

/// No relay will settle the messages that a dead relay held.
#[test]
fn messages_of_a_dead_relay_are_forgotten() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    database.enqueue_message(message("order.paid", tenant, "alice"));
    database.execute("UPDATE {o} SET locked_by = 7, locked_at = now()");
    let done = forget(&database, tenant, AT_ONCE);
    assert_eq!((done.messages, done.left), (1, 0));
}

/// The messages behind the tenant's messages continue.
#[test]
fn keys_that_the_tenant_has_held_continue() {
    let database = Database::new();
    let (tenant, receiver) = (Uuid::now_v7(), Receiver::answering(|_| 400));
    let of_key = |topic: &str| NewMessage::new(topic, &json!({})).expect("JSON");
    let mut destination = Destination::new("only", &receiver.url()).expect("a URL");
    destination.policy.on_dead = Some(OnDead::Block);
    let relay = database.relay().destination(destination).route("*", "only");
    let relay = relay.start().expect("a relay");
    database.enqueue_message(of_key("order.lost").ordering_key("k").tenant_id(tenant));
    eventually("the dead letter blocks its key", || {
        database.count("dead") == 1
    });
    database.enqueue_message(of_key("order.paid").ordering_key("k"));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(receiver.count(), 1);
    assert_eq!(forget(&database, tenant, AT_ONCE).dead_letters, 1);
    receiver.wait_for(2);
    end(&relay);
}

#[test]
fn long_work_is_done_in_steps_reports_its_progress_and_continues_after_a_stop() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload, tenant_id, idempotency_key)
         SELECT 'order.paid', '{{}}', '{tenant}', 'live-' || n FROM generate_series(1, 2500) n"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, tenant_id, status, attempts, created_at)
         SELECT 0, -n, gen_random_uuid(), 'order.paid', '', '{tenant}', 'delivered', 1, now() FROM generate_series(1, 1500) n"
    ));
    let (conn, name) = (&mut database.connect(), database.outbox_name());
    let mut seen = Vec::new();
    let stopped = admin::forget(conn, &name, tenant, AT_ONCE, &note(), |so_far| {
        seen.push(so_far.messages);
        so_far.messages < 2000
    });
    assert_eq!(stopped.expect("stopped").messages, 2000);
    assert_eq!(seen, [1000, 2000]);
    let done = forget(&database, tenant, AT_ONCE);
    assert_eq!((done.messages, done.ledger_entries), (500, 4000));
    assert_eq!(rows_with(&database, &tenant.to_string()), [0; 8]);
}

/// Three messages with this content, of each of two customers, whose delivery succeeds, fails, and is to be retried.
fn settled_with(content: &str) -> Database {
    let database = Database::new();
    let receiver = Receiver::start(|request, stream| {
        let code = match request.header("ce-type") {
            Some("order.lost") => 400,
            Some("order.late") => 500,
            _ => 200,
        };
        let body = String::from_utf8_lossy(&request.body);
        let length = body.len();
        let answer = format!("HTTP/1.1 {code} Reason\r\ncontent-length: {length}\r\n\r\n{body}");
        std::io::Write::write_all(stream, answer.as_bytes())
    });
    for customer in ["ada", "bob"] {
        let content = format!("{content} {customer}");
        for topic in ["order.paid", "order.lost", "order.late"] {
            let message = NewMessage::new(topic, &json!({ "card": content })).expect("JSON");
            database.enqueue_message(
                message
                    .header("x-card", &content)
                    .header("ce-subject", format!("customers/{customer}"))
                    .ordering_key(format!("{customer}-{topic}")),
            );
        }
    }
    let hour = Backoff::Table(vec![Duration::from_secs(3600)]);
    let relay = database
        .relay()
        .url(&receiver.url())
        .backoff(hour)
        .configure(|config| config.ledger_payload = LedgerPayload::WithEntry);
    let relay = relay.start().expect("a relay");
    eventually("all messages are in their final state", || {
        ["delivered", "dead", "retrying"].map(|status| database.count(status)) == [2, 2, 2]
    });
    end(&relay);
    database
}

/// R63, R75.
#[test]
fn all_of_a_subject_is_expunged_by_its_ce_subject_or_ordering_key_and_others_stay() {
    let has = |database: &Database, text: &str| rows_with(database, text).iter().sum::<i64>() > 0;
    let run = |database: &Database, options: &[&str]| {
        let why = ["--why", "a person left", "--json"];
        finish(database.binary(&[&["message", "expunge"], options, &why].concat()))
    };
    let database = settled_with("4711");
    let ada = ["--subject", "customers/ada"];
    let counted = run(&database, &[&ada[..], &["--dry-run"]].concat()).code(0);
    let rows = |cancelled, discarded, ledger_entries| {
        json!({
            "cancelled": cancelled, "discarded": discarded, "ledger_entries": ledger_entries,
            "attempts": 0, "feed_events": 0, "left": [],
        })
    };
    // What is to be retried is not in the ledger yet.
    assert_eq!(counted.json(), rows(1, 1, 2));
    let refused = run(&database, &ada).code(1).stderr;
    assert!(refused.contains("nothing was changed"), "{refused}");
    assert!(has(&database, "4711 ada"));
    let done = run(&database, &[&ada[..], &["--yes"]].concat())
        .code(0)
        .json();
    assert_eq!(
        (&done["cancelled"], &done["discarded"]),
        (&json!(1), &json!(1))
    );
    assert!(
        !has(&database, "4711 ada"),
        "{:?}",
        rows_with(&database, "4711 ada")
    );
    assert!(!has(&database, "customers/ada"), "the audit has no content");
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE ordering_key LIKE 'ada%'"),
        3
    );
    let again = run(&database, &[&ada[..], &["--dry-run"]].concat()).code(0);
    assert_eq!(again.json(), rows(0, 0, 0));

    let bob = |topic: &str| {
        let key = format!("bob-{topic}");
        let done = run(&database, &["--key", &key, "--topic", topic, "--yes"])
            .code(0)
            .json();
        [&done["cancelled"], &done["discarded"]].map(|number| number.as_u64().expect("a number"))
    };
    assert!(has(&database, "4711 bob"));
    assert_eq!(bob("order.paid"), [0, 0]);
    assert_eq!(bob("order.lost"), [0, 1]);
    let other = run(
        &database,
        &["--key", "bob-order.late", "--topic", "order.paid", "--yes"],
    );
    assert_eq!(other.code(0).json(), rows(0, 0, 0));
    assert!(has(&database, "4711 bob"));
    assert_eq!(bob("order.late"), [1, 0]);
    assert!(
        !has(&database, "4711 bob"),
        "{:?}",
        rows_with(&database, "4711 bob")
    );
    for wrong in [
        &[][..],
        &["--key", "a", "--subject", "b"],
        &["--topic", "order.paid"],
    ] {
        run(&database, wrong).code(2);
    }
}

/// R75.
#[test]
fn an_expunge_does_what_its_dry_run_counts_and_once_done_finds_nothing_and_says_who_did_it() {
    let database = settled_with("4711");
    database.enqueue_message(
        NewMessage::new("order.soon", &json!(1))
            .expect("JSON")
            .ordering_key("eve")
            .delay(Duration::from_secs(3600)),
    );
    for key in ["ada-order.paid", "ada-order.lost", "ada-order.late", "eve"] {
        let run = |option: &str| {
            let options = [
                "message", "expunge", "--key", key, "--why", "a test", "--json",
            ];
            let done = finish(database.binary(&[&options[..], &[option]].concat())).code(0);
            let done = done.json();
            ["cancelled", "discarded", "ledger_entries"].map(|name| done[name].clone())
        };
        let counted = run("--dry-run");
        assert_eq!(run("--yes"), counted, "{key}");
        assert_eq!(run("--dry-run"), [0, 0, 0].map(|zero| json!(zero)), "{key}");
    }
    let who =
        "SELECT count(*) FROM {o}_ledger WHERE reason = 'CANCELLED' AND error LIKE '%a test%'";
    assert_eq!(database.number(who), 2);
}

/// R75.
#[test]
fn a_large_subject_is_expunged_in_steps_that_a_stop_interrupts_and_what_is_in_flight_is_named() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key) SELECT 'order.paid', '{}', 'k' FROM generate_series(1, 2500)",
    );
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('works', now() + interval '1 hour')",
    );
    database.execute(
        "UPDATE {o} SET locked_by = (SELECT id FROM {o}_lease), locked_at = now()
          WHERE sequence = (SELECT min(sequence) FROM {o})",
    );
    let in_flight = database.text("SELECT message_id::text FROM {o} WHERE locked_by IS NOT NULL");
    let (conn, name) = (&mut database.connect(), database.outbox_name());
    let (note, subject) = (note(), Subject::key("k"));
    let mut seen = Vec::new();
    let bulk = Bulk::new(&note).progress(|so_far| {
        seen.push(so_far.changed);
        so_far.changed < 2000
    });
    let stopped = admin::expunge_all(conn, &name, &subject, bulk).expect("stopped");
    assert!((1999..=2000).contains(&stopped.cancelled), "{stopped:?}");
    assert_eq!(seen, [1000, 2000]);
    let done = admin::expunge_all(conn, &name, &subject, Bulk::new(&note)).expect("done");
    assert_eq!(stopped.cancelled + done.cancelled, 2499);
    let left: Vec<String> = done.left.iter().map(Uuid::to_string).collect();
    assert_eq!(left, [in_flight.expect("a message")]);
}

/// R63.
#[test]
fn the_content_of_an_expunged_message_is_nowhere_and_its_entry_stays() {
    const CARD: &str = "4711-0815";
    let database = settled_with(CARD);
    let has_content = || rows_with(&database, CARD).iter().any(|rows| *rows > 0);
    let ids = database.text("SELECT string_agg(DISTINCT message_id::text, ' ') FROM {o}_messages");
    let ids = ids.expect("messages");
    let why = ["--why", "a card number"];
    for id in ids.split(' ') {
        let asked = finish(database.binary(&[&["message", "expunge", id][..], &why].concat()));
        let stderr = asked.code(1).stderr;
        assert!(stderr.contains("nothing was changed"), "{stderr}");
    }
    assert!(has_content());
    let mut ended = [0; 2];
    for id in ids.split(' ') {
        let run = |option: &str| {
            let arguments = [&["message", "expunge", id, option, "--json"][..], &why].concat();
            finish(database.binary(&arguments)).code(0).json()
        };
        let counted = run("--dry-run");
        let done = run("--yes");
        for rows in ["cancelled", "discarded", "ledger_entries"] {
            assert_eq!(counted[rows], done[rows], "{rows}");
        }
        let cancelled = done["cancelled"].as_u64().expect("a number");
        // The entry of a cancelled message is new, and never had content.
        assert_eq!(
            (&done["ledger_entries"], &done["left"]),
            (&json!(1 - cancelled), &json!([]))
        );
        ended[0] += cancelled;
        ended[1] += done["discarded"].as_u64().expect("a number");
    }
    assert_eq!(ended, [2, 2]);
    assert!(!has_content(), "{:?}", rows_with(&database, CARD));
    let entries = "SELECT string_agg(DISTINCT topic || ' ' || status || coalesce(' ' || reason, ''), ', ') FROM {o}_ledger";
    assert_eq!(
        database.text(entries).as_deref(),
        Some("order.late dead CANCELLED, order.lost dead REJECTED, order.paid delivered")
    );
    let acts =
        "SELECT count(*) FROM {o}_audit WHERE act = 'message expunge' AND why = 'a card number'";
    assert_eq!(database.number(acts), 6);
    let unknown = Uuid::now_v7().to_string();
    for option in ["--yes", "--dry-run"] {
        let arguments = [&["message", "expunge", &unknown, option][..], &why].concat();
        let stderr = finish(database.binary(&arguments)).code(1).stderr;
        assert!(stderr.contains("there is no message"), "{stderr}");
    }
}
