//! The module `testing`, with which applications test.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_outbox::handlers::{HandlerError, Handlers};
use diesel_outbox::testing::{self, RecordingDispatcher, TestRelay};
use diesel_outbox::{
    Backoff, Event, Failure, NewMessage, Outbox, Outcome, ReasonCode, Relay, RelayBuilder,
    assert_enqueued, assert_not_enqueued,
};
use serde::{Deserialize, Serialize};

use crate::support::Database;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct OrderPaid {
    order_id: i64,
    euro: u32,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct MailSent {
    order_id: i64,
}

impl Event for MailSent {
    const TOPIC: &'static str = "mail.sent";
}

/// A connection in a test transaction: no other connection ever sees its changes.
fn in_test(database: &Database) -> PgConnection {
    let mut conn = database.connect();
    conn.begin_test_transaction().expect("a transaction");
    conn
}

fn paid(order_id: i64) -> OrderPaid {
    OrderPaid { order_id, euro: 42 }
}

fn relay(database: &Database) -> RelayBuilder {
    Relay::in_test()
        .outbox(&database.name())
        .backoff(Backoff::Table(vec![Duration::from_secs(10)]))
}

fn failure_of(run: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("the call must fail");
    *panic.downcast::<String>().expect("a text")
}

#[test]
fn an_application_asserts_what_was_enqueued_in_its_own_transaction() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    assert_not_enqueued!(conn, outbox, OrderPaid { .. });
    outbox.enqueue(conn, paid(7)).expect("enqueued");
    outbox
        .enqueue(conn, MailSent { order_id: 7 })
        .expect("enqueued");

    assert_enqueued!(conn, outbox, OrderPaid { order_id: 7, .. });
    assert_enqueued!(&mut *conn, outbox, OrderPaid { euro, .. } if euro > 40);
    assert_not_enqueued!(conn, outbox, OrderPaid { order_id: 8, .. });
    assert_eq!(
        testing::events::<OrderPaid>(conn, &outbox).expect("read"),
        [paid(7)]
    );
    assert_eq!(testing::messages(conn, &outbox).expect("read").len(), 2);
    // No other connection sees any of it.
    assert_eq!(database.count("pending"), 0);
}

#[test]
fn a_failed_assertion_says_what_there_is() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let text = failure_of(|| assert_enqueued!(conn, outbox, OrderPaid { order_id: 1, .. }));
    assert_eq!(
        text,
        "no event OrderPaid { order_id: 1, .. } was enqueued; the outbox is empty"
    );
    outbox.enqueue(conn, paid(7)).expect("enqueued");
    let text = failure_of(|| assert_enqueued!(conn, outbox, OrderPaid { order_id: 1, .. }));
    assert!(
        text.ends_with("the outbox contains:\n  order.paid {\"order_id\":7,\"euro\":42}"),
        "{text}"
    );
    let text =
        failure_of(|| assert_not_enqueued!(conn, outbox, OrderPaid { euro, .. } if euro == 42));
    assert!(
        text.starts_with("an event OrderPaid { euro, .. } if euro == 42 was enqueued"),
        "{text}"
    );

    let odd = NewMessage::new("order.paid", &"no order").expect("JSON");
    outbox.enqueue(conn, odd).expect("enqueued");
    let text = failure_of(|| assert_enqueued!(conn, outbox, OrderPaid { .. }));
    assert!(
        text.contains("order.paid does not match its type"),
        "{text}"
    );
}

#[test]
fn a_recording_dispatcher_gets_what_a_receiver_would() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let receiver = RecordingDispatcher::new();
    let relay = TestRelay::new(relay(&database).dispatcher(receiver.clone())).expect("a relay");
    for order_id in 0..3 {
        outbox.enqueue(conn, paid(order_id)).expect("enqueued");
    }
    let drained = relay.drain(conn).expect("drained");
    drained.assert_all_delivered();
    assert_eq!(drained.delivered.len(), 3);
    assert_eq!(receiver.events::<OrderPaid>(), [paid(0), paid(1), paid(2)]);
    assert_eq!(relay.drain(conn).expect("nothing").delivered.len(), 0);
    assert!(testing::messages(conn, &outbox).expect("read").is_empty());
    // The ledger has the messages, and the lease is gone.
    let name = database.name();
    conn.batch_execute(&format!(
        "DO $$ BEGIN
            ASSERT (SELECT count(*) FROM {name}_ledger WHERE status = 'delivered') = 3;
            ASSERT (SELECT count(*) FROM {name}_lease) = 0;
         END $$"
    ))
    .expect("both hold");
}

#[test]
fn a_failed_message_waits_for_the_clock_and_is_dead_lettered_after_its_last_attempt() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let receiver = RecordingDispatcher::answering(|_| {
        Outcome::Retry(Failure::new(ReasonCode::ServerError, "503"))
    });
    let builder = relay(&database)
        .max_attempts(2)
        .dispatcher(receiver.clone());
    let relay = TestRelay::new(builder).expect("a relay");
    outbox.enqueue(conn, paid(1)).expect("enqueued");

    let first = relay.drain(conn).expect("drained");
    assert_eq!((first.retried.len(), first.dead.len()), (1, 0));
    assert_eq!(first.retried[0].reason, ReasonCode::ServerError);
    assert!(failure_of(|| first.assert_all_delivered()).contains("SERVER_ERROR 503"));
    assert_eq!(relay.drain(conn).expect("nothing is due").retried.len(), 0);
    testing::advance(conn, &outbox, Duration::from_secs(9)).expect("moved");
    assert_eq!(relay.drain(conn).expect("not yet").dead.len(), 0);
    testing::advance(conn, &outbox, Duration::from_secs(2)).expect("moved");
    let last = relay.drain(conn).expect("drained");
    assert_eq!((last.retried.len(), last.dead.len()), (0, 1));
    assert_eq!(last.dead[0].error, "503");
    assert_eq!(receiver.messages().len(), 2);
}

/// R6
#[test]
fn a_delayed_message_waits_for_the_clock_and_an_expired_one_is_dead() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let receiver = RecordingDispatcher::new();
    let relay = TestRelay::new(relay(&database).dispatcher(receiver.clone())).expect("a relay");
    let hour = Duration::from_secs(3600);
    let message = || NewMessage::of(&paid(1)).expect("JSON");
    outbox
        .enqueue(conn, message().delay(hour))
        .expect("enqueued");
    let brief = message().delay(hour).expires_after(hour / 2);
    outbox.enqueue(conn, brief).expect("enqueued");
    assert!(relay.drain(conn).expect("nothing").delivered.is_empty());
    testing::advance(conn, &outbox, hour).expect("moved");
    let drained = relay.drain(conn).expect("drained");
    assert_eq!(drained.delivered.len(), 1);
    assert_eq!(drained.dead[0].reason, ReasonCode::Expired);
}

#[test]
fn the_clock_can_be_moved_as_far_as_anybody_wants() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let relay = TestRelay::new(relay(&database).dispatcher(RecordingDispatcher::new()));
    let relay = relay.expect("a relay");
    let message = NewMessage::of(&paid(1)).expect("JSON");
    let century = Duration::from_secs(100 * 365 * 24 * 3600);
    outbox
        .enqueue(conn, message.delay(century))
        .expect("enqueued");
    let last_day = std::time::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    let message = NewMessage::of(&paid(2)).expect("JSON");
    outbox
        .enqueue(conn, message.available_at(last_day))
        .expect("enqueued");
    let name = database.name();
    conn.batch_execute(&format!(
        "INSERT INTO {name} (topic, payload, available_at, expires_at)
         VALUES ('never', '1', 'infinity', 'infinity'), ('now', '1', '-infinity', 'infinity')"
    ))
    .expect("inserted");
    for _ in 0..2 {
        testing::advance(conn, &outbox, Duration::MAX).expect("moved");
    }
    let drained = relay.drain(conn).expect("drained");
    drained.assert_all_delivered();
    assert_eq!(drained.delivered.len(), 3);
    let left = testing::messages(conn, &outbox).expect("read");
    assert_eq!(left[0].topic, "never");
}

/// Compiling statements (`jit`) costs a hundred times what it saves: 4,000 messages took minutes.
#[test]
fn a_test_relay_works_with_compilation_off_and_leaves_it_as_it_was() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    conn.batch_execute("SET jit = on").expect("set");
    let is_off = |conn: &mut PgConnection, is: bool| {
        let is = if is { "off" } else { "on" };
        let check =
            format!("DO $$ BEGIN ASSERT current_setting('jit') = '{is}', 'it is not {is}'; END $$");
        conn.batch_execute(&check)
    };
    let relay = relay(&database).on_pooled::<OrderPaid>(move |_, context| {
        let mut conn = context.connection()?;
        is_off(&mut conn, true)?;
        Ok(())
    });
    let relay = TestRelay::new(relay).expect("a relay");
    outbox.enqueue(conn, paid(1)).expect("enqueued");
    relay.drain(conn).expect("drained").assert_all_delivered();
    is_off(conn, false).expect("on again");
}

/// G5
#[test]
fn a_key_keeps_its_order_also_behind_a_message_that_fails() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let receiver = RecordingDispatcher::answering(|message| {
        if message.payload == "1" && message.attempts == 0 {
            return Outcome::Retry(Failure::new(ReasonCode::ServerError, "503"));
        }
        Outcome::Delivered(Default::default())
    });
    let relay = TestRelay::new(relay(&database).dispatcher(receiver.clone())).expect("a relay");
    let messages = (0..4).map(|n| {
        let message = NewMessage::new("a", &n).expect("JSON");
        message.ordering_key("k")
    });
    outbox.enqueue_batch(conn, messages).expect("enqueued");
    let drained = relay.drain(conn).expect("drained");
    assert_eq!((drained.delivered.len(), drained.retried.len()), (1, 1));
    testing::advance(conn, &outbox, Duration::from_secs(11)).expect("moved");
    relay.drain(conn).expect("drained").assert_all_delivered();
    let payloads: Vec<String> = receiver.messages().into_iter().map(|m| m.payload).collect();
    assert_eq!(payloads, ["0", "1", "1", "2", "3"]);
}

/// R16, R17
#[test]
fn handlers_run_in_the_tests_thread_and_transaction() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    conn.batch_execute("CREATE TEMPORARY TABLE mails (order_id bigint PRIMARY KEY)")
        .expect("a table");
    let follow_up = database.outbox();
    let thread = std::thread::current().id();
    let mailer = Handlers::new().on_pooled::<OrderPaid>(move |event, context| {
        assert_eq!(std::thread::current().id(), thread);
        let mut conn = context.connection()?;
        diesel::sql_query("INSERT INTO mails VALUES ($1)")
            .bind::<diesel::sql_types::BigInt, _>(event.order_id)
            .execute(&mut *conn)?;
        let order_id = event.order_id;
        follow_up.enqueue(&mut *conn, MailSent { order_id })?;
        Ok(())
    });
    let counter = Handlers::new()
        .on::<OrderPaid>(|event, _| {
            if event.order_id == 9 {
                return Err(HandlerError::dead("nine"));
            }
            Ok(())
        })
        .on::<MailSent>(|_, _| Ok(()));
    let builder = relay(&database)
        .handlers("mailer", mailer)
        .handlers("counter", counter);
    let relay = TestRelay::new(builder).expect("a relay");
    for order_id in [1, 9, 1] {
        outbox.enqueue(conn, paid(order_id)).expect("enqueued");
    }
    let drained = relay.drain(conn).expect("drained");
    // Both groups get each order. The table refuses the second mail for order 1, which spoils nothing else.
    let of = |topic: &str| {
        drained
            .delivered
            .iter()
            .filter(|m| m.topic == topic)
            .count()
    };
    assert_eq!((of("order.paid"), of("mail.sent")), (4, 2));
    assert_eq!(drained.dead[0].error, "nine");
    assert!(
        drained.retried[0].error.contains("duplicate key"),
        "{drained:?}"
    );
    let mails = diesel::dsl::sql::<diesel::sql_types::BigInt>("(SELECT count(*) FROM mails)");
    let mails: i64 = diesel::select(mails).get_result(conn).expect("a number");
    assert_eq!(mails, 2);
    assert_eq!(
        database.count("delivered"),
        0,
        "no other connection sees the messages"
    );
}

/// The guide shows this test (docs/application.md). R33
#[test]
fn a_message_that_is_enqueued_twice_calls_the_handler_twice_and_once_works_once() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let relay = relay(&database).on_pooled::<OrderPaid>(|event, context| {
        Outbox::default().enqueue(&mut *context.connection()?, paid(event.order_id + 100))?;
        context.once(|conn| {
            Outbox::default().enqueue(conn, MailSent { order_id: 7 })?;
            Ok(())
        })?;
        Ok(())
    });
    let relay = TestRelay::new(relay).expect("a relay");
    let message = NewMessage::of(&paid(7)).expect("JSON");
    outbox.enqueue(conn, message.clone()).expect("enqueued");
    outbox.enqueue(conn, message).expect("enqueued");
    let drained = relay.drain(conn).expect("drained");
    drained.assert_all_delivered();
    assert_eq!(drained.delivered.len(), 2, "the handler is called twice");
    let mut of = |topic| {
        let topics = testing::messages(conn, &Outbox::default()).expect("messages");
        topics.iter().filter(|one| one.topic == topic).count()
    };
    assert_eq!(of("order.paid"), 2, "work outside of `once` is done twice");
    assert_eq!(of("mail.sent"), 1, "work inside of `once` is done once");
}

/// R33
#[test]
fn a_handler_that_panics_in_its_transaction_leaves_the_tests_connection_usable() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let relay = relay(&database).on_pooled::<OrderPaid>(|_, context| {
        context.once(|conn| {
            let outbox = Outbox::default();
            outbox.enqueue(conn, MailSent { order_id: 1 })?;
            assert!(context.attempt() > 1, "the first attempt fails");
            Ok(())
        })?;
        Ok(())
    });
    let relay = TestRelay::new(relay).expect("a relay");
    outbox.enqueue(conn, paid(1)).expect("enqueued");
    let drained = relay.drain(conn).expect("drained");
    assert_eq!(drained.retried[0].reason, ReasonCode::Panic);
    assert_not_enqueued!(conn, Outbox::default(), MailSent { order_id: 1 });
    testing::advance(conn, &outbox, Duration::from_secs(11)).expect("moved");
    relay.drain(conn).expect("drained").assert_all_delivered();
    assert_enqueued!(conn, Outbox::default(), MailSent { order_id: 1 });
}

#[test]
fn a_message_in_conflict_with_a_part_of_another_one_is_reported_as_dead() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let ready = Handlers::new().on::<OrderPaid>(|_, _| Ok(()));
    let busy = Handlers::new().on::<OrderPaid>(|_, _| Err(HandlerError::retry("busy")));
    let builder = relay(&database)
        .handlers("ready", ready)
        .handlers("busy", busy);
    let relay = TestRelay::new(builder).expect("a relay");
    let message = |order_id| {
        let message = NewMessage::of(&paid(order_id)).expect("JSON");
        message.idempotency_key("k")
    };
    outbox.enqueue(conn, message(1)).expect("enqueued");
    let first = relay.drain(conn).expect("drained");
    assert_eq!((first.delivered.len(), first.retried.len()), (1, 1));
    outbox.enqueue(conn, message(2)).expect("enqueued");
    let second = relay.drain(conn).expect("drained");
    assert_eq!(second.dead[0].reason, ReasonCode::IdempotencyConflict);
}

#[test]
fn a_handler_that_ignores_an_error_of_the_database_learns_that_its_work_is_rolled_back() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut in_test(&database);
    let relay = relay(&database).on_pooled::<OrderPaid>(|event, context| {
        let mut conn = context.connection()?;
        Outbox::default().enqueue(&mut *conn, MailSent { order_id: 1 })?;
        let failing = diesel::sql_query("SELECT 1 / 0");
        let ignored = match event.order_id {
            1 => failing.execute(&mut *conn),
            // A failure in a nested transaction is rolled back alone.
            _ => conn.transaction(|conn| failing.execute(conn)),
        };
        assert!(ignored.is_err());
        Ok(())
    });
    let relay = TestRelay::new(relay).expect("a relay");
    for order_id in [1, 2] {
        outbox.enqueue(conn, paid(order_id)).expect("enqueued");
    }
    let drained = relay.drain(conn).expect("drained");
    assert_eq!(drained.delivered.len(), 1);
    let error = &drained.retried[0].error;
    assert!(error.contains("their own transaction"), "{error}");
    let mails = testing::events::<MailSent>(conn, &Outbox::default());
    assert_eq!(mails.expect("read").len(), 1);
}

/// G2
#[test]
fn a_drain_that_the_database_ends_releases_its_messages() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut database.connect();
    outbox.enqueue(conn, paid(1)).expect("enqueued");
    database.execute("ALTER TABLE {o}_ledger ADD CONSTRAINT none CHECK (false)");
    let receiver = RecordingDispatcher::new();
    let relay = TestRelay::new(relay(&database).dispatcher(receiver)).expect("a relay");
    relay.drain(conn).expect_err("the ledger refuses the entry");
    assert_eq!(database.count("pending"), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_lease"), 0);
}

/// R16, R44.
#[test]
fn unserved_messages_are_reported() {
    let database = Database::new();
    let outbox: Outbox = database.outbox();
    let conn = &mut in_test(&database);
    let relay = TestRelay::new(relay(&database).on::<MailSent>(|_, _| Ok(()))).expect("a relay");
    outbox.enqueue(conn, paid(1)).expect("enqueued");
    let drained = relay.drain(conn).expect("drained");
    assert_eq!(drained.unrouted[0].reason, ReasonCode::NoRoute);
    assert!(drained.retried.is_empty());
    let told = std::panic::catch_unwind(|| drained.assert_all_delivered());
    assert!(
        told.is_err(),
        "unrouted messages must not pass as delivered"
    );
    let messages = testing::messages(conn, &outbox).expect("read");
    assert_eq!(messages[0].attempts, 0);
}
