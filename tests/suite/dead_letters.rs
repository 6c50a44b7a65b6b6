//! Dead letters by page and by group.

use std::collections::HashSet;

use diesel_outbox::ReasonCode;
use diesel_outbox::admin::{Place, Selection};
use diesel_outbox::program;

use crate::page::Page;
use crate::support::{Database, Receiver, Running, eventually, finish};

/// Inserts 25 dead letters, several with the same time.
fn fill(db: &Database) {
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
            available_at, created_at, attempts, reason, last_error, dead_lettered_at)
         SELECT g, gen_random_uuid(), 't' || g % 2, '', '1', 'k' || g, now(), now(), 1,
                CASE WHEN g <= 5 THEN 'TIMEOUT' ELSE 'SERVER_ERROR' END, 'error ' || g,
                now() - g / 4 * interval '1 s'
           FROM generate_series(1, 25) g",
    );
}

/// R25: every dead letter is on exactly one page, even if dead letters come and go between pages.
#[test]
fn pages_show_each_dead_letter_once() {
    let db = Database::new();
    fill(&db);
    let mut conn = db.connect();
    let (mut seen, mut before): (Vec<i64>, Option<Place>) = (Vec::new(), None);
    loop {
        let filter = program::behind(Selection::default(), before);
        let page = program::dead_letters(&mut conn, &db.outbox_name(), &filter, 4).expect("a page");
        let Some(last) = page.last() else { break };
        // The place travels through text, as in a link.
        before = Some(last.place().to_string().parse().expect("a place"));
        seen.extend(page.iter().map(|letter| letter.sequence.0));
        db.execute(&format!(
            "DELETE FROM {{o}}_dead WHERE sequence = {}",
            seen[0]
        ));
    }
    let mut all: Vec<i64> = (1..=25).collect();
    all.sort_by_key(|sequence| (sequence / 4, -sequence));
    assert_eq!(seen, all);
}

/// R55: an operator can see how many before, and how fast.
#[test]
fn dead_letters_are_counted_before_and_requeued_at_a_rate() {
    let db = Database::new();
    fill(&db);
    let dead = |arguments: &[&str]| {
        let arguments = [&["dead"], arguments].concat();
        finish(db.binary(&arguments)).code(0).stdout
    };
    let counted = dead(&["requeue", "--all", "--dry-run"]);
    assert!(
        counted.starts_with("25 dead letters would be requeued"),
        "{counted}"
    );
    let counted = dead(&["discard", "--topic", "t1", "--dry-run", "--json"]);
    let counted: serde_json::Value = serde_json::from_str(&counted).expect("JSON");
    assert_eq!(
        (&counted["matched"], &counted["changed"]),
        (&13.into(), &0.into())
    );
    assert_eq!(db.count("dead"), 25, "nothing was changed");
    let began = std::time::Instant::now();
    let done = dead(&["requeue", "--topic", "t1", "--yes", "--rate", "10"]);
    assert_eq!(done, "requeued 13 dead letters\n");
    let took = began.elapsed();
    assert!(took >= std::time::Duration::from_millis(1_300), "{took:?}");
    assert_eq!(db.count("dead"), 12);
    let done = dead(&["discard", "--all", "--yes", "--rate", "1000"]);
    assert_eq!(done, "discarded 12 dead letters\n");
    let acts = "SELECT count(*) FROM {o}_audit WHERE act LIKE '%dead%'";
    assert_eq!(db.number(acts), 3, "each step is one act");
}

/// R25: many dead letters form a few groups, the largest first, each with an example.
#[test]
fn groups_count_dead_letters_by_reason() {
    let db = Database::new();
    fill(&db);
    let mut conn = db.connect();
    let all = Selection::default();
    let groups = program::dead_groups(&mut conn, &db.outbox_name(), &all, 10).expect("groups");
    let seen: Vec<(&str, &str, i64, i64)> = groups
        .iter()
        .map(|g| {
            (
                g.reason.as_str(),
                g.topic.as_str(),
                g.count,
                g.example_sequence.0,
            )
        })
        .collect();
    let expected = [
        ("SERVER_ERROR", "t0", 10, 24),
        ("SERVER_ERROR", "t1", 10, 25),
        ("TIMEOUT", "t1", 3, 5),
        ("TIMEOUT", "t0", 2, 4),
    ];
    assert_eq!(seen, expected);
    assert_eq!(groups[0].example_error.as_deref(), Some("error 24"));
    assert!(groups[0].oldest_dead_lettered_at < groups[0].latest_dead_lettered_at);
    let timeouts = all.reason(ReasonCode::Timeout);
    let groups = program::dead_groups(&mut conn, &db.outbox_name(), &timeouts, 1).expect("groups");
    assert_eq!(groups.len(), 1);
    assert_eq!(groups[0].count, 3);
}

/// R36: dead letters of one tenant, in the commands, on the page and in the ledger.
#[test]
fn dead_letters_of_a_tenant_are_found_and_changed_alone() {
    let db = Database::new();
    fill(&db);
    let tenant = "00000000-0000-0000-0000-000000000007";
    db.execute(&format!(
        "UPDATE {{o}}_dead SET tenant_id = '{tenant}' WHERE sequence <= 3"
    ));
    db.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, tenant_id, status, attempts, created_at)
         SELECT 0, sequence, message_id, topic, destination, tenant_id, 'dead', 1, created_at FROM {o}_dead",
    );
    let dead = |what: &[&str]| {
        let dead = [["dead"].as_slice(), what, &["--tenant", tenant, "--json"]].concat();
        finish(db.binary(&dead)).code(0).json()
    };
    let ids = dead(&["list"]);
    let ids = ids.as_array().expect("a list");
    let ids: HashSet<_> = ids.iter().filter_map(|one| one["id"].as_i64()).collect();
    assert_eq!(ids, HashSet::from([1, 2, 3]));
    let groups = dead(&["groups", "--topic", "t1"]);
    assert_eq!(groups[0]["count"], 2, "{groups}");

    let page = Page::start(db.binary(&["admin"]));
    let body = |path: &str| page.get(&format!("{path}?tenant={tenant}")).body;
    let (letters, ledger) = (body("/dead"), body("/ledger"));
    for n in 1..=25 {
        let is_there = letters.contains(&format!("href=\"/dead/{n}\""));
        assert_eq!(is_there, n <= 3, "{n}: {letters}");
    }
    let entries = ledger.matches("href=\"/messages?q=").count();
    assert_eq!(entries, 3, "{ledger}");

    dead(&["requeue", "--topic", "t1", "--yes"]);
    dead(&["discard", "--yes"]);
    let of_tenant = format!("SELECT count(*) FROM {{o}} WHERE tenant_id = '{tenant}'");
    assert_eq!(db.number(&of_tenant), 2);
    assert_eq!(db.number("SELECT count(*) FROM {o}"), 2);
    assert_eq!(db.number("SELECT count(*) FROM {o}_dead"), 22);
}

/// R50: a customer whose receiver refuses every message does not fill the log.
#[test]
fn dead_letters_of_one_destination_have_one_line_and_then_a_count() {
    let db = Database::new();
    let receiver = Receiver::answering(|_| 400);
    let mut command = db.binary(&["run", "--url", &receiver.url()]);
    command.env("OUTBOX_BATCH", "2");
    let mut relay = Running::start(command);
    db.enqueue_many(20);
    eventually("all are dead letters", || db.count("dead") == 20);
    relay.signal("TERM");
    assert!(relay.wait().success());
    let log = relay.log();
    assert_eq!(
        log.matches("gave up on order.paid to default").count(),
        1,
        "{log}"
    );
    assert_eq!(
        log.matches("gave up on 19 more messages to default (REJECTED)")
            .count(),
        1,
        "{log}"
    );
}
