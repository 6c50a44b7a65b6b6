//! What a relay reports about itself. `chaos::wedged` covers a database that hangs.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::config::Config;
use diesel_outbox::handlers::Handlers;
use diesel_outbox::{
    Health, Message, NewMessage, Observer, ProblemKind, Relay, RelayHandle, Settled,
};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::metrics::Metrics;
use crate::support::{Database, Dispatch, Gate, Receiver, delivered, end, eventually};

/// Calls the closure with each outcome.
struct Observing<F>(F);

impl<F: Fn() + Send + Sync + 'static> Observer for Observing<F> {
    fn settled(&self, _: &Settled<'_>) {
        self.0();
    }
}

fn kinds(health: &Health) -> Vec<ProblemKind> {
    health
        .problems()
        .iter()
        .map(|problem| problem.kind)
        .collect()
}

/// Fails unless the metrics show exactly this problem of the outbox.
fn is_shown(relay: &RelayHandle, metrics: &Metrics<'_>, problem: &str, live: f64) {
    relay.record_metrics();
    let of = |labels: &[_]| metrics.value("diesel_outbox_problem", labels);
    assert_eq!(
        (of(&[("problem", problem)]), of(&[])),
        (1.0, 1.0),
        "{problem}"
    );
    assert_eq!(metrics.value("diesel_outbox_live", &[]), live);
}

/// Waits until these are the problems, and returns the health at that moment.
fn until(relay: &RelayHandle, expected: &[ProblemKind]) -> Health {
    eventually(&format!("{expected:?}"), || {
        kinds(&relay.health()) == expected
    });
    relay.health()
}

fn set(database: &Database, settings: &[(&str, &str)]) -> RelayHandle {
    let mut config = Config::default();
    let name = database.name();
    let common = [
        ("DATABASE_URL", database.url.as_str()),
        ("OUTBOX_TABLE", &name),
        ("OUTBOX_POLL_INTERVAL", "50ms"),
        ("OUTBOX_SEND_TIMEOUT", "500ms"),
        ("OUTBOX_LEASE", "3s"),
    ];
    for (variable, value) in common.iter().chain(settings) {
        config.set(variable, value).expect("a good setting");
    }
    Relay::from_config(config).start().expect("a relay")
}

/// Relays that work, stand by, are disabled, and end.
#[test]
fn a_relay_without_a_problem_is_live_and_ready_and_an_ending_relay_is_live() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let url = receiver.url();
    let single = [("OUTBOX_SINGLE_ACTIVE", "true"), ("OUTBOX_URL", &url)];
    let (first, second) = (set(&database, &single), set(&database, &single));
    let off = set(&database, &[("OUTBOX_ENABLED", "false")]);
    database.enqueue_many(20);
    eventually("all messages are delivered", || {
        first.stats().delivered == 20
    });
    for relay in [&first, &second] {
        let health = until(relay, &[]);
        assert!(health.is_live() && health.is_ready() && relay.is_healthy());
        assert_eq!(health.to_string(), "ok");
    }
    let health = until(&off, &[ProblemKind::Disabled]);
    assert!(health.is_live() && health.is_ready());
    for relay in [&second, &first, &off] {
        end(relay);
        let health = relay.health();
        assert_eq!(kinds(&health), [ProblemKind::Stopping]);
        assert!(health.is_live() && !health.is_ready() && !relay.is_healthy());
    }
}

/// A message whose settle fails on a trigger or a constraint does not make the database count as down.
#[test]
fn a_relay_whose_settle_is_refused_has_its_database() {
    let database = Database::new();
    let schema = database.schema().to_owned();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    ));
    database.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}}_ledger FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    ));
    let receiver = Receiver::ok();
    let relay = set(&database, &[("OUTBOX_URL", &receiver.url())]);
    database.enqueue("order.paid", json!(1));
    eventually("the message is sent", || receiver.count() == 1);
    assert!(
        relay.wait_until_idle(Duration::from_secs(30)),
        "the refused message is set aside"
    );
    assert!(until(&relay, &[]).is_ready());
    database.drop_trigger_of_ledger("refuse");
    end(&relay);
    assert_eq!((receiver.count(), database.count("delivered")), (1, 1));
}

/// Senders that never return are reported, and do not affect other destinations.
#[test]
fn senders_that_never_return_are_not_live_and_other_destinations_continue() {
    let (database, half) = (Database::new(), Database::new());
    let metrics = [Metrics::of(&database), Metrics::of(&half)];
    let (gate, pass) = Gate::new();
    let relay = |database: &Database, threads| {
        let fine = Handlers::new().on_topic("fine", |_, _| Ok(()));
        let pass = pass.clone();
        let hanging = Dispatch(move |message: &Message| {
            if message.topic == "hangs" {
                pass();
            }
            delivered()
        });
        let relay = database.relay().concurrency(threads).dispatcher(hanging);
        relay.handlers("fine", fine).start().expect("a relay")
    };
    let relays = [relay(&database, 1), relay(&half, 2)];
    for database in [&database, &half] {
        database.enqueue("hangs", json!(1));
    }
    let began = Instant::now();
    let health = until(&relays[0], &[ProblemKind::SendersStuck]);
    // The limit is 1 s. The wide margin keeps the test reliable on a slow machine.
    assert!(began.elapsed() > Duration::from_secs(25), "too soon");
    assert!(!health.is_live() && !health.is_ready());
    is_shown(&relays[0], &metrics[0], "senders_stuck", 0.0);
    let text = health.to_string();
    assert!(text.contains("1 of 1 threads that send to \"\""), "{text}");
    assert!(!relays[0].has_failed(), "no thread has ended");
    let health = until(&relays[1], &[ProblemKind::SomeSendersStuck]);
    assert!(health.is_live() && health.is_ready());
    is_shown(&relays[1], &metrics[1], "some_senders_stuck", 1.0);
    for (relay, database) in relays.iter().zip([&database, &half]) {
        database.enqueue("fine", json!(1));
        eventually("the other destination delivers", || {
            relay.stats().delivered == 1
        });
    }
    gate.open();
    for relay in &relays {
        assert!(until(relay, &[]).is_live());
        eventually("the message that hung is delivered", || {
            relay.stats().delivered == 2
        });
        end(relay);
    }
}

/// Messages whose outcomes are not settled, because an observer blocks.
#[test]
fn a_relay_that_is_held_up_by_an_observer_makes_no_progress() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let (gate, pass) = Gate::new();
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .observe(Observing(pass))
        .url(&receiver.url());
    let relay = relay.start().expect("a relay");
    database.enqueue("order.paid", json!(1));
    let health = until(&relay, &[ProblemKind::NoProgress]);
    assert!(!health.is_live());
    is_shown(&relay, &metrics, "no_progress", 0.0);
    gate.open();
    assert!(until(&relay, &[]).is_live());
    end(&relay);
}

/// A relay works without its listener and reports the loss.
#[test]
fn a_relay_whose_listener_is_cut_off_is_live_and_ready_and_says_so() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let receiver = Receiver::ok();
    let role = format!("t_{}", uuid::Uuid::now_v7().simple());
    database.execute(&format!("CREATE ROLE {role} LOGIN"));
    let schema = database.schema();
    database.execute(&format!("GRANT USAGE ON SCHEMA {schema} TO {role}"));
    let mut listener_url = url::Url::parse(&database.url).expect("a URL");
    listener_url.set_username(&role).expect("a name");
    let relay = set(
        &database,
        &[
            ("OUTBOX_URL", &receiver.url()),
            ("OUTBOX_LISTENER_URL", listener_url.as_str()),
        ],
    );
    let listens = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE usename = '{role}' AND query ~ 'advisory'"
    );
    eventually("the relay listens", || database.number(&listens) == 1);
    database.execute(&format!("ALTER ROLE {role} NOLOGIN"));
    let cut = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{role}'"
    );
    assert_eq!(database.number(&cut), 1);
    let health = until(&relay, &[ProblemKind::ListenerDown]);
    assert!(health.is_live() && health.is_ready() && relay.is_healthy());
    is_shown(&relay, &metrics, "listener_down", 1.0);
    assert!(
        health.to_string().contains("by polling, every 50ms"),
        "{health}"
    );
    database.enqueue("order.paid", json!(1));
    receiver.wait_for(1);
    database.execute(&format!("ALTER ROLE {role} LOGIN"));
    until(&relay, &[]);
    end(&relay);
    database.execute(&format!("DROP OWNED BY {role}"));
    database.execute(&format!("DROP ROLE {role}"));
}

/// A missing database is no reason to restart the relay.
#[test]
fn without_its_database_a_relay_is_live_and_not_ready() {
    let fresh = FreshDatabase::new();
    let database = Database::at(&fresh.url);
    let receiver = Receiver::ok();
    let relay = set(&database, &[("OUTBOX_URL", &receiver.url())]);
    until(&relay, &[]);
    fresh.close();
    let mut seen = Vec::new();
    eventually("the relay has lost its lease as well", || {
        let health = relay.health();
        assert!(health.is_live(), "{health}");
        seen.extend(kinds(&health));
        kinds(&health).contains(&ProblemKind::NoLease)
    });
    let health = relay.health();
    assert!(!health.is_ready() && !relay.is_healthy());
    assert!(
        kinds(&health).contains(&ProblemKind::NoDatabase),
        "{health}"
    );
    assert!(!seen.contains(&ProblemKind::Schema), "{seen:?}");
    fresh.open();
    assert!(until(&relay, &[]).is_ready());
    end(&relay);
}

/// A database without the outbox's tables is distinguished from a database that is down.
#[test]
fn without_its_tables_a_relay_is_live_and_not_ready_and_says_what_is_missing() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = set(&database, &[("OUTBOX_URL", &receiver.url())]);
    until(&relay, &[]);
    let mut conn = database.connect();
    let mut rename = |from: &str, to: &str| {
        conn.batch_execute(&format!(
            "ALTER TABLE {}.{from} RENAME TO {to}",
            database.schema()
        ))
        .expect("renamed");
    };
    rename("outbox_lease", "gone");
    eventually("the relay reports what is missing", || {
        let health = relay.health();
        let kinds = kinds(&health);
        assert!(health.is_live(), "{health}");
        assert!(!kinds.contains(&ProblemKind::NoDatabase), "{health}");
        kinds.contains(&ProblemKind::Schema)
    });
    assert!(!relay.health().is_ready());
    rename("gone", "outbox_lease");
    assert!(until(&relay, &[]).is_ready());
    let message = NewMessage::new("order.paid", &json!(1)).expect("JSON");
    database.enqueue_message(message);
    receiver.wait_for(1);
    end(&relay);
}
