//! `pause` and `resume` with a running relay: waiting messages cost no attempts, and are delivered in the end.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::commands::{With, refused};
use crate::support::{Database, File, Finished, Receiver, Running, eventually, finish};

/// Two destinations with a topic for each: `billing` and `audit`.
struct Shop {
    database: Database,
    billing: Receiver,
    audit: Receiver,
    file: File,
}

impl Shop {
    fn new() -> Self {
        Self::with(Receiver::ok())
    }

    fn with(billing: Receiver) -> Self {
        let audit = Receiver::ok();
        let file = File::new(&format!(
            "[destinations.billing]\nurl = '{}'
             [destinations.audit]\nurl = '{}'
             [[routes]]\ntopic = 'billing.*'\nto = 'billing'
             [[routes]]\ntopic = 'audit.*'\nto = 'audit'",
            billing.url(),
            audit.url()
        ));
        Self {
            database: Database::new(),
            billing,
            audit,
            file,
        }
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        let command = self.database.binary(arguments);
        finish(command.with("OUTBOX_CONFIG", self.file.path()))
    }

    fn relay(&self) -> Running {
        let command = self.database.binary(&["run"]);
        Running::start(command.with("OUTBOX_CONFIG", self.file.path()))
    }

    /// The messages of the topic that are neither claimed nor tried.
    fn untouched(&self, topic: &str) -> i64 {
        self.database.number(&format!(
            "SELECT count(*) FROM {{o}} WHERE topic = '{topic}' AND attempts = 0 AND locked_by IS NULL"
        ))
    }

    fn paused(&self) -> Value {
        self.run(&["pause", "list", "--json"]).code(0).json()
    }
}

#[test]
fn a_paused_destination_gets_nothing_until_it_is_resumed() {
    let shop = Shop::new();
    let relay = shop.relay();
    shop.database.enqueue("billing.due", json!(1));
    shop.billing.wait_for(1);

    let text = shop
        .run(&["pause", "destination", "billing"])
        .code(0)
        .stdout;
    let sentence = "destination billing is paused by an operator: OPERATOR (by hand, without a reason), until resumed\n";
    assert_eq!(text, sentence);
    relay.wait_for_log("event=destination_closed");
    for n in 0..20 {
        shop.database.enqueue("billing.due", json!(n));
    }
    shop.database.enqueue("audit.due", json!(1));
    // A later message to the other destination has arrived.
    shop.audit.wait_for(1);
    eventually("no message is claimed", || {
        shop.untouched("billing.due") == 20
    });
    assert_eq!(shop.billing.count(), 1);

    let text = shop.run(&["resume", "destination", "billing"]).code(0);
    assert_eq!(text.stdout, "destination billing is resumed\n");
    shop.billing.wait_for(21);
    eventually("all messages are delivered", || {
        shop.database.count("delivered") == 22
    });
    let first_attempts = shop.billing.requests();
    let is_first =
        |request: &crate::support::Request| request.header("outbox-attempt") == Some("1");
    assert!(
        first_attempts.iter().all(is_first),
        "the pause cost no attempt"
    );
}

#[test]
fn a_paused_topic_waits_and_others_of_its_destination_do_not() {
    let shop = Shop::new();
    let _relay = shop.relay();
    let pause = [
        "pause",
        "topic",
        "billing.due",
        "--reason",
        "they are closed",
    ];
    let text = shop.run(&pause).code(0).stdout;
    let sentence = "topic billing.due is paused by an operator: they are closed, until resumed\n";
    assert_eq!(text, sentence);
    // The relay still sends messages that it claims before it knows of the pause. Enqueues until a message stays.
    let mut rounds = 0;
    eventually("the relay knows of the pause", || {
        rounds += 1;
        shop.database.enqueue("billing.due", json!(rounds));
        shop.database.enqueue("billing.paid", json!(rounds));
        eventually("the other topic is delivered", || {
            shop.database.number(
                "SELECT count(*) FROM {o}_messages WHERE topic = 'billing.paid' AND status = 'delivered'",
            ) == rounds
        });
        shop.untouched("billing.due") > 0
    });
    let waiting = shop.untouched("billing.due");
    assert_eq!(waiting, 1);

    let text = shop.run(&["resume", "topic", "billing.due"]).code(0).stdout;
    assert_eq!(text, "topic billing.due is resumed\n");
    eventually("all messages are delivered", || {
        shop.database.count("delivered") == 2 * rounds
    });
}

#[test]
fn a_pause_for_a_time_ends_by_itself() {
    let shop = Shop::new();
    let began = Instant::now();
    let pause = ["pause", "destination", "billing", "--for", "2s", "--json"];
    let paused = shop.run(&pause).code(0).json();
    assert_eq!(paused["what"], "destination");
    assert_eq!(paused["name"], "billing");
    assert_eq!(paused["reason"], "OPERATOR");
    let left = paused["seconds_left"].as_f64().expect("a number");
    assert!(left > 0.0 && left <= 2.0, "{left}");

    shop.database.enqueue("billing.due", json!(1));
    let _relay = shop.relay();
    let arrived = shop.billing.wait_for(1)[0].at;
    let waited = arrived.duration_since(began);
    assert!(waited >= Duration::from_millis(1900), "{waited:?}");
    eventually("the message is delivered", || {
        shop.database.count("delivered") == 1
    });
    assert_eq!(shop.paused(), json!([]));
    let text = shop.run(&["pause", "list"]).code(0).stdout;
    assert_eq!(text, "nothing is paused\n");
}

#[test]
fn status_check_and_list_show_what_is_paused() {
    let shop = Shop::new();
    let pause = ["pause", "destination", "billing", "--for", "1h"];
    shop.run(&pause).code(0);
    let pause = ["pause", "topic", "audit.due", "--reason", "migration"];
    shop.run(&pause).code(0);

    let listed = shop.paused();
    let status = shop.run(&["status", "--json"]).code(0).json();
    for pauses in [&listed, &status["pauses"]] {
        assert_eq!(pauses[0]["what"], "destination");
        assert_eq!(pauses[0]["name"], "billing");
        let left = pauses[0]["seconds_left"].as_f64().expect("a number");
        assert!(left > 3000.0 && left <= 3600.0, "{left}");
        let topic = json!({
            "what": "topic", "name": "audit.due", "by": "operator", "reason": "migration", "seconds_left": null,
        });
        assert_eq!(pauses[1], topic);
    }
    for command in ["status", "pause list"] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let text = shop.run(&arguments).code(0).stdout;
        for part in [
            "billing",
            "OPERATOR",
            "for another",
            "migration",
            "until resumed",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    let text = shop.run(&["check"]).code(1).stdout;
    for part in [
        "warning pause       destination billing is paused by an operator: OPERATOR (by hand, without a reason), for another ",
        "PROBLEM pause       topic audit.due is paused by an operator: migration, until resumed",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn an_operator_resumes_what_a_receiver_has_paused() {
    let gone = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let is_gone = std::sync::Arc::clone(&gone);
    let shop = Shop::with(Receiver::answering(move |_| {
        let gone = is_gone.load(std::sync::atomic::Ordering::Acquire);
        if gone { 410 } else { 200 }
    }));
    let relay = shop.relay();
    shop.database.enqueue("billing.due", json!(1));
    relay.wait_for_log("event=destination_paused");
    eventually("the pause is in the table", || shop.paused() != json!([]));
    let text = shop.run(&["check"]).code(1).stdout;
    let sentence = "destination billing is paused by its receiver: GONE (the receiver answered 410), until resumed";
    assert!(text.contains(sentence), "{text}");
    // The operator's pause stands beside that of the receiver; a longer one of the operator stays.
    let pause = |time| shop.run(&["pause", "destination", "billing", "--for", time]);
    pause("1h").code(0);
    let text = pause("1s").code(0).stdout;
    assert!(
        text.contains("nothing was changed: destination billing is paused by an operator"),
        "{text}"
    );
    assert!(text.contains("at least as long as requested"), "{text}");

    gone.store(false, std::sync::atomic::Ordering::Release);
    let resumed = shop.run(&["resume", "destination", "billing", "--json"]);
    let resumed = resumed.code(0).json();
    assert_eq!(resumed["resumed"]["reason"], "GONE");
    eventually("the message is delivered", || {
        shop.database.count("delivered") == 1
    });
}

#[test]
fn a_destination_that_is_not_paused_cannot_be_resumed() {
    let shop = Shop::new();
    for (kind, name) in [("destination", "billing"), ("topic", "billing.due")] {
        let error = shop.run(&["resume", kind, name]).code(1).stderr;
        let sentence = format!("{kind} {name:?} is not paused: `diesel-outbox pause list`");
        assert!(error.contains(&sentence), "{error}");
        // The same after a pause that has ended.
        shop.run(&["pause", kind, name, "--for", "1ms"]);
        eventually("the pause has ended", || shop.paused() == json!([]));
        shop.run(&["resume", kind, name]).code(1);
    }
}

/// R46: a removed destination leaves a row in the table of pauses, so that relays dead-letter the waiting messages.
#[test]
fn a_removed_destination_is_not_paused() {
    let shop = Shop::new();
    shop.database
        .execute("INSERT INTO {o}_endpoint (name, url) VALUES ('busy', 'https://a.example')");
    shop.database.execute("DELETE FROM {o}_endpoint");
    assert_eq!(shop.paused(), json!([]));
    let error = shop.run(&["resume", "destination", "busy"]).code(1).stderr;
    assert!(
        error.contains("destination \"busy\" is not paused"),
        "{error}"
    );
    // A relay may configure a destination of the name.
    shop.run(&["pause", "destination", "busy", "--force"])
        .code(0);
    shop.run(&["resume", "destination", "busy"]).code(0);
    assert_eq!(shop.database.number("SELECT count(*) FROM {o}_pause"), 1);
}

/// R46: an endpoint stands in no settings.
#[test]
fn an_endpoint_is_paused_by_its_name() {
    let shop = Shop::new();
    shop.database
        .execute("INSERT INTO {o}_endpoint (name, url) VALUES ('acme', 'https://a.example')");
    let pause = ["pause", "destination", "acme"];
    assert_eq!(shop.run(&pause).code(0).stderr, "");
    let misspelt = ["pause", "destination", "acmee"];
    refused(
        shop.database.binary(&misspelt),
        &["\"acmee\"", "acme", "--force"],
    );
    // Settings without a destination do not doubt the name either.
    assert_eq!(finish(shop.database.binary(&pause)).code(0).stderr, "");
    assert_eq!(shop.paused().as_array().map(Vec::len), Some(1));
}

/// An operator's shell has no `outbox.toml`, but the leases of running relays name their destinations.
#[test]
fn a_destination_of_a_running_relay_is_known_by_its_lease() {
    let shop = Shop::new();
    let _relay = shop.relay();
    eventually("the relay has a lease", || {
        let leases = finish(shop.database.binary(&["leases", "--json"]));
        leases.code(0).json()[0]["destinations"] == json!(["audit", "billing"])
    });
    let status = finish(shop.database.binary(&["status"])).code(0).stdout;
    assert!(status.contains("audit, billing"), "{status}");
    let pause = |name| shop.database.binary(&["pause", "destination", name]);
    refused(
        pause("biling"),
        &["\"biling\"", "audit, billing", "--force"],
    );
    assert_eq!(finish(pause("billing")).code(0).stderr, "");
}

#[test]
fn a_pause_that_would_do_nothing_is_refused() {
    let shop = Shop::new();
    let command = |arguments: &[&str]| {
        let command = shop.database.binary(arguments);
        command.with("OUTBOX_CONFIG", shop.file.path())
    };
    let misspelt = ["pause", "destination", "biling"];
    refused(
        command(&misspelt),
        &["\"biling\"", "audit, billing", "--force"],
    );
    let pattern = ["pause", "topic", "billing.*"];
    refused(command(&pattern), &["pause topic", "pattern"]);
    for (option, value) in [
        ("--for", "soon"),
        ("--for", "0s"),
        ("--reason", " "),
        ("--reason", "BREAKER_OPEN"),
    ] {
        let pause = ["pause", "destination", "billing", option, value];
        refused(command(&pause), &[option]);
    }
    assert_eq!(shop.paused(), json!([]));

    shop.run(&[&misspelt[..], &["--force"]].concat()).code(0);
    // Settings without a destination cannot know which destinations the relay has.
    let elsewhere = ["pause", "destination", "elsewhere"];
    let told = finish(shop.database.binary(&elsewhere)).code(0).stderr;
    let doubt = "no waiting message has the destination \"elsewhere\"";
    assert!(told.contains(doubt), "{told}");
    // These settings do not know every topic either.
    let misspelt = ["pause", "topic", "order.piad"];
    let told = shop.run(&misspelt).code(0).stderr;
    assert!(told.contains("the topic \"order.piad\""), "{told}");
    shop.database.enqueue("order.piad", json!(1));
    assert_eq!(shop.run(&misspelt).code(0).stderr, "");
    shop.run(&["resume", "topic", "order.piad"]).code(0);
    assert_eq!(shop.paused().as_array().map(Vec::len), Some(2));
}
