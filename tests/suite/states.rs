//! The state of an endpoint, whose act it is, and what becomes of its events: each sentence is tried by letting it happen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel_outbox::config::{Rate, Verification};
use diesel_outbox::endpoints::{Endpoint, EndpointError, EndpointFilter, EndpointState, Hand};
use diesel_outbox::{Backoff, NewMessage};
use diesel_outbox_pages::{Language, Pages, Portal, Rights, Visitor};
use http::Method;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually, finish, status};
use crate::tenants::config;

const HOUR: Duration = Duration::from_secs(3600);

/// A tenant with one endpoint, `acme`, that a program manages through the portal.
struct Customer {
    database: Database,
    portal: Portal,
    id: Uuid,
    receiver: Receiver,
}

impl Customer {
    fn new(receiver: Receiver, settings: &[(&str, &str)]) -> Self {
        let database = Database::new();
        let mut config = config(&database);
        for (setting, value) in settings {
            config.set(setting, value).expect(setting);
        }
        let url = config.database_url().expect("a database");
        let portal = Pages::portal(&config, url).expect("a portal");
        let portal = portal.key([7; 32]).expect("a key");
        let customer = Self {
            portal: portal.language(Language::English),
            id: Uuid::now_v7(),
            receiver,
            database,
        };
        let hook = Endpoint::new("acme", customer.receiver.url());
        customer.put(&hook.tenant(customer.id));
        customer
    }

    fn put(&self, hook: &Endpoint) {
        let (outbox, conn) = (self.database.outbox(), &mut self.database.connect());
        outbox.endpoints().put(conn, hook).expect("put");
    }

    fn get(&self) -> Endpoint {
        let (outbox, conn) = (self.database.outbox(), &mut self.database.connect());
        let found = outbox.endpoints().get(conn, "acme").expect("read");
        found.expect("a destination")
    }

    fn ask(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let token = self.portal.token(self.id, HOUR, Rights::all());
        let mut request = http::Request::builder()
            .method(method)
            .uri(format!("/api/v1/endpoints/acme{path}"))
            .header("host", "localhost")
            .header("authorization", format!("Bearer {token}"));
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        let request = request.body(body).expect("a request");
        let visitor = Visitor::unknown([127, 0, 0, 1].into());
        let response = self.portal.respond(request, visitor);
        let answer = serde_json::from_slice(response.body()).unwrap_or_default();
        (response.status().as_u16(), answer)
    }

    fn post(&self, path: &str, body: Value) -> u16 {
        self.ask(Method::POST, path, Some(body)).0
    }

    /// What the portal says of the endpoint.
    fn says(&self) -> Value {
        self.ask(Method::GET, "", None).1
    }

    fn page(&self) -> String {
        let request = http::Request::get("/endpoint?name=acme").header("host", "localhost");
        let visitor = Visitor::of_tenant(self.id, "ann", Rights::all());
        let response = self
            .portal
            .respond(request.body(Vec::new()).expect("a request"), visitor);
        String::from_utf8_lossy(response.body()).into_owned()
    }

    fn enqueue(&self) -> String {
        let message = NewMessage::new("order.paid", &json!({ "order_id": 1 })).expect("JSON");
        let id = message.message_id().to_string();
        self.database.enqueue_message(message.tenant_id(self.id));
        id
    }

    /// Another endpoint of the tenant, which gets every event.
    fn another(&self) -> Receiver {
        let receiver = Receiver::ok();
        let hook = Endpoint::new("other", receiver.url());
        self.put(&hook.tenant(self.id));
        receiver
    }

    fn waiting(&self) -> i64 {
        self.database
            .number("SELECT count(*) FROM {o} WHERE destination = 'acme'")
    }

    fn change(&self, sql: &str) {
        self.database.execute(sql);
    }

    fn pause_by(&self, hand: &str, reason: &str, until: &str) {
        self.change(&format!(
            "INSERT INTO {{o}}_pause (kind, name, reason, paused_by, paused_until)
             VALUES ('destination', 'acme', '{reason}', '{hand}', {until})"
        ));
    }
}

/// R66: one word in the library, the portal, the commands, the page, and SQL, and the counts are of the same words.
#[test]
fn the_state_is_one_word_wherever_it_is_shown() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let database = &customer.database;
    let switches = ["false", "true"];
    let pauses = [
        None,
        Some(("owner", "HOLIDAY", "NULL")),
        Some(("operator", "upgrade", "now() + interval '1 h'")),
        Some(("relay", "BREAKER_OPEN", "now() + interval '1 h'")),
        Some(("receiver", "GONE", "'-infinity'")),
        Some(("operator", "over", "now() - interval '1 h'")),
    ];
    for enabled in switches {
        for verification in ["NULL", "'none'", "'challenge'"] {
            for failing in switches {
                for pause in pauses {
                    customer.change("DELETE FROM {o}_pause");
                    customer.change(&format!(
                        "UPDATE {{o}}_endpoint SET enabled = {enabled}, disabled_reason = 'why',
                            verification = {verification}, failing_since = now(), failing = {failing}"
                    ));
                    customer.change(&format!(
                        "UPDATE {{o}}_endpoint SET failing_since = now(), failing = {failing}"
                    ));
                    if let Some((by, reason, until)) = pause {
                        customer.pause_by(by, reason, until);
                    }
                    let holds = pause.filter(|(_, reason, _)| *reason != "over");
                    let state = match (enabled, verification, holds, failing) {
                        ("false", ..) => "disabled",
                        (_, "'challenge'", ..) => "unverified",
                        (.., Some(_), _) => "paused",
                        (.., "true") => "failing",
                        _ => "active",
                    };
                    let case = format!("{enabled} {verification} {failing} {pause:?}");
                    let one = customer.get();
                    assert_eq!(one.state.as_str(), state, "{case}");
                    let by = one.state_by.map(Hand::as_str);
                    let is_paused = holds.filter(|_| state == "paused");
                    let hand = is_paused.map(|(by, ..)| by);
                    let hand = hand.or((state == "disabled").then_some("operator"));
                    assert_eq!(by, hand, "{case}");
                    let ends = is_paused.is_some_and(|(.., until)| until.starts_with("now"));
                    assert_eq!(one.state_until.is_some(), ends, "{case}");
                    let sql = format!("SELECT {}_endpoint_state('acme')", database.name());
                    assert_eq!(database.text(&sql).as_deref(), Some(state), "{case}");
                    let says = customer.says();
                    assert_eq!(
                        (&says["state"], says["state_by"].as_str()),
                        (&json!(state), hand)
                    );
                    assert_eq!(says["state_until"].is_string(), ends, "{says}");
                    let outbox = database.outbox();
                    for word in EndpointState::ALL {
                        let filter = EndpointFilter::default().state(*word);
                        let conn = &mut database.connect();
                        let found = outbox.endpoints().list(conn, &filter, 9).expect("listed");
                        assert_eq!(found.len() == 1, word.as_str() == state, "{case} {word}");
                    }
                }
            }
        }
    }
    let none = format!("SELECT {}_endpoint_state('nobody')", database.name());
    assert_eq!(database.text(&none), None);
    customer.change("UPDATE {o}_endpoint SET enabled = true, verification = NULL");
    customer.pause_by("owner", "HOLIDAY", "NULL");
    let run = |arguments: &[&str]| finish(database.binary(arguments)).code(0);
    let shown = run(&["endpoint", "show", "acme", "--json"]).json();
    assert_eq!(shown["state"], "paused");
    let list = run(&["endpoint", "list"]).stdout;
    assert!(
        list.contains("paused by its owner until resumed: HOLIDAY"),
        "{list}"
    );
    let counts = &run(&["status", "--json"]).json()["endpoints"];
    assert_eq!(
        (&counts["paused"], &counts["working"]),
        (&json!(1), &json!(0))
    );
}

/// R65, R66: the pause of a tenant is a pause of each of its endpoints, and an operator's.
#[test]
fn an_endpoint_of_a_paused_tenant_is_paused_by_an_operator() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let (database, id) = (&customer.database, customer.id.to_string());
    let other = Endpoint::new("other", customer.receiver.url());
    customer.put(&other.tenant(Uuid::now_v7()));
    let run = |arguments: &[&str]| finish(database.binary(arguments)).code(0);
    let expect = |state: &str, hand: Option<&str>| {
        let one = customer.get();
        assert_eq!(one.state.as_str(), state);
        assert_eq!(one.state_by.map(Hand::as_str), hand);
        let says = customer.says();
        assert_eq!(
            (&says["state"], says["state_by"].as_str()),
            (&json!(state), hand)
        );
        let sql = |name| format!("SELECT {}_endpoint_state('{name}')", database.name());
        assert_eq!(database.text(&sql("acme")).as_deref(), Some(state));
        assert_eq!(database.text(&sql("other")).as_deref(), Some("active"));
        let paused = EndpointFilter::default().state(EndpointState::Paused);
        let conn = &mut database.connect();
        let found = database.outbox().endpoints().list(conn, &paused, 9);
        let found = found.expect("listed").len();
        assert_eq!(found, usize::from(state == "paused"));
        let counts = &run(&["status", "--json"]).json()["endpoints"];
        assert_eq!(counts["paused"], found, "{counts}");
    };
    expect("active", None);
    run(&["pause", "tenant", &id, "--reason", "unpaid"]);
    expect("paused", Some("operator"));
    assert_eq!(customer.post("/resume", json!({})), 409);
    expect("paused", Some("operator"));
    // The endpoint's own pause ends earlier.
    customer.pause_by("receiver", "RATE_LIMITED", "now() + interval '1 h'");
    expect("paused", Some("operator"));
    customer.change("DELETE FROM {o}_pause WHERE kind = 'destination'");
    run(&["resume", "tenant", &id]);
    expect("active", None);
}

/// R66: what else holds the messages, the one answer names.
#[test]
fn a_resume_says_what_still_holds_the_destination() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let (database, id) = (&customer.database, customer.id.to_string());
    let run = |arguments: &[&str]| finish(database.binary(arguments)).code(0);
    run(&["pause", "tenant", &id, "--reason", "unpaid"]);
    run(&["pause", "destination", "acme"]);
    let said = run(&["resume", "destination", "acme"]).stdout;
    let held = format!("tenant {id} is paused by an operator: unpaid, until resumed");
    assert!(said.contains(&held), "{said}");
    assert!(said.contains(&format!("resume tenant {id}")), "{said}");
    let none = finish(database.binary(&["resume", "destination", "acme"]));
    let none = none.code(1).stderr;
    assert!(none.contains(&held), "{none}");
    run(&["pause", "destination", "acme"]);
    let said = run(&["resume", "destination", "acme", "--json"]).json();
    assert_eq!(said["still_paused"]["what"], "tenant", "{said}");
    run(&["resume", "tenant", &id]);

    run(&["pause", "destination", "acme"]);
    run(&["endpoint", "disable", "acme", "--reason", "unpaid"]);
    let said = run(&["resume", "destination", "acme"]).stdout;
    assert!(said.contains("disabled by an operator: unpaid"), "{said}");
    run(&["endpoint", "enable", "acme"]);
    run(&["pause", "destination", "acme"]);
    let said = run(&["resume", "destination", "acme"]).stdout;
    assert_eq!(said, "destination acme is resumed\n");
    assert_eq!(customer.get().state.as_str(), "active");
}

/// R66
#[test]
fn while_paused_new_events_are_for_the_endpoint_and_wait_until_the_pause_ends() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let other = customer.another();
    assert_eq!(customer.post("/pause", json!({ "for": "an hour" })), 422);
    let body = json!({ "for": "2h", "reason": "our server is upgraded" });
    assert_eq!(customer.post("/pause", body), 200);
    let says = customer.says();
    assert_eq!(
        (&says["state"], &says["state_by"]),
        (&json!("paused"), &json!("owner"))
    );
    assert_eq!(says["state_reason"], "our server is upgraded");
    assert!(
        customer
            .page()
            .contains("New events wait until the pause ends.")
    );
    let relay = customer.database.keeping_relay().start().expect("a relay");
    let ids = [customer.enqueue(), customer.enqueue()];
    other.wait_for(2);
    eventually("both wait for acme", || customer.waiting() == 2);
    assert_eq!(customer.receiver.count(), 0);
    assert_eq!(customer.post("/resume", json!({})), 200);
    let came = customer.receiver.wait_for(2);
    assert!(came.iter().all(|request| ids.contains(&request.id())));
    assert_eq!(customer.says()["state"], "active");
    end(&relay);
}

/// R66: what is addressed waits, new events are not for the endpoint, and the page says whether they can be recovered.
#[test]
fn while_disabled_new_events_are_not_for_the_endpoint_and_are_recovered_if_they_are_kept() {
    for (kept, says, count) in [
        ("true", "can be recovered for 72 h", 1),
        ("false", "cannot be recovered", 0),
    ] {
        let settings = [("OUTBOX_LEDGER_PAYLOAD", kept), ("OUTBOX_RETENTION", "72h")];
        let customer = Customer::new(Receiver::ok(), &settings);
        let other = customer.another();
        let started = || {
            let relay = customer.database.keeping_relay();
            let keeps = settings[0];
            let relay =
                relay.configure(move |config| config.set(keeps.0, keeps.1).expect("a value"));
            relay.start().expect("a relay")
        };
        assert_eq!(customer.post("/pause", json!({})), 200);
        let relay = started();
        let addressed = customer.enqueue();
        eventually("addressed", || customer.waiting() == 1);
        let page = customer.page();
        assert!(
            page.contains(&format!("Events of the time of the disablement {says}")),
            "{page}"
        );
        // Relays follow a change within a second: the next relay begins with it.
        end(&relay);
        assert_eq!(customer.post("/disable", json!({})), 200);
        assert_eq!(customer.post("/resume", json!({})), 200);
        let missed = customer.enqueue();
        let relay = started();
        other.wait_for(2);
        eventually("settled", || customer.database.count("delivered") == 2);
        assert_eq!((customer.receiver.count(), customer.waiting()), (0, 1));
        assert_eq!(customer.post("/enable", json!({})), 200);
        assert_eq!(customer.receiver.wait_for(1)[0].id(), addressed);
        eventually("all is settled", || {
            customer.database.count("delivered") == 3
        });
        let body = json!({ "since": "1h", "missing": true });
        let (status, done) = customer.ask(Method::POST, "/recover", Some(body));
        assert_eq!(
            (status, &done["changed"], &done["more"]),
            (200, &json!(count), &json!(false))
        );
        if count > 0 {
            assert_eq!(customer.receiver.wait_for(2)[1].id(), missed);
        } else {
            assert_eq!(done["without_payload"], 1, "{done}");
        }
        end(&relay);
    }
}

/// R66: nor does the portal show what operators have written.
#[test]
fn a_customer_neither_enables_nor_resumes_nor_changes_what_an_operator_has_set() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let (outbox, conn) = (customer.database.outbox(), &mut customer.database.connect());
    let (all, own) = (
        outbox.endpoints(),
        outbox.endpoints().of_tenant(customer.id),
    );
    let binary = |arguments: &[&str]| finish(customer.database.binary(arguments)).code(0);
    binary(&["endpoint", "disable", "acme", "--reason", "they annoy us"]);
    let is_refused = |path| {
        let (status, answer) = customer.ask(Method::POST, path, Some(json!({})));
        assert_eq!(status, 409, "{answer}");
        assert!(
            answer.to_string().contains("contact our support"),
            "{answer}"
        );
    };
    is_refused("/enable");
    assert_eq!(customer.post("/disable", json!({})), 200);
    is_refused("/enable");
    let says = customer.says();
    assert_eq!(
        (&says["state"], &says["state_by"]),
        (&json!("disabled"), &json!("operator"))
    );
    let page = customer.page();
    assert!(
        page.contains("contact our support") && !page.contains("/endpoint/enable"),
        "{page}"
    );
    assert!(
        !page.contains("annoy") && !says.to_string().contains("annoy"),
        "{says}"
    );
    assert_eq!(all.enable(conn, "acme").ok(), Some(true));

    // Both hands have a pause of their own.
    assert_eq!(
        customer.post("/pause", json!({ "reason": "holidays" })),
        200
    );
    binary(&[
        "pause",
        "destination",
        "acme",
        "--reason",
        "they annoy us",
        "--for",
        "1h",
    ]);
    is_refused("/resume");
    let text = binary(&["resume", "destination", "acme"]).stdout;
    assert!(text.contains("paused by its owner: holidays"), "{text}");
    assert_eq!(customer.says()["state_by"], "owner");
    assert_eq!(customer.post("/resume", json!({})), 200);
    assert_eq!(customer.says()["state"], "active");
    // Those of relays and receivers end, too.
    customer.pause_by("receiver", "RATE_LIMITED", "now() + interval '1 h'");
    customer.pause_by("relay", "BREAKER_OPEN", "now() + interval '1 h'");
    assert_eq!(customer.post("/resume", json!({})), 200);
    assert_eq!(customer.says()["state"], "active");

    // Values.
    binary(&[
        "endpoint",
        "put",
        "acme",
        "--rate",
        "5/s",
        "--filter",
        r#"{"a": [1]}"#,
    ]);
    let set_by = customer.get().set_by;
    assert_eq!(set_by.get("rate"), Some(&Hand::Operator), "{set_by:?}");
    let changed = own.change(conn, "acme", |row| row.filter = None);
    assert!(matches!(changed, Err(EndpointError::SetByOperator(what)) if what == "filter"));
    let changed = own.change(conn, "acme", |row| row.policy.max_attempts = Some(3));
    assert_eq!(changed.ok(), Some(true));
    let one = customer.get();
    assert_eq!(one.set_by.get("max_attempts"), Some(&Hand::Owner));
    assert_eq!(one.policy.rate, Some(Rate::per_second(5.0)));
    assert!(!customer.page().contains("5/s") && !customer.says().to_string().contains("5/s"));
}

/// R66: relays and receivers disable, too; the owner may enable then.
#[test]
fn a_customer_enables_what_a_relay_or_the_receiver_has_disabled() {
    let customer = Customer::new(Receiver::answering(|_| 410), &[]);
    let relay = customer.database.keeping_relay().start().expect("a relay");
    customer.enqueue();
    eventually("disabled", || customer.says()["state"] == "disabled");
    let says = customer.says();
    assert_eq!(says["state_by"], "receiver");
    assert!(
        says["hint"]
            .as_str()
            .is_some_and(|hint| hint.contains("410 (Gone)")),
        "{says}"
    );
    end(&relay);
    assert_eq!(customer.post("/enable", json!({})), 200);
    assert_eq!(customer.says()["state"], "active");
    assert_eq!(customer.get().disabled_reason, None);
}

/// R66: a disable, a filter and a rate that commit between read and write of another change stay.
#[test]
fn no_change_undoes_what_commits_meanwhile() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let database = &customer.database;
    let hook = customer.get();
    let outbox = database.outbox();
    let patched = || {
        let body = json!({ "description": "ours" });
        assert_eq!(customer.ask(Method::PATCH, "", Some(body)).0, 200);
    };
    let declared = || {
        let hook = hook
            .clone()
            .configure(|hook| hook.description = Some("ours".to_owned()));
        let put = outbox.endpoints().put(&mut database.connect(), &hook);
        put.expect("put");
    };
    let by_command = || {
        let put = ["endpoint", "put", "acme", "--description", "ours"];
        finish(database.binary(&put)).code(0);
    };
    for (change, rate) in [
        (&patched as &(dyn Fn() + Sync), 1),
        (&declared, 2),
        (&by_command, 3),
    ] {
        customer.change(
            "UPDATE {o}_endpoint SET enabled = true, description = NULL, rate = NULL, filter = NULL",
        );
        let mut other = database.connect();
        let meanwhile = format!(
            "BEGIN; UPDATE {outbox}_endpoint SET enabled = false, disabled_reason = 'no', rate = '{rate}/s', filter = '{{\"a\": [1]}}',
                set_by = '{{\"rate\": \"operator\", \"filter\": \"operator\"}}'",
            outbox = database.name(),
        );
        other.batch_execute(&meanwhile).expect("changed");
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                change();
                is_done.store(true, Ordering::Release);
            });
            eventually("the change waits for the row", || {
                let waiters = "SELECT count(*) FROM pg_stat_activity
                    WHERE wait_event_type = 'Lock' AND query LIKE '%_endpoint%'";
                assert!(!is_done.load(Ordering::Acquire), "{rate}: it did not wait");
                database.number(waiters) > 0
            });
            other.batch_execute("COMMIT").expect("committed");
        });
        let one = customer.get();
        assert_eq!(one.description.as_deref(), Some("ours"), "{rate}");
        assert_eq!(
            (one.enabled, one.disabled_reason.as_deref()),
            (false, Some("no")),
            "{rate}"
        );
        assert_eq!(one.policy.rate, Some(Rate::per_second(f64::from(rate))));
        assert_eq!(one.filter, Some(json!({"a": [1]})), "{rate}");
    }
}

/// R66: code declares destinations at each start.
#[test]
fn code_that_declares_never_enables_and_leaves_what_operators_set() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let (outbox, conn) = (customer.database.outbox(), &mut customer.database.connect());
    let all = outbox.endpoints();
    let changed = all.change(conn, "acme", |row| {
        row.policy.rate = Some(Rate::per_second(5.0));
        row.verification = Verification::Challenge;
    });
    assert_eq!(changed.ok(), Some(true));
    all.disable(conn, "acme", "no").expect("disabled");
    let hook = Endpoint::new("acme", "https://new.example/hooks").tenant(customer.id);
    let hook = hook.filter(json!({"total": [1]})).configure(|hook| {
        hook.policy.rate = Some(Rate::per_second(100.0));
        hook.policy.max_attempts = Some(3);
    });
    all.put(conn, &hook).expect("put");
    let one = customer.get();
    assert_eq!(
        (one.enabled, one.state_reason.as_deref()),
        (false, Some("no"))
    );
    assert_eq!(one.url, "https://new.example/hooks");
    assert_eq!(one.policy.rate, Some(Rate::per_second(5.0)));
    assert_eq!(one.verification, Verification::Challenge);
    assert_eq!(one.policy.max_attempts, Some(3));
    assert!(one.filter.is_some());
    // A change that changes nothing writes nothing.
    let updated_at = one.updated_at;
    assert_eq!(all.change(conn, "acme", |_| {}).ok(), Some(true));
    assert_eq!(customer.get().updated_at, updated_at);
    assert_eq!(all.change(conn, "nobody", |_| {}).ok(), Some(false));
    let unusable = all.change(conn, "acme", |row| row.url = "acme.example".to_owned());
    assert!(matches!(unusable, Err(EndpointError::Invalid(_))));
}

/// R66: messages behind an open breaker are sent as soon as the endpoint has accepted a test.
#[test]
fn a_good_test_closes_the_breaker_and_a_bad_one_does_not() {
    let receiver = Receiver::start(|request, stream| {
        let is_test = request.json()["type"] == "outbox.test";
        let is_bad = is_test && request.header("x-mended").is_none();
        std::io::Write::write_all(stream, &status(if is_bad { 500 } else { 200 }))
    });
    let customer = Customer::new(receiver, &[]);
    customer.pause_by("relay", "BREAKER_OPEN", "now() + interval '1 h'");
    let relay = customer.database.keeping_relay().start().expect("a relay");
    let id = customer.enqueue();
    eventually("it waits for acme", || {
        customer.database.count("pending") == 1
    });
    let (_, answer) = customer.ask(Method::POST, "/test", Some(json!({})));
    assert_eq!(answer["accepted"], false, "{answer}");
    let says = customer.says();
    assert_eq!(
        (&says["state"], &says["state_by"]),
        (&json!("paused"), &json!("relay"))
    );
    assert!(
        says["hint"]
            .as_str()
            .is_some_and(|hint| hint.contains("send an example")),
        "{says}"
    );
    customer.change("UPDATE {o}_endpoint SET headers = '{\"x-mended\": \"yes\"}'");
    let (_, answer) = customer.ask(Method::POST, "/test", Some(json!({})));
    assert_eq!(answer["accepted"], true, "{answer}");
    eventually("delivered", || customer.database.count("delivered") == 1);
    assert!(customer.receiver.ids().contains(&id));
    assert_eq!(customer.says()["state"], "active");
    end(&relay);
}

/// R54, R66: the portal gives the one answer to why an event waits, and no time in the past.
#[test]
fn the_portal_says_why_an_event_waits_as_operators_read_it() {
    let customer = Customer::new(Receiver::ok(), &[]);
    let database = &customer.database;
    let put = |key: &str| {
        let message = NewMessage::new("order.paid", &json!({})).expect("JSON");
        let message = message
            .tenant_id(customer.id)
            .destination("acme")
            .ordering_key(key);
        database.enqueue_message(message)
    };
    let (first, second) = (put("k"), put("k"));
    customer.change(&format!(
        "UPDATE {{o}} SET attempts = 3, available_at = now() + interval '1 h' WHERE sequence = {first}"
    ));
    let expect = |word: &str, text: &str, of: i64| {
        let id = database.text(&format!(
            "SELECT message_id::text FROM {{o}} WHERE sequence = {of}"
        ));
        let (_, page) = customer.ask(Method::GET, "/deliveries", None);
        let rows = page["data"].as_array().expect("rows");
        let row = rows
            .iter()
            .find(|row| row["message_id"].as_str() == id.as_deref());
        let row = row.expect("the event");
        assert_eq!(row["wait_reason"], word, "{row}");
        assert!(
            row["waits"]
                .as_str()
                .is_some_and(|waits| waits.contains(text)),
            "{row}"
        );
        assert_eq!(
            row["next_attempt_at"].is_string(),
            word == "not_due",
            "{row}"
        );
        assert!(customer.page().contains(text), "{text}");
        let operators = ["message", "list", "--destination", "acme", "--json"];
        let list = finish(database.binary(&operators)).code(0).json();
        let list = list["messages"].as_array().cloned().unwrap_or_default();
        let same = list.iter().find(|row| row["sequence"] == of);
        assert_eq!(same.expect("the message")["wait_reason"], word);
    };
    expect("not_due", "next attempt", first);
    // The next attempt is not at its time.
    customer.pause_by("operator", "they annoy us", "NULL");
    expect("destination_paused", "paused", first);
    customer.change("DELETE FROM {o}_pause");
    customer.pause_by("operator", "not for long", "now() + interval '1 min'");
    expect("not_due", "next attempt", first);
    customer.change("DELETE FROM {o}_pause");
    expect("behind_key", "earlier event of the same key", second);
    customer.change(&format!(
        "UPDATE {{o}} SET available_at = now() - interval '1 h' WHERE sequence = {first}"
    ));
    expect("no_relay", "waits for us", first);
    customer.pause_by("relay", "BREAKER_OPEN", "now() + interval '1 h'");
    expect("breaker_open", "deliveries failed repeatedly until", first);
    customer.change("DELETE FROM {o}_pause");
    assert_eq!(customer.post("/pause", json!({})), 200);
    expect("destination_paused", "the endpoint is paused", first);
    customer.pause_by("operator", "they annoy us", "NULL");
    expect("destination_paused", "paused", first);
    assert!(!customer.page().contains("annoy"));
    customer.change("UPDATE {o}_endpoint SET enabled = false");
    customer.change("DELETE FROM {o}_pause");
    expect("destination_disabled", "the endpoint is disabled", first);
}

/// R66: and `message retry` says what holds the rest.
#[test]
fn a_customer_sends_waiting_events_now() {
    let well = Arc::new(AtomicBool::new(false));
    let is_well = Arc::clone(&well);
    let receiver = Receiver::answering(move |_| {
        if is_well.load(Ordering::Acquire) {
            200
        } else {
            500
        }
    });
    let customer = Customer::new(receiver, &[]);
    let database = &customer.database;
    let relay = database.keeping_relay().configure(|config| {
        config.endpoint_backoff = Backoff::Table(vec![HOUR]);
        config.endpoint_max_attempts = 5;
    });
    let relay = relay.start().expect("a relay");
    customer.enqueue();
    eventually("it waits for a retry", || database.count("retrying") == 1);
    well.store(true, Ordering::Release);
    customer.pause_by("relay", "BREAKER_OPEN", "now() + interval '1 h'");
    let retry = ["message", "retry", "--destination", "acme", "--yes"];
    let text = finish(database.binary(&retry)).code(0).stdout;
    assert!(
        text.contains("still waiting: 1 message, destination breaker open until"),
        "{text}"
    );
    let (status, done) = customer.ask(Method::POST, "/retry", Some(json!({})));
    assert_eq!((status, &done["changed"]), (200, &json!(0)), "{done}");
    eventually("delivered", || database.count("delivered") == 1);
    end(&relay);
}
