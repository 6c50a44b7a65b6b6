//! New settings while messages are in flight.

use std::time::Duration;

use diesel_outbox::Relay;
use diesel_outbox::config::Config;
use serde_json::json;

use crate::page::Page;
use crate::support::{Database, File, PATIENCE, Receiver, end, eventually};

/// R47: no message is lost or sent twice during the reload.
#[test]
fn a_relay_with_other_settings_takes_the_place_of_one_at_work() {
    let database = Database::new();
    let (before, after) = (Receiver::ok(), Receiver::ok());
    let relay = database
        .relay()
        .url(&before.url())
        .start()
        .expect("a relay");
    database.enqueue_many(500);
    before.wait_for(100);
    let next = database.relay().url(&after.url());
    let deadline = Duration::from_secs(30);
    relay.reload(next, deadline).expect("reloaded");
    let at_the_change = before.count();
    database.enqueue_many(500);
    eventually("all messages are delivered", || {
        database.count("delivered") == 1000
    });
    eventually("the stats cover both relays", || {
        relay.stats().delivered == 1000
    });
    end(&relay);
    assert_eq!(
        before.count(),
        at_the_change,
        "the old destination gets nothing more"
    );
    assert_eq!(
        before.count() + after.count(),
        1000,
        "every message was sent once"
    );

    // A relay that cannot start changes nothing.
    let database = Database::new();
    let relay = database
        .relay()
        .url(&before.url())
        .start()
        .expect("a relay");
    let wrong = database.relay().url("https://");
    assert!(relay.reload(wrong, deadline).is_err());
    database.enqueue("order.paid", json!({}));
    eventually("the old relay works", || database.count("delivered") == 1);
    end(&relay);
}

/// R47: who waits for an idle relay waits for both relays of a reload.
#[test]
fn a_relay_is_idle_only_after_the_relay_that_it_replaces() {
    let database = Database::new();
    let (held, gate) = Receiver::held();
    let receiver = Receiver::ok();
    let relay = database.relay().url(&held.url());
    // The send must last until the gate opens, also on a slow machine.
    let relay = relay
        .send_timeout(Duration::from_secs(20))
        .lease(Duration::from_secs(60))
        .start();
    let relay = relay.expect("a relay");
    database.enqueue("order.paid", json!({}));
    held.wait_for(1);
    std::thread::scope(|scope| {
        let asked_before = scope.spawn(|| relay.wait_until_idle(PATIENCE));
        let next = database.relay().url(&receiver.url());
        scope.spawn(|| relay.reload(next, PATIENCE).expect("reloaded"));
        eventually("the new relay works while the old relay sends", || {
            database.enqueue("order.paid", json!({}));
            database.count("delivered") > 0
        });
        assert!(
            !relay.wait_until_idle(Duration::from_millis(500)),
            "the old relay is sending"
        );
        assert!(!asked_before.is_finished());
        gate.open();
        assert!(relay.wait_until_idle(PATIENCE), "nothing is left");
        assert!(
            asked_before.join().expect("no panic"),
            "who asked before the reload has an answer"
        );
    });
    assert_eq!(database.number("SELECT count(*) FROM {o}"), 0);
    end(&relay);
}

/// R47: with `OUTBOX_SINGLE_ACTIVE`, the new relay becomes active as soon as the old relay has ended, however rarely it
/// polls.
#[test]
fn a_relay_whose_turn_a_reload_brings_waits_for_no_poll() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = || {
        let mut config = Config::default();
        for (variable, value) in [
            ("DATABASE_URL", database.url.as_str()),
            ("OUTBOX_TABLE", &database.name()),
            ("OUTBOX_SINGLE_ACTIVE", "true"),
            ("OUTBOX_URL", &receiver.url()),
            ("OUTBOX_POLL_INTERVAL", "1h"),
        ] {
            config.set(variable, value).expect("a good setting");
        }
        Relay::from_config(config)
    };
    let running = relay().start().expect("a relay");
    running.reload(relay(), PATIENCE).expect("reloaded");
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(1);
    end(&running);
}

/// R47: a shutdown also covers the relay that would take over.
#[test]
fn a_reload_brings_no_relay_back_that_was_shut_down() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    end(&relay);
    let next = database.relay().url(&receiver.url());
    let deadline = Duration::from_secs(30);
    relay.reload(next, deadline).expect("the relay stays down");
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

/// R47: `systemctl reload`.
#[test]
fn sighup_reloads_the_settings_and_reports_mistakes() {
    let database = Database::new();
    let (before, after) = (Receiver::ok(), Receiver::ok());
    let to = |url: &str| format!("url = \"{url}\"\n");
    let file = File::new(&to(&before.url()));
    let mut command = database.binary(&["run"]);
    command.env("OUTBOX_CONFIG", file.path());
    let page = Page::start(command);
    let running = &page.process;
    running.wait_for_log("relay_started");
    database.enqueue("order.paid", json!({}));
    before.wait_for(1);

    std::fs::write(file.path(), "nonsense = 1\n").expect("written");
    running.signal("HUP");
    running.wait_for_log("reload_failed");
    let health = || page.get("/readyz").body;
    eventually("the problem is shown", || {
        health().contains("reload_failed") && health().contains("nonsense")
    });
    let problem = "diesel_outbox_problem{outbox=\"";
    eventually("the metric shows the problem", || {
        let metrics = page.get("/metrics").body;
        let mut lines = metrics.lines().filter(|line| line.starts_with(problem));
        lines.any(|line| line.contains("reload_failed") && line.ends_with(" 1"))
    });
    database.enqueue("order.paid", json!({}));
    before.wait_for(2);

    let next = to(&after.url()) + "admin_read_only = true\n";
    std::fs::write(file.path(), next).expect("written");
    running.signal("HUP");
    running.wait_for_log("\"event\":\"reloaded\"");
    running.wait_for_log("\"settings\":\"OUTBOX_ADMIN_READ_ONLY\"");
    eventually("the problem is solved", || {
        !health().contains("reload_failed")
    });
    database.enqueue("order.paid", json!({}));
    after.wait_for(1);
    assert_eq!((before.count(), after.count()), (2, 1));
}
