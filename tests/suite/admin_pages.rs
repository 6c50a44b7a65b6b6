//! What the admin page shows and changes, tested without a browser. The test target `browser` covers the page in a
//! browser, `admin_access` covers who may use it.

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

/// The form fields that choose these dead letters.
fn chosen(database: &Database, sequences: &[i64]) -> String {
    let field = |sequence: &i64| {
        let id = database.text(&format!(
            "SELECT coalesce((SELECT message_id FROM {{o}}_dead WHERE sequence = {sequence}), gen_random_uuid())"
        ));
        format!("letter={sequence}.{}", id.expect("an id"))
    };
    sequences.iter().map(field).collect::<Vec<_>>().join("&")
}

/// R25
#[test]
fn chosen_dead_letters_are_requeued_and_the_others_stay() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 5);
    let page = open(&database);
    let answer = send(
        &page,
        "/dead/requeue",
        &format!("topic=order.paid&{}", chosen(&database, &[2, 4, 99])),
    );
    assert_eq!(answer.status, 303);
    let next = answer.header("location").expect("a redirect");
    assert_eq!(next, "/dead?topic=order.paid&done=requeued&count=2");
    assert!(page.get(next).body.contains("2 dead letters were requeued"));
    assert_eq!(database.number("SELECT sum(sequence) FROM {o}"), 6);
    assert_eq!(count_dead(&database), 3);

    let again = send(&page, "/dead/requeue", &chosen(&database, &[2]));
    let next = again.header("location").expect("a redirect");
    assert!(page.get(next).body.contains("Nothing was requeued"));
    assert_eq!(send(&page, "/dead/requeue", "letter=x").status, 400);
    let none = send(&page, "/dead/requeue", "topic=order.paid");
    assert_eq!(
        none.header("location"),
        Some("/dead?topic=order.paid&done=nothing")
    );

    let line = page.process.log();
    let line = line
        .lines()
        .find(|line| line.contains("admin_requeue"))
        .expect("an audit line");
    let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["target"], "diesel_outbox::audit");
    assert_eq!(
        (&line["who"], &line["peer"]),
        (&json!("local"), &json!("127.0.0.1"))
    );
    assert_eq!((&line["matched"], &line["changed"]), (&json!(2), &json!(2)));
    let what = line["what"].as_str().unwrap_or_default();
    assert!(what.starts_with("2."), "{what}");
}

#[test]
fn nothing_is_discarded_before_somebody_has_said_yes_to_how_much() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 60);
    bury(&database, "order.shipped", 101, 7);
    let page = open(&database);

    let one = send(&page, "/dead/discard", &chosen(&database, &[101]));
    assert_eq!(one.status, 200);
    assert!(one.body.contains("Discard 1 dead letter?"), "{}", one.body);
    let all = send(&page, "/dead/discard", "all=yes&topic=order.paid");
    assert!(
        all.body.contains("Discard 60 dead letters?"),
        "{}",
        all.body
    );
    assert!(all.body.contains("topic order.paid"));
    let requeue = send(&page, "/dead/requeue", "all=yes&topic=order.paid");
    assert!(requeue.body.contains("Requeue 60 dead letters?"));
    let (_, before) = all
        .body
        .split_once("name=\"counted_at\" value=\"")
        .expect("a hidden field");
    let (before, _) = before.split_once('"').expect("a time");
    // Meanwhile one dead letter is gone and others are new. One of the new ones was not part of the question, and one
    // was recorded late.
    database.execute("DELETE FROM {o}_dead WHERE sequence = 60");
    bury(&database, "order.paid", 0, 1);
    database.execute("UPDATE {o}_dead SET dead_lettered_at = now() WHERE sequence = 0");
    let yes = format!("all=yes&topic=order.paid&counted_at={before}&sure");
    bury(&database, "order.paid", 61, 2);
    let more = send(&page, "/dead/discard", &format!("{yes}=60"));
    assert_eq!(more.status, 200);
    assert!(more.body.contains("Discard 61 dead letters?") && more.body.contains("More match"));
    assert_eq!(count_dead(&database), 69);

    let done = send(&page, "/dead/discard", &format!("{yes}=61"));
    assert_eq!(
        done.header("location"),
        Some("/dead?topic=order.paid&done=discarded&count=61")
    );
    assert_eq!(
        database
            .number("SELECT count(*) FROM {o}_dead WHERE topic = 'order.paid' AND sequence = 0"),
        1,
        "a dead letter that was not part of the question is kept"
    );
    assert_eq!(count_dead(&database), 8);
    page.process.wait_for_log("\"what\":\"topic order.paid\"");
    let done = send(&page, "/dead/requeue", "all=yes&q=order.shipped-103&sure=1");
    assert_eq!(
        done.header("location"),
        Some("/dead?q=order.shipped-103&done=requeued&count=1")
    );
    assert_eq!(database.number("SELECT sequence FROM {o}"), 103);
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

#[test]
fn a_topic_is_paused_and_resumed_and_what_cannot_be_is_said() {
    let database = Database::new();
    let page = open(&database);
    for fields in [
        "kind=outbox&name=x",
        "kind=topic",
        "kind=topic&name=%20",
        "kind=topic&name=a&for=soon",
        "kind=topic&name=a&for=900000y",
        "kind=destination&name=a&reason=BREAKER_OPEN",
    ] {
        let answer = post_overview(&page, "/pause", fields);
        assert_eq!(answer.status, 400, "{fields}");
    }
    let pause = "kind=topic&name=order.paid&reason=%3Cb%3Ethey+sleep%3C%2Fb%3E&for=1h";
    assert_eq!(
        post_overview(&page, "/pause", pause).header("location"),
        Some("/?done=paused")
    );
    let body = page.get("/").body;
    assert!(
        body.contains("&lt;b&gt;they sleep&lt;/b&gt;") && !body.contains("<b>"),
        "{body}"
    );
    let resume = "kind=topic&name=order.paid";
    for count in [1, 0] {
        let next = format!("/?done=resumed&count={count}");
        assert_eq!(
            post_overview(&page, "/resume", resume).header("location"),
            Some(next.as_str())
        );
    }
    for event in ["admin_pause", "admin_resume"] {
        page.process.wait_for_log(&format!("\"{event}\""));
    }
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

/// R60: the list of acts is read to its end.
#[test]
fn older_acts_are_on_further_pages_and_a_test_of_a_destination_is_an_act() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let acme = Endpoint::new("acme", receiver.url());
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &acme).expect("put");
    database.execute(
        "INSERT INTO {o}_audit (at, who, act, target, why)
         SELECT now() - n * interval '1 min', 'ann', 'pause', 'topic-' || n, '' FROM generate_series(1, 250) n",
    );
    let mut command = database.binary(&["admin"]);
    command.env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false");
    command.env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
    let page = Page::start(command);
    let tested = post_overview(&page, "/endpoint/test", "name=acme");
    assert!(tested.body.contains("succeeded"), "{tested:?}");
    let first = page.get("/audit").body;
    assert!(first.contains("<code>endpoint test</code>"), "{first}");
    assert!(first.contains("topic-199") && !first.contains("topic-200"));
    let (_, rest) = first
        .split_once("<a class=\"button second\" href=\"")
        .expect("older ones");
    let next = rest.split('"').next().expect("a link");
    let second = page.get(next).body;
    assert!(
        second.contains("topic-250") && !second.contains("topic-199"),
        "{second}"
    );
    assert_eq!(page.get("/audit?before=x").status, 400);
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

/// R46
#[test]
fn endpoints_are_searched_shown_and_changed() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let outbox = database.outbox();
    let hook = format!("{}/services/T0/B0", receiver.url());
    let acme = Endpoint::new("acme", hook)
        .topics(["order.*"])
        .header("x-key", "hunter2");
    let conn = &mut database.connect();
    outbox.endpoints().put(conn, &acme).expect("put");
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, description, enabled)
         SELECT 'd' || n, 'https://customer.example/' || n, '100%_' || n || '<b>', n % 2 = 0
           FROM generate_series(10001, 20000) n",
    );
    let environment = [
        ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
        ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
    ];
    let mut command = database.binary(&["admin"]);
    command.envs(environment);
    let page = Page::start(command);
    let rows = |path: &str| {
        let answer = page.get(path);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.body.matches("/endpoints?name=").count()
    };
    assert_eq!(rows("/endpoints"), 50);
    assert_eq!(rows("/endpoints?after=d19990"), 10);
    assert_eq!(rows("/endpoints?q=EXAMPLE%2F1234&state=active"), 5);
    assert_eq!(
        rows("/endpoints?q=100%25_12345"),
        1,
        "a wildcard is taken literally"
    );
    assert_eq!(rows("/endpoints?q=100__12345"), 0);
    assert_eq!(page.get("/endpoints?state=odd").status, 400);
    assert_eq!(page.get("/endpoints?name=nobody").status, 404);
    let body = page.get("/endpoints?q=d12345").body;
    assert!(
        body.contains("&lt;b&gt;") && !body.contains("<b>"),
        "{body}"
    );

    // One message that was dead-lettered at this destination, and one that it got.
    let message = |table: &str, columns: &str, values: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}}{table} (sequence, message_id, topic, destination, idempotency_key, created_at, {columns})
             VALUES (1, '0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c', 'order.paid', 'acme', 'k', now(), {values})"
        ));
    };
    message(
        "_dead",
        "payload, available_at, attempts, reason, last_error",
        "'{}', now(), 3, 'REJECTED', 'the receiver returned 422'",
    );
    database.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, named_destination,
                status, attempts, created_at, settled_at)
         SELECT 0, 100 + n, gen_random_uuid(), 'order.paid', 'acme', '', 'delivered', 1, now(), now()
           FROM generate_series(1, 37) n",
    );
    let one = "/endpoints?name=acme";
    let body = page.get(one).body;
    assert!(
        body.contains("37") && body.contains("Delivered messages, last hour"),
        "{body}"
    );
    for shown in ["order.*", "x-key", "REJECTED", "Send again", "active"] {
        assert!(body.contains(shown), "{shown}: {body}");
    }
    let secret = outbox.endpoints().secret(conn, "acme").expect("read");
    let secret = secret.expect("one").written().expose_secret().to_owned();
    for hidden in ["hunter2", "T0/B0", &secret] {
        assert!(!body.contains(hidden), "{hidden}");
    }

    let change = |what: &str, fields: &str| {
        let (path, fields) = (format!("/endpoint/{what}"), format!("name=acme&{fields}"));
        post_overview(&page, &path, &fields)
    };
    let leads = |answer: &Answer| answer.header("location").map(str::to_owned);
    let done = change("disable", "reason=they+asked");
    assert_eq!(leads(&done), Some(format!("{one}&done=disabled")));
    let body = page.get(&format!("{one}&done=disabled")).body;
    assert!(body.contains("they asked"), "{body}");
    assert!(body.contains("Disabled. New messages are not for the endpoint"));
    let tested = change("test", "");
    assert!(tested.body.contains("succeeded"), "{tested:?}");
    assert_eq!(receiver.count(), 1);
    let done = change("enable", "");
    assert_eq!(leads(&done), Some(format!("{one}&done=enabled")));
    assert_eq!(change("send-again", "message=1").status, 400);
    let done = change("send-again", "message=0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c");
    assert_eq!(leads(&done), Some(format!("{one}&done=sent_again")));
    assert_eq!(database.count("pending"), 1);
    let asked = change("remove", "").body;
    assert!(
        asked.contains("No, go back") && asked.contains("1 message waits"),
        "{asked}"
    );
    let done = change("remove", "sure=yes");
    assert_eq!(leads(&done), Some("/endpoints?done=removed".to_owned()));
    let body = page.get("/endpoints?done=removed").body;
    assert!(
        body.contains("are not sent, and end in the ledger"),
        "{body}"
    );
    let done = change("enable", "");
    assert_eq!(leads(&done), Some(format!("{one}&done=no_endpoint")));
    page.process.wait_for_log("\"admin_endpoint\"");
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

/// R30. A login name with a space, an equals sign or a line end stays one value.
#[test]
fn no_name_and_no_duration_forges_a_line_of_the_audit_log() {
    let database = Database::new();
    let forger = "x who=root event=admin_resume";
    let act = |page: &Page| {
        let name = forger.replace(' ', "+").replace('=', "%3D") + "%0AT%1B";
        let login = page.post("/login", "", &format!("token={TOKEN}&name={name}"));
        let cookie = login.cookie();
        let overview = page.request("GET /", &[&format!("cookie: {cookie}")], "");
        let token = overview.form_token();
        let fields = format!("form_token={token}&kind=topic&name={name}&reason={name}&for=1h");
        assert_eq!(page.post("/pause", cookie, &fields).status, 303);
        page.process.wait_for_log("admin_pause");
    };
    let admin = || {
        let command = database.binary(&["admin"]);
        command.with("OUTBOX_ADMIN_TOKEN", TOKEN)
    };
    let page = Page::start(admin());
    act(&page);
    let log = page.process.log();
    let lines = log.lines().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let time = line["time"].as_str().expect("a time");
        assert!(time.starts_with("20") && time.ends_with('Z'), "{line}");
        line
    });
    let pause = lines
        .filter(|line| line["event"] == "admin_pause")
        .collect::<Vec<_>>();
    let [pause] = pause.as_slice() else {
        panic!("not exactly one line: {log}");
    };
    assert_eq!(pause["how_long"], "1h");
    assert!(pause["who"].as_str().expect("a name").starts_with(forger));

    let command = admin()
        .with("OUTBOX_ADMIN_ADDR", "127.0.0.1:0")
        .with("OUTBOX_LOG_FORMAT", "text");
    let page = Page::of(Running::start(command));
    act(&page);
    let log = page.process.log();
    for line in log.lines() {
        assert!(line.starts_with("20"), "{line}");
    }
    // Every second piece is quoted.
    let line = log.lines().find(|line| line.contains("event=admin_pause"));
    let line = line.expect("a line").replace("\\\"", "");
    let outside: String = line.split('"').step_by(2).collect();
    assert!(!outside.contains("root"), "{outside}: {line}");
    assert_eq!(outside.matches("event=").count(), 1, "{outside}: {line}");
    assert_eq!(outside.matches("who=").count(), 1, "{outside}: {line}");
}

fn post_overview(page: &Page, path: &str, fields: &str) -> Answer {
    let token = page.get("/").form_token();
    page.post(path, "", &format!("form_token={token}&{fields}"))
}

#[test]
fn the_audit_log_is_text_where_logs_are() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let command = database
        .binary(&["admin"])
        .with("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    let page = Page::of(Running::start(command));
    let one = chosen(&database, &[1]);
    send(&page, "/dead/discard", &format!("{one}&sure=1"));
    page.process.wait_for_log("event=admin_discard");
    let log = page.process.log();
    let line = log
        .lines()
        .find(|line| line.contains("admin_discard"))
        .expect("a line");
    for part in ["who=local", "peer=127.0.0.1", "what=1.", "changed=1"] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[derive(QueryableByName)]
struct LastQuery {
    #[diesel(sql_type = Nullable<Text>)]
    at: Option<String>,
}

/// R32: a page that an operator keeps reloading costs the database next to nothing.
#[test]
fn pages_share_what_one_of_them_has_seen() {
    let database = outbox_alone();
    let page = open_alone(&database);
    let mut conn = database.connect();
    let began = Instant::now();
    let mut looks = BTreeSet::new();
    for _ in 0..100 {
        assert_eq!(page.get("/").status, 200);
        let last = sql_query(
            "SELECT max(query_start)::text AS at FROM pg_stat_activity
              WHERE pid <> pg_backend_pid() AND datname = current_database()",
        );
        looks.insert(last.get_result::<LastQuery>(&mut conn).expect("a row").at);
    }
    // One query every two seconds for the pages, the sampler's queries, and readings in the middle of a query.
    let most = 20 + 2 * began.elapsed().as_secs();
    assert!(looks.len() as u64 <= most, "{} queries", looks.len());
}

/// R60: also if many ask for the slow page, and if a change waits for a lock.
#[test]
fn a_slow_page_and_a_slow_change_delay_no_others() {
    let database = Database::new();
    database.execute("INSERT INTO {o}_endpoint (name, url) VALUES ('acme', 'https://a.example')");
    bury(&database, "order.paid", 1, 1);
    let page = open(&database);
    let token = page.get("/dead").form_token();
    let form = |fields: &str| format!("form_token={token}&{fields}");
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!(
            "BEGIN; LOCK TABLE {name}_attempt; SELECT FROM {name}_endpoint FOR UPDATE"
        ))
        .expect("locks");
    let waiting = || {
        database.number("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE '%admin%'")
    };
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| page.get("/messages?q=1"));
        }
        threads.spawn(|| {
            page.post(
                "/endpoint/disable",
                "",
                &form("name=acme&reason=they+asked"),
            )
        });
        eventually("a page and a change wait for the locks", || waiting() >= 2);
        for path in ["/", "/audit", "/ledger", "/dead"] {
            let began = Instant::now();
            assert_eq!(page.get(path).status, 200, "{path}");
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "{path}: {:?}",
                began.elapsed()
            );
        }
        let pause = form("kind=topic&name=order.paid&reason=stop");
        let began = Instant::now();
        assert_eq!(page.post("/pause", "", &pause).status, 303);
        assert!(
            began.elapsed() < Duration::from_secs(1),
            "{:?}",
            began.elapsed()
        );
        other.batch_execute("COMMIT").expect("unlocked");
    });
}

/// An open page does not repeat a search that takes seconds.
#[test]
fn a_slow_search_runs_once() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let page = open(&database);
    let paths = ["/messages?q=1", "/dead?q=1"];
    for path in paths {
        assert!(page.get(path).body.contains("data-live"), "{path}");
    }
    for path in paths {
        let mut other = database.connect();
        let lock = format!(
            "BEGIN; LOCK TABLE {0}; SELECT pg_sleep(1); COMMIT",
            database.name()
        );
        let holding = std::thread::spawn(move || other.batch_execute(&lock).expect("a lock"));
        eventually("the table is locked", || {
            database.number(
                "SELECT count(*) FROM pg_locks
                  WHERE relation = '{o}'::regclass AND mode = 'AccessExclusiveLock' AND granted",
            ) == 1
        });
        let answer = page.get(path);
        assert_eq!(answer.status, 200);
        assert!(!answer.body.contains("data-live"), "{path}");
        holding.join().expect("no panic");
    }
}

/// A database with only an outbox in it.
fn outbox_alone() -> FreshDatabase {
    let database = FreshDatabase::new();
    let name = "outbox".parse().expect("a name");
    diesel_outbox::migrate(&mut database.connect(), &name).expect("an outbox");
    database
}

fn open_alone(database: &FreshDatabase) -> Page {
    let mut command = binary(&["admin"]);
    command.env("DATABASE_URL", &database.url);
    Page::start(command)
}

#[test]
fn without_a_database_pages_say_so_and_come_back_with_it() {
    let database = outbox_alone();
    let page = open_alone(&database);
    assert_eq!(page.get("/").status, 200);

    database.close();
    eventually("the overview reports the outage", || {
        page.get("/").status == 503
    });
    let body = page.get("/").body;
    assert!(
        body.contains("Status unknown: the outbox cannot be read."),
        "{body}"
    );
    assert!(
        body.contains("when the database last responded") && body.contains("Topics"),
        "{body}"
    );
    for path in ["/dead", "/ledger", "/keys", "/relays", "/messages?q=1"] {
        let answer = page.get(path);
        assert_eq!(answer.status, 503, "{path}");
        let reason = "not currently accepting connections";
        assert!(answer.body.contains(reason), "{}", answer.body);
    }
    database.open();
    eventually("the overview is back", || page.get("/").status == 200);
    assert_eq!(page.get("/dead").status, 200);
}

#[test]
fn an_error_of_the_database_shows_no_password() {
    let mut command = binary(&["admin"]);
    command.env("DATABASE_URL", "postgres://ann:hunter2@127.0.0.1:9/shop");
    let page = Page::start(command);
    for path in ["/", "/dead", "/relays"] {
        let answer = page.get(path);
        assert_eq!(answer.status, 503, "{path}");
        assert!(!answer.body.contains("hunter2"), "{}", answer.body);
    }
    page.process.wait_for_log("admin_look_failed");
    assert!(!page.process.log().contains("hunter2"));
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

#[cfg(target_os = "linux")]
#[test]
fn it_ends_at_once_with_its_sampler() {
    let database = Database::new();
    let mut page = open(&database);
    let tasks = format!("/proc/{}/task", page.process.pid());
    let has_sampler = || {
        let threads = std::fs::read_dir(&tasks).expect("its threads");
        threads.flatten().any(|thread| {
            std::fs::read_to_string(thread.path().join("comm"))
                .is_ok_and(|name| name.trim() == "admin-sampler")
        })
    };
    eventually("the sampler is at work", has_sampler);
    let began = Instant::now();
    page.process.signal("TERM");
    assert!(page.process.wait().success());
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
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

#[test]
fn a_change_that_is_broken_off_says_how_far_it_came() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1500);
    let schema = database.schema().to_owned();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    ));
    database.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}} FOR EACH ROW
         WHEN (NEW.sequence = 1200) EXECUTE FUNCTION {schema}.refuse()"
    ));
    let page = open(&database);
    let answer = send(&page, "/dead/requeue", "all=true&sure=1500");
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.body.contains("not this one"), "{}", answer.body);
    assert!(
        answer.body.contains("1,000 were requeued before the error"),
        "{}",
        answer.body
    );
    let requeued = database.number("SELECT count(*) FROM {o}");
    assert_eq!((requeued, count_dead(&database)), (1000, 500));
    page.process
        .wait_for_log("1000 of 1500 dead letters requeued, then failed");
    assert!(
        page.process.log().contains("\"changed\":1000"),
        "{}",
        page.process.log()
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
