//! Acts on many messages: whoever carries one out, a command, a page or a program, it is the same act.

use diesel_outbox::program::{ACTS, ManyAct};
use serde_json::json;

use crate::page::Page;
use crate::support::{Database, finish};

const EACH: [(&str, Interface); 3] = [("command", command), ("page", page), ("JSON", program)];

/// Carries the act out for all messages of this topic; returns how many were changed.
type Interface = fn(&Database, &dyn ManyAct, &str) -> i64;

fn command(database: &Database, act: &dyn ManyAct, topic: &str) -> i64 {
    let words = act.words();
    let which = [words.group, words.name, "--topic", topic];
    let signed = ["--who", "local", "--why", "mended", "--yes", "--json"];
    let all = [which.as_slice(), &signed].concat();
    let done = finish(database.binary(&all)).code(0).json();
    done["changed"].as_i64().expect("a number")
}

fn page(database: &Database, act: &dyn ManyAct, topic: &str) -> i64 {
    let page = Page::start(database.binary(&["admin"]));
    let token = page.get("/dead").form_token();
    let path = act.words().path;
    let all = format!("form_token={token}&topic={topic}&all=yes&why=mended");
    let asked = page.post(path, "", &all);
    assert_eq!(asked.status, 200, "{asked:?}");
    let field = |name: &str| {
        let begin = format!("name=\"{name}\" value=\"");
        let (_, rest) = asked.body.split_once(&begin).expect("a field");
        rest.split_once('"').expect("its end").0
    };
    let sure = format!(
        "{all}&sure={}&counted_at={}",
        field("sure"),
        field("counted_at")
    );
    let done = page.post(path, "", &sure);
    let next = done.header("location").expect("a redirect");
    let (_, count) = next.split_once("count=").expect("a count");
    count.parse().expect("a number")
}

fn program(database: &Database, act: &dyn ManyAct, topic: &str) -> i64 {
    let page = Page::start(database.binary(&["admin"]));
    let path = act.words().path;
    let done = page.json(
        &format!("{path}?topic={topic}"),
        &json!({ "why": "mended" }),
    );
    assert_eq!(done["left"], 0, "{done}");
    done["changed"].as_i64().expect("a number")
}

/// Three waiting messages that have failed and three dead letters of `order.paid` and `order.late`, and one each of another
/// topic; one message is delayed, and one letter's key is in the outbox again.
fn fill(database: &Database) {
    database.execute(
        "INSERT INTO {o} (topic, payload, attempts, available_at, idempotency_key, last_error_code)
         SELECT topic, '1', attempts, now() + interval '1 hour', key, CASE WHEN attempts > 0 THEN 'TIMEOUT' END
           FROM (VALUES ('order.paid', 1, 'a'), ('order.late', 2, 'b'), ('order.late', 0, 'c'), ('orders', 1, 'd'))
                AS t(topic, attempts, key)",
    );
    database.execute(
        "INSERT INTO {o}_dead (sequence, message_id, topic, destination, payload, idempotency_key, available_at,
            created_at, attempts, reason, dead_lettered_at)
         SELECT -n, gen_random_uuid(), topic, '', '1', key, now(), now(), 3, 'REJECTED', now() - interval '1 minute'
           FROM (VALUES (1, 'order.paid', 'x'), (2, 'order.late', 'y'), (3, 'order.late', 'c'), (4, 'orders', 'z'))
                AS t(n, topic, key)",
    );
}

/// All that an act may leave behind.
fn traces(database: &Database) -> String {
    let each = [
        "SELECT string_agg(concat_ws(' ', idempotency_key, topic, attempts, available_at <= now()), ', ' ORDER BY idempotency_key) FROM {o}",
        "SELECT string_agg(concat_ws(' ', idempotency_key, topic), ', ' ORDER BY sequence) FROM {o}_dead",
        "SELECT string_agg(concat_ws(' ', idempotency_key, status, reason, error), ', ' ORDER BY idempotency_key) FROM {o}_ledger",
        "SELECT string_agg(concat_ws(' ', topic, event, operator), ', ' ORDER BY sequence) FROM {o}_attempt",
        "SELECT string_agg(concat_ws(' ', who, act, target, why), ', ' ORDER BY at) FROM {o}_audit",
    ];
    let each = each.map(|query| database.text(query).unwrap_or_else(|| "-".to_owned()));
    each.join("\n")
}

/// R71: rows, history and audit are the same, whichever interface carries the act out.
#[test]
fn each_act_is_the_same_through_each_interface() {
    for act in ACTS {
        let words = act.words();
        let mut seen: Vec<(&str, i64, String)> = Vec::new();
        for (interface, carry_out) in EACH {
            let database = Database::new();
            fill(&database);
            let before = traces(&database);
            let changed = carry_out(&database, *act, "order.*");
            let after = traces(&database);
            assert_ne!(before, after, "{} by {interface}", words.name);
            assert!(changed > 0, "{} by {interface}", words.name);
            assert!(after.contains("local: mended"), "{interface}: {after}");
            seen.push((interface, changed, after));
        }
        let (first, rest) = seen.split_first().expect("interfaces");
        for (interface, changed, after) in rest {
            assert_eq!(
                (changed, after),
                (&first.1, &first.2),
                "{} by {interface}, and by {}",
                words.name,
                first.0
            );
        }
    }
}

/// R71: each act says before what becomes of the messages, and refuses to guess which are meant.
#[test]
fn each_act_says_what_it_would_do_and_refuses_an_empty_choice() {
    let database = Database::new();
    fill(&database);
    let before = traces(&database);
    let served = Page::start(database.binary(&["admin"]));
    for act in ACTS {
        let words = act.words();
        let command = |options: &[&str]| {
            let all = [&[words.group, words.name], options].concat();
            finish(database.binary(&all))
        };
        let dry = command(&["--topic", "order.*", "--dry-run"]).code(0).stdout;
        let path = format!("{}?topic=order.*", words.path);
        let found = served.json(&path, &json!({ "dry_run": true }));
        let matched = found["matched"].as_u64().expect("a number");
        assert!(matched > 1, "{found}");
        assert!(dry.contains(&words.counted(matched)), "{dry}");
        assert!(
            dry.contains(words.becomes) && dry.contains(words.undo),
            "{dry}"
        );
        assert_eq!(found["becomes"], words.becomes);
        assert_eq!(found["undo"], words.undo);
        assert!(found["first"].is_i64(), "{found}");

        let help = command(&["--help"]).code(0).stdout;
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for said in [words.about, words.becomes, words.undo, words.ids] {
            assert!(help.contains(said), "{said}: {help}");
        }

        let asks = command(&["--topic", "order.*"]).code(1);
        assert!(asks.stderr.contains("--yes"), "{}", asks.stderr);
        let nothing = command(&["--yes"]).code(2);
        assert!(nothing.stderr.contains("--all"), "{}", nothing.stderr);
        command(&["--all", "--topic", "order.*", "--yes"]).code(2);
        command(&["--reason", "SOMEHOW", "--yes"]).code(2);
        for refused in [json!({}), json!({ "all": false }), json!({ "topik": "x" })] {
            let problem = served.json(words.path, &refused);
            assert_eq!(problem["status"], 422, "{problem}");
        }
    }
    assert_eq!(traces(&database), before);
}

/// R71: what was named by its id, and is not changed, is an error.
#[test]
fn a_dead_letter_that_stays_is_reported() {
    let database = Database::new();
    fill(&database);
    let refused = finish(database.binary(&["dead", "requeue", "--", "-3"])).code(1);
    assert!(
        refused
            .stdout
            .contains("requeued 0 dead letters; 1 unchanged"),
        "{}",
        refused.stdout
    );
    let done = finish(database.binary(&["dead", "requeue", "--", "-1"])).code(0);
    assert_eq!(done.stdout, "requeued 1 dead letter\n");
}

/// R67: a variable of a script that is empty chooses nothing, instead of more.
#[test]
fn an_empty_condition_is_refused() {
    let database = Database::new();
    fill(&database);
    let before = traces(&database);
    let page = Page::start(database.binary(&["admin"]));
    for act in ACTS {
        let words = act.words();
        for name in ["topic", "destination", "key"] {
            let option = format!("--{name}=");
            let command = [
                words.group,
                words.name,
                &option,
                "--since",
                "9999d",
                "--yes",
            ];
            finish(database.binary(&command)).code(2);
            let path = format!("{}?since=9999d&{name}=", words.path);
            let problem = page.json(&path, &json!({}));
            assert_eq!(
                (&problem["status"], &problem["field"]),
                (&json!(422), &json!(name))
            );
        }
    }
    assert_eq!(traces(&database), before);
}

/// R71: each named message is told, and the first of many is one that the act changes.
#[test]
fn each_message_that_an_id_names_is_reported() {
    let database = Database::new();
    fill(&database);
    let page = Page::start(database.binary(&["admin"]));
    let found = page.json(
        "/messages/retry?topic=order.late",
        &json!({ "dry_run": true }),
    );
    let failed = database.number("SELECT sequence FROM {o} WHERE idempotency_key = 'b'");
    assert_eq!(
        (&found["matched"], &found["first"]),
        (&json!(1), &json!(failed))
    );
    let done = page.json("/messages/cancel", &json!({ "ids": ["a", "nobody"] }));
    assert_eq!((&done["changed"], &done["skipped"]), (&json!(1), &json!(1)));
    let told = json!([{ "id": "a", "answer": "done" }, { "id": "nobody", "answer": "unknown" }]);
    assert_eq!(done["messages"], told);
}

/// R67: the page of dead letters carries out an act on all that its search and its filter find.
#[test]
fn all_that_a_search_finds_are_changed() {
    let database = Database::new();
    fill(&database);
    let page = Page::start(database.binary(&["admin"]));
    // A field that the list does not have changes no list.
    assert!(page.get("/dead?status=pending").body.contains("order.paid"));
    let token = page.get("/dead").form_token();
    let all = format!("form_token={token}&q=x&reason=REJECTED&all=yes");
    let asked = page.post("/dead/requeue", "", &all);
    assert!(
        asked.status == 303 || asked.body.contains("Requeue 1 dead letter?"),
        "{asked:?}"
    );
}
