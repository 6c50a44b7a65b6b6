//! The commands that show one message, keys, relays and groups of dead letters.

use serde_json::json;

use crate::support::{Database, finish};

fn fill(db: &Database) {
    db.execute(
        "INSERT INTO {o} (topic, destination, payload, ordering_key, idempotency_key, attempts,
                available_at, last_error_code, last_error)
         VALUES ('t', 'a', '{\"secret\": 1}', 'k', 'one', 2, now() + interval '1 hour', 'TIMEOUT', 'slow'),
                ('t', 'a', '2', 'k', 'two', 0, now(), NULL, NULL),
                ('t', 'a', '3', 'k', 'three', 0, now(), NULL, NULL)",
    );
    db.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key,
            available_at, created_at, attempts, reason, last_error)
         SELECT -g, gen_random_uuid(), 't', '', '1', 'd' || g, now(), now(), 3, 'REJECTED',
                E'no \\x1b[31mway'
           FROM generate_series(1, 3) g",
    );
    db.execute(
        "INSERT INTO {o}_lease (id, relay, expires_at) VALUES (1, 'host/1', now() + interval '1 h'),
            (2, 'host/2', now() - interval '3 h')",
    );
}

/// R42: `message show` finds a message by any name and shows its payload and its history.
#[test]
fn message_show_has_the_payload_and_a_timeline() {
    let db = Database::new();
    fill(&db);
    let text = finish(db.binary(&["message", "show", "one"]))
        .code(0)
        .stdout;
    for part in [
        "retrying, in the outbox",
        "{\"secret\": 1}",
        "enqueued for a as ",
        "due again for a after 2 attempts: TIMEOUT (slow)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let dead = finish(db.binary(&["message", "show", "--json", "--", "-1"])).code(0);
    let shown = dead.json();
    assert_eq!(shown["complete"], json!(true));
    assert_eq!(shown["records"][0]["status"], json!("dead"));
    assert_eq!(
        shown["timeline"][1]["what"],
        json!("dead-lettered after 3 attempts: REJECTED (no \u{1b}[31mway)")
    );
    let text = finish(db.binary(&["message", "show", "d1"])).code(0).stdout;
    assert!(
        !text.contains('\x1b'),
        "a terminal would obey the control character: {text}"
    );
    let none = finish(db.binary(&["message", "show", "nobody"])).code(1);
    assert!(none.stderr.contains("nobody"), "{}", none.stderr);
}

/// R32: the waiting keys, and the messages of one key.
#[test]
fn keys_show_waiting_messages_and_the_reason() {
    let db = Database::new();
    fill(&db);
    let keys = finish(db.binary(&["keys", "--json"])).code(0).json();
    assert_eq!(keys[0]["ordering_key"], json!("k"));
    assert_eq!(keys[0]["waiting"], json!(2));
    assert_eq!(keys[0]["waiting_is_capped"], json!(false));
    let listed = finish(db.binary(&["keys", "list", "--json"]))
        .code(0)
        .json();
    assert_eq!(listed[0]["sequence"], keys[0]["sequence"]);
    let text = finish(db.binary(&["keys"])).code(0).stdout;
    assert!(text.contains("retrying TIMEOUT, due in"), "{text}");
    let messages = finish(db.binary(&["keys", "show", "k", "--json"]))
        .code(0)
        .json();
    let states: Vec<_> = messages
        .as_array()
        .expect("an array")
        .iter()
        .map(|m| m["status"].clone())
        .collect();
    assert_eq!(states, ["retrying", "pending", "pending"]);
    let text = finish(db.binary(&["keys", "show", "k"])).code(0).stdout;
    assert!(
        text.contains("TIMEOUT") && text.contains("pending"),
        "{text}"
    );
    finish(db.binary(&["keys", "show", "nobody"])).code(1);
    // The same column in both tables, and the same name in JSON.
    let tables = ["keys", "keys show k"].map(|command| {
        let arguments: Vec<&str> = command.split(' ').collect();
        finish(db.binary(&arguments)).code(0).stdout
    });
    for (table, heading) in tables.iter().zip([" blocked by sequence ", " sequence "]) {
        let headings = table.lines().nth(1).expect("headings");
        assert!(headings.contains(heading), "{table}");
        let sequence = keys[0]["sequence"].to_string();
        assert!(table.contains(&sequence), "{table}");
    }
    // Its relay is silent, and no other relay has taken the message over.
    db.execute("UPDATE {o} SET locked_by = 2, locked_at = now() WHERE idempotency_key = 'one'");
    let silent = finish(db.binary(&["keys", "show", "k"])).code(0).stdout;
    assert!(silent.contains("sending, lease expired"), "{silent}");
    let silent = finish(db.binary(&["keys", "show", "k", "--json"])).code(0);
    assert_eq!(silent.json()[0]["lease_expired"], json!(true));
    assert_eq!(silent.json()[1]["lease_expired"], json!(false));
    let empty = Database::new();
    assert_eq!(
        finish(empty.binary(&["keys"])).code(0).stdout,
        "no keys are blocked\n"
    );
}

#[test]
fn leases_show_who_is_alive() {
    let db = Database::new();
    fill(&db);
    let leases = finish(db.binary(&["leases", "--json"])).code(0).json();
    assert_eq!(leases[0]["relay"], json!("host/1"));
    assert_eq!(leases[0]["expired"], json!(false));
    assert_eq!(leases[1]["expired"], json!(true));
    let text = finish(db.binary(&["leases"])).code(0).stdout;
    assert!(
        text.contains("alive, ") && text.contains("expired 3.0 h ago"),
        "{text}"
    );
}

/// R25: dead letters in groups by reason, and in pages.
#[test]
fn dead_groups_and_pages_of_dead_list() {
    let db = Database::new();
    fill(&db);
    let groups = finish(db.binary(&["dead", "groups", "--json"]))
        .code(0)
        .json();
    assert_eq!(groups[0]["count"], json!(3));
    assert_eq!(groups[0]["reason"], json!("REJECTED"));
    let text = finish(db.binary(&["dead", "groups", "--topic", "t"]))
        .code(0)
        .stdout;
    assert!(
        text.contains("REJECTED") && !text.contains('\x1b'),
        "{text}"
    );
    let text = finish(db.binary(&["dead", "groups", "--topic", "u"]))
        .code(0)
        .stdout;
    assert_eq!(text, "no dead letter matches\n");
    let page = finish(db.binary(&["dead", "list", "--limit", "2", "--json"]))
        .code(0)
        .json();
    let place = page[1]["place"].as_str().expect("a place");
    let next = finish(db.binary(&["dead", "list", "--before", place, "--json"]))
        .code(0)
        .json();
    assert_eq!(next.as_array().map(Vec::len), Some(1));
    let text = finish(db.binary(&["dead", "list", "--limit", "2"]))
        .code(0)
        .stdout;
    assert!(text.contains(&format!("more: --before {place}")), "{text}");
    finish(db.binary(&["dead", "list", "--before", "nowhere"])).code(2);
}

/// R32: estimates are marked as estimates.
#[test]
fn status_of_a_large_outbox_is_an_estimate_unless_it_is_to_be_exact() {
    let db = Database::new();
    db.execute(
        "INSERT INTO {o} (topic, payload, attempts, available_at, last_error_code)
         SELECT 't', '1', (g > 99990)::int, now() + (g > 99990)::int * interval '1 hour',
                CASE WHEN g > 99990 THEN 'TIMEOUT' END
           FROM generate_series(1, 100000) g",
    );
    let about = finish(db.binary(&["status", "--json"])).code(0).json();
    assert_eq!(about["estimated"], json!(true));
    assert!(
        about["counts"]["retrying"].as_i64() >= Some(10),
        "{}",
        about["counts"]
    );
    assert_eq!(about["troubles"][0]["reason"], json!("TIMEOUT"));
    let exact = finish(db.binary(&["status", "--json", "--exact"]))
        .code(0)
        .json();
    assert_eq!(exact["estimated"], json!(false));
    assert_eq!(exact["counts"]["pending"], json!(99990));
    assert_eq!(exact["counts"]["retrying"], json!(10));
    assert_eq!(exact["troubles"][0]["count"], json!(10));
    assert!(finish(db.binary(&["status"])).code(0).stdout.contains('~'));
    assert!(
        !finish(db.binary(&["status", "--exact"]))
            .code(0)
            .stdout
            .contains('~')
    );
}
