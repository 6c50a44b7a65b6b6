//! Settings that the relays of an outbox must agree on.

use serde_json::json;

use crate::support::{Database, Receiver, Running, eventually, finish};

fn run(database: &Database, url: &str, settings: &[(&str, &str)]) -> Running {
    let mut run = database.binary(&["run"]);
    run.env("OUTBOX_URL", url);
    run.env("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    run.envs(settings.iter().copied());
    Running::start(run)
}

fn checked(database: &Database) -> String {
    let mut check = database.binary(&["check"]);
    check.env("OUTBOX_URL", "http://127.0.0.1:9");
    let output = check.output().expect("the program");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// R69: half of the deliveries could not be replayed.
#[test]
fn relays_that_do_not_agree_on_the_ledger_are_a_problem_of_each() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let keeps = run(
        &database,
        &receiver.url(),
        &[("OUTBOX_LEDGER_PAYLOAD", "true")],
    );
    let keeps_not = run(&database, &receiver.url(), &[]);
    eventually("check warns", || {
        checked(&database).contains("settings_differ")
    });
    let text = checked(&database);
    let line = text.lines().find(|line| line.contains("settings_differ"));
    let line = line.expect("a line");
    assert!(line.contains("OUTBOX_LEDGER_PAYLOAD"), "{line}");
    assert!(!line.contains("OUTBOX_ON_DEAD"), "{line}");
    for relay in [&keeps, &keeps_not] {
        relay.wait_for_log("event=settings_differ");
    }
    let leases = finish(database.binary(&["leases", "--json"]))
        .code(0)
        .json();
    for lease in leases.as_array().expect("relays") {
        let name = lease["relay"].as_str().expect("a name");
        assert!(line.contains(name), "{name}: {line}");
    }
    // Both relays are ready, and work.
    database.enqueue("order.paid", json!({}));
    receiver.wait_for(1);
    keeps_not.kill();
    eventually("one relay agrees with itself", || {
        !checked(&database).contains("settings_differ")
    });
}

/// R69: keys are compared by fingerprint, and no key is in the lease.
#[test]
fn relays_that_do_not_agree_on_keys_are_a_problem_and_their_leases_hold_no_key() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let one = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    let other = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";
    let threads = ("OUTBOX_ENDPOINT_THREADS", "4");
    let _one = run(
        &database,
        &receiver.url(),
        &[("OUTBOX_SECRET_KEY", one), threads],
    );
    let _other = run(
        &database,
        &receiver.url(),
        &[("OUTBOX_SECRET_KEY", other), threads],
    );
    eventually("check warns", || {
        let text = checked(&database);
        text.contains("settings_differ") && text.contains("OUTBOX_SECRET_KEY")
    });
    let leases = database.text("SELECT string_agg(l::text, ' ') FROM {o}_lease l");
    let leases = leases.expect("leases");
    for key in [one, other] {
        assert!(!leases.contains(key) && !checked(&database).contains(key));
    }
}
