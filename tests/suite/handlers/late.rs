//! Handlers that panic, or take too long.

use diesel_outbox::{RelayBuilder, RelayHandle};

use super::*;
use crate::logged;

/// The lease of `Database::relay`.
const LEASE: Duration = Duration::from_secs(3);

/// Whether a line of this event was logged for the message with this sequence.
fn is_logged(database: &Database, event: &str, sequence: i64) -> bool {
    let id = database.text(&format!(
        "SELECT message_id FROM {{o}} WHERE sequence = {sequence}
         UNION ALL SELECT message_id FROM {{o}}_dead WHERE sequence = {sequence}
         UNION ALL SELECT message_id FROM {{o}}_ledger WHERE sequence = {sequence} LIMIT 1"
    ));
    let id = id.expect("the message is in one of the tables");
    logged::is_logged(event, &id)
}

/// Starts this relay with a handler that has been called with a message and is held by the gate.
fn held(database: &Database, relay: RelayBuilder) -> (RelayHandle, Gate) {
    let (gate, pass) = Gate::new();
    let relay = relay
        .on::<MemberJoined>(move |_, _| {
            pass();
            Ok(())
        })
        .start()
        .expect("a relay");
    join(database, 1);
    eventually("the handler is called", || gate.came() == 1);
    (relay, gate)
}

/// R17
#[test]
fn a_panic_is_an_error_of_its_message_and_of_nothing_else() {
    logged::keep();
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
    eventually("the other messages are handled", || {
        database.count("delivered") == 20
    });
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    assert_eq!(
        database.text("SELECT reason || ' ' || attempts || ' ' || last_error FROM {o}_dead"),
        Some("PANIC 2 the dispatcher or handler panicked: thirteen".to_owned())
    );
    assert!(is_logged(&database, "dispatch_panic", thirteen));
    assert!(relay.is_healthy());
    end(&relay);
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
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    let error = database.text("SELECT last_error FROM {o}_dead");
    let error = error.expect("a text");
    assert!(
        error.contains("panicked") && !error.contains("hunter2"),
        "{error}"
    );
    end(&relay);
}

/// R17, R45
#[test]
fn a_handler_past_its_limit_keeps_its_message_and_no_place_in_its_group_and_its_late_result_counts()
{
    logged::keep();
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(200))
        .concurrency(1)
        .on::<MemberJoined>(move |_, context| {
            pass();
            assert!(context.remaining().is_zero());
            Err(HandlerError::dead("late, and heard"))
        })
        .on::<MemberLeft>(|_, _| Ok(()));
    let relay = database
        .relay()
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    let stuck = join(&database, 1);
    eventually("the stuck handler is reported", || {
        is_logged(&database, "handler_stuck", stuck)
    });
    assert!(
        relay
            .health()
            .to_string()
            .contains("longer than their limit")
    );
    assert!(relay.is_healthy(), "a stuck handler is only a warning");
    // The group's only thread is free for other messages.
    database.enqueue("member.left", json!({ "member_id": 1 }));
    eventually("the group continues", || database.count("delivered") == 1);
    assert_eq!(database.count("sending"), 1);
    assert_eq!(gate.came(), 1);
    gate.open();
    eventually("the late result counts", || database.count("dead") == 1);
    assert!(is_logged(&database, "handler_late", stuck));
    assert_eq!(
        database.text("SELECT last_error || ' ' || attempts FROM {o}_dead"),
        Some("late, and heard 1".to_owned())
    );
    assert_eq!(gate.came(), 1);
    end(&relay);
}

/// R45, G4
#[test]
fn a_message_whose_lease_was_lost_is_not_started_again_while_its_handler_runs() {
    let database = Database::new();
    let (relay, gate) = held(&database, database.relay().on::<MemberLeft>(|_, _| Ok(())));
    let first = database.number("SELECT locked_by FROM {o}");
    database.execute(&format!(
        "UPDATE {{o}}_lease SET expires_at = now() - interval '1 second' WHERE id = {first}"
    ));
    eventually(
        "the relay has taken the message over under its next lease",
        || database.number("SELECT coalesce(max(locked_by), 0) FROM {o}") > first,
    );
    // A later message of the same group is delivered, so the relay has continued.
    database.enqueue("member.left", json!({ "member_id": 1 }));
    eventually("other messages are handled", || {
        database.count("delivered") == 1
    });
    assert_eq!(gate.came(), 1);
    gate.open();
    eventually("the late success counts", || {
        database.count("delivered") == 2
    });
    assert_eq!(gate.came(), 1);
    // The takeover costs an attempt, because the message may have crashed the relay.
    assert_eq!(database.number("SELECT max(attempts) FROM {o}_ledger"), 2);
    end(&relay);
}

/// R45, G4, G5: a handler whose relay has lost its lease can ask before it does what the next message of the key, at another
/// relay, may have done already.
#[test]
fn a_handler_can_ask_whether_the_lease_of_its_relay_still_holds() {
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let (tell, told) = mpsc::channel();
    let relay = database.relay().on::<MemberJoined>(move |_, context| {
        tell.send(context.holds_lease())?;
        pass();
        tell.send(context.holds_lease())?;
        Ok(())
    });
    let relay = relay.start().expect("a relay");
    join(&database, 1);
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(true));
    eventually("the handler waits", || gate.came() == 1);
    // Another relay has taken the message over.
    let first = database.number("SELECT locked_by FROM {o}");
    database.execute(
        "WITH other AS (INSERT INTO {o}_lease (relay, expires_at) VALUES ('other', now() + interval '1 h') RETURNING id)
         UPDATE {o} SET locked_by = other.id FROM other",
    );
    database.execute(&format!(
        "UPDATE {{o}}_lease SET expires_at = now() - interval '1 second' WHERE id = {first}"
    ));
    eventually("the relay has its next lease", || {
        let leases =
            format!("SELECT count(*) FROM {{o}}_lease WHERE relay <> 'other' AND id > {first}");
        database.number(&leases) == 1
    });
    gate.open();
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(false));
    end(&relay);
    assert_eq!(database.count("delivered"), 0, "the result did not count");
}

/// R28, R45
#[test]
fn a_shutdown_waits_for_a_handler_until_its_deadline_and_the_result_counts_when_it_comes() {
    let database = Database::new();
    let (relay, gate) = held(&database, database.relay().lease(Duration::from_secs(60)));
    let ended = relay.shutdown(Duration::from_millis(300));
    assert!(
        matches!(ended, Err(ShutdownError::Deadline { messages: 1, .. })),
        "{ended:?}"
    );
    assert_eq!(
        database.count("sending"),
        1,
        "the message stays with the lease"
    );
    gate.open();
    end(&relay);
    assert_eq!(database.count("delivered"), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
}

#[test]
fn while_64_handlers_are_stuck_messages_wait_and_no_attempt_is_counted() {
    logged::keep();
    let database = Database::new();
    let (gate, pass) = Gate::new();
    let handlers = Handlers::new()
        .timeout(Duration::from_millis(50))
        .concurrency(16)
        .on::<MemberJoined>(move |event, _| {
            if event.member_id == 1 {
                pass();
            }
            Ok(())
        });
    let relay = database
        .relay()
        .handlers("members", handlers)
        .start()
        .expect("a relay");
    let stuck: Vec<_> = (0..64).map(|_| join(&database, 1)).collect();
    // A handler that has only begun does not count as stuck yet.
    eventually("all handlers are stuck", || {
        let mut stuck = stuck.iter();
        stuck.all(|sequence| is_logged(&database, "handler_stuck", *sequence))
    });
    let second = join(&database, 2);
    eventually("the second message waits", || {
        database.number(&format!(
            "SELECT count(*) FROM {{o}} WHERE sequence = {second} AND last_error LIKE '%run longer than their limit%' AND attempts = 0"
        )) == 1
    });
    // Handlers that begin at the same time may exceed the limit.
    assert!(gate.came() < 64 + 16);
    gate.open();
    eventually("all messages are handled", || {
        database.count("delivered") == 65
    });
    assert_eq!(
        database.number(&format!(
            "SELECT attempts FROM {{o}}_ledger WHERE sequence = {second}"
        )),
        1
    );
    end(&relay);
}

/// A panic value that panics again when it is dropped.
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
    eventually("all messages are dead-lettered", || {
        database.count("dead") == 8
    });
    database.enqueue("member.left", json!({ "member_id": 1 }));
    eventually("the group continues", || database.count("delivered") == 1);
    assert!(relay.is_healthy());
    end(&relay);
}

/// R45
#[test]
fn a_handler_that_takes_longer_than_the_lease_is_called_once_and_its_success_counts() {
    let database = Database::new();
    let (relay, gate) = held(&database, database.relay());
    let ends = "SELECT (extract(epoch FROM expires_at) * 1000)::bigint FROM {o}_lease";
    let (first, lease) = (database.number(ends), LEASE.as_millis());
    eventually("the lease is renewed for longer than a lease", || {
        u128::try_from(database.number(ends) - first).is_ok_and(|later| later > lease)
    });
    gate.open();
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    assert_eq!(gate.came(), 1);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
    end(&relay);
}
