//! The delivery policy of each endpoint, from its row to the receiver.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel_outbox::config::{Class, Classes, OnDead};
use diesel_outbox::endpoints::{DeliveryFilter, Endpoint};
use diesel_outbox::{Backoff, Destination, NewMessage, Relay, RelayHandle};
use serde_json::json;

use crate::support::{Database, Receiver, end, eventually, finish};

const MOMENT: Duration = Duration::from_millis(10);

/// A relay that retries a message after 50 ms, four times.
fn started(database: &Database) -> RelayHandle {
    database
        .relay()
        .endpoint_threads(8)
        .configure(|config| config.endpoint_max_attempts = 4)
        .start()
        .expect("a relay")
}

fn hook(name: &str, receiver: &Receiver) -> Endpoint {
    Endpoint::new(name, format!("{}/{name}", receiver.url()))
}

fn put(database: &Database, hook: &Endpoint) {
    let conn = &mut database.connect();
    let put = database.outbox().endpoints().put(conn, hook);
    put.expect("put");
}

/// How many requests each destination got.
fn sends(receiver: &Receiver, names: &[&str]) -> Vec<usize> {
    let requests = receiver.requests();
    let of = |name: &&str| {
        let path = format!("/events/{name} ");
        requests
            .iter()
            .filter(|one| one.line.contains(&path))
            .count()
    };
    names.iter().map(of).collect()
}

/// The dead letters of each destination: reason and attempts.
fn dead(database: &Database) -> String {
    let text = database.text(
        "SELECT string_agg(destination || ' ' || reason || ' ' || attempts, ', ' ORDER BY destination, sequence)
           FROM {o}_dead",
    );
    text.unwrap_or_default()
}

/// R12, R46: what a crashed relay leaves is sent at once, if its destination allows one more attempt, whatever the settings
/// of the relay say.
#[test]
fn a_takeover_counts_against_the_limit_of_the_messages_destination() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let patient = Destination::new("patient", &receiver.url()).expect("a URL");
    let patient = patient.configure(|one| one.policy.max_attempts = Some(3));
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('dead:1', now() - interval '1 s')",
    );
    for (topic, attempts) in [("patient", 1), ("patient", 2), ("hasty", 0), ("hasty", 1)] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, attempts, locked_by, locked_at)
             SELECT '{topic}', '{attempts}', {attempts}, id, now() FROM {{o}}_lease"
        ));
    }
    let relay = database
        .relay()
        .max_attempts(2)
        .backoff(Backoff::Table(vec![Duration::from_secs(3600)]))
        .destination(patient)
        .route("patient", "patient")
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("none waits for a retry", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    let ended = "SELECT string_agg(topic || ' ' || status || ' ' || attempts, ', ' ORDER BY topic DESC, sequence) FROM {o}_ledger";
    assert_eq!(
        database.text(ended).as_deref(),
        Some("patient delivered 3, patient dead 3, hasty delivered 2, hasty dead 2")
    );
    assert_eq!(receiver.count(), 2);
}

/// R46: rows by plain SQL, by the library and without a policy.
#[test]
fn each_row_has_its_own_number_of_attempts() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    put(&database, &hook("default", &receiver));
    put(
        &database,
        &hook("once", &receiver).configure(|hook| hook.policy.max_attempts = Some(1)),
    );
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, policy)
         VALUES ('twice', '{}/twice', '{{\"max_attempts\": 2, \"backoff\": \"10ms\"}}')",
        receiver.url()
    ));
    let relay = started(&database);
    database.enqueue("order.paid", json!({}));
    eventually("all are dead letters", || database.count("dead") == 3);
    end(&relay);
    assert_eq!(sends(&receiver, &["default", "once", "twice"]), [4, 1, 2]);
    assert_eq!(
        dead(&database),
        "default SERVER_ERROR 4, once SERVER_ERROR 1, twice SERVER_ERROR 2"
    );
}

/// R46
#[test]
fn each_row_has_its_own_delay_between_attempts() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 500);
    put(
        &database,
        &hook("slow", &receiver)
            .configure(|hook| hook.policy.backoff = Some("1h".parse().expect("a table"))),
    );
    put(
        &database,
        &hook("quick", &receiver)
            .configure(|hook| hook.policy.backoff = Some("10ms".parse().expect("a table"))),
    );
    let relay = started(&database);
    database.enqueue("order.paid", json!({}));
    eventually("one is a dead letter", || database.count("dead") == 1);
    end(&relay);
    assert_eq!(dead(&database), "quick SERVER_ERROR 4");
    let minutes = "SELECT (extract(epoch FROM available_at - last_attempt_at) / 60)::bigint
                     FROM {o} WHERE destination = 'slow'";
    assert_eq!(database.number(minutes), 60);
}

/// R46
#[test]
fn each_row_says_what_4xx_responses_mean() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 404);
    let mut classes = Classes::default();
    classes.set(404, Class::Dead).expect("a 4xx");
    put(
        &database,
        &hook("final", &receiver).configure(|hook| hook.policy.classes = classes),
    );
    put(&database, &hook("retried", &receiver));
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, url, policy)
         VALUES ('paused', '{}/paused', '{{\"classes\": {{\"404\": \"pause\"}}}}')",
        receiver.url()
    ));
    let relay = started(&database);
    database.enqueue("order.paid", json!({}));
    eventually("two are dead letters", || database.count("dead") == 2);
    eventually("one destination is paused", || {
        database.number("SELECT count(*) FROM {o}_pause WHERE name = 'paused'") == 1
    });
    end(&relay);
    assert_eq!(dead(&database), "final REJECTED 1, retried CLIENT_ERROR 4");
    assert_eq!(sends(&receiver, &["final", "retried", "paused"]), [1, 4, 1]);
}

/// R46, G5: a dead letter blocks its key at the destination that wants so, and nowhere else.
#[test]
fn a_dead_letter_blocks_its_key_where_the_row_says_so() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.json() {
        first if first == json!(0) => 500,
        _ => 200,
    });
    let once = |name| hook(name, &receiver).configure(|hook| hook.policy.max_attempts = Some(1));
    put(
        &database,
        &once("blocks").configure(|hook| hook.policy.on_dead = Some(OnDead::Block)),
    );
    put(&database, &once("continues"));
    for n in 0..3 {
        let message = NewMessage::new("order.paid", &json!(n)).expect("JSON");
        database.enqueue_message(message.ordering_key("customer-7"));
    }
    let relay = started(&database);
    eventually("one destination continues", || {
        (database.count("dead"), database.count("delivered")) == (2, 2)
    });
    let blocked = "SELECT string_agg(destination, ' ') FROM {o}_dead WHERE blocks_key";
    assert_eq!(database.text(blocked).as_deref(), Some("blocks"));
    assert_eq!(sends(&receiver, &["blocks", "continues"]), [1, 3]);
    finish(database.binary(&["dead", "discard", "--all", "--yes"])).code(0);
    eventually("the blocked messages are sent", || {
        database.count("delivered") == 4
    });
    end(&relay);
}

/// R46: a message expires where the row says so, whether it waits unsent or for its next attempt.
#[test]
fn a_message_expires_in_the_time_of_the_row() {
    let database = Database::new();
    let receiver = Receiver::answering(|request| match request.line.contains("/fails ") {
        true => 500,
        false => 200,
    });
    let brief = Duration::from_secs(2);
    let table = |text: &str| text.parse().expect("a table");
    put(
        &database,
        &hook("fails", &receiver).configure(|hook| {
            hook.policy.expires_after = Some(brief);
            hook.policy.max_attempts = Some(1_000);
            hook.policy.backoff = Some(table("100ms"));
        }),
    );
    put(
        &database,
        &hook("late", &receiver).configure(|hook| hook.policy.expires_after = Some(MOMENT)),
    );
    put(&database, &hook("patient", &receiver));
    // Two messages wait for their destinations, as during a pause.
    for name in ["late", "patient"] {
        let message = NewMessage::new("order.paid", &json!(1)).expect("JSON");
        database.enqueue_message(message.destination(name));
    }
    database.execute("UPDATE {o} SET available_at = now() - interval '1 hour'");
    let relay = started(&database);
    let message = NewMessage::new("order.paid", &json!(2)).expect("JSON");
    database.enqueue_message(message.destination("fails"));
    eventually("two have expired", || database.count("dead") == 2);
    eventually("one is delivered", || database.count("delivered") == 1);
    end(&relay);
    let reasons =
        "SELECT string_agg(destination || ' ' || reason, ', ' ORDER BY destination) FROM {o}_dead";
    assert_eq!(
        database.text(reasons).as_deref(),
        Some("fails EXPIRED, late EXPIRED")
    );
    let sent = sends(&receiver, &["fails", "late", "patient"]);
    assert!(sent[0] >= 2, "{sent:?}");
    assert_eq!(sent[1..], [0, 1]);

    // An operator's decision counts: a requeued message becomes due again.
    database.execute(&format!(
        "UPDATE {{o}}_endpoint SET url = '{}/late', policy = '{{\"expires_after\": \"1min\"}}'",
        receiver.url()
    ));
    finish(database.binary(&["dead", "requeue", "--all", "--yes"])).code(0);
    let relay = started(&database);
    eventually("all are delivered", || database.count("delivered") == 3);
    end(&relay);
}

/// R46: as other values that cannot be read.
#[test]
fn a_policy_that_cannot_be_read_is_the_problem_of_its_row() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, policy)
         VALUES ('typo', 'https://a.example/', '{\"max_attempt\": 3}'),
                ('range', 'https://a.example/', '{\"max_attempts\": 0}')",
    );
    let show = |name: &str| finish(database.binary(&["endpoint", "show", name, "--json"]));
    let typo = show("typo").code(0).json();
    assert_eq!(
        typo["problem"],
        "policy.max_attempt: unknown key: did you mean max_attempts?"
    );
    let range = show("range").code(0).json();
    let problem = range["problem"].as_str().unwrap_or_default();
    assert!(
        problem.contains("destinations.range.max_attempts"),
        "{problem}"
    );
    // A change of another value leaves the policy as it is.
    let put = database.binary(&["endpoint", "put", "typo", "--description", "x"]);
    finish(put).code(0);
    let policy = "SELECT policy::text FROM {o}_endpoint WHERE name = 'typo'";
    assert_eq!(
        database.text(policy).as_deref(),
        Some("{\"max_attempt\": 3}")
    );
    let refused = database.refused("UPDATE {o}_endpoint SET policy = '[]'");
    assert!(refused.contains("policy_is_an_object"), "{refused}");

    let relay = started(&database);
    eventually("no relay can use the rows", || {
        database.number("SELECT count(*) FROM {o}_endpoint WHERE NOT enabled") == 2
    });
    end(&relay);
    let why = database.text("SELECT disabled_reason FROM {o}_endpoint WHERE name = 'typo'");
    assert!(why.is_some_and(|why| why.contains("did you mean max_attempts?")));
}

/// A relay that sends to endpoints as the defaults say.
fn started_with_defaults(database: &Database) -> RelayHandle {
    Relay::builder(crate::support::database_url().as_str())
        .outbox(&database.name())
        .poll_interval(Duration::from_millis(20))
        .send_timeout(Duration::from_millis(500))
        .endpoint_threads(4)
        .configure(|config| config.endpoint_https_only = false)
        .configure(|config| config.endpoint_public_only = false)
        .start()
        .expect("a relay")
}

/// R46, R56: the times between the attempts pass by themselves here.
#[test]
fn a_receiver_that_is_down_for_a_weekend_gets_everything_on_monday() {
    const WEEKEND: f64 = 63.0;
    let database = Database::new();
    let is_monday = Arc::new(AtomicBool::new(false));
    let is_up = Arc::clone(&is_monday);
    let receiver = Receiver::answering(move |_| match is_up.load(Ordering::SeqCst) {
        true => 200,
        false => 503,
    });
    put(&database, &hook("acme", &receiver));
    let relay = started_with_defaults(&database);
    for n in 0..3 {
        database.enqueue("order.paid", json!(n));
    }
    let mut hours = 0.0;
    for attempts in 1.. {
        let all_failed = format!(
            "SELECT count(*) FROM {{o}} WHERE attempts = {attempts} AND destination = 'acme' AND locked_by IS NULL"
        );
        eventually("all attempts have failed", || {
            assert_eq!(database.count("dead"), 0, "after {hours} hours");
            database.number(&all_failed) == 3
        });
        let millis = "SELECT (1000 * max(extract(epoch FROM available_at - clock_timestamp())))::bigint FROM {o}";
        let passes = database.number(millis).max(0);
        hours += f64::from(i32::try_from(passes).expect("less than a day")) / 3.6e6;
        if hours >= WEEKEND {
            is_monday.store(true, Ordering::SeqCst);
        }
        let time = format!("interval '{passes} ms'");
        for (table, column) in [
            ("_endpoint", "failing_since"),
            ("_pause", "paused_until"),
            ("", "available_at"),
        ] {
            database.execute(&format!(
                "UPDATE {{o}}{table} SET {column} = {column} - {time}"
            ));
        }
        if hours >= WEEKEND {
            break;
        }
    }
    eventually("all messages are delivered", || {
        database.count("delivered") == 3
    });
    end(&relay);
}

/// R46, R56: the defaults of endpoints are their own.
#[test]
fn an_endpoint_has_the_defaults_of_webhooks() {
    let database = Database::new();
    let (receiver, gate) = Receiver::held();
    put(&database, &hook("slow", &receiver));
    let relay = started_with_defaults(&database);
    database.enqueue("order.paid", json!({}));
    let request = &receiver.wait_for(1)[0];
    // Longer than a send to a configured destination may take.
    let arrived = Instant::now();
    eventually("six seconds have passed", || {
        arrived.elapsed() > Duration::from_secs(6)
    });
    gate.open();
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(receiver.count(), 1);
    assert_eq!(
        request.header("content-type"),
        Some("application/cloudevents+json")
    );
    end(&relay);
}

/// R46, R56: where the URL redirects to is said. To customers only if no server inside the network can have said so.
#[test]
fn a_redirect_is_not_followed_and_says_where_to() {
    let database = Database::new();
    let receiver = Receiver::start(|_, stream| {
        let head = "HTTP/1.1 308 Permanent Redirect\r\nlocation: https://new.example/hooks\r\n";
        stream.write_all(format!("{head}content-length: 0\r\n\r\n").as_bytes())
    });
    put(
        &database,
        &hook("moved", &receiver).configure(|hook| hook.policy.max_attempts = Some(1)),
    );
    let relay = started(&database);
    database.enqueue("order.paid", json!({}));
    eventually("the message is a dead letter", || {
        database.count("dead") == 1
    });
    end(&relay);
    let page = database
        .outbox()
        .endpoints()
        .deliveries(
            &mut database.connect(),
            "moved",
            &DeliveryFilter::default(),
            1,
        )
        .expect("a page");
    let row = &page.rows[0];
    let error = "the receiver returned 308; only for operators: https://new.example/hooks";
    assert_eq!(row.error.as_deref(), Some(error));
    let words = "your endpoint redirects, and redirects are not followed";
    assert_eq!(row.public_error().as_deref(), Some(words));
}

/// R46: signatures cover no headers.
#[test]
fn check_warns_where_binary_requests_are_signed() {
    let database = Database::new();
    put(&database, &Endpoint::new("acme", "https://acme.example/"));
    let check = |mode: &str| {
        let mut command = database.binary(&["check"]);
        command.env("OUTBOX_ENDPOINT_MODE", mode);
        command.env("OUTBOX_ENDPOINT_THREADS", "4");
        finish(command).stdout
    };
    let binary = check("binary");
    assert!(
        binary.contains("signed requests in binary mode"),
        "{binary}"
    );
    let structured = check("structured");
    assert!(!structured.contains("binary mode"), "{structured}");
}
