//! What an application's own recorder sees. The process has only one recorder, so tests tell their metrics apart by
//! the names of their outboxes.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use diesel::{Connection, PgConnection};
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::config::Breaker;
use diesel_outbox::program;
use diesel_outbox::{Destination, Failure, Message, NewMessage, Outcome, ReasonCode};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use serde_json::json;

use crate::support::{Database, Dispatch, Gate, Receiver, delivered, end, eventually};

fn recorder() -> &'static PrometheusHandle {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    RECORDER.get_or_init(|| {
        PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &[0.1, 1.0, 60.0])
            .expect("buckets")
            .install_recorder()
            .expect("no other recorder")
    })
}

/// The metrics of one outbox.
pub(crate) struct Metrics<'a> {
    database: &'a Database,
}

impl<'a> Metrics<'a> {
    /// Counts everything from now on.
    pub(crate) fn of(database: &'a Database) -> Self {
        recorder();
        Self { database }
    }

    /// The sum of all series with this name and all these labels, or `None` without such a series.
    fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let outbox = self.database.name();
        let of_outbox = [("outbox", outbox.as_str())];
        let text = recorder().render();
        let values = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (found, rest) = series.split_once('{')?;
            let has = |(key, value): &(&str, &str)| rest.contains(&format!("{key}=\"{value}\""));
            let is_it = found == name && of_outbox.iter().chain(labels).all(has);
            is_it.then(|| value.parse::<f64>().expect(line))
        });
        values.reduce(|a, b| a + b)
    }

    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).unwrap_or(0.0)
    }
}

fn with_key(topic: &str, key: &str) -> NewMessage {
    NewMessage::new(topic, &json!({ "n": 1 }))
        .expect("JSON")
        .idempotency_key(key)
}

/// R29, R38: each outcome of each message is counted once.
#[test]
fn counters_and_histograms_say_what_became_of_each_message() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let (shop, mail) = (Receiver::ok(), Receiver::ok());
    let tries = AtomicUsize::new(0);
    let moody = Receiver::answering(move |request| {
        let is_bad = request.json() == json!("bad");
        match (
            is_bad,
            tries.fetch_add(usize::from(!is_bad), Ordering::SeqCst),
        ) {
            (true, _) => 422,
            (false, 0 | 1) => 500,
            (false, _) => 200,
        }
    });
    database.enqueue_many(10);
    database.enqueue("moody", json!("good"));
    database.enqueue("moody", json!("bad"));
    database.enqueue("both", json!(1));
    database.enqueue_message(with_key("order.paid", "same"));
    database.enqueue_message(with_key("order.paid", "same"));
    let enqueued = "diesel_outbox_enqueued_total";
    assert_eq!(metrics.value(enqueued, &[("topic", "order.paid")]), 11.0);
    assert_eq!(metrics.value(enqueued, &[]), 14.0);
    assert_eq!(
        metrics.value("diesel_outbox_enqueue_duplicates_total", &[]),
        1.0
    );

    let destination = |name: &str, to: &Receiver| Destination::new(name, &to.url()).expect("a URL");
    let relay = database
        .relay()
        .destination(destination("shop", &shop))
        .destination(destination("mail", &mail))
        .destination(destination("moody", &moody))
        .route("order.*", "shop")
        .route("moody", "moody")
        .route_to_each("both", &["shop", "mail"])
        .start()
        .expect("a relay");
    eventually("all messages are settled", || {
        relay.stats().processed() == 15
    });
    // The key is in the ledger, and no longer in the outbox.
    database.enqueue_message(with_key("order.paid", "same"));
    eventually("the last message is settled", || {
        relay.stats().processed() == 16
    });
    end(&relay);

    let settled = |destination, outcome| {
        let labels = [("destination", destination), ("outcome", outcome)];
        metrics.value("diesel_outbox_settled_total", &labels)
    };
    assert_eq!(settled("shop", "delivered"), 12.0);
    assert_eq!(settled("shop", "deduplicated"), 1.0);
    assert_eq!(settled("mail", "delivered"), 1.0);
    assert_eq!(settled("moody", "retried"), 2.0);
    assert_eq!(settled("moody", "delivered"), 1.0);
    assert_eq!(settled("moody", "dead"), 1.0);
    assert_eq!(settled("", "split"), 1.0);
    let all = metrics.value("diesel_outbox_settled_total", &[]);
    assert_eq!(all - settled("shop", "released"), 19.0);
    let retries = |attempt| metrics.value("diesel_outbox_retries_total", &[("attempt", attempt)]);
    assert_eq!((retries("1"), retries("2"), retries("3")), (1.0, 1.0, 0.0));
    let dead = [("destination", "moody"), ("reason", "REJECTED")];
    assert_eq!(metrics.value("diesel_outbox_dead_total", &dead), 1.0);
    assert_eq!(metrics.value("diesel_outbox_dead_total", &[]), 1.0);
    let dead = [("topic", "moody"), ("reason", "REJECTED")];
    assert_eq!(metrics.value("diesel_outbox_dead_total", &dead), 1.0);
    // R38.
    let dispatched = |topic, result| {
        let labels = [("topic", topic), ("result", result)];
        metrics.value("diesel_outbox_dispatch_seconds_count", &labels)
    };
    assert_eq!(dispatched("moody", "delivered"), 1.0);
    assert_eq!(dispatched("moody", "retry"), 2.0);
    assert_eq!(dispatched("moody", "dead"), 1.0);
    assert_eq!(dispatched("order.paid", "delivered"), 11.0);
    assert_eq!(dispatched("both", "delivered"), 2.0);
    let all = metrics.value("diesel_outbox_dispatch_seconds_count", &[]);
    assert_eq!(all, 17.0);
    let stats = relay.stats();
    assert_eq!(
        metrics.value("diesel_outbox_claimed_total", &[]),
        number(stats.claimed)
    );
    let counted = |name: &str, destination| {
        let name = format!("{name}_seconds_count");
        metrics.value(&name, &[("destination", destination)])
    };
    assert_eq!(counted("diesel_outbox_send", "shop"), 12.0);
    assert_eq!(counted("diesel_outbox_send", "moody"), 4.0);
    assert_eq!(counted("diesel_outbox_queue_wait", "moody"), 4.0);
    assert_eq!(counted("diesel_outbox_delivery", "moody"), 1.0);
    assert_eq!(counted("diesel_outbox_delivery", "shop"), 12.0);
    let claims = metrics.value("diesel_outbox_claim_seconds_count", &[]);
    assert_eq!(claims, number(program::statements(&stats).claims));
    let settles = metrics.value("diesel_outbox_settle_seconds_count", &[]);
    assert_eq!(settles, number(program::statements(&stats).settles));
    let took = metrics.value(
        "diesel_outbox_delivery_seconds_sum",
        &[("destination", "moody")],
    );
    // Two retries of at least 50 ms.
    assert!((0.1..60.0).contains(&took), "{took}");
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).expect("a small number"))
}

/// R29: takeovers between relays.
#[test]
fn takeovers_lost_leases_and_conflicts_are_counted() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    database.enqueue("order.paid", json!(1));
    let (gate, pass) = Gate::new();
    let relay = database
        .relay()
        .dispatcher(Dispatch(move |_: &Message| {
            pass();
            delivered()
        }))
        .start()
        .expect("a relay");
    eventually("the relay sends", || {
        program::destination_states(&relay)
            .iter()
            .any(|one| one.busy == 1)
    });
    database.execute("UPDATE {o}_lease SET expires_at = now() - interval '1 s'");
    let second = database.relay().url(&Receiver::ok().url()).start();
    let second = second.expect("a relay");
    eventually("the second relay takes the message over", || {
        second.stats().processed() == 1 || second.stats().retried == 1
    });
    eventually("the first relay's lease is lost", || {
        relay.stats().leases_lost == 1
    });
    drop(gate);
    eventually("the first relay's outcome changes nothing", || {
        relay.stats().conflicts == 1
    });
    let value = |name| metrics.value(name, &[]);
    assert_eq!(value("diesel_outbox_taken_over_total"), 1.0);
    assert_eq!(value("diesel_outbox_leases_lost_total"), 1.0);
    assert_eq!(value("diesel_outbox_conflicts_total"), 1.0);
    end(&relay);
    end(&second);
}

/// R29: breakers, wake-ups by cause, and errors by thread.
#[test]
fn breakers_wake_ups_and_errors_are_counted() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let receiver = Receiver::answering(|_| 500);
    let mut destination = Destination::new("billing", &receiver.url()).expect("a URL");
    let mut breaker = Breaker::default();
    (breaker.min_sends, breaker.open) = (5, Duration::from_secs(300));
    destination.policy.breaker = Some(breaker);
    let relay = database
        .relay()
        .poll_interval(Duration::from_secs(600))
        .destination(destination)
        .route("billing", "billing")
        .start()
        .expect("a relay");
    let billing = [("destination", "billing")];
    assert_eq!(
        metrics.value("diesel_outbox_breaker_opened_total", &billing),
        0.0
    );
    // Until it sleeps, a relay finds messages without a notification.
    eventually("the relay sleeps", || database.is_relay_asleep());
    let woken = |source| metrics.value("diesel_outbox_wake_ups_total", &[("source", source)]);
    for _ in 0..20 {
        database.enqueue("billing", json!(1));
    }
    eventually("the breaker opens", || {
        metrics.value("diesel_outbox_breaker_opened_total", &billing) == 1.0
    });
    assert!(woken("notification") >= 1.0);
    assert_eq!((woken("call"), woken("poll")), (0.0, 0.0));
    relay.wake();
    assert_eq!(woken("call"), 1.0);
    relay.record_metrics();
    assert_eq!(metrics.value("diesel_outbox_breaker_open", &billing), 1.0);
    let state = program::destination_states(&relay)
        .into_iter()
        .find(|one| one.name == "billing");
    assert_eq!(state.expect("it is there").state, "breaker_open");

    let errors = || {
        metrics.value(
            "diesel_outbox_database_errors_total",
            &[("thread", "claimer")],
        )
    };
    assert_eq!(errors(), 0.0);
    database.execute("ALTER TABLE {o}_pause RENAME TO elsewhere");
    relay.wake();
    eventually("the claimer fails", || errors() >= 1.0);
    end(&relay);
}

/// R29: the gauges count waiting messages, also those that no relay touches, and fall to zero afterwards.
#[test]
fn gauges_say_how_much_waits_and_fall_to_zero() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let outbox = database.outbox_name();
    let waits = (Pausable::Topic, "waits");
    let mut conn = database.connect();
    admin::pause(&mut conn, &outbox, waits.0, waits.1, "test", None).expect("paused");
    // Messages in every state, some claimed by another relay.
    database.execute(
        "INSERT INTO {o}_lease (relay, expires_at) VALUES ('other:1', now() + interval '1 h')",
    );
    database.execute(
        "INSERT INTO {o} (topic, destination, payload, attempts, available_at, locked_by, locked_at) VALUES
            ('waits', '', '1', 0, now() - interval '90 s', NULL, NULL),
            ('waits', '', '2', 0, now() - interval '30 s', NULL, NULL),
            ('waits', 'made up', '3', 0, now(), NULL, NULL),
            ('waits', 'made up, too', '4', 0, now(), NULL, NULL),
            ('fails', '', '5', 1, now() + interval '1 h', NULL, NULL),
            ('sends', '', '6', 0, now(), (SELECT max(id) FROM {o}_lease), now())",
    );
    let dying = database
        .relay()
        .dispatcher(Dispatch(|_: &Message| {
            Outcome::Dead(Failure::new(ReasonCode::Rejected, "never"))
        }))
        .start()
        .expect("a relay");
    database.enqueue("dies", json!(1));
    eventually("the message is dead-lettered", || dying.stats().dead == 1);
    eventually("the dead letter is counted", || {
        let labels = [("topic", "dies"), ("status", "dead")];
        metrics.find("diesel_outbox_messages", &labels) == Some(1.0)
    });
    end(&dying);
    let counted = metrics.value("diesel_outbox_messages", &[]);
    assert_eq!(counted, 0.0, "nobody counts any more");

    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    let messages = |topic, status| {
        let labels = [("topic", topic), ("status", status)];
        metrics.find("diesel_outbox_messages", &labels)
    };
    let is_paused = || {
        relay.record_metrics();
        metrics.find("diesel_outbox_topic_paused", &[("topic", "waits")])
    };
    eventually("the topic shows as paused", || is_paused() == Some(1.0));
    eventually("the gauges show all messages", || {
        messages("waits", "pending") == Some(4.0)
            && messages("fails", "retrying") == Some(1.0)
            && messages("sends", "sending") == Some(1.0)
            && messages("dies", "dead") == Some(1.0)
    });
    // Made-up destinations share one series.
    let made_up = [
        ("topic", "waits"),
        ("destination", "other"),
        ("status", "pending"),
    ];
    assert_eq!(metrics.find("diesel_outbox_messages", &made_up), Some(2.0));
    let oldest = |topic| metrics.find("diesel_outbox_oldest_due_seconds", &[("topic", topic)]);
    let age = oldest("waits").expect("a gauge");
    assert!((90.0..180.0).contains(&age), "{age}");
    assert_eq!(oldest("fails"), Some(0.0), "the message is not due yet");

    database.execute("UPDATE {o} SET available_at = now(), destination = ''");
    database.execute(
        "UPDATE {o}_lease SET expires_at = now() - interval '1 s' WHERE relay = 'other:1'",
    );
    database.execute("DELETE FROM {o}_dead");
    admin::resume(&mut conn, &outbox, waits.0, waits.1).expect("resumed");
    eventually("all messages are delivered", || {
        relay.stats().delivered == 6
    });
    eventually("the gauges show that nothing is left", || {
        metrics.value("diesel_outbox_messages", &[]) == 0.0
            && metrics.value("diesel_outbox_oldest_due_seconds", &[]) == 0.0
    });
    end(&relay);
}

/// R29: what a relay holds at the moment, and nothing after the relay has ended.
#[test]
fn gauges_say_what_the_relay_does_just_now() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let (gate, pass) = Gate::new();
    let relay = database
        .relay()
        .concurrency(2)
        .dispatcher(Dispatch(move |_: &Message| {
            pass();
            delivered()
        }))
        .start()
        .expect("a relay");
    for n in 0..5 {
        database.enqueue("order.paid", json!(n));
    }
    eventually("two messages are in flight and three wait", || {
        let all = program::destination_states(&relay);
        all[0].busy == 2 && all[0].queued == 3
    });
    relay.record_metrics();
    let value = |name: &str| metrics.value(&format!("diesel_outbox_{name}"), &[]);
    assert_eq!(value("threads"), 2.0);
    assert_eq!(value("threads_busy"), 2.0);
    assert_eq!(value("queued"), 3.0);
    assert_eq!(value("in_flight"), 5.0);
    assert_eq!((value("live"), value("ready")), (1.0, 1.0));
    assert_eq!(value("problem"), 0.0);
    // Of a lease of 3 s, with a margin for a send of 1 s.
    assert!((0.1..=2.0).contains(&value("lease_seconds_left")));
    eventually("all threads but the settler have connected", || {
        relay.record_metrics();
        value("connections") == 4.0 && value("listener_connected") == 1.0
    });
    drop(gate);
    eventually("all messages are delivered", || {
        relay.stats().delivered == 5
    });
    relay.record_metrics();
    assert_eq!(
        (value("queued"), value("in_flight"), value("threads_busy")),
        (0.0, 0.0, 0.0)
    );
    end(&relay);
    let gone = [
        "live",
        "ready",
        "threads",
        "connections",
        "lease_seconds_left",
    ];
    for name in gone {
        assert_eq!(value(name), 0.0, "{name}");
    }
}

/// R29: the connections that handlers hold.
#[test]
fn connections_of_the_handlers_pool_are_counted() {
    let database = Database::new();
    let metrics = Metrics::of(&database);
    let (gate, pass) = Gate::new();
    let url = database.url.clone();
    let relay = database
        .relay()
        .connections(move || PgConnection::establish(&url).map(Box::new))
        .on_topic_pooled("t", move |_, context| {
            let _conn = context.connection()?;
            pass();
            Ok(())
        })
        .start()
        .expect("a relay");
    let in_use = || metrics.value("diesel_outbox_pool_connections_in_use", &[]);
    database.enqueue("t", json!(1));
    eventually("the handler holds a connection", || in_use() == 1.0);
    drop(gate);
    eventually("the connection is returned", || in_use() == 0.0);
    end(&relay);
}
