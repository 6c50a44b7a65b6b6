//! What the admin page shows and changes, tested without a browser. The test target `browser` covers the page in a
//! browser, `admin_access` covers who may use it.

mod changes;
mod slow;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::sql_types::{Nullable, Text};
use diesel::{QueryableByName, RunQueryDsl, sql_query};
use diesel_outbox::endpoints::Endpoint;
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::commands::With;
use crate::fresh::FreshDatabase;
use crate::page::{Answer, Page, TOKEN};
use crate::support::{Database, File, Receiver, Running, binary, eventually, finish};

const PAGES: [&str; 10] = [
    "/",
    "/dead",
    "/messages",
    "/messages?q=1",
    "/ledger",
    "/keys",
    "/endpoints",
    "/topics",
    "/relays",
    "/audit",
];

fn open(database: &Database) -> Page {
    Page::start(database.binary(&["admin"]))
}

/// Inserts dead letters of a topic, from this sequence on.
fn bury(database: &Database, topic: &str, first: i64, count: i64) {
    database.execute(&format!(
        "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, payload, headers, idempotency_key,
                available_at, created_at, attempts, reason, last_error, response, dead_lettered_at)
         SELECT n, gen_random_uuid(), '{topic}', '', '{{\"name\": \"Ada Lovelace\"}}', '{{\"tracestate\": \"Byron\"}}',
                '{topic}-' || n, now(), now(), 3, 'REJECTED', 'the receiver returned 422', 'no such Babbage',
                now() - n * interval '1 second'
           FROM generate_series({first}, {first} + {count} - 1) n"
    ));
}

fn count_dead(database: &Database) -> i64 {
    database.number("SELECT count(*) FROM {o}_dead")
}

/// Sends a form as the page would.
fn send(page: &Page, path: &str, fields: &str) -> Answer {
    let token = page.get("/dead").form_token();
    page.post(path, "", &format!("form_token={token}&{fields}"))
}

#[test]
fn every_page_is_whole_and_has_nothing_inline() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let page = open(&database);
    for path in PAGES.iter().chain(&["/dead/1", "/login"]) {
        let answer = page.get(path);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        let body = &answer.body;
        assert!(body.starts_with("<!DOCTYPE html>") && body.ends_with("</html>"));
        for inline in [" style=", " onclick=", " onload=", "<style", "javascript:"] {
            assert!(!body.contains(inline), "{path}: {inline}");
        }
        let scripts = body.matches("<script").count();
        let own = body
            .matches("<script src=\"/assets/script.js\" defer></script>")
            .count();
        assert_eq!((scripts, own), (1, 1), "{path}");
        let head = page.request(&format!("HEAD {path}"), &[], "");
        assert_eq!((head.status, head.body.as_str()), (200, ""), "{path}");
    }
    for (path, kind) in [
        ("/assets/style.css", "text/css; charset=utf-8"),
        ("/assets/script.js", "text/javascript; charset=utf-8"),
        ("/assets/icon.svg", "image/svg+xml"),
    ] {
        assert_eq!(page.get(path).header("content-type"), Some(kind));
    }
    for path in [
        "/nothing",
        "/dead/2",
        "/dead/x",
        "/dead/1/",
        "/assets/",
        "/dead/requeue",
    ] {
        let answer = page.get(path);
        assert_eq!(answer.status, 404, "{path}");
        assert!(answer.body.contains("<h1>Not found</h1>"), "{path}");
    }
}

/// Values are shown only after an explicit request for them.
#[test]
fn payloads_headers_and_answers_are_masked_unless_they_are_asked_for() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let paths = ["/dead/1", "/messages?q=1", "/messages?q=order.paid-1"];
    let masked = open(&database);
    for path in paths {
        let body = masked.get(path).body;
        for secret in ["Ada", "Lovelace", "Byron", "Babbage"] {
            assert!(!body.contains(secret), "{path} shows {secret}");
        }
        for shown in [
            "name&quot;: ‹string, 12 characters›",
            "tracestate&quot;: ‹string, 5 characters›",
        ] {
            assert!(body.contains(shown), "{path}: {body}");
        }
        assert!(body.contains("‹text, 15 characters›"), "{path}");
    }
    let shown = Page::start(
        database
            .binary(&["admin"])
            .with("OUTBOX_ADMIN_PAYLOADS", "true"),
    );
    for path in paths {
        let body = shown.get(path).body;
        for word in ["Ada Lovelace", "Byron", "no such Babbage"] {
            assert!(body.contains(word), "{path}: {word}");
        }
    }
}

#[test]
fn dead_letters_are_listed_by_pages_groups_and_filters() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 120);
    bury(&database, "order.shipped", 1001, 3);
    let page = open(&database);
    let letters = |body: &str| -> BTreeSet<i64> {
        let choices = body.split("name=\"letter\" value=\"").skip(1);
        choices
            .map(|rest| {
                rest.split('.')
                    .next()
                    .expect("a value")
                    .parse()
                    .expect("a number")
            })
            .collect()
    };
    let mut all = BTreeSet::new();
    let mut next = Some("/dead".to_owned());
    let mut sizes = Vec::new();
    while let Some(path) = next {
        let body = page.get(&path).body;
        let shown = letters(&body);
        sizes.push(shown.len());
        all.extend(shown);
        next = body
            .split("<a class=\"button second\" href=\"")
            .nth(1)
            .map(|rest| {
                let link = rest.split('"').next().expect("a link");
                link.replace("&amp;", "&")
            });
    }
    assert_eq!((sizes, all.len()), (vec![50, 50, 23], 123));

    let body = page.get("/dead").body;
    assert!(body.contains("Causes") && body.contains(">120<"), "{body}");
    let filtered = |query: &str| letters(&page.get(&format!("/dead?{query}")).body);
    assert_eq!(filtered("topic=order.shipped"), [1001, 1002, 1003].into());
    assert_eq!(filtered("q=1002"), [1002].into());
    assert_eq!(filtered("q=order.paid-7"), [7].into());
    assert_eq!(filtered("q=order.paid-7&topic=order.shipped"), [].into());
    assert_eq!(filtered("destination=billing"), [].into());
    assert_eq!(filtered("reason=gone"), [].into());
    assert_eq!(page.get("/dead?reason=NOTHING").status, 400);
    assert_eq!(page.get("/dead?before=nowhere").status, 200);
}

#[test]
fn the_ledger_is_searched_and_odd_questions_get_an_answer() {
    let database = Database::new();
    let receiver = Receiver::ok();
    for topic in ["order.paid", "order.shipped"] {
        database.enqueue(topic, json!({ "n": 1 }));
    }
    let relay = database
        .binary(&["run"])
        .with("OUTBOX_URL", &receiver.url());
    let page = Page::start(relay);
    receiver.wait_for(2);
    eventually("both messages are settled", || {
        database.count("delivered") == 2
    });
    let rows = |query: &str| {
        let body = page.get(&format!("/ledger?{query}")).body;
        body.matches("href=\"/messages?q=").count()
    };
    assert_eq!(
        (rows(""), rows("topic=order.paid"), rows("status=dead")),
        (2, 1, 0)
    );
    assert_eq!(
        (rows("since=1h"), rows("until=1h"), rows("since=2999-01-01")),
        (2, 0, 0)
    );
    for query in ["status=x", "reason=x", "since=yesterday", "until=%3Cb%3E"] {
        assert_eq!(page.get(&format!("/ledger?{query}")).status, 400, "{query}");
    }
    assert_eq!(
        rows("topic=order%00.paid"),
        1,
        "no stored text has this character"
    );
    for path in ["/dead?topic=%00", "/messages?q=%00a", "/keys?key=a%00"] {
        assert_eq!(page.get(path).status, 200, "{path}");
    }
    let key = database
        .text("SELECT message_id FROM {o}_ledger WHERE topic = 'order.paid'")
        .expect("an id");
    let body = page.get(&format!("/messages?q={key}")).body;
    assert!(
        body.contains("Delivered") && body.contains("Enqueued"),
        "{body}"
    );
    assert!(
        page.get("/messages?q=unheard-of")
            .body
            .contains("No message found for")
    );
}

#[test]
fn keys_that_wait_lead_to_their_messages() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, available_at, attempts)
         SELECT 'order.paid', '1', 'order 7', now() + CASE n WHEN 1 THEN interval '1 hour' ELSE '0' END, n % 2
           FROM generate_series(1, 3) n",
    );
    let page = open(&database);
    let all = page.get("/keys").body;
    assert!(all.contains("href=\"/keys?key=order+7\""), "{all}");
    let one = page.get("/keys?key=order+7").body;
    assert_eq!(one.matches("href=\"/messages?q=").count(), 3, "{one}");
    // A key may have up to 1 KiB.
    let long = "k".repeat(1024);
    database.execute(&format!("UPDATE {{o}} SET ordering_key = '{long}'"));
    let all = page.get("/keys").body;
    let shown = format!(">{}…</span>", &long[..79]);
    assert!(all.contains(&shown), "{all}");
    assert!(all.contains(&format!("href=\"/keys?key={long}\"")), "{all}");
    let table = finish(database.binary(&["keys"])).code(0).stdout;
    assert!(!table.contains(&"k".repeat(81)), "{table}");
}

/// R60
#[test]
fn topics_are_listed_with_the_relays_that_serve_them_or_why_none_does() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         VALUES ('order.paid', '1', now() + interval '1 h'), ('invoice.sent', '1', now() + interval '1 h')",
    );
    let alone = open(&database).get("/topics").body;
    assert_eq!(alone.matches("No relay is active").count(), 2, "{alone}");
    let settings = File::new(
        "[destinations.billing]\nurl = 'http://127.0.0.1:9/'\n[[routes]]\ntopic = 'order.*'\nto = 'billing'",
    );
    let relay = database
        .binary(&["run"])
        .with("OUTBOX_CONFIG", settings.path());
    let page = Page::start(relay);
    page.process.wait_for_log("relay started");
    let seen = page.get("/topics").body;
    let rows: Vec<&str> = seen.split("<tr").collect();
    let row = |name: &str| *rows.iter().find(|row| row.contains(name)).expect("a row");
    let relay = database
        .text("SELECT relay FROM {o}_lease")
        .expect("a relay");
    assert!(row("order.paid").contains(&relay), "{seen}");
    let unserved = row("invoice.sent");
    assert!(
        unserved.contains("no active relay has a route"),
        "{unserved}"
    );
    assert!(unserved.contains("Next step: add a route"), "{unserved}");
    let (_, ever) = seen.split_once("id=\"served\"").expect("a list");
    assert!(ever.contains("order.*") && ever.contains("route"), "{ever}");
}

/// R60
#[test]
fn a_tenant_has_a_page() {
    let database = Database::new();
    let tenants = [1, 2].map(Uuid::from_u128);
    for (tenant, name) in tenants.iter().zip(["acme", "other"]) {
        database.execute(&format!(
            "INSERT INTO {{o}}_endpoint (name, url, tenant_id)
             VALUES ('{name}', 'https://customer.example/{name}', '{tenant}')"
        ));
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, tenant_id) VALUES ('{name}.waits', '1', '{tenant}')"
        ));
        database.execute(&format!(
            "INSERT INTO {{o}}_dead (sequence, message_id, topic, destination, created_at, tenant_id, payload,
                    available_at, attempts, reason, last_error)
             SELECT 1000 + count(*), gen_random_uuid(), '{name}.died', 'acme', now(), '{tenant}', '{{}}', now(), 3,
                    'REJECTED', 'refused' FROM {{o}}_dead"
        ));
    }
    let page = open(&database);
    let [mine, _] = tenants;
    let seen = page.get(&format!("/tenant?tenant={mine}"));
    assert_eq!(seen.status, 200, "{seen:?}");
    for text in ["/endpoints?name=acme", "acme.waits", "acme.died"] {
        assert!(seen.body.contains(text), "{text}");
    }
    assert!(!seen.body.contains("other"), "{}", seen.body);
    for list in ["/endpoints", "/dead", "/messages", "/ledger"] {
        let link = format!("\"{list}?tenant={mine}\"");
        assert!(seen.body.contains(&link), "{link}");
    }
    let destination = page.get("/endpoints?name=acme");
    let link = format!("/tenant?tenant={mine}");
    assert!(destination.body.contains(&link), "{destination:?}");
    for path in ["/tenant", "/tenant?tenant=acme"] {
        assert_eq!(page.get(path).status, 400, "{path}");
    }
}

/// R60: a page reads a part of the destinations, so no search lasts for long; and it ends at the same place whether hidden
/// parts have the text or not.
#[test]
fn a_search_continues_behind_ten_thousand_destinations_and_tells_nothing_of_what_is_hidden() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, description)
         SELECT 'h' || n, 'https://customer.example/x/token' || n, NULL FROM generate_series(10001, 20001) n
          UNION ALL SELECT 'i', 'https://customer.example/', 'has an x/token'",
    );
    let page = Page::start(database.binary(&["admin"]));
    let rows = |path: &str| {
        let body = page.get(path).body;
        let next = body.contains("after=h20000");
        (body.matches("/endpoints?name=").count(), next)
    };
    for text in ["x%2Ftoken", "x%2Fother"] {
        assert_eq!(rows(&format!("/endpoints?q={text}")), (0, true));
    }
    assert_eq!(rows("/endpoints?q=x%2Ftoken&after=h20000"), (1, false));
}

/// R66: the portal gives endpoints UUIDs as names.
#[test]
fn the_overview_calls_an_endpoint_by_its_description_or_its_url() {
    let database = Database::new();
    for (name, description) in [(1, "'Accounting'"), (2, "NULL")] {
        let name = format!("01990000-0000-7000-8000-{name:012}");
        database.execute(&format!(
            "INSERT INTO {{o}}_endpoint (name, url, description)
             VALUES ('{name}', 'https://ann:pw@hooks.acme.example/orders/s3cret', {description})"
        ));
        database.execute(&format!(
            "INSERT INTO {{o}}_pause (kind, name, reason) VALUES ('destination', '{name}', 'moving')"
        ));
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, destination, payload) VALUES ('order.paid', '{name}', '{{}}')"
        ));
    }
    let body = Page::start(database.binary(&["admin"])).get("/").body;
    for called in ["Accounting", "https://***@hooks.acme.example/orders/***"] {
        let pause = format!("The destination {called} is paused until resumed: moving");
        assert!(body.contains(&pause), "{body}");
        // In the lists of topics and of destinations.
        assert_eq!(body.matches(&format!(">{called}</a>")).count(), 2, "{body}");
    }
    assert!(
        !body.contains("s3cret") && !body.contains(">01990000"),
        "{body}"
    );
}

#[test]
fn incoming_messages_are_drawn_after_a_while() {
    let database = Database::new();
    database.enqueue_many(30);
    let page = open(&database);
    let mut overview = String::new();
    eventually("the sampler has sampled twice", || {
        overview = page.get("/").body;
        overview.contains("class=\"line\" d=\"M")
    });
    let waiting = "lowest 30, highest 30, latest 30";
    assert!(overview.contains(waiting), "{overview}");
    assert!(overview.contains("No relay holds a lease"), "{overview}");
}

/// R32: the page measures the waiting messages where the process has no relay, and never reports old values.
#[test]
fn a_page_without_a_relay_measures_waiting_messages() {
    let database = Database::new();
    database.enqueue("order.paid", json!(1));
    bury(&database, "order.paid", 100, 2);
    let page = open(&database);
    let has = |text: &str| page.get("/metrics").body.lines().any(|line| line == text);
    let series = |status: &str, value: u8| {
        let name = database.name();
        format!(
            "diesel_outbox_messages{{outbox=\"{name}\",topic=\"order.paid\",destination=\"\",status=\"{status}\"}} {value}"
        )
    };
    eventually("all messages are counted", || {
        has(&series("pending", 1)) && has(&series("dead", 2))
    });
    database.execute("DELETE FROM {o}");
    eventually("no message is left", || has(&series("pending", 0)));
    database.execute("DROP TABLE {o}_dead CASCADE");
    eventually("no old values are reported", || {
        page.get("/metrics").status == 503
    });
}

/// R32: the overview names the keys whose messages wait, and the message that they wait for.
#[test]
fn the_overview_names_blocked_keys() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key, attempts, available_at, last_error_code)
         VALUES ('order.paid', '1', 'order-7', 3, now() + interval '1 hour', 'SERVER_ERROR'),
                ('order.paid', '2', 'order-7', 0, now(), NULL)",
    );
    let page = open(&database);
    let first = database.number("SELECT min(sequence) FROM {o}");
    let words =
        format!("Ordering key order-7: 1 message is waiting behind the next attempt of #{first}");
    eventually("the overview names the key", || {
        page.get("/").body.contains(&words)
    });
}

#[test]
fn a_masked_answer_says_where_it_can_be_read() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let masked = open(&database).get("/dead/1").body;
    assert!(masked.contains("diesel-outbox message show"), "{masked}");
    let command = database.binary(&["admin"]);
    let shown = Page::start(command.with("OUTBOX_ADMIN_PAYLOADS", "true"))
        .get("/dead/1")
        .body;
    assert!(
        shown.contains("no such Babbage") && !shown.contains("message show"),
        "{shown}"
    );
}

/// R58: the same numbers and names in `status`, `endpoint list` and `show`, on the page, and as metrics.
#[test]
fn failing_and_disabled_destinations_are_shown_everywhere() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, enabled, failing_since, failing) VALUES
            ('works', 'https://a.example', true, NULL, false),
            ('falters', 'https://a.example', true, '2026-11-26 10:00:00Z', false),
            ('fails', 'https://a.example', true, '2026-11-26 09:00:00Z', true),
            ('ended', 'https://a.example', false, '2026-11-20 09:00:00Z', true)",
    );
    let run = |arguments: &[&str]| finish(database.binary(arguments)).code(0);
    let status = run(&["status"]).stdout;
    let line = "endpoints: 1 failing, 0 paused, 1 disabled, 0 unverified";
    assert!(status.contains(line), "{status}");
    assert_eq!(
        run(&["status", "--json"]).json()["endpoints"],
        json!({ "working": 2, "unverified": 0, "paused": 0, "failing": 1, "unread": 0, "disabled": 1 })
    );
    let list = run(&["endpoint", "list"]).stdout;
    for text in [
        "failing since 2026-11-26T09:00:00Z",
        "active, no success since 2026-11-26T10:00:00Z",
    ] {
        assert_eq!(list.matches(text).count(), 1, "{list}");
    }
    let failing = run(&["endpoint", "list", "--failing", "--json"]).json();
    let names = |all: &Value| -> Vec<Value> {
        let all = all.as_array().expect("rows").iter();
        all.map(|one| one["name"].clone()).collect()
    };
    assert_eq!(names(&failing), ["ended", "fails"]);
    assert_eq!(failing[1]["failing"], true);
    assert_eq!(failing[1]["failing_since"], "2026-11-26T09:00:00Z");
    let shown = run(&["endpoint", "show", "fails"]).stdout;
    assert!(
        shown.contains("failing since 2026-11-26T09:00:00Z"),
        "{shown}"
    );

    let page = open(&database);
    let verdict = page.get("/").body;
    for remark in [
        "1 endpoint is failing (see Endpoints).",
        "1 endpoint is disabled (see Endpoints).",
    ] {
        assert!(verdict.contains(remark), "{verdict}");
    }
    let rows = page.get("/endpoints?state=failing").body;
    assert_eq!(rows.matches("/endpoints?name=").count(), 1, "{rows}");
    assert!(rows.contains(">failing</span>"), "{rows}");
    let metrics = page.get("/metrics").body;
    for (state, count) in [
        ("working", 2),
        ("unverified", 0),
        ("paused", 0),
        ("failing", 1),
        ("unread", 0),
        ("disabled", 1),
    ] {
        let sample = format!(",state=\"{state}\"}} {count}\n");
        assert!(metrics.contains(&sample), "{sample}: {metrics}");
    }
}
