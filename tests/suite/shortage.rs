//! A process with few file descriptors: nobody is blamed, and every send is recorded.

use std::process::Command;
use std::time::Duration;

use diesel_outbox::config::{Mode, Proxy};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{Destination, ProblemKind, program};
use serde_json::json;

use crate::page::Page;
use crate::support::{Database, File, Receiver, Running, end, eventually};

/// The same command with at most this many descriptors.
fn with_descriptors(command: &Command, most: usize) -> Command {
    let mut limited = Command::new("prlimit");
    limited
        .arg(format!("--nofile={most}:{most}"))
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// R50
#[test]
fn more_threads_than_descriptors_deliver_and_record_every_message_once() {
    const DESTINATIONS: usize = 12;
    const EACH: usize = 30;

    let database = Database::new();
    let receiver = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(150));
        200
    });
    let mut file = String::new();
    for number in 0..DESTINATIONS {
        file += &format!(
            "[destinations.d{number}]\nurl = \"{}\"\nconcurrency = 16\n\n",
            receiver.url()
        );
        for _ in 0..EACH {
            database.enqueue(&format!("topic{number}"), json!(number));
        }
    }
    for number in 0..DESTINATIONS {
        file += &format!("[[routes]]\ntopic = \"topic{number}\"\nto = \"d{number}\"\n\n");
    }
    let file = File::new(&file);
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_CONFIG", file.path())
        .env("OUTBOX_SEND_TIMEOUT", "5s")
        .env("OUTBOX_LEASE", "15s");
    let running = Running::start(with_descriptors(&command, 96));
    let all = i64::try_from(DESTINATIONS * EACH).expect("a few");
    eventually("every message is delivered and recorded", || {
        database.count("delivered") == all
    });
    assert_eq!(receiver.count(), DESTINATIONS * EACH, "{}", running.log());
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 0);
}

/// R50
#[test]
fn a_proxy_that_is_down_is_a_problem_of_this_relay_and_opens_no_breaker_for_all() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let mut destination = Destination::new("shop", &receiver.url()).expect("a URL");
    // Nobody listens on this address.
    destination.proxy = Some(Proxy::Via("http://127.0.77.9:1".parse().expect("a URL")));
    let relay = database
        .relay()
        .destination(destination)
        .route("*", "shop")
        .start()
        .expect("a relay");
    database.enqueue_many(20);
    let problem = || {
        let health = relay.health();
        let mut problems = health.problems().iter();
        let problem = problems.find(|problem| problem.kind == ProblemKind::Proxy);
        problem.map(|problem| problem.what.clone())
    };
    eventually("the problem is named", || problem().is_some());
    let what = problem().expect("a problem");
    assert!(
        what.starts_with("proxy 127.0.77.9:1 cannot be reached"),
        "{what}"
    );
    assert!(relay.health().is_ready());
    let held = || {
        program::destination_states(&relay)
            .iter()
            .any(|one| one.state == "held")
    };
    eventually("the destination is held", held);
    assert_eq!(database.number("SELECT count(*) FROM {o}_pause"), 0);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}"), 0);
    end(&relay);
}

/// R50
#[test]
fn messages_behind_a_proxy_that_is_down_are_tried_one_at_a_time() {
    let database = Database::new();
    let mut destination = Destination::new("shop", "http://127.0.0.1:9/").expect("a URL");
    // Nobody listens on this address.
    destination.proxy = Some(Proxy::Via("http://127.0.77.9:1".parse().expect("a URL")));
    destination.policy.mode = Some(Mode::Batched);
    // The first request is one, and full. The linger ends before the hold.
    destination.request_batch.size = 100;
    destination.request_batch.linger = Duration::from_millis(50);
    database.enqueue_many(1000);
    let relay = database
        .relay()
        .concurrency(1)
        .destination(destination)
        .route("*", "shop")
        .start()
        .expect("a relay");
    let tried = || relay.stats().retried;
    eventually("the first request has failed", || tried() >= 100);
    eventually("the relay tries again", || tried() >= 105);
    let (tried, released) = (tried(), relay.stats().released);
    assert!(tried < 150, "{tried} tries");
    // Until the first request has failed, the relay may claim all 1,000, in two claims. None is claimed again.
    assert!(
        released <= 1000,
        "{released} messages were claimed for nothing"
    );
    end(&relay);
}

/// R50: the page says which destinations this relay cannot reach, and why, as health and metrics do.
#[test]
fn the_page_shows_destinations_that_are_held() {
    let database = Database::new();
    let acme = Endpoint::new("acme", "https://acme.example/hook").topics(["acme.*"]);
    let conn = &mut database.connect();
    (database.outbox().endpoints().put(conn, &acme)).expect("put");
    let mut command = database.binary(&["run"]);
    command
        .env("OUTBOX_URL", "http://receiver.example/")
        // Nobody listens on this address.
        .env("OUTBOX_PROXY", "http://127.0.77.9:1");
    let page = Page::start(command);
    database.enqueue("order.paid", json!(1));
    database.enqueue("acme.paid", json!(1));
    let held = "held</span> <span class=\"quiet\">proxy 127.0.77.9:1 cannot be reached";
    for path in ["/", "/endpoints", "/endpoints?name=acme"] {
        eventually("the destination is held", || {
            page.get(path).body.contains(held)
        });
    }
}
