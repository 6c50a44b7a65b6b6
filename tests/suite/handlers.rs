//! Handlers in the process: what they are given, what they say, and what becomes of those that panic
//! or take too long.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::{
    Destination, Event, HandlerError, Handlers, Message, NewMessage, Observer, Outcome, Settled,
    StartError,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::support::{Database, PATIENCE, Receiver, eventually};

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

fn stop(relay: diesel_outbox::RelayHandle) {
    relay.shutdown(PATIENCE).expect("a clean end");
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
    eventually("both are delivered", || database.count("delivered") == 2);
    let topics: Vec<_> = receiver
        .requests()
        .iter()
        .filter_map(|request| request.header("ce-type").map(str::to_owned))
        .collect();
    assert_eq!(topics, ["order.paid"]);
    stop(relay);
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
    eventually("both are tried again", || database.count("retrying") == 2);
    assert_eq!(
        database.text("SELECT string_agg(DISTINCT last_error_code, ' ') FROM {o}"),
        Some("NO_ROUTE".to_owned())
    );
    assert_eq!(database.count("delivered"), 0);
    stop(relay);
}

#[test]
fn what_a_handler_says_decides_done_again_later_or_dead() {
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
    eventually("four are done", || database.count("delivered") == 4);
    eventually("one is dead", || database.count("dead") == 1);
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
    stop(relay);
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
    // Names of headers have no case.
    database.execute(
        r#"INSERT INTO {o} (topic, payload, headers)
           VALUES ('member.joined', '{"id":1}', '{"CE-DataVersion":"2"}')"#,
    );
    eventually("one is dead", || database.count("dead") == 1);
    assert_eq!(
        database.text("SELECT reason || ': ' || last_error FROM {o}_dead"),
        Some("UNDECODABLE: the payload cannot be read: the JSON has another shape at line 1, column 24".to_owned())
    );
    eventually("two wait", || database.count("retrying") == 2);
    assert_eq!(
        database.text(
            "SELECT string_agg(DISTINCT last_error_code || ': ' || last_error, ' ') FROM {o}"
        ),
        Some(
            "UNDECODABLE: the payload cannot be read: it is of version 2; version 1 is known"
                .to_owned()
        )
    );
    stop(relay);
}

/// Keeps the lines of the events that the tests here look for. One for the whole process.
struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl log::Log for Lines {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        let event = record.key_values().get("event".into());
        let event = event.map_or_else(String::new, |event| event.to_string());
        if ["dispatch_panic", "handler_stuck", "handler_late"].contains(&event.as_str()) {
            let line = format!("{event}: {}", record.args());
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
    }

    fn flush(&self) {}
}

fn keep_log_lines() {
    static SET: std::sync::Once = std::sync::Once::new();
    SET.call_once(|| {
        log::set_logger(&LINES).expect("nobody else sets one");
        log::set_max_level(log::LevelFilter::Warn);
    });
}

/// Whether such a line was logged that names the message of this sequence.
fn is_logged(database: &Database, event: &str, sequence: i64) -> bool {
    let id = database.text(&format!(
        "SELECT message_id FROM {{o}} WHERE sequence = {sequence}
         UNION ALL SELECT message_id FROM {{o}}_dead WHERE sequence = {sequence}
         UNION ALL SELECT message_id FROM {{o}}_ledger WHERE sequence = {sequence} LIMIT 1"
    ));
    let id = id.expect("the message is somewhere");
    let lines = LINES.0.lock().unwrap_or_else(PoisonError::into_inner);
    lines
        .iter()
        .any(|line| line.starts_with(event) && line.contains(&id))
}

/// R17
#[test]
fn a_panic_is_an_error_of_its_message_and_of_nothing_else() {
    keep_log_lines();
    let database = Database::new();
    let relay = database
        .relay()
        .max_attempts(2)
        .on::<MemberJoined>(|event, _| {
            assert!(event.member_id != 13, "thirteen");
            Ok(())
        })
        .start()
        .expect("a relay");
    let thirteen = join(&database, 13);
    for member_id in 20..40 {
        join(&database, member_id);
    }
    eventually("the others are handled", || {
        database.count("delivered") == 20
    });
    eventually("it is dead", || database.count("dead") == 1);
    assert_eq!(
        database.text("SELECT reason || ' ' || attempts || ' ' || last_error FROM {o}_dead"),
        Some("PANIC 2 the dispatcher or handler panicked: thirteen".to_owned())
    );
    assert!(is_logged(&database, "dispatch_panic", thirteen));
    assert!(relay.is_healthy());
    stop(relay);
}

/// R17, R24
#[test]
fn a_panics_text_that_may_quote_the_payload_is_not_kept() {
    let database = Database::new();
    let relay = database
        .relay()
        .max_attempts(1)
        .on_topic("a", |message, _| {
            let n: Result<u32, _> = serde_json::from_str(&message.payload);
            n.expect("a number");
            Ok(())
        })
        .start()
        .expect("a relay");
    database.enqueue("a", json!("hunter2"));
    eventually("it is dead", || database.count("dead") == 1);
    let error = database.text("SELECT last_error FROM {o}_dead");
    let error = error.expect("a text");
    assert!(
        error.contains("panicked") && !error.contains("hunter2"),
        "{error}"
    );
    stop(relay);
}

/// R17
#[test]
fn a_stuck_handler_loses_its_message_and_its_late_result_does_not_count() {
    keep_log_lines();
    let database = Database::new();
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let calls = Arc::new(AtomicUsize::new(0));
    let (count, late) = (Arc::clone(&calls), Arc::new(AtomicUsize::new(0)));
    let ended = Arc::clone(&late);
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(200))
        .concurrency(1)
        .on::<MemberJoined>(move |_, _| {
            if count.fetch_add(1, Ordering::SeqCst) == 0 {
                // Nothing is ever sent: this ends when the gate is dropped.
                let _ = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
                ended.fetch_add(1, Ordering::SeqCst);
                return Err(HandlerError::dead("too late to say so"));
            }
            Ok(())
        })
        .on::<MemberLeft>(|_, _| Ok(()));
    let relay = database
        .relay()
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    let stuck = join(&database, 1);
    // The message is handed over, to another thread, while the first one is still at it.
    eventually("it is handled by another call", || {
        database.count("delivered") == 1
    });
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert_eq!(late.load(Ordering::SeqCst), 0);
    assert_eq!(
        database.number("SELECT attempts FROM {o}_ledger"),
        2,
        "its time was a failed attempt"
    );
    assert!(is_logged(&database, "handler_stuck", stuck));
    drop(gate);
    eventually("the first call ends", || late.load(Ordering::SeqCst) == 1);
    eventually("it is told that it was too late", || {
        is_logged(&database, "handler_late", stuck)
    });
    database.enqueue("member.left", json!({ "member_id": 1 }));
    eventually("the group goes on", || database.count("delivered") == 2);
    assert_eq!(database.count("dead"), 0);
    stop(relay);
}

#[test]
fn while_64_handlers_are_stuck_messages_wait_and_no_attempt_is_counted() {
    let database = Database::new();
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(50))
        .concurrency(16)
        .on::<MemberJoined>(move |event, _| {
            count.fetch_add(1, Ordering::SeqCst);
            if event.member_id == 1 {
                let _ = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
            }
            Ok(())
        });
    let relay = database
        .relay()
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    for _ in 0..64 {
        join(&database, 1);
    }
    eventually("all of them are stuck", || {
        calls.load(Ordering::SeqCst) >= 64
    });
    let second = join(&database, 2);
    eventually("the second one waits", || {
        database.number(&format!(
            "SELECT count(*) FROM {{o}} WHERE sequence = {second} AND last_error LIKE '% handlers are at work%' AND attempts = 0"
        )) == 1
    });
    // As many as were begun at once may go beyond it.
    assert!(calls.load(Ordering::SeqCst) < 64 + 16);
    drop(gate);
    eventually("all are handled", || database.count("delivered") == 65);
    assert_eq!(
        database.number(&format!(
            "SELECT attempts FROM {{o}}_ledger WHERE sequence = {second}"
        )),
        1
    );
    stop(relay);
}

#[test]
fn groups_and_urls_each_get_a_message_of_their_own() {
    let database = Database::new();
    let receiver = Receiver::answering(|_| 200);
    let counts: [Arc<AtomicUsize>; 2] = Default::default();
    let [mails, members] = counts.clone();
    let mailer = Handlers::new().on::<MemberJoined>(move |_, context| {
        // The other group's message goes on meanwhile.
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
    eventually("all three have it", || database.count("delivered") == 3);
    let [mails, members] = counts.map(|count| count.load(Ordering::SeqCst));
    assert_eq!((mails, members, receiver.requests().len()), (1, 1, 1));
    assert_eq!(
        database.text(
            "SELECT string_agg(destination || attempts, ' ' ORDER BY destination) FROM {o}_ledger"
        ),
        Some("crm1 mailer2 statistics1".to_owned())
    );
    stop(relay);
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
        .on::<MemberJoined>(move |_, context| {
            sql_query(&insert).execute(&mut *context.connection()?)?;
            Ok(())
        })
        .start()
        .expect("a relay");
    for member_id in 0..10 {
        join(&database, member_id);
    }
    eventually("all are handled", || database.count("delivered") == 10);
    let members = format!("SELECT count(*) FROM {}.members", database.schema());
    assert_eq!(database.number(&members), 10);
    stop(relay);
}

fn pool_of(database: &Database) -> Pool<ConnectionManager<PgConnection>> {
    Pool::builder()
        .max_size(4)
        .build(ConnectionManager::<PgConnection>::new(&database.url))
        .expect("a pool")
}

/// A table that counts members.
fn club(database: &Database) -> String {
    let club = format!("{}.club", database.schema());
    database.execute(&format!("CREATE TABLE {club} (members bigint)"));
    database.execute(&format!("INSERT INTO {club} VALUES (0)"));
    club
}

/// R33
#[test]
fn what_a_handler_does_once_is_done_once_also_where_it_is_called_again() {
    let database = Database::new();
    let club = club(&database);
    let (pool, calls) = (pool_of(&database), Arc::new(AtomicUsize::new(0)));
    let duplicates = Arc::new(AtomicUsize::new(0));
    let (counted, repeated) = (Arc::clone(&calls), Arc::clone(&duplicates));
    let add = format!("UPDATE {club} SET members = members + 1");
    let group = || {
        let (add, counted, repeated) = (add.clone(), counted.clone(), repeated.clone());
        Handlers::new().on::<MemberJoined>(move |event, context| {
            counted.fetch_add(1, Ordering::SeqCst);
            let once = context.once(|conn| {
                sql_query(&add).execute(conn)?;
                if event.member_id == 1 && context.attempt() == 1 {
                    return Err(HandlerError::retry("rolled back"));
                }
                Ok(())
            })?;
            if once.is_duplicate() {
                repeated.fetch_add(1, Ordering::SeqCst);
            }
            assert!(
                event.member_id != 2 || context.attempt() > 2,
                "after the commit"
            );
            Ok(())
        })
    };
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("first", group())
        .handlers("second", group())
        .start()
        .expect("a relay");
    for member_id in 0..3 {
        join(&database, member_id);
    }
    eventually("both groups have all", || database.count("delivered") == 6);
    assert_eq!(
        database.number(&format!("SELECT members FROM {club}")),
        6,
        "each group once for each member"
    );
    // Member 0 once, 1 twice, 2 three times, of which two find it done.
    assert_eq!(calls.load(Ordering::SeqCst), 2 * (1 + 2 + 3));
    assert_eq!(duplicates.load(Ordering::SeqCst), 2 * 2);
    stop(relay);
}

/// R17, R33
#[test]
fn calls_behind_one_that_is_stuck_in_once_give_their_connections_back() {
    let database = Database::new();
    let pool = Pool::builder()
        .max_size(2)
        .build(ConnectionManager::<PgConnection>::new(&database.url));
    let pool = pool.expect("a pool");
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(300))
        .on::<MemberJoined>(move |event, context| {
            context.once(|conn| {
                // Nothing is ever sent: this ends when the gate is dropped.
                if event.member_id == 1 && context.attempt() == 1 {
                    let _ = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
                }
                Ok(sql_query("SELECT 1").execute(conn)?)
            })?;
            Ok(())
        });
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("members", handlers)
        .max_attempts(1000)
        .start()
        .expect("a relay");
    join(&database, 1);
    // More calls for it than the pool has connections.
    eventually("it was tried often", || {
        database.number("SELECT coalesce(max(attempts), 0) FROM {o}") >= 4
    });
    for member_id in 2..6 {
        join(&database, member_id);
    }
    eventually("the others are handled", || {
        database.count("delivered") == 4
    });
    drop(gate);
    eventually("it is handled", || database.count("delivered") == 5);
    stop(relay);
}

/// R33
#[test]
fn a_second_once_in_one_call_is_an_error_and_not_taken_for_done() {
    let database = Database::new();
    let club = club(&database);
    let pool = pool_of(&database);
    let add = format!("UPDATE {club} SET members = members + 1");
    let relay = database
        .relay()
        .connections(move || pool.get())
        .on::<MemberJoined>(move |_, context| {
            if context.attempt() == 1 {
                let failed = context.once(|_| Err::<(), _>(HandlerError::retry("not this way")));
                assert!(failed.is_err());
            }
            context.once(|conn| Ok(sql_query(&add).execute(conn)?))?;
            if context.attempt() < 3 {
                context.once(|_| Ok(()))?;
            }
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("it is told", || {
        let told =
            "SELECT count(*) FROM {o} WHERE last_error LIKE '%all of its work belongs into one'";
        database.number(told) == 1 || database.count("delivered") == 1
    });
    eventually("the third call is right", || {
        database.count("delivered") == 1
    });
    assert_eq!(database.number(&format!("SELECT members FROM {club}")), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 3);
    stop(relay);
}

/// R17, R33
#[test]
fn a_late_handler_commits_nothing_and_the_one_that_took_over_does() {
    let database = Database::new();
    let club = club(&database);
    let pool = pool_of(&database);
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let (ended, late) = mpsc::channel();
    let add = format!("UPDATE {club} SET members = members + 1");
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(200))
        .on::<MemberJoined>(move |_, context| {
            if context.attempt() > 1 {
                context.once(|conn| Ok(sql_query(&add).execute(conn)?))?;
                return Ok(());
            }
            let error = context.once(|conn| {
                // Nothing is ever sent: this ends when the gate is dropped.
                let _ = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
                Ok(sql_query(&add).execute(conn)?)
            });
            ended.send(format!("{error:?}"))?;
            Ok(())
        });
    let relay = database
        .relay()
        .connections(move || pool.get())
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    join(&database, 1);
    // The second call waits for the first one's transaction, and takes too long for it.
    eventually("it was handed over", || {
        database.number("SELECT coalesce(max(attempts), 0) FROM {o}") >= 1
    });
    drop(gate);
    let late = late.recv_timeout(PATIENCE).expect("it ends");
    assert!(late.contains("what it did was rolled back"), "{late}");
    eventually("another call does it", || database.count("delivered") == 1);
    assert_eq!(database.number(&format!("SELECT members FROM {club}")), 1);
    stop(relay);
}

#[test]
fn without_a_pool_a_handler_that_wants_one_is_told_so() {
    let database = Database::new();
    let relay = database
        .relay()
        .on::<MemberJoined>(|_, context| context.connection().map(drop))
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("it is told", || {
        let error = database.text("SELECT max(last_error) FROM {o}");
        error.is_some_and(|error| error.contains("RelayBuilder::connections"))
    });
    stop(relay);
}

#[test]
fn a_group_is_paused_and_resumed_by_its_name_like_any_destination() {
    let database = Database::new();
    let name = database.name().parse().expect("a name");
    let conn = &mut database.connect();
    let kind = diesel_outbox::admin::Pausable::Destination;
    diesel_outbox::admin::pause(conn, &name, kind, "handlers", "by a test", None).expect("paused");
    let relay = database
        .relay()
        .on::<MemberJoined>(|_, _| Ok(()))
        .on::<MemberLeft>(|_, _| panic!("nobody has left"))
        .url(&Receiver::answering(|_| 200).url())
        .start()
        .expect("a relay");
    join(&database, 1);
    assert!(relay.wait_until_idle(PATIENCE));
    assert_eq!(database.count("pending"), 1);
    diesel_outbox::admin::resume(conn, &name, kind, "handlers").expect("resumed");
    eventually("it is handled", || database.count("delivered") == 1);
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 1);
    stop(relay);
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
    eventually("all are handled", || database.count("delivered") == 40);
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(*seen, (0..40).collect::<Vec<_>>());
    stop(relay);
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
            "name it there, too",
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
            database
                .relay()
                .handlers("a", group().timeout(Duration::from_secs(2))),
            "OUTBOX_LEASE",
        ),
        (
            database
                .relay()
                .handlers("a", group().timeout(Duration::MAX)),
            "OUTBOX_LEASE",
        ),
    ] {
        let error = relay.start().expect_err(named);
        assert!(
            matches!(&error, StartError::Config(error) if error.to_string().contains(named)),
            "{named}: {error}"
        );
    }
}

/// Counts what it is told; panics now and then.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    fn push(&self, line: String) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
    }
}

impl Observer for Told {
    fn sending(&self, message: &Message, destination: &str) {
        self.push(format!("sending {} to {destination}", message.payload));
    }

    fn sent(&self, message: &Message, _: &str, outcome: &Outcome, took: Duration) {
        let is_delivered = matches!(outcome, Outcome::Delivered(_));
        self.push(format!("sent {} {is_delivered}", message.topic));
        assert!(took < PATIENCE);
        assert!(!is_delivered, "a panic of an observer");
    }

    fn settled(&self, settled: &Settled<'_>) {
        let Settled {
            status,
            reason,
            attempts,
            ..
        } = settled;
        let reason = reason.map_or("", |reason| reason.as_str());
        self.push(format!("{status} {attempts} {reason}"));
    }
}

/// One with the hooks as they are.
struct Silent;

impl Observer for Silent {}

#[test]
fn observers_are_told_of_each_step_and_their_panics_harm_nobody() {
    let database = Database::new();
    let told = Told::default();
    let relay = database
        .relay()
        .observe(told.clone())
        .observe(Silent)
        .on::<MemberJoined>(|_, context| {
            if context.attempt() == 1 {
                return Err(HandlerError::retry("not yet"));
            }
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 5);
    eventually("it is handled", || database.count("delivered") == 1);
    stop(relay);
    let lines = told.0.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(
        *lines,
        [
            "sending {\"member_id\":5} to handlers",
            "sent member.joined false",
            "retrying 1 FAILED",
            "sending {\"member_id\":5} to handlers",
            "sent member.joined true",
            "delivered 2 ",
        ]
    );
}
