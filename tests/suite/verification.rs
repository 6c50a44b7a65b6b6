//! Endpoints of endpoints that must show that they want messages, before the first is sent.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use diesel_outbox::config::{Config, Verification};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::receive::{Headers, Verifier};
use diesel_outbox::{NewMessage, RelayHandle};
use serde_json::json;

use crate::support::{Database, Receiver, Request, end, eventually, finish, status};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn started(database: &Database) -> RelayHandle {
    let relay = database.relay().endpoint_threads(8);
    let relay = relay.configure(|config| config.endpoint_timeout = Duration::from_secs(10));
    relay.own_events(true).start().expect("a relay")
}

fn register(database: &Database, url: &str, verification: Verification) {
    let hook = Endpoint::new("hook", url)
        .topics(["order.*"])
        .secret(SECRET.parse().expect("a secret"))
        .configure(|hook| hook.verification = verification);
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &hook).expect("put");
}

fn is_challenge(request: &Request) -> bool {
    type_of(request) == "outbox.verification"
}

/// In binary mode, as these relays send, and in structured mode, as the commands do.
fn type_of(request: &Request) -> String {
    let header = request.header("ce-type").map(str::to_owned);
    header.unwrap_or_else(|| {
        request.json()["type"]
            .as_str()
            .expect("an event")
            .to_owned()
    })
}

fn data(request: &Request) -> serde_json::Value {
    match request.header("ce-type") {
        Some(_) => request.json(),
        None => request.json()["data"].clone(),
    }
}

fn challenge(request: &Request) -> String {
    data(request)["challenge"]
        .as_str()
        .expect("a challenge")
        .to_owned()
}

fn ok(stream: &mut TcpStream, body: &str) -> std::io::Result<()> {
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Repeats challenges in the way that `form` says.
fn repeating(form: impl Fn(&str) -> String + Send + Sync + 'static) -> Receiver {
    Receiver::start(move |request, stream| match is_challenge(request) {
        true => ok(stream, &form(&challenge(request))),
        false => ok(stream, ""),
    })
}

/// The events that arrived, without challenges.
fn events(receiver: &Receiver) -> Vec<Request> {
    let mut requests = receiver.requests();
    requests.retain(|one| one.line.starts_with("POST") && !is_challenge(one));
    requests
}

fn is_settled(database: &Database) -> bool {
    database.number("SELECT count(*) FROM {o}") == 0
}

const ERROR: &str = "SELECT verification_error FROM {o}_endpoint";

/// R59, R54: and a customer reads why.
#[test]
fn nothing_is_sent_until_the_endpoint_repeats_the_challenge_and_then_all_that_waited() {
    let database = Database::new();
    let is_ready = Arc::new(Mutex::new(false));
    let ready = Arc::clone(&is_ready);
    let receiver = repeating(move |token| match *ready.lock().expect("no panic") {
        true => json!({ "challenge": token }).to_string(),
        false => "hello".to_owned(),
    });
    register(&database, &receiver.url(), Verification::Challenge);
    let relay = started(&database);
    for number in 0..3 {
        database.enqueue("order.paid", json!({ "n": number }));
    }
    eventually("the first try has failed", || {
        database.text(ERROR).is_some()
    });
    let expected = "NOT_VERIFIED: the response did not repeat the challenge";
    assert_eq!(database.text(ERROR).as_deref(), Some(expected));
    let due = "SELECT count(*) FROM {o}_endpoint WHERE verification_due
                BETWEEN now() AND now() + interval '15 s'";
    assert_eq!(database.number(due), 1);
    eventually("the messages are addressed", || {
        database.number("SELECT count(*) FROM {o} WHERE destination = 'hook'") == 3
    });
    let said = |arguments: &[&str]| {
        let mut command = database.binary(arguments);
        command.env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false");
        command.env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
        finish(command)
    };
    let status = said(&["status"]).code(0).stdout;
    let counted = "endpoints: 0 failing, 0 paused, 0 disabled, 1 unverified";
    assert!(status.contains(counted), "{status}");
    let counts = said(&["status", "--json"]).code(0).json()["endpoints"].clone();
    assert_eq!(
        counts,
        json!({ "working": 0, "unverified": 1, "paused": 0, "failing": 0, "unread": 0, "disabled": 0 })
    );
    let listed = said(&["message", "list", "--json"]).code(0).stdout;
    let reason = format!("destination not verified: hook: {expected}");
    assert!(listed.contains(&reason), "{listed}");
    let shown = said(&["endpoint", "show", "hook"]).code(0).stdout;
    assert!(
        shown.contains(&format!("unverified: {expected}")),
        "{shown}"
    );
    let refused = said(&["endpoint", "verify", "hook", "--json"]).code(1);
    assert_eq!(refused.json()["verified"], false);
    assert_eq!(
        refused.json()["public_error"],
        "the answer of your endpoint did not repeat the challenge"
    );
    said(&["endpoint", "test", "hook"]).code(0);
    assert_eq!(events(&receiver).len(), 1, "only the test");

    *is_ready.lock().expect("no panic") = true;
    let verified = said(&["endpoint", "verify", "hook"]).code(0).stdout;
    assert!(verified.contains("hook is verified"), "{verified}");
    eventually("all are delivered", || is_settled(&database));
    assert_eq!(events(&receiver).len(), 4);
    let shown = said(&["endpoint", "show", "hook", "--json"]).json();
    assert!(shown["verified_at"].is_string(), "{shown}");
    assert_eq!(shown["verification_error"], json!(null));
    end(&relay);
    let acts = "SELECT string_agg(act, ' ' ORDER BY at) FROM {o}_audit WHERE target = 'hook'";
    assert_eq!(
        database.text(acts).as_deref(),
        Some("endpoint verify endpoint test endpoint verify")
    );

    // The challenge is signed as a message is, with the secret that the receiver has brought.
    let verifier = Verifier::new(&[SECRET.parse().expect("a secret")]).expect("a verifier");
    for request in receiver.requests() {
        let headers = Headers::new(request.headers());
        let signed = verifier.verify(&headers, &request.body);
        assert!(signed.is_ok(), "{signed:?}");
    }
}

/// R59: nothing that is in flight goes to the new URL either.
#[test]
fn a_changed_url_is_verified_again_and_its_messages_wait() {
    let database = Database::new();
    let [first, second] = [(); 2].map(|()| repeating(str::to_owned));
    let silent = Receiver::ok();
    register(&database, &first.url(), Verification::Challenge);
    let relay = started(&database);
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the first is delivered", || is_settled(&database));
    let moves = |url: &str| {
        database.execute(&format!("UPDATE {{o}}_endpoint SET url = '{url}'"));
    };
    moves(&silent.url());
    assert_eq!(
        database.text("SELECT verified_at::text FROM {o}_endpoint"),
        None
    );
    eventually("it is not verified", || database.text(ERROR).is_some());
    database.enqueue("order.paid", json!({ "n": 2 }));
    eventually("the message is addressed", || {
        database.number("SELECT count(*) FROM {o} WHERE destination = 'hook'") == 1
    });
    moves(&second.url());
    database.enqueue("order.paid", json!({ "n": 3 }));
    eventually("both are delivered", || is_settled(&database));
    end(&relay);
    assert_eq!(events(&first).len(), 1);
    assert_eq!(events(&silent).len(), 0);
    assert_eq!(events(&second).len(), 2);
}

/// R59.
#[test]
fn an_endpoint_that_skips_gets_no_messages_until_it_is_verified() {
    let database = Database::new();
    let is_ready = Arc::new(Mutex::new(false));
    let ready = Arc::clone(&is_ready);
    let receiver = repeating(move |token| match *ready.lock().expect("no panic") {
        true => token.to_owned(),
        false => String::new(),
    });
    register(&database, &receiver.url(), Verification::ChallengeSkip);
    let relay = started(&database);
    eventually("the first try has failed", || {
        database.text(ERROR).is_some()
    });
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("it is for nobody", || is_settled(&database));
    assert_eq!(database.count("no_subscriber"), 1);
    *is_ready.lock().expect("no panic") = true;
    database.execute("UPDATE {o}_endpoint SET verification_due = NULL");
    eventually("it is verified", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE verified_at IS NOT NULL") == 1
    });
    database.enqueue("order.paid", json!({ "n": 2 }));
    eventually("it is sent", || is_settled(&database));
    end(&relay);
    let events = events(&receiver);
    assert_eq!(events.len(), 1);
    assert_eq!(data(&events[0])["n"], 2);
}

/// Answers OPTIONS with these headers, and everything else with 200.
fn allowing(headers: &'static str) -> Receiver {
    Receiver::start(
        move |request, stream| match request.line.starts_with("OPTIONS") {
            true => write!(
                stream,
                "HTTP/1.1 200 OK\r\n{headers}content-length: 0\r\n\r\n"
            ),
            false => stream.write_all(&status(200)),
        },
    )
}

/// R59: CloudEvents, HTTP 1.1 Web Hooks for Event Delivery, section 4.
#[test]
fn an_endpoint_allows_the_origin_and_says_how_many_requests_it_takes() {
    let database = Database::new();
    let receiver = allowing("WebHook-Allowed-Origin: *\r\nWebHook-Allowed-Rate: 120\r\n");
    register(&database, &receiver.url(), Verification::CloudEvents);
    let mut config = Config::default();
    config.source = Some("https://shop.example/orders".to_owned());
    (config.endpoint_https_only, config.endpoint_public_only) = (false, false);
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    let destinations = outbox.endpoints();
    let check = destinations.verify(conn, "hook", &config).expect("ready");
    let answer = check.expect("it is there").ask();
    assert!(answer.is_verified, "{answer:?}");
    assert!(destinations.record(conn, &answer).expect("recorded"));
    let asked = &receiver.requests()[0];
    assert_eq!(asked.header("webhook-request-origin"), Some("shop.example"));
    assert_eq!(asked.body, b"");
    let hook = destinations.get(conn, "hook").expect("an answer");
    let hook = hook.expect("it is there");
    assert_eq!(hook.allowed_rate, Some("2/s".parse().expect("a rate")));
    // The lower rate holds, also in a relay that starts later.
    database.execute("UPDATE {o}_endpoint SET rate = '1000/s', allowed_rate = '1/h'");
    let relay = started(&database);
    for number in 0..3 {
        let message = NewMessage::new("order.paid", &json!({ "n": number })).expect("JSON");
        database.enqueue_message(message.destination("hook"));
    }
    eventually("the first is sent", || events(&receiver).len() == 1);
    eventually("the others wait for the rate", || {
        let reasons = finish(database.binary(&["message", "list", "--json"])).stdout;
        reasons.matches("rate limit").count() == 2 && reasons.contains("1/h")
    });
    end(&relay);
    let events = events(&receiver);
    assert_eq!(events.len(), 1);
    let origin = events[0].header("webhook-request-origin");
    assert_eq!(origin, Some("diesel-outbox"));
}

/// R59, R58.
#[test]
fn an_endpoint_that_refuses_or_fails_for_three_days_is_disabled_and_an_event_tells_it() {
    let reason = "SELECT disabled_reason FROM {o}_endpoint WHERE NOT enabled";
    for (headers, tries, error) in [
        (
            "WebHook-Allowed-Origin: other.example\r\n",
            0,
            "NOT_VERIFIED: the response does not allow the origin diesel-outbox (WebHook-Allowed-Origin)",
        ),
        (
            "",
            10,
            "NOT_VERIFIED: the response does not allow the origin diesel-outbox (WebHook-Allowed-Origin)",
        ),
    ] {
        let database = Database::new();
        let receiver = allowing(headers);
        register(&database, &receiver.url(), Verification::CloudEvents);
        database.execute(&format!(
            "UPDATE {{o}}_endpoint SET verification_tries = {tries}"
        ));
        let relay = started(&database);
        eventually("it is disabled", || database.text(reason).is_some());
        end(&relay);
        let disabled = format!("NOT_VERIFIED: {error}");
        assert_eq!(database.text(reason), Some(disabled));
        let told = "SELECT count(*) FROM {o}_messages WHERE topic = 'outbox.endpoint.disabled'";
        assert_eq!(database.number(told), 1);
        assert_eq!(receiver.count(), 1);
        // Enabled again, it is asked again.
        database.execute("UPDATE {o}_endpoint SET enabled = true");
        let left = "SELECT verification_tries FROM {o}_endpoint";
        assert_eq!(database.number(left), 0);
    }
}

/// R59.
#[test]
fn relays_ask_an_endpoint_one_at_a_time() {
    let database = Database::new();
    let (asking, most) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    let receiver = Receiver::start(move |request, stream| {
        seen.fetch_max(asking.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        // Longer than the relays' interval.
        std::thread::sleep(Duration::from_millis(2500));
        asking.fetch_sub(1, Ordering::SeqCst);
        ok(stream, &challenge(request))
    });
    register(&database, &receiver.url(), Verification::Challenge);
    let relays = [(); 3].map(|()| started(&database));
    eventually("it is verified", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE verified_at IS NOT NULL") == 1
    });
    relays.iter().for_each(end);
    assert_eq!(most.load(Ordering::SeqCst), 1);
    assert_eq!(receiver.count(), 1);
}

/// R59: what an endpoint answers is bounded where it is read, and where it was stored before.
#[test]
fn an_endpoint_that_asks_for_hardly_any_requests_delays_no_other() {
    let database = Database::new();
    let receiver = allowing("WebHook-Allowed-Origin: *\r\nWebHook-Allowed-Rate: 1e-308\r\n");
    let other = Receiver::ok();
    register(&database, &receiver.url(), Verification::CloudEvents);
    let second = Endpoint::new("other", other.url()).topics(["order.*"]);
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &second).expect("put");
    let rate = "SELECT allowed_rate FROM {o}_endpoint WHERE name = 'hook'";
    for sent in 1..=2 {
        let before = other.count();
        let relay = started(&database);
        eventually("it is verified", || database.text(rate).is_some());
        for number in 0..3 {
            database.enqueue("order.paid", json!({ "n": number }));
        }
        eventually("one message is sent", || events(&receiver).len() == sent);
        eventually("the other endpoint gets all", || {
            other.count() == before + 3
        });
        database.enqueue("order.paid", json!({ "n": 3 }));
        eventually("and the next", || other.count() == before + 4);
        assert!(relay.health().is_live());
        end(&relay);
        let hook = outbox.endpoints().get(conn, "hook").expect("an answer");
        let hook = hook.expect("it is there");
        assert_eq!(
            hook.allowed_rate.map(|rate| rate.per_second),
            Some(1.0 / 86_400.0)
        );
        assert!(hook.enabled);
        // As a relay has written it that did not bound it.
        database.execute("UPDATE {o}_endpoint SET allowed_rate = '1e-308/min' WHERE name = 'hook'");
        database.execute("TRUNCATE {o}");
    }
}

/// R59: the server's clock was 30 days ahead when the next try was written.
#[test]
fn a_next_try_that_lies_too_far_ahead_is_made_now() {
    let database = Database::new();
    let receiver = repeating(str::to_owned);
    register(&database, &receiver.url(), Verification::Challenge);
    database.execute(
        "UPDATE {o}_endpoint SET verification_tries = 1, verification_due = now() + interval '30 days'",
    );
    let relay = started(&database);
    eventually("it is verified", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE verified_at IS NOT NULL") == 1
    });
    end(&relay);
}
