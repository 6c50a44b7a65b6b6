//! Feeds: destinations that are read (R73).

use std::process::Command;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{NewMessage, RelayBuilder};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::commands::With;
use crate::page::{Answer, Page};
use crate::support::{Database, File, Receiver, Running, end, eventually, finish};

/// The program, which relays and serves the events of feeds.
fn program(database: &Database) -> Command {
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_ENDPOINT_THREADS", "2")
        .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
        .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
    command
}

fn relay(database: &Database) -> RelayBuilder {
    database.relay().endpoint_threads(2)
}

/// A consumer of a feed over HTTP.
struct Consumer<'a> {
    page: &'a Page,
    feed: &'a str,
    token: String,
    after: String,
}

impl<'a> Consumer<'a> {
    fn new(page: &'a Page, feed: &'a str, token: &str) -> Self {
        Self {
            page,
            feed,
            token: token.to_owned(),
            after: "begin".to_owned(),
        }
    }

    fn get(&self, query: &str) -> Answer {
        let authorization = format!("authorization: Bearer {}", self.token);
        let path = format!("GET /api/v1/feeds/{}/events?{query}", self.feed);
        self.page.request(&path, &[&authorization], "")
    }

    /// The next events.
    fn read(&mut self, query: &str) -> Vec<Value> {
        let answer = self.get(&format!("after={}&{query}", self.after));
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(
            answer.header("content-type"),
            Some("application/cloudevents-batch+json")
        );
        self.after = answer
            .header("outbox-feed-next")
            .expect("a cursor")
            .to_owned();
        let link = answer.header("link").expect("a link");
        assert!(
            link.contains(&self.after) && link.contains("rel=\"next\""),
            "{link}"
        );
        serde_json::from_str(&answer.body).expect("JSON")
    }
}

fn positions(events: &[Value]) -> Vec<i64> {
    let position = |event: &Value| event["position"].as_str()?.parse().ok();
    events.iter().filter_map(position).collect()
}

fn token(database: &Database, feed: &str) -> String {
    let made = finish(database.binary(&["feed", "token", feed])).code(0);
    made.stdout.trim().to_owned()
}

fn make(database: &Database, feed: &str) {
    let conn = &mut database.connect();
    let feed = Endpoint::feed(feed).topics(["order.*"]);
    database.outbox().endpoints().put(conn, &feed).expect("put");
}

fn stored(database: &Database, feed: &str) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM {{o}}_feed_event WHERE feed = '{feed}'"
    ))
}

/// R73: as the contract for checks has it.
#[test]
fn r73_a_customer_reads_a_feed_over_http() {
    let database = Database::new();
    let tenant = Uuid::now_v7();
    let put = [
        "endpoint", "put", "crm", "--feed", "--topic", "order.*", "--tenant",
    ];
    let mut put = database.binary(&put);
    put.arg(tenant.to_string());
    finish(put).code(0);
    let token = token(&database, "crm");
    let page = Page::start(program(&database));
    let mut reader = Consumer::new(&page, "crm", &token);
    assert_eq!(reader.read("wait=0s"), Vec::<Value>::new());

    let mine = |n: i32, key: Option<&str>| {
        let message = NewMessage::new("order.paid", &json!({ "n": n })).expect("JSON");
        let message = message.tenant_id(tenant).header("ce-subject", "s");
        database.enqueue_message(match key {
            Some(key) => message.ordering_key(key),
            None => message,
        })
    };
    for n in 0..20 {
        mine(n, (n % 2 == 0).then_some("k"));
    }
    database.enqueue("order.paid", json!({ "n": "of another tenant" }));
    eventually("all events are stored", || stored(&database, "crm") == 20);

    let mut all = Vec::new();
    while all.len() < 20 {
        let events = reader.read("limit=7&wait=5s");
        assert!(!events.is_empty() && events.len() <= 7);
        all.extend(events);
    }
    assert_eq!(positions(&all), (1..=20).collect::<Vec<_>>());
    let numbers = |keyed: bool| -> Vec<i64> {
        let of = all
            .iter()
            .filter(|one| one.get("partitionkey").is_some() == keyed);
        of.map(|one| one["data"]["n"].as_i64().expect("n"))
            .collect()
    };
    assert_eq!(
        numbers(true),
        (0..20).step_by(2).collect::<Vec<_>>(),
        "in order of the key"
    );
    assert_eq!(numbers(false).len(), 10);
    assert_eq!(
        (&all[0]["type"], &all[0]["subject"]),
        (&json!("order.paid"), &json!("s"))
    );

    // Caught up: an empty page with the same cursor, at once.
    let before = reader.after.clone();
    assert!(reader.read("").is_empty());
    assert_eq!(reader.after, before);

    // A long poll ends with the next event.
    let began = Instant::now();
    std::thread::scope(|scope| {
        let polled = scope.spawn(|| reader.read("wait=30s"));
        std::thread::sleep(Duration::from_millis(300));
        mine(20, None);
        let events = polled.join().expect("a page");
        assert_eq!(positions(&events), [21]);
    });
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );

    // What was read again is the same.
    let again: Vec<Value> =
        serde_json::from_str(&reader.get("after=begin&limit=5").body).expect("JSON");
    assert_eq!(again, all[..5]);

    for (path, token, status) in [
        ("crm", "wrong", 401),
        ("nobody", token.as_str(), 401),
        ("crm", "", 401),
    ] {
        let headers = [format!("authorization: Bearer {token}")];
        let headers: Vec<&str> = headers
            .iter()
            .map(String::as_str)
            .filter(|_| !token.is_empty())
            .collect();
        let path = format!("GET /api/v1/feeds/{path}/events");
        let answer = page.request(&path, &headers, "");
        assert_eq!(answer.status, status, "{path} {token} {answer:?}");
        assert_eq!(
            answer.header("content-type"),
            Some("application/problem+json")
        );
    }
    for query in [
        "limit=0",
        "limit=1001",
        "limit=x",
        "wait=61s",
        "wait=5",
        "after=",
        "after=soon",
        "after=1",
        "before=1",
        "limit=1&limit=2",
    ] {
        assert_eq!(reader.get(query).status, 400, "{query}");
    }
    let ahead = format!("after=400.{}", Uuid::now_v7());
    let changed = reader.get(&ahead);
    assert_eq!(changed.status, 409, "{changed:?}");
    let problem: Value = serde_json::from_str(&changed.body).expect("JSON");
    assert_eq!(
        (&problem["type"], &problem["last_position"]),
        (&json!("feed-changed"), &json!(21))
    );
    let end: Answer = reader.get("after=end");
    assert_eq!(end.header("outbox-feed-next"), Some(reader.after.as_str()));

    // From a time.
    let time = database.text(
        "SELECT to_char(stored_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') FROM {o}_feed_event WHERE feed = 'crm' AND position = 21",
    );
    let since: Vec<Value> =
        serde_json::from_str(&reader.get(&format!("after={}", time.expect("a time"))).body)
            .expect("JSON");
    assert_eq!(positions(&since), [21]);
    let east = "after=2026-01-01T00:00:00%2B02:00&limit=1";
    assert_eq!(reader.get(east).status, 200);
    let odd = reader.get("after=2026-01-01T00:00:00+02:00");
    assert!(odd.status == 400 && odd.body.contains("%2B"), "{odd:?}");

    // A new token, and the old one for a while.
    let second = finish(database.binary(&["feed", "token", "crm", "--keep", "0s"])).code(0);
    let second = second.stdout.trim().to_owned();
    assert_eq!(reader.get("").status, 401);
    reader.token = second;
    assert_eq!(reader.get("").status, 200);
}

/// R73: also of a reader that reads everything at once.
#[test]
fn r73_how_far_a_reader_is_is_known_when_it_stops() {
    let database = Database::new();
    make(&database, "crm");
    let token = token(&database, "crm");
    let page = Page::start(program(&database));
    for n in 0..5 {
        database.enqueue("order.paid", json!({ "n": n }));
    }
    eventually("all events are stored", || stored(&database, "crm") == 5);
    let noted = || database.number("SELECT coalesce(max(last_position), -1) FROM {o}_feed_reader");
    let mut reader = Consumer::new(&page, "crm", &token);
    assert_eq!(reader.get("after=end&wait=1s").body, "[]");
    assert_eq!(noted(), -1, "the reader has not said that it has these");
    for _ in 0..3 {
        assert!(!reader.read("limit=2").is_empty());
    }
    assert!(reader.read("").is_empty());
    assert_eq!(noted(), 5);
}

/// R73: whoever waits for a feed that is removed learns it.
#[test]
fn r73_a_long_poll_ends_with_its_feed() {
    let database = Database::new();
    make(&database, "crm");
    let token = token(&database, "crm");
    let page = Page::start(program(&database));
    let mut reader = Consumer::new(&page, "crm", &token);
    assert!(reader.read("").is_empty());
    let began = Instant::now();
    std::thread::scope(|scope| {
        let after = format!("after={}&wait=60s", reader.after);
        let polled = scope.spawn(move || reader.get(&after));
        eventually("the reader is there", || {
            database.number("SELECT count(last_position) FROM {o}_feed_reader") == 1
        });
        finish(database.binary(&["endpoint", "remove", "crm", "--yes"])).code(0);
        assert_eq!(polled.join().expect("an answer").status, 401);
    });
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// R73: `OUTBOX_ENDPOINT_THREADS=0` sends nothing, and stores and serves the events of feeds all the same.
#[test]
fn r73_a_relay_without_senders_serves_feeds() {
    let database = Database::new();
    make(&database, "crm");
    let token = token(&database, "crm");
    let mut page = Page::start(program(&database).with("OUTBOX_ENDPOINT_THREADS", "0"));
    database.enqueue("order.paid", json!({ "n": 1 }));
    let mut reader = Consumer::new(&page, "crm", &token);
    assert_eq!(positions(&reader.read("wait=30s")), [1]);
    // It decides for all endpoints, and says to which it does not send.
    database.enqueue("for.nobody", json!({ "n": 1 }));
    eventually("it ends", || database.count("no_subscriber") == 1);
    let conn = &mut database.connect();
    let hook = Endpoint::new("hook", "https://example.com/").topics(["sent"]);
    database.outbox().endpoints().put(conn, &hook).expect("put");
    page.process.wait_for_log("this relay serves feeds only");
    page.process.signal("TERM");
    page.process.wait();
    // Of several messages in a batch, and beside other destinations.
    let receiver = Receiver::ok();
    for n in 2..12 {
        database.enqueue("order.paid", json!({ "n": n }));
        database.enqueue("other", json!({ "n": n }));
    }
    let settings = format!(
        "[destinations.hook]\nurl = '{}'\n[[routes]]\ntopic = 'other'\nto = 'hook'\n",
        receiver.url()
    );
    let file = File::new(&settings);
    let mut drain = database.binary(&["drain", "--config", file.path()]);
    drain.env("OUTBOX_ENDPOINT_THREADS", "0");
    finish(drain).code(0);
    receiver.wait_for(10);
    assert_eq!(stored(&database, "crm"), 11);
}

/// R73: fan-out to webhooks and feeds, and a feed of the settings.
#[test]
fn r73_webhooks_and_feeds_get_the_same_messages() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let conn = &mut database.connect();
    let endpoints = database.outbox();
    let endpoints = endpoints.endpoints();
    endpoints
        .put(conn, &Endpoint::new("hook", receiver.url()))
        .expect("put");
    make(&database, "crm");
    make(&database, "other");
    let relay = relay(&database).start().expect("a relay");
    for n in 0..30 {
        let message = NewMessage::new("order.paid", &json!({ "n": n })).expect("JSON");
        database.enqueue_message(message.ordering_key(format!("k{}", n % 3)));
    }
    receiver.wait_for(30);
    eventually("both feeds have them", || {
        stored(&database, "crm") == 30 && stored(&database, "other") == 30
    });
    eventually("all are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_ledger WHERE status = 'delivered'"),
        90
    );
    for feed in ["crm", "other"] {
        let gaps = format!(
            "SELECT count(*) FROM (SELECT position - row_number() OVER (ORDER BY position) AS gap FROM {{o}}_feed_event WHERE feed = '{feed}') e WHERE gap <> 0"
        );
        assert_eq!(database.number(&gaps), 0);
        let disorder = format!(
            "SELECT count(*) FROM (SELECT (payload->>'n')::int < lag((payload->>'n')::int) OVER (PARTITION BY ordering_key ORDER BY position) AS is_wrong FROM {{o}}_feed_event WHERE feed = '{feed}') e WHERE is_wrong"
        );
        assert_eq!(database.number(&disorder), 0);
    }
    end(&relay);
}

/// R73, G4: of each key, an endpoint wants the first message, and only the route the second one.
#[test]
fn r73_a_filter_of_an_endpoint_leaves_keys_of_a_route_in_order() {
    const KEYS: i64 = 100;
    let database = Database::new();
    let filter = json!({"n": [1]});
    let feed = Endpoint::feed("first").topics(["*"]).filter(filter);
    let conn = &mut database.connect();
    database.outbox().endpoints().put(conn, &feed).expect("put");
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload, ordering_key)
         SELECT 'a', json_build_object('n', n), k FROM generate_series(1, {KEYS}) k, generate_series(1, 2) n ORDER BY k, n"
    ));
    let file =
        File::new("[destinations.audit]\nfeed = true\n[[routes]]\ntopic = '*'\nto = 'audit'\n");
    let mut drain = database.binary(&["drain", "--config", file.path()]);
    drain.env("OUTBOX_ENDPOINT_THREADS", "0");
    finish(drain).code(0);
    assert_eq!(
        (stored(&database, "audit"), stored(&database, "first")),
        (2 * KEYS, KEYS)
    );
    let disorder = database.number(
        "SELECT count(*) FROM {o}_feed_event a JOIN {o}_feed_event b USING (feed, ordering_key)
          WHERE feed = 'audit' AND a.payload->>'n' = '1' AND b.payload->>'n' = '2' AND b.position < a.position",
    );
    assert_eq!(disorder, 0);
}

/// R73: `feed = true` in the settings, beside a webhook of the same route.
#[test]
fn r73_a_destination_of_the_settings_may_be_a_feed() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let settings = format!(
        "[destinations.audit]\nfeed = true\n[destinations.hook]\nurl = '{}'\n[[routes]]\ntopic = '*'\nto = ['audit', 'hook']\n",
        receiver.url()
    );
    let file = File::new(&settings);
    let mut command = database.binary(&["run", "--config", file.path()]);
    command.env("OUTBOX_CONCURRENCY", "2");
    let page = Page::start(command);
    // Before the first message.
    eventually("the feed is there", || {
        database
            .number("SELECT count(*) FROM {o}_feed WHERE name = 'audit' AND registration IS NULL")
            == 1
    });
    let token = token(&database, "audit");
    for n in 0..10 {
        let message = NewMessage::new("anything", &json!({ "n": n })).expect("JSON");
        database.enqueue_message(message.ordering_key("k"));
    }
    let mut reader = Consumer::new(&page, "audit", &token);
    let mut all = Vec::new();
    while all.len() < 10 {
        all.extend(reader.read("wait=10s"));
    }
    assert_eq!(positions(&all), (1..=10).collect::<Vec<_>>());
    receiver.wait_for(10);
    for (more, key) in [
        ("url = 'http://a'", "destinations.audit.url"),
        ("mode = 'binary'", "destinations.audit.mode"),
    ] {
        let file = File::new(&format!("[destinations.audit]\nfeed = true\n{more}\n"));
        let refused = finish(database.binary(&["check", "--config", file.path()])).code(2);
        assert!(refused.stderr.contains(key), "{}", refused.stderr);
    }
}

/// R73: the acts on a feed that send to webhooks are refused, and its kind stays.
#[test]
fn r73_nothing_is_sent_to_a_feed() {
    let database = Database::new();
    make(&database, "crm");
    for (arguments, why) in [
        (&["endpoint", "test", "crm"][..], "a feed is read"),
        (&["endpoint", "rotate", "crm"], "of a feed is absent"),
        (
            &["endpoint", "put", "crm", "https://a.example/hooks"],
            "a feed is read",
        ),
        (
            &["endpoint", "put", "new", "--feed", "--header", "a: b"],
            "cannot be used with",
        ),
        (&["feed", "token", "nobody"], "there is no feed"),
    ] {
        let refused = finish(database.binary(arguments));
        assert_ne!(refused.status.code(), Some(0), "{arguments:?}");
        assert!(
            refused.stderr.contains(why),
            "{arguments:?} {}",
            refused.stderr
        );
    }
    database.execute("INSERT INTO {o}_endpoint (name, url) VALUES ('hook', 'https://a.example')");
    for sql in [
        "UPDATE {o}_endpoint SET kind = 'feed', url = '' WHERE name = 'hook'",
        "UPDATE {o}_endpoint SET url = 'https://a.example' WHERE name = 'crm'",
        "UPDATE {o}_endpoint SET secret = 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw' WHERE name = 'crm'",
        "INSERT INTO {o}_endpoint (name) VALUES ('bare')",
    ] {
        database.refused(sql);
    }
    let hook = finish(database.binary(&["endpoint", "put", "hook", "--feed"]));
    assert!(
        hook.stderr.contains("is a webhook, and stays one"),
        "{}",
        hook.stderr
    );
    let conn = &mut database.connect();
    let outbox = database.outbox();
    let error = outbox
        .endpoints()
        .put(conn, &Endpoint::feed("hook"))
        .expect_err("the kind stays");
    assert!(
        error.to_string().contains("is a webhook, and stays one"),
        "{error}"
    );
}

/// R73: a paused feed gets what came meanwhile, a disabled one does not; both can be read.
#[test]
fn r73_pause_disable_and_removal_mean_what_they_mean_for_webhooks() {
    let database = Database::new();
    make(&database, "crm");
    let relay = relay(&database).start().expect("a relay");
    let outbox = database.outbox();
    let (endpoints, conn) = (outbox.endpoints(), &mut database.connect());
    let enqueue = |n: i32| database.enqueue("order.paid", json!({ "n": n }));
    enqueue(1);
    eventually("the first is stored", || stored(&database, "crm") == 1);

    endpoints
        .pause(conn, "crm", "maintenance", None)
        .expect("paused");
    eventually("the relay has read the pause", || {
        enqueue(2);
        database.number("SELECT count(*) FROM {o} WHERE locked_by IS NULL AND created_at < now() - interval '1 s'") > 0
    });
    let before = stored(&database, "crm");
    let waiting = database.number("SELECT count(*) FROM {o}");
    endpoints.resume(conn, "crm").expect("resumed");
    eventually("all are stored", || {
        stored(&database, "crm") == before + waiting
    });

    endpoints.disable(conn, "crm", "a test").expect("disabled");
    eventually("the relay has read it", || {
        let sequence = enqueue(3);
        eventually("it is settled", || {
            database.number(&format!(
                "SELECT count(*) FROM {{o}} WHERE sequence = {sequence}"
            )) == 0
        });
        database.number("SELECT count(*) FROM {o}_ledger WHERE status = 'no_subscriber'") > 0
    });

    // Registered again: another feed, that shows nothing of the first.
    let lags = || {
        let status = finish(database.binary(&["status", "--json"])).code(0);
        let status: Value = serde_json::from_str(&status.stdout).expect("JSON");
        status["feeds"].as_array().expect("feeds").len()
    };
    assert_eq!(lags(), 1);
    endpoints.remove(conn, "crm").expect("removed");
    assert_eq!(lags(), 0, "nobody is behind");
    let last = stored(&database, "crm");
    make(&database, "crm");
    eventually("the new one gets messages", || {
        enqueue(4);
        stored(&database, "crm") > last
    });
    end(&relay);
    let read = finish(database.binary(&["feed", "read", "crm"])).code(0);
    let read: Vec<Value> = read
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(positions(&read)[0], last + 1);
    assert!(read.iter().all(|event| event["data"]["n"] == 4), "{read:?}");
}

/// R73, R63: what is forgotten or expunged leaves no gap.
#[test]
fn r73_events_are_expunged_and_a_tenant_is_forgotten() {
    let database = Database::new();
    let (gone, stays) = (Uuid::now_v7(), Uuid::now_v7());
    make(&database, "all");
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let own = Endpoint::feed("own").tenant(gone);
    outbox.endpoints().put(conn, &own).expect("put");
    let relay = relay(&database).start().expect("a relay");
    let mut ids = Vec::new();
    for n in 0..6 {
        let tenant = if n % 2 == 0 { gone } else { stays };
        let message = NewMessage::new("order.paid", &json!({ "n": n }))
            .expect("JSON")
            .tenant_id(tenant);
        database.enqueue_message(message);
    }
    eventually("all are stored", || {
        stored(&database, "all") == 6 && stored(&database, "own") == 3
    });
    end(&relay);
    ids.push(database.text(
        "SELECT message_id::text FROM {o}_feed_event WHERE feed = 'all' AND payload->>'n' = '1'",
    ));
    let id = ids.pop().flatten().expect("an id");
    finish(database.binary(&["message", "expunge", &id, "--yes", "--why", "a test"])).code(0);
    let forget = ["forget", "--tenant", &gone.to_string(), "--yes"].map(str::to_owned);
    let forget: Vec<&str> = forget.iter().map(String::as_str).collect();
    let forgotten = finish(database.binary(&forget)).code(0);
    assert!(
        forgotten.stdout.contains("events of feeds"),
        "{}",
        forgotten.stdout
    );
    assert_eq!(stored(&database, "own"), 0);
    assert_eq!(
        database.number("SELECT count(*) FROM {o}_feed WHERE name = 'own'"),
        0
    );
    let read = finish(database.binary(&["feed", "read", "all"])).code(0);
    let read: Vec<Value> = read
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(positions(&read), (1..=6).collect::<Vec<_>>());
    let with_data = read
        .iter()
        .filter(|event| event.get("data").is_some())
        .count();
    let expunged = read
        .iter()
        .filter(|event| event["expunged"] == true)
        .count();
    assert_eq!((with_data, expunged), (2, 4), "{read:?}");
}

/// R73: two relays report the beginning once, and the end once.
#[test]
fn r73_an_unread_feed_is_reported_until_a_reader_is_back() {
    let database = Database::new();
    make(&database, "crm");
    let conn = &mut database.connect();
    let silent = Endpoint::feed("silent").topics(["nothing"]);
    database
        .outbox()
        .endpoints()
        .put(conn, &silent)
        .expect("put");
    let mut command = program(&database);
    command
        .env("OUTBOX_FEED_UNREAD_AFTER", "3s")
        .env("OUTBOX_OWN_EVENTS", "true");
    let page = Page::start(command);
    let relay = relay(&database)
        .own_events(true)
        .configure(|config| config.feed_unread_after = Duration::from_secs(3))
        .start()
        .expect("a relay");
    let state = |feed: &str| {
        let sql = format!("SELECT {}_endpoint_state('{feed}')", database.name());
        database.text(&sql).expect("a state")
    };
    let told = |turn: &str| {
        database.number(&format!(
            "SELECT count(*) FROM {{o}}_messages WHERE topic = 'outbox.endpoint.{turn}'"
        ))
    };
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the event is stored", || stored(&database, "crm") == 1);
    assert_eq!(state("crm"), "active", "not yet");
    eventually("the feed is unread", || state("crm") == "unread");
    // What is stored is not read.
    database.enqueue("order.paid", json!({ "n": 2 }));
    eventually("another event is stored", || stored(&database, "crm") == 2);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((told("unread"), state("silent")), (1, "active".to_owned()));

    let run = |arguments: &[&str]| finish(database.binary(arguments)).code(0);
    let list = run(&["endpoint", "list", "--json"]).json();
    assert_eq!(
        (&list[0]["kind"], &list[0]["state"], &list[1]["state"]),
        (&json!("feed"), &json!("unread"), &json!("active"))
    );
    let show = run(&["endpoint", "show", "crm"]).stdout;
    assert!(
        show.contains("unread since") && !show.contains("url"),
        "{show}"
    );
    let status = run(&["status", "--json"]).json();
    assert_eq!(status["endpoints"]["unread"], 1);
    assert_eq!(
        (
            &status["feeds"][0]["name"],
            &status["feeds"][0]["lag_events"]
        ),
        (&json!("crm"), &json!(2))
    );
    let text = run(&["status"]).stdout;
    assert!(
        text.contains("feeds with events that nobody reads: 1"),
        "{text}"
    );
    let check = finish(database.binary(&["check"])).stdout;
    assert!(check.contains("nobody reads the feed crm"), "{check}");
    eventually("the overview says so", || {
        let overview = page.get("/").body;
        overview.contains("1 endpoint is unread") && overview.contains("Events not read")
    });
    let rows = page.get("/endpoints?state=unread").body;
    assert!(
        rows.contains("2 events not read for") && !rows.contains("silent"),
        "{rows}"
    );
    let lag = |value: &str| {
        let sample = format!(
            "diesel_outbox_feed_lag_events{{outbox=\"{}\",feed=\"crm\"}} {value}\n",
            database.name()
        );
        page.get("/metrics").body.contains(&sample)
    };
    eventually("the metrics have the lag", || lag("2"));

    let token = token(&database, "crm");
    let mut reader = Consumer::new(&page, "crm", &token);
    assert_eq!(reader.read("").len(), 2);
    assert!(reader.read("").is_empty());
    eventually("the feed is read", || state("crm") == "active");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((told("unread"), told("recovered")), (1, 1));
    eventually("the metrics have no lag", || lag("0"));
    end(&relay);
}

/// R73
#[test]
fn r73_check_names_a_feed_of_the_settings_without_tables() {
    let database = Database::new();
    database.execute("DROP TABLE {o}_feed_reader, {o}_feed_event, {o}_feed_part, {o}_feed CASCADE");
    let file = File::new("[destinations.audit]\nfeed = true\n");
    let checked = finish(database.binary(&["check", "--config", file.path()])).stdout;
    assert!(
        checked.contains("the settings have the feed audit") && checked.contains("--with feeds"),
        "{checked}"
    );
    // The janitor does its other work: it names each failure in the log.
    let mut relay = Running::start(database.binary(&["run", "--config", file.path()]));
    eventually("it is there", || {
        database.number("SELECT count(*) FROM {o}_part WHERE opened_at IS NOT NULL") == 1
    });
    relay.signal("TERM");
    relay.wait();
    assert!(!relay.log().contains("_feed"), "{}", relay.log());
}

/// R65: whoever has locked a feed's row holds up the events of that feed, and no other message.
#[test]
fn r65_a_locked_feed_holds_up_only_its_own_events() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let endpoints = outbox.endpoints();
    let hook = Endpoint::new("hook", receiver.url()).topics(["other"]);
    endpoints.put(conn, &hook).expect("put");
    make(&database, "held");
    let free = Endpoint::feed("free").topics(["other"]);
    endpoints.put(conn, &free).expect("put");
    let relay = relay(&database).start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("the first is stored", || stored(&database, "held") == 1);

    let mut person = database.connect();
    let lock = format!(
        "BEGIN; SELECT FROM {}_feed WHERE name = 'held' FOR UPDATE",
        database.name()
    );
    person.batch_execute(&lock).expect("locked");
    let began = Instant::now();
    for n in 0..20 {
        database.enqueue("order.paid", json!({ "n": n }));
        database.enqueue("other", json!({ "n": n }));
    }
    receiver.wait_for(20);
    eventually("the free feed has all", || stored(&database, "free") == 20);
    eventually("they are settled", || {
        database.number("SELECT count(*) FROM {o} WHERE topic = 'other'") == 0
    });
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(stored(&database, "held"), 1);
    person.batch_execute("ROLLBACK").expect("unlocked");
    eventually("the held feed has all", || stored(&database, "held") == 21);
    end(&relay);
}

/// R73: a message that only one feed wants becomes its event without a row of its own, however many there are.
#[test]
fn r73_messages_for_a_single_feed_are_not_fanned_out() {
    let database = Database::new();
    make(&database, "crm");
    database.execute(
        "INSERT INTO {o} (topic, payload) SELECT 'order.paid', '{}' FROM generate_series(1, 5000)",
    );
    let relay = relay(&database).start().expect("a relay");
    eventually("all are stored", || stored(&database, "crm") == 5000);
    eventually("all are counted", || relay.stats().delivered == 5000);
    assert_eq!(relay.stats().split, 0);
    end(&relay);
}
