//! Acts: whoever carries one out, a command, a page or a program, it is the same act.

use std::panic::{self, AssertUnwindSafe};
use std::thread;

use diesel::connection::SimpleConnection;
use diesel_outbox::Due;
use diesel_outbox::admin::Verdict;
use diesel_outbox::program::{
    ACTS, ENDPOINT_ACTS, EndpointAct, ManyAct, MessageAct, RESCHEDULE, SENDING_ACTS, SETTLE,
    SendingAct,
};
use diesel_outbox_pages::{Pages, Rights, Visitor};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::page::{Answer, Page};
use crate::support::{Database, eventually, finish};
use crate::tenants::config;

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
        // Not what a customer's search has cost: that depends on the time that it takes.
        "SELECT string_agg(concat_ws(' ', who, act, target, why), ', ' ORDER BY at) FROM {o}_audit WHERE act <> 'search'",
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

/// An act on one message, and how each interface asks for it: options, fields and body.
fn acts_on_one() -> [(MessageAct, &'static str, &'static str, Value); 4] {
    let by_hand = |verdict: &str| json!({ "verdict": verdict, "why": "mended" });
    let why = || json!({ "why": "mended" });
    [
        (MessageAct::Cancel, "", "", why()),
        (MessageAct::Reschedule(Due::Now), "--now", "&in=", why()),
        (
            MessageAct::Settle(Verdict::Delivered),
            "--delivered",
            "&verdict=delivered",
            by_hand("delivered"),
        ),
        (
            MessageAct::Settle(Verdict::NotToBeSent),
            "--never",
            "&verdict=never",
            by_hand("never"),
        ),
    ]
}

const SEQUENCE: &str = "SELECT sequence FROM {o} WHERE idempotency_key = 'a'";

/// R71: rows, history and audit are the same, whichever interface changes one message.
#[test]
fn each_act_on_one_message_is_the_same_through_each_interface() {
    for (act, option, fields, body) in acts_on_one() {
        let words = act.words();
        let command = |database: &Database| {
            let which = ["message", words.name, "a", "--who", "local"];
            let options = [
                &["--why", "mended"][..],
                &option.split_whitespace().collect::<Vec<_>>(),
            ];
            finish(database.binary(&[&which[..], &options.concat()].concat())).code(0);
        };
        let page = |database: &Database| {
            let (page, sequence) = (
                Page::start(database.binary(&["admin"])),
                database.number(SEQUENCE),
            );
            let token = page.get("/messages?q=a").form_token();
            let which = format!("form_token={token}&sequence={sequence}&key=a&why=mended{fields}");
            let done = page.post(&format!("/message/{}", words.name), "", &which);
            assert_eq!(done.status, 303, "{done:?}");
        };
        let program = |database: &Database| {
            let (page, sequence) = (
                Page::start(database.binary(&["admin"])),
                database.number(SEQUENCE),
            );
            let path = words.path.replace("{sequence}", &sequence.to_string());
            let done = page.json(&path, &body);
            assert_eq!(done["became"], act.became(diesel_outbox::Answer::Done));
        };
        let each: [&dyn Fn(&Database); 3] = [&command, &page, &program];
        let seen = each.map(|carry_out| {
            let database = Database::new();
            fill(&database);
            let before = traces(&database);
            carry_out(&database);
            let after = traces(&database);
            assert_ne!(before, after, "{}", words.name);
            let signed = format!("local message {} 1 mended", words.name);
            assert!(after.contains(&signed), "{signed}: {after}");
            after
        });
        assert_eq!(seen[0], seen[1], "{} by command and page", words.name);
        assert_eq!(seen[0], seen[2], "{} by command and JSON", words.name);
    }
}

/// R71, R67: an act on one message says what becomes of it, and refuses what is empty or has no reason.
#[test]
fn each_act_on_one_message_says_what_it_does_and_refuses_to_guess() {
    let database = Database::new();
    fill(&database);
    let before = traces(&database);
    let page = Page::start(database.binary(&["admin"]));
    for words in [&RESCHEDULE, &SETTLE] {
        let help = finish(database.binary(&["message", words.name, "--help"]))
            .code(0)
            .stdout;
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for said in [words.about, words.becomes, words.undo] {
            assert!(help.contains(said), "{said}: {help}");
        }
    }
    let shown = page.get("/messages?q=a").body;
    assert!(
        shown.contains(RESCHEDULE.becomes) && shown.contains(SETTLE.becomes),
        "{shown}"
    );
    let sequence = database.number(SEQUENCE);
    for (words, body, field) in [
        (&RESCHEDULE, json!({ "in": "" }), "in"),
        (&RESCHEDULE, json!({ "in": "soon" }), "in"),
        (&SETTLE, json!({ "verdict": "never", "why": " " }), "why"),
    ] {
        let path = words.path.replace("{sequence}", &sequence.to_string());
        let problem = page.json(&path, &body);
        assert_eq!(
            (&problem["status"], &problem["field"]),
            (&json!(422), &json!(field))
        );
    }
    finish(database.binary(&["message", "reschedule", "a", "--in", ""])).code(2);
    assert_eq!(traces(&database), before);
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

/// Carries an act out for the endpoint `acme`.
type OfEndpoint = fn(&Database, &EndpointAct);

const OF_ENDPOINT: [(&str, OfEndpoint); 3] = [
    ("command", |database, act| {
        let which = ["endpoint", act.name, "acme", "--who", "local"];
        let signed = ["--why", "they asked", "--yes"];
        finish(database.binary(&[which.as_slice(), &signed].concat())).code(0);
    }),
    ("page", |database, act| {
        let page = Page::start(database.binary(&["admin"]));
        let token = page.get("/endpoints?name=acme").form_token();
        // The button of the page that asks has no field for the reason.
        let all = format!("form_token={token}&name=acme&reason=they+asked&sure=yes");
        let done = page.post(&format!("/endpoint/{}", act.name), "", &all);
        assert_eq!(done.status, 303, "{done:?}");
    }),
    ("JSON", |database, act| {
        let page = Page::start(database.binary(&["admin"]));
        let (method, path) = act.route;
        let path = path.replace("{name}", "acme");
        let done = match method {
            "DELETE" => page.delete(&format!("{path}?why=they+asked")),
            _ => page.json(&path, &json!({ "why": "they asked" })),
        };
        assert_eq!(done["done"], true, "{done}");
    }),
];

/// A disabled endpoint, and one that is enabled, for which two messages wait.
fn register(database: &Database, is_enabled: bool) {
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, enabled) VALUES ('acme', 'https://acme.example', {is_enabled})"
    ));
    database.execute(
        "INSERT INTO {o} (topic, destination, payload, idempotency_key, registration)
         SELECT 'order.paid', name, '1', n::text, id FROM {o}_endpoint, generate_series(1, 2) n",
    );
}

/// R71, R67: an act on an endpoint is the same through each interface, and says before how many messages wait.
#[test]
fn each_act_on_an_endpoint_is_the_same_through_each_interface() {
    let traces = |database: &Database| {
        let each = [
            "SELECT string_agg(concat_ws(' ', name, enabled, disabled_by, disabled_reason), ', ') FROM {o}_endpoint",
            "SELECT string_agg(concat_ws(' ', who, act, target, why), ', ') FROM {o}_audit",
        ];
        each.map(|query| database.text(query).unwrap_or_else(|| "-".to_owned()))
            .join("\n")
    };
    for act in ENDPOINT_ACTS {
        let mut seen: Vec<(&str, String)> = Vec::new();
        for (interface, carry_out) in OF_ENDPOINT {
            let database = Database::new();
            register(&database, act.name != "enable");
            let before = traces(&database);
            let dry = finish(database.binary(&["endpoint", act.name, "acme", "--dry-run"]));
            let said = dry.code(0).stdout;
            assert!(said.contains("2 messages wait for it"), "{said}");
            assert!(said.contains(act.undo), "{said}");
            assert_eq!(traces(&database), before, "{}: a dry run", act.name);
            carry_out(&database, act);
            let after = traces(&database);
            assert_ne!(before, after, "{} by {interface}", act.name);
            let signed = format!("local endpoint {} acme they asked", act.name);
            assert!(after.contains(&signed), "{interface}: {after}");
            seen.push((interface, after));
        }
        let (first, rest) = seen.split_first().expect("interfaces");
        for (interface, after) in rest {
            assert_eq!(after, &first.1, "{} by {interface}", act.name);
        }
    }
}

const TENANT: Uuid = Uuid::from_u128(7);

/// Carries the act out for the endpoint `acme`, with all that it can send since an hour ago; returns how many messages it sent.
/// `None`: the interface does not have the act.
type OfSending = fn(&Database, &SendingAct) -> Option<i64>;

const OF_SENDING: [(&str, OfSending); 4] = [
    ("command", |database, act| {
        let which = [
            "endpoint", act.name, "acme", "--since", "1h", "--yes", "--json",
        ];
        let signed = ["--who", "local", "--why", "portal"];
        let missing = act.missing.map_or(&[] as &[&str], |_| &["--missing"]);
        let all = [which.as_slice(), &signed, missing].concat();
        finish(database.binary(&all)).code(0).json()["changed"].as_i64()
    }),
    ("page", |database, act| {
        let page = Page::start(database.binary(&["admin"]));
        let token = page.get("/endpoints?name=acme").form_token();
        let missing = act.missing.map_or("", |_| "&missing=yes");
        let all = format!("form_token={token}&name=acme&since=1h&why=portal{missing}");
        let path = format!("/endpoint/{}", act.name);
        let asked = page.post(&path, "", &all);
        assert!(asked.body.contains(" for acme?"), "{asked:?}");
        let done = page.post(&path, "", &format!("{all}&sure=yes"));
        let next = done.header("location").expect("a redirect");
        next.split_once("count=")
            .and_then(|(_, count)| count.parse().ok())
    }),
    ("JSON", |database, act| {
        let page = Page::start(database.binary(&["admin"]));
        let done = page.json(
            &act.path.replace("{name}", "acme"),
            &since(act, json!({ "why": "portal" })),
        );
        assert_eq!(done["more"], false, "{done}");
        done["changed"].as_i64()
    }),
    ("portal", |database, act| {
        let config = config(database);
        let portal = Pages::portal(&config, config.database_url().expect("a database"));
        let path = format!("/api/v1{}", act.path.replace("{name}", "acme"));
        let request = http::Request::post(path).header("host", "shop.example");
        let request = request.header("content-type", "application/json");
        let body = since(act, json!({})).to_string().into_bytes();
        let visitor = Visitor::of_tenant(TENANT, "local", Rights::all());
        let request = request.body(body).expect("a request");
        let answer = portal.expect("a portal").respond(request, visitor);
        let done: Value = serde_json::from_slice(answer.body()).expect("JSON");
        (answer.status() == 200).then(|| done["changed"].as_i64().expect("a number"))
    }),
];

/// The body of a request for all that the act can send.
fn since(act: &SendingAct, mut body: Value) -> Value {
    body["since"] = json!("1h");
    if act.missing.is_some() {
        body["missing"] = json!(true);
    }
    body
}

/// An endpoint with two dead letters, a message that it missed, another without a payload, and one that it retries.
fn register_with_missed(database: &Database, is_enabled: bool) {
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, enabled, tenant_id) VALUES ('acme', 'https://acme.example', {is_enabled}, '{TENANT}')"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, destination, payload, idempotency_key, registration, tenant_id, attempts, available_at)
         SELECT 'order.paid', name, '1', 'retrying', id, '{TENANT}', 1, now() + interval '1 hour' FROM {{o}}_endpoint"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, registration, tenant_id, payload, idempotency_key,
                available_at, created_at, attempts, reason, dead_lettered_at)
         SELECT -n, gen_random_uuid(), 'order.paid', name, id, '{TENANT}', '1', 'dead ' || n, now(), now(), 3, 'REJECTED', now()
           FROM {{o}}_endpoint, generate_series(1, 2) n"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, named_destination, tenant_id, idempotency_key,
                status, attempts, payload, created_at, settled_at, split_from)
         SELECT 0, 100 + n, gen_random_uuid(), 'order.paid', 'other', 'other', '{TENANT}', 'missed ' || n, 'delivered', 1,
                CASE n WHEN 1 THEN '1'::json END, now(), now(), 200 + n FROM generate_series(1, 2) n"
    ));
}

/// R71: an act that sends an endpoint many messages is the same through each interface.
#[test]
fn each_act_that_sends_an_endpoint_many_messages_is_the_same_through_each_interface() {
    for act in SENDING_ACTS {
        let mut seen: Vec<(&str, i64, String)> = Vec::new();
        for (interface, carry_out) in OF_SENDING {
            let database = Database::new();
            register_with_missed(&database, true);
            let Some(changed) = carry_out(&database, act) else {
                assert_eq!((interface, act.name), ("portal", "backfill"));
                continue;
            };
            assert_eq!(changed, if act.missing.is_some() { 3 } else { 1 });
            let signed = format!("local endpoint {} acme", act.name);
            let after = traces(&database);
            // As the words of the act say.
            let others = database.number("SELECT count(*) FROM {o} WHERE attempts > 0");
            assert_eq!(others, 1, "{interface}: attempts are reset");
            let cancel = ["message", "cancel", "--destination", "acme", "--yes"];
            finish(database.binary(&cancel)).code(0);
            let waiting = database.number("SELECT count(*) FROM {o}");
            assert_eq!(waiting, 0, "{interface}: the act is undone");
            assert!(after.contains(&signed), "{interface}: {after}");
            seen.push((interface, changed, after));
        }
        let (first, rest) = seen.split_first().expect("interfaces");
        assert!(rest.len() >= 2);
        for (interface, changed, after) in rest {
            assert_eq!(
                (changed, after),
                (&first.1, &first.2),
                "{} by {interface}",
                act.name
            );
        }
    }
}

/// R71, R67: such an act says before how many messages it sends, what becomes of them, and what it leaves.
#[test]
fn each_act_that_sends_an_endpoint_many_messages_says_before_what_it_would_do() {
    let database = Database::new();
    register_with_missed(&database, false);
    let before = traces(&database);
    let page = Page::start(database.binary(&["admin"]));
    let token = page.get("/endpoints?name=acme").form_token();
    for act in SENDING_ACTS {
        let command = |options: &[&str]| {
            let all = [&["endpoint", act.name, "acme", "--since", "1h"], options].concat();
            finish(database.binary(&all))
        };
        let missing = act.missing.map_or(&[] as &[&str], |_| &["--missing"]);
        let dry = command(&[missing, &["--dry-run"]].concat()).code(0).stdout;
        let path = act.path.replace("{name}", "acme");
        let found = page.json(&path, &since(act, json!({ "dry_run": true })));
        let fields = format!("form_token={token}&name=acme&since=1h&missing=yes");
        let fields = fields.replace("&missing=yes", act.missing.map_or("", |_| "&missing=yes"));
        let asked = page
            .post(&format!("/endpoint/{}", act.name), "", &fields)
            .body;
        let asked = asked.replace("<code>", "`").replace("</code>", "`");
        let said = |text: &str| {
            assert!(dry.contains(text), "{text}: {dry}");
            assert!(asked.contains(text), "{text}: {asked}");
        };
        let count = found["changed"].as_i64().expect("a number");
        said(&format!("{count} message"));
        assert_eq!(
            (&found["retrying"], &found["without_payload"]),
            (&json!(1), &json!(1))
        );
        assert_eq!(found["becomes"], SendingAct::BECOMES);
        assert_eq!(found["undo"], SendingAct::UNDO);
        said(SendingAct::BECOMES);
        said(SendingAct::UNDO);
        let leaves = found["leaves"].as_array().expect("sentences");
        assert_eq!(leaves.len(), 3, "{found}");
        for leaves in leaves {
            said(leaves.as_str().expect("a sentence"));
        }
        let asks = command(&[]).code(1).stderr;
        assert!(asks.contains("--yes"), "{asks}");
        command(&["--since", "yesterday"]).code(2);
        let wrong = page.json(&path, &json!({ "since": "yesterday" }));
        assert_eq!(
            (&wrong["status"], &wrong["field"]),
            (&json!(422), &json!("since"))
        );
        let wrong = page.json(&path, &json!({ "since": "1h", "missing": "x" }));
        assert_eq!(
            (&wrong["status"], &wrong["field"]),
            (&json!(422), &json!("missing"))
        );
        if act.missing.is_none() {
            let refused = command(&["--missing", "--yes"]).code(2).stderr;
            assert!(refused.contains("--missing"), "{refused}");
        }
    }
    assert_eq!(traces(&database), before);
}

/// R67: a program, too, can ask before what becomes of the messages; an endpoint that is unknown is said.
#[test]
fn an_act_on_an_endpoint_says_in_json_what_it_would_do() {
    let database = Database::new();
    register(&database, true);
    let page = Page::start(database.binary(&["admin"]));
    let disabled = page.json("/endpoints/acme/disable", &json!({ "dry_run": true }));
    assert_eq!(
        (&disabled["done"], &disabled["waiting"]),
        (&json!(false), &json!(2))
    );
    let becomes = disabled["becomes"].as_str().expect("words");
    assert!(becomes.contains("cannot be recovered"), "{becomes}");
    let removed = page.delete("/endpoints/acme?dry_run=true");
    assert_eq!(
        (&removed["done"], &removed["waiting"]),
        (&json!(false), &json!(2))
    );
    assert_eq!(
        database.text("SELECT count(*)::text FROM {o}_endpoint WHERE enabled"),
        Some("1".to_owned())
    );
    for odd in ["=yes", "=", "", "=false&dry_run=true"] {
        let odd = page.delete(&format!("/endpoints/acme?dry_run{odd}"));
        assert_eq!(odd["status"], 422, "{odd}");
    }
    let unknown = finish(database.binary(&["endpoint", "disable", "acme2"]));
    assert!(unknown.code(1).stderr.contains("there is no endpoint"));
}

/// R20: the history of a message that is sent to an endpoint again says who has done it, whichever interface was used.
#[test]
fn the_history_says_who_has_sent_a_message_again() {
    let database = Database::new();
    register(&database, true);
    database.execute("DELETE FROM {o}");
    let id = "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c";
    let letter = format!(
        "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, registration, idempotency_key, payload, created_at,
                available_at, attempts, reason, last_error)
         SELECT 1, '{id}', 'order.paid', 'acme', id, 'k', '{{}}', now(), now(), 3, 'REJECTED', '422' FROM {{o}}_endpoint"
    );
    let page = Page::start(database.binary(&["admin"]));
    let each: [(&str, &dyn Fn()); 3] = [
        ("command", &|| {
            let which = ["endpoint", "send-again", "acme", id, "--who", "local"];
            finish(database.binary(&which)).code(0);
        }),
        ("page", &|| {
            let token = page.get("/endpoints?name=acme").form_token();
            let fields = format!("form_token={token}&name=acme&message={id}");
            assert_eq!(page.post("/endpoint/send-again", "", &fields).status, 303);
        }),
        ("JSON", &|| {
            let path = format!("/endpoints/acme/deliveries/{id}/send-again");
            assert_eq!(page.json(&path, &json!({}))["done"], true);
        }),
    ];
    for (interface, send_again) in each {
        database.execute("DELETE FROM {o}");
        database.execute("DELETE FROM {o}_attempt");
        database.execute(&letter);
        send_again();
        let who = database.text("SELECT operator FROM {o}_attempt WHERE event = 'requeued'");
        assert_eq!(who.as_deref(), Some("local"), "by {interface}");
    }
    let acts = database.number("SELECT count(*) FROM {o}_audit WHERE act = 'endpoint send-again'");
    assert_eq!(acts, 3);
}

/// R71: after an error midway, the same request with its key continues with what is left, and with nothing that came since.
#[test]
fn a_request_that_failed_midway_continues_with_its_key() {
    let database = Database::new();
    let bury = |sequences: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, payload, idempotency_key, available_at,
                created_at, attempts, reason, dead_lettered_at)
             SELECT n, gen_random_uuid(), 'order.paid', '', '1', n::text, now(), now(), 3, 'REJECTED', clock_timestamp()
               FROM generate_series({sequences}) n"
        ));
    };
    bury("1, 1500");
    let schema = database.schema().to_owned();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    ));
    database.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}} FOR EACH ROW
         WHEN (NEW.idempotency_key = '1200') EXECUTE FUNCTION {schema}.refuse()"
    ));
    let page = Page::start(database.binary(&["admin"]));
    let path = "/dead/requeue?topic=order.paid";
    assert_eq!(keyed(&page, path).status, 503);
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 1000);
    database.execute("DROP TRIGGER refuse ON {o}");
    bury("1501, 1510");
    let answer = keyed(&page, path);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.contains("\"changed\":500"), "{answer:?}");
    assert_eq!(database.number("SELECT count(*) FROM {o}_dead"), 10);
}

/// Sends an act without more to say, with an `Idempotency-Key`.
fn keyed(page: &Page, path: &str) -> Answer {
    page.raw(
        format!(
            "POST /api/v1{path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             idempotency-key: 1\r\ncontent-length: 2\r\n\r\n{{}}",
            page.address
        )
        .as_bytes(),
    )
}

/// R71: a request whose process ends before it has acted acts later, with the same key, on what was there when it was sent
/// first, and on nothing that came since.
#[test]
fn a_request_that_a_process_did_not_finish_is_about_what_was_there_at_first() {
    let database = Database::new();
    let failed = |keys: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, attempts, available_at, idempotency_key, last_error_code)
             SELECT 'order.paid', '1', 1, now() + interval '1 hour', key, 'TIMEOUT' FROM unnest('{keys}'::text[]) key"
        ));
    };
    failed("{a,b}");
    let send_of = |page: &Page, topic: &str| keyed(page, &format!("/messages/retry?topic={topic}"));
    let send = |page: &Page| send_of(page, "order.paid");
    let mut locker = database.connect();
    let lock = format!("BEGIN; LOCK TABLE {}", database.name());
    locker.batch_execute(&lock).expect("locked");
    let first = Page::start(database.binary(&["admin"]));
    thread::scope(|scope| {
        scope.spawn(|| {
            // The process dies with the connection.
            let _ = panic::catch_unwind(AssertUnwindSafe(|| send(&first)));
        });
        // From here on, the act waits for the lock.
        eventually("the request is known", || {
            database.number("SELECT count(*) FROM {o}_request") > 0
        });
        first.process.signal("KILL");
    });
    locker.batch_execute("ROLLBACK").expect("unlocked");
    failed("{c}");
    let second = Page::start(database.binary(&["admin"]));
    assert_eq!(send(&second).status, 409, "it may still be running");
    database.execute("UPDATE {o}_request SET at = at - interval '15 minutes'");
    let other = send_of(&second, "order.late");
    assert_eq!(other.status, 422, "the key is that of another request");
    let answer = send(&second);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.contains("\"changed\":2"), "{answer:?}");
    let due = "SELECT string_agg(idempotency_key, ',' ORDER BY idempotency_key) FROM {o} WHERE available_at <= now()";
    assert_eq!(database.text(due).as_deref(), Some("a,b"));
}

/// R71: whoever registers an endpoint that relays with these settings would not send to is told, whichever interface was used.
#[test]
fn an_endpoint_that_these_settings_refuse_is_registered_and_said_to_be_refused() {
    let database = Database::new();
    let with = |is_strict: &str, arguments: &[&str]| {
        let mut command = database.binary(arguments);
        for rule in ["OUTBOX_ENDPOINT_HTTPS_ONLY", "OUTBOX_ENDPOINT_PUBLIC_ONLY"] {
            command.env(rule, is_strict);
        }
        command
    };
    let strict = |arguments: &[&str]| with("true", arguments);
    let url = "http://127.0.0.1:9/hook";
    let said = finish(strict(&["endpoint", "put", "a", url]))
        .code(0)
        .stdout;
    assert!(said.contains("would not send to a"), "{said}");
    let page = Page::start(strict(&["admin"]));
    let new = json!({ "name": "b", "endpoint": { "url": url } });
    let registered = page.json("/endpoints", &new);
    let refused = registered["endpoint"]["refused"].as_str();
    assert!(
        refused.is_some_and(|why| why.contains("https")),
        "{registered}"
    );
    let shown = page.get("/endpoints?name=b").body;
    assert!(shown.contains("would not send to this endpoint"), "{shown}");
    let lax = Page::start(with("false", &["admin"]));
    let shown = lax.get("/endpoints?name=b").body;
    assert!(!shown.contains("would not send"), "{shown}");
}
