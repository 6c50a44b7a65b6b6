//! Handlers that panic, or take too long.

use super::*;

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

/// What a handler panics with; dropping it panics again.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("once more");
    }
}

/// R17
#[test]
fn a_panic_whose_value_panics_when_it_is_dropped_ends_no_thread() {
    let database = Database::new();
    let relay = database
        .relay()
        .max_attempts(1)
        .on::<MemberJoined>(|_, _| std::panic::panic_any(Bomb))
        .on::<MemberLeft>(|_, _| Ok(()))
        .start()
        .expect("a relay");
    for member_id in 0..8 {
        join(&database, member_id);
    }
    eventually("all are dead", || database.count("dead") == 8);
    database.enqueue("member.left", json!({ "member_id": 1 }));
    eventually("the group goes on", || database.count("delivered") == 1);
    assert!(relay.is_healthy());
    stop(relay);
}
