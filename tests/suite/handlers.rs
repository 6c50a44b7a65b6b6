//! Handlers in the process: their input, their results, and handlers that panic or take too long.

mod late;
mod observers;
mod once;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::config::Rate;
use diesel_outbox::handlers::{HandlerError, Handlers};
use diesel_outbox::{
    Backoff, Destination, Event, Message, NewMessage, Observer, Outcome, Settled, ShutdownError,
    StartError,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::support::{Database, Gate, PATIENCE, Receiver, end, eventually};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct MemberJoined {
    member_id: i64,
}

impl Event for MemberJoined {
    const TOPIC: &'static str = "member.joined";
}

#[derive(Serialize, Deserialize)]
struct MemberLeft {
    member_id: i64,
}

impl Event for MemberLeft {
    const TOPIC: &'static str = "member.left";
}

fn join(database: &Database, member_id: i64) -> i64 {
    database
        .outbox()
        .enqueue(&mut database.connect(), MemberJoined { member_id })
        .expect("enqueued")
        .sequence
        .0
}

/// R16
#[test]
fn a_handler_gets_the_events_of_its_topic_and_urls_get_the_rest() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 200);
    let (heard, hear) = mpsc::channel();
    let relay = database
        .relay()
        .on::<MemberJoined>(move |event, context| {
            let message = context.message();
            heard.send((event, message.topic.clone(), context.attempt()))?;
            assert!(!context.remaining().is_zero());
            Ok(())
        })
        .url(&receiver.url())
        .start()
        .expect("a relay");
    join(&database, 7);
    database.enqueue("order.paid", json!(1));
    let event = MemberJoined { member_id: 7 };
    assert_eq!(
        hear.recv_timeout(PATIENCE),
        Ok((event, "member.joined".to_owned(), 1))
    );
    eventually("both messages are delivered", || {
        database.count("delivered") == 2
    });
    let topics: Vec<_> = receiver
        .requests()
        .iter()
        .filter_map(|request| request.header("ce-type").map(str::to_owned))
        .collect();
    assert_eq!(topics, ["order.paid"]);
    end(&relay);
}

/// R16
#[test]
fn a_topic_without_a_handler_is_a_visible_error_and_no_silent_success() {
    let database = Database::new();
    let relay = database
        .relay()
        .on::<MemberJoined>(|_, _| Ok(()))
        .start()
        .expect("a relay");
    database.enqueue("member.renamed", json!(1));
    let named = NewMessage::new("member.renamed", &1)
        .expect("JSON")
        .destination("handlers");
    database.enqueue_message(named);
    eventually("the relay reports both topics", || {
        let said = relay.health().to_string();
        said.contains("no_route") && said.contains("and 1 more")
    });
    assert_eq!(database.count("pending"), 2);
    assert_eq!(database.number("SELECT sum(attempts) FROM {o}"), 0);
    end(&relay);
}

#[test]
fn the_result_of_a_handler_decides_done_again_later_or_dead() {
    let database = Database::new();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let called = Arc::clone(&calls);
    let relay = database
        .relay()
        .on::<MemberJoined>(move |event, context| {
            let mut calls = called.lock().unwrap_or_else(PoisonError::into_inner);
            calls.push((event.member_id, context.attempt(), Instant::now()));
            match (event.member_id, context.attempt()) {
                (1, 1) => Err(HandlerError::retry("not yet")),
                (2, 1) => Err(HandlerError::retry_after(
                    "busy",
                    Duration::from_millis(400),
                )),
                (3, _) => Err(HandlerError::dead("no such member")),
                (4, 1) => {
                    "x".parse::<u32>()?;
                    Ok(())
                }
                _ => Ok(()),
            }
        })
        .start()
        .expect("a relay");
    for member_id in 0..5 {
        join(&database, member_id);
    }
    eventually("four messages are delivered", || {
        database.count("delivered") == 4
    });
    eventually("one message is dead-lettered", || {
        database.count("dead") == 1
    });
    assert_eq!(
        database.text("SELECT last_error || ' ' || reason || ' ' || attempts FROM {o}_dead"),
        Some("no such member FAILED 1".to_owned())
    );
    let calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
    let of = |member: i64| {
        let of_member = calls.iter().filter(move |(id, ..)| *id == member);
        of_member.collect::<Vec<_>>()
    };
    let counts: Vec<usize> = (0..5).map(|member| of(member).len()).collect();
    assert_eq!(counts, [1, 2, 2, 1, 2]);
    let again = of(2);
    assert!(again[1].2.duration_since(again[0].2) >= Duration::from_millis(400));
    end(&relay);
}

/// R45, G6
#[test]
fn a_snoozed_message_comes_again_when_asked_and_costs_no_attempt() {
    let database = Database::new();
    let (heard, hear) = mpsc::channel();
    let relay = database
        .relay()
        .max_attempts(1)
        // The backoff is longer than the snooze.
        .backoff(Backoff::Table(vec![Duration::from_secs(3600)]))
        .on::<MemberJoined>(move |_, context| {
            heard.send((context.attempt(), Instant::now()))?;
            if context.message().created_at.elapsed()? < Duration::from_millis(900) {
                return Err(HandlerError::snooze(Duration::from_millis(300)));
            }
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("the message waits", || {
        database.text("SELECT last_error_code || ' ' || attempts || ': ' || last_error FROM {o}")
            == Some("SNOOZED 0: the handler asked to wait for 300ms".to_owned())
    });
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    let calls: Vec<_> = hear.try_iter().collect();
    assert!(calls.len() > 1);
    assert!(calls.iter().all(|(attempt, _)| *attempt == 1));
    for pair in calls.windows(2) {
        assert!(pair[1].1.duration_since(pair[0].1) >= Duration::from_millis(300));
    }
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
    end(&relay);
}

/// R45
#[test]
fn a_group_has_its_own_attempts_backoff_and_rate() {
    let database = Database::new();
    let (heard, hear) = mpsc::channel();
    let failing = |delay| {
        let handlers = Handlers::new().backoff(Backoff::Table(vec![delay]));
        handlers.on::<MemberJoined>(|_, _| Err(HandlerError::retry("always")))
    };
    let often = failing(Duration::from_millis(10)).max_attempts(4);
    let never = failing(Duration::from_secs(3600)).max_attempts(2);
    let limited = Handlers::new()
        .rate(Rate::per_second(10.0))
        .on::<MemberLeft>(move |_, _| Ok(heard.send(Instant::now())?));
    let relay = database
        .relay()
        .handlers("often", often)
        .handlers("never", never)
        .handlers("limited", limited)
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("one group has given up", || database.count("dead") == 1);
    assert_eq!(
        database.text("SELECT destination || ' ' || attempts FROM {o}_dead"),
        Some("often 4".to_owned())
    );
    assert_eq!(
        database.text("SELECT destination || ' ' || attempts FROM {o}"),
        Some("never 1".to_owned())
    );
    for _ in 0..5 {
        database.enqueue("member.left", json!({ "member_id": 1 }));
    }
    eventually("all messages are handled", || {
        database.count("delivered") == 5
    });
    let calls: Vec<Instant> = hear.try_iter().collect();
    let took = calls[4].duration_since(calls[0]);
    // One message at once, then one every tenth of a second.
    assert!(took >= Duration::from_millis(390), "{took:?}");
    end(&relay);
}

/// R22, R24
#[test]
fn a_payload_of_another_shape_is_dead_at_once_and_a_newer_version_waits_for_a_newer_program() {
    let database = Database::new();
    let relay = database
        .relay()
        .on::<MemberJoined>(|_, _| Ok(()))
        .start()
        .expect("a relay");
    database.enqueue("member.joined", json!({ "member_id": "my secret" }));
    let newer = NewMessage::new("member.joined", &json!({ "id": 1 }))
        .expect("JSON")
        .header("ce-dataversion", "2");
    database.enqueue_message(newer);
    // Header names are case-insensitive.
    database.execute(
        r#"INSERT INTO {o} (topic, payload, headers)
           VALUES ('member.joined', '{"id":1}', '{"CE-DataVersion":"2"}')"#,
    );
    eventually("one message is dead-lettered", || {
        database.count("dead") == 1
    });
    assert_eq!(
        database.text("SELECT reason || ': ' || last_error FROM {o}_dead"),
        Some(
            "UNDECODABLE: cannot decode the payload: unexpected JSON shape at line 1, column 24"
                .to_owned()
        )
    );
    eventually("two messages wait", || database.count("retrying") == 2);
    assert_eq!(
        database.text(
            "SELECT string_agg(DISTINCT last_error_code || ': ' || last_error, ' ') FROM {o}"
        ),
        Some(
            "UNDECODABLE: cannot decode the payload: unsupported version 2, expected 1".to_owned()
        )
    );
    end(&relay);
}

#[test]
fn groups_and_urls_each_get_a_message_of_their_own() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 200);
    let counts: [Arc<AtomicUsize>; 2] = Default::default();
    let [mails, members] = counts.clone();
    let mailer = Handlers::new().on::<MemberJoined>(move |_, context| {
        // The other group's message continues meanwhile.
        if context.attempt() == 1 {
            return Err(HandlerError::retry("the mail server is down"));
        }
        mails.fetch_add(1, Ordering::SeqCst);
        Ok(())
    });
    let statistics = Handlers::new().on_topic("member.joined", move |message: &Message, _| {
        assert!(message.payload.contains("member_id"));
        members.fetch_add(1, Ordering::SeqCst);
        Ok(())
    });
    let crm = Destination::new("crm", &receiver.url()).expect("a URL");
    let relay = database
        .relay()
        .handlers("mailer", mailer)
        .handlers("statistics", statistics)
        .destination(crm)
        .route_to_each("member.joined", &["mailer", "statistics", "crm"])
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("all three have the message", || {
        database.count("delivered") == 3
    });
    let [mails, members] = counts.map(|count| count.load(Ordering::SeqCst));
    assert_eq!((mails, members, receiver.requests().len()), (1, 1, 1));
    assert_eq!(
        database.text(
            "SELECT string_agg(destination || attempts, ' ' ORDER BY destination) FROM {o}_ledger"
        ),
        Some("crm1 mailer2 statistics1".to_owned())
    );
    end(&relay);
}

#[test]
fn handlers_work_on_connections_of_the_applications_pool() {
    let database = Database::new();
    database.execute(&format!(
        "CREATE TABLE {}.members (id bigint)",
        database.schema()
    ));
    let pool = Pool::builder()
        .max_size(2)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool");
    let insert = format!("INSERT INTO {}.members VALUES (1)", database.schema());
    let relay = database
        .relay()
        .connections(move || pool.get())
        .on_pooled::<MemberJoined>(move |_, context| {
            sql_query(&insert).execute(&mut *context.connection()?)?;
            Ok(())
        })
        .start()
        .expect("a relay");
    for member_id in 0..10 {
        join(&database, member_id);
    }
    eventually("all messages are handled", || {
        database.count("delivered") == 10
    });
    let members = format!("SELECT count(*) FROM {}.members", database.schema());
    assert_eq!(database.number(&members), 10);
    end(&relay);
}

/// R53
#[test]
fn handlers_have_a_pool_of_their_own_and_take_no_connection_from_the_application() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let held = Arc::new(AtomicUsize::new(0));
    let (holding, own) = (held.clone(), database.name());
    let relay = database
        .relay()
        .concurrency(3)
        .on_pooled::<MemberJoined>(move |_, context| {
            let mut conn = context.connection()?;
            sql_query(format!("SELECT FROM {own}")).execute(&mut *conn)?;
            holding.fetch_add(1, Ordering::SeqCst);
            pass();
            Ok(())
        })
        .start()
        .expect("a relay");
    for member_id in 0..6 {
        join(&database, member_id);
    }
    eventually("three calls hold a connection each", || {
        held.load(Ordering::SeqCst) == 3
    });
    gate.open();
    eventually("all messages are handled", || {
        database.count("delivered") == 6
    });
    end(&relay);
}

/// R53: the pool of the application has no connection left for longer than any attempt lasts.
#[test]
fn a_handler_without_a_connection_has_not_failed() {
    let database = Database::new();
    let pool = Pool::builder()
        .max_size(1)
        .connection_timeout(Duration::from_millis(20))
        .build_unchecked(ConnectionManager::<PgConnection>::new(&database.url));
    let request = pool.get_timeout(PATIENCE);
    let request = request.expect("the connection of a web request");
    let relay = database
        .relay()
        .connections(move || pool.get())
        .max_attempts(1)
        .on_pooled::<MemberJoined>(|_, context| context.connection().map(drop))
        .start()
        .expect("a relay");
    for member_id in 0..5 {
        join(&database, member_id);
    }
    eventually("each message waits for a connection", || {
        database.number(
            "SELECT count(*) FROM {o} WHERE last_error_code = 'NO_CONNECTION' AND attempts = 0",
        ) == 5
    });
    drop(request);
    eventually("all messages are handled", || {
        database.count("delivered") == 5
    });
    assert_eq!(database.count("dead"), 0);
    end(&relay);
}

#[test]
fn a_group_is_paused_and_resumed_by_its_name_like_any_destination() {
    let database = Database::new();
    let name = database.outbox_name();
    let conn = &mut database.connect();
    let kind = diesel_outbox::admin::Pausable::Destination;
    diesel_outbox::admin::pause(conn, &name, kind, "handlers", "by a test", None).expect("paused");
    let relay = database
        .relay()
        .on::<MemberJoined>(|_, _| Ok(()))
        .on::<MemberLeft>(|_, _| panic!("no member has left"))
        .url(&Receiver::answering(|_| 200).url())
        .start()
        .expect("a relay");
    join(&database, 1);
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(database.count("pending"), 1);
    diesel_outbox::admin::resume(conn, &name, kind, "handlers").expect("resumed");
    eventually("the message is handled", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    end(&relay);
}

/// G5
#[test]
fn handlers_keep_the_order_of_a_key() {
    let database = Database::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&seen);
    let relay = database
        .relay()
        .on_topic("member.joined", move |message, context| {
            let n: usize = serde_json::from_str(&message.payload)?;
            if n.is_multiple_of(7) && context.attempt() == 1 {
                return Err(HandlerError::retry("once more"));
            }
            list.lock().unwrap_or_else(PoisonError::into_inner).push(n);
            Ok(())
        })
        .start()
        .expect("a relay");
    let messages = (0..40).map(|n| {
        let message = NewMessage::new("member.joined", &n).expect("JSON");
        message.ordering_key("club")
    });
    database
        .outbox()
        .enqueue_batch(&mut database.connect(), messages)
        .expect("enqueued");
    eventually("all messages are handled", || {
        database.count("delivered") == 40
    });
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(*seen, (0..40).collect::<Vec<_>>());
    end(&relay);
}

#[test]
fn groups_that_cannot_be_meant_are_refused_at_the_start() {
    let database = Database::new();
    let group = || Handlers::new().on::<MemberJoined>(|_, _| Ok(()));
    let crm = || Destination::new("crm", "http://crm.test/").expect("a URL");
    for (relay, named) in [
        (
            database
                .relay()
                .on::<MemberJoined>(|_, _| Ok(()))
                .on::<MemberJoined>(|_, _| Ok(())),
            "\"member.joined\" has two handlers",
        ),
        (
            database
                .relay()
                .handlers("a", group())
                .handlers("a", group()),
            "handlers.a",
        ),
        (
            database.relay().handlers("a", Handlers::new()),
            "handlers.a",
        ),
        (database.relay().handlers("", group()), "handlers."),
        (
            database.relay().on_topic("member.*", |_, _| Ok(())),
            "is a pattern",
        ),
        (
            database.relay().handlers("crm", group()).destination(crm()),
            "handlers.crm",
        ),
        (
            database
                .relay()
                .handlers("a", group())
                .destination(crm())
                .route("member.joined", "crm"),
            "to the route",
        ),
        (
            database.relay().handlers("a", group().concurrency(0)),
            "handlers.a.concurrency",
        ),
        (
            database
                .relay()
                .handlers("a", group().timeout(Duration::ZERO)),
            "handlers.a.timeout",
        ),
        (
            database.relay().handlers("a", group().max_attempts(0)),
            "handlers.a.max_attempts",
        ),
        (
            database.relay().handlers("a", {
                let mut rate = Rate::per_second(1.0);
                rate.burst = 0;
                group().rate(rate)
            }),
            "handlers.a.burst",
        ),
    ] {
        let error = relay.start().expect_err(named);
        assert!(
            matches!(&error, StartError::Config(error) if error.to_string().contains(named)),
            "{named}: {error}"
        );
    }
}
