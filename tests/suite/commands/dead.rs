//! `dead`.

use super::*;

// --- dead ---------------------------------------------------------------------------------

/// Inserts dead letters: two of the topic `a` with the reason `REJECTED`, one of `b` with `REJECTED` and one of `b`
/// with `CLIENT_ERROR`. Returns their ids.
fn dead_letters(database: &Database) -> [i64; 4] {
    let receiver = Receiver::answering(|request| match request.json().as_str() {
        Some("gone") => 404,
        _ => 400,
    });
    let ids = [
        database.enqueue("a", json!("bad")),
        database.enqueue("a", json!("bad")),
        database.enqueue("b", json!("bad")),
        database.enqueue("b", json!("gone")),
    ];
    finish(
        database
            .binary(&["drain"])
            .with("OUTBOX_MAX_ATTEMPTS", "1")
            .with("OUTBOX_URL", &receiver.url()),
    )
    .code(1);
    assert_eq!(database.count("dead"), 4);
    ids
}

fn dead(database: &Database, arguments: &[&str]) -> Finished {
    finish(database.binary(&[&["dead"], arguments].concat()))
}

/// The dead letters that are left.
fn left(database: &Database) -> Vec<i64> {
    let ids = database
        .text("SELECT string_agg(sequence::text, ' ' ORDER BY sequence) FROM {o}_dead")
        .unwrap_or_default();
    ids.split_whitespace()
        .map(|id| id.parse().expect("a number"))
        .collect()
}

#[test]
fn dead_letters_are_listed_by_id_topic_and_reason() {
    let database = Database::new();
    let [a1, a2, b1, b2] = dead_letters(&database);
    let list = |arguments: &[&str]| -> Vec<i64> {
        let shown = dead(&database, &[&["list", "--json"], arguments].concat())
            .code(0)
            .json();
        let mut ids: Vec<i64> = shown
            .as_array()
            .expect("an array")
            .iter()
            .map(|letter| letter["id"].as_i64().expect("an id"))
            .collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(list(&[]), [a1, a2, b1, b2]);
    assert_eq!(list(&["--topic", "a"]), [a1, a2]);
    assert_eq!(list(&["--reason", "CLIENT_ERROR"]), [b2]);
    assert_eq!(list(&["--reason", "rejected", "--topic", "b"]), [b1]);
    assert_eq!(list(&[&a2.to_string(), &b2.to_string()]), [a2, b2]);
    assert_eq!(list(&["--topic", "c"]), Vec::<i64>::new());
    assert_eq!(list(&["--limit", "3"]).len(), 3);
    let text = dead(&database, &["list"]).code(0).stdout;
    for part in ["REJECTED", "CLIENT_ERROR", &a1.to_string()] {
        assert!(text.contains(part), "{text}");
    }
    let unknown = dead(&database, &["list", "--reason", "TIRED"]).code(2);
    assert!(unknown.stderr.contains("TIRED"), "{}", unknown.stderr);
}

#[test]
fn a_dead_letter_is_shown_whole() {
    let database = Database::new();
    let [_, _, _, gone] = dead_letters(&database);
    let id = gone.to_string();
    let tenant = "0198c5a1-7b1e-7000-8000-000000000001";
    database.execute(&format!(
        "UPDATE {{o}}_dead SET tenant_id = '{tenant}' WHERE sequence = {id}"
    ));
    let shown = dead(&database, &["show", &id, "--json"]).code(0).json();
    assert_eq!(shown["id"], gone);
    assert_eq!(shown["payload"], "gone");
    assert_eq!(shown["reason"], "CLIENT_ERROR");
    assert_eq!(shown["http_status"], 404);
    assert_eq!(shown["tenant_id"], tenant);
    let text = dead(&database, &["show", &id]).code(0).stdout;
    assert!(text.contains(tenant), "{text}");
    assert!(
        text.contains("CLIENT_ERROR") && text.contains("\"gone\""),
        "{text}"
    );
    let missing = dead(&database, &["show", "999999"]).code(1);
    assert!(missing.stderr.contains("999999"), "{}", missing.stderr);
    dead(&database, &["show", "first"]).code(2);
}

/// R25.
#[test]
fn dead_letters_are_requeued_by_id_topic_and_reason() {
    let database = Database::new();
    let [a1, a2, b1, b2] = dead_letters(&database);
    dead(&database, &["requeue", &a1.to_string()]).code(0);
    assert_eq!(left(&database), [a2, b1, b2]);
    let shown = dead(
        &database,
        &["requeue", "--reason", "CLIENT_ERROR", "--yes", "--json"],
    )
    .code(0)
    .json();
    assert_eq!(
        (&shown["matched"], &shown["changed"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(left(&database), [a2, b1]);
    let text = dead(&database, &["requeue", "--topic", "a", "--yes"]);
    assert_eq!(text.code(0).stdout, "requeued 1 dead letter\n");
    assert_eq!(left(&database), [b1]);
    assert_eq!(database.count("pending"), 3);
    assert_eq!(
        database.number("SELECT count(*) FROM {o} WHERE attempts = 0 AND available_at <= now()"),
        3
    );
}

/// R25: a misspelled topic or reason is reported; it does not look like one without dead letters.
#[test]
fn an_unknown_topic_and_an_unknown_reason_are_reported() {
    let database = Database::new();
    dead_letters(&database);
    let requeue = |arguments: &[&str]| dead(&database, &[&["requeue"], arguments].concat());
    let text = requeue(&["--topic", "aa"]).code(0).stdout;
    assert!(
        text.starts_with("requeued 0 dead letters: ")
            && text.contains("topic aa: check the spelling"),
        "{text}"
    );
    let text = requeue(&["--topic", "a*", "--dry-run"]).code(0).stdout;
    assert!(text.contains("2 dead letters would"), "{text}");
    database.enqueue("live", json!(1));
    let text = requeue(&["--topic", "live"]).code(0).stdout;
    assert_eq!(text, "requeued 0 dead letters: none matches\n");
    let text = requeue(&["--topic", "a", "--reason", "DNS"]).code(0).stdout;
    assert!(text.contains("none matches"), "{text}");
    let refused = requeue(&["--reason", "SERVER"]).code(2).stderr;
    for name in ["--reason", "\"SERVER\"", "SERVER_ERROR", "TIMEOUT"] {
        assert!(refused.contains(name), "{name}: {refused}");
    }
}

/// R25.
#[test]
fn dead_letters_are_discarded_by_id_topic_and_reason() {
    let database = Database::new();
    let [a1, a2, b1, b2] = dead_letters(&database);
    dead(&database, &["discard", &a1.to_string(), &a2.to_string()]).code(0);
    assert_eq!(left(&database), [b1, b2]);
    dead(
        &database,
        &[
            "discard",
            "--topic",
            "b",
            "--reason",
            "CLIENT_ERROR",
            "--yes",
        ],
    )
    .code(0);
    assert_eq!(left(&database), [b1]);
    let text = dead(&database, &["discard", "--topic", "b", "--yes"]);
    assert_eq!(text.code(0).stdout, "discarded 1 dead letter\n");
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE status = 'dead'"),
        4,
        "the ledger keeps the dead entries"
    );
}

#[test]
fn an_id_that_is_not_there_changes_nothing() {
    let database = Database::new();
    let ids = dead_letters(&database);
    for verb in ["requeue", "discard"] {
        let failed = dead(&database, &[verb, &ids[0].to_string(), "999999"]).code(1);
        assert!(failed.stderr.contains("999999"), "{}", failed.stderr);
    }
    assert_eq!(left(&database), ids);
}

#[test]
fn all_has_to_be_said_and_without_a_terminal_confirmed_beforehand() {
    let database = Database::new();
    let ids = dead_letters(&database);
    for verb in ["requeue", "discard"] {
        // No selection.
        dead(&database, &[verb]).code(2);
        // Two selections.
        dead(&database, &[verb, "--all", "--topic", "a", "--yes"]).code(2);
        // No confirmation.
        let failed = dead(&database, &[verb, "--all"]).code(1);
        assert!(failed.stderr.contains("--yes"), "{}", failed.stderr);
        assert!(failed.stderr.contains("nothing was changed"));
        assert_eq!(left(&database), ids);
    }
    let text = dead(&database, &["requeue", "--all", "--yes"])
        .code(0)
        .stdout;
    assert_eq!(text, "requeued 4 dead letters\n");
    assert_eq!(left(&database), Vec::<i64>::new());
    assert_eq!(database.count("pending"), 4);
    // Without dead letters there is nothing to confirm.
    let text = dead(&database, &["discard", "--all"]).code(0).stdout;
    assert_eq!(text, "discarded 0 dead letters: none matches\n");
    assert_eq!(database.count("pending"), 4);
}

#[test]
fn discard_all_with_yes_leaves_no_dead_letter() {
    let database = Database::new();
    dead_letters(&database);
    let shown = dead(&database, &["discard", "--all", "--yes", "--json"])
        .code(0)
        .json();
    assert_eq!(
        (&shown["matched"], &shown["changed"]),
        (&json!(4), &json!(4))
    );
    assert_eq!(left(&database), Vec::<i64>::new());
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let database = Database::new();
    let ids = dead_letters(&database);
    for arguments in [
        ["dead", "list"].as_slice(),
        &["dead", "list", "--json"],
        &["dead", "show", &ids[0].to_string()],
        &["status"],
        &["migrate", "--print"],
        &["--help"],
    ] {
        let mut child = database
            .binary(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // The reader closes the pipe before the command writes anything, or soon after.
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("our child");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
}
