//! Rows that plain SQL can make and a relay must survive. An odd row delays no other.

use std::time::Duration;

use diesel::Connection;
use diesel::connection::SimpleConnection;
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::{Dispatcher, EnqueueError, Failure, Message, NewMessage, Outcome, ReasonCode};
use serde_json::json;

use crate::support::{Database, Receiver, end, eventually, finish};

#[test]
fn times_without_end_are_read_as_never_and_always() {
    let database = Database::new();
    for (topic, expires_at, created_at) in [
        ("never", "'infinity'", "now()"),
        ("always", "'-infinity'", "now()"),
        ("first", "NULL", "'-infinity'"),
        ("last", "NULL", "'infinity'"),
        ("ancient", "NULL", "'0044-03-15 BC'"),
        ("good", "NULL", "now()"),
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}} (topic, payload, expires_at, created_at, available_at)
             VALUES ('{topic}', '1', {expires_at}, {created_at}, '-infinity')"
        ));
    }
    finish(database.binary(&["status"])).code(0);
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("all messages but one are delivered", || {
        database.count("delivered") == 5
    });
    eventually("one message has expired", || database.count("dead") == 1);
    end(&relay);
    assert_eq!(
        database.text("SELECT reason FROM {o}_dead").as_deref(),
        Some("EXPIRED")
    );
    database.execute("UPDATE {o}_dead SET created_at = 'infinity'");
    finish(database.binary(&["dead", "list"])).code(0);
}

#[test]
fn a_message_that_cannot_be_settled_holds_no_other() {
    let database = Database::new();
    let schema = database.schema().to_owned();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN IF NEW.topic = 'refused' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    ));
    database.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}}_ledger FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    ));
    for n in 0..5 {
        database.enqueue("refused", json!(n));
    }
    database.enqueue_many(40);
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("the other messages are delivered", || {
        database.count("delivered") == 40
    });
    database.enqueue_many(40);
    eventually("later messages are delivered", || {
        database.count("delivered") == 80
    });
    assert_eq!(database.count("sending"), 5);
    assert!(
        relay.wait_until_idle(Duration::from_secs(30)),
        "the refused messages keep no one waiting"
    );
    // Once the trigger is gone, the messages are settled, at the latest when the relay ends.
    database.drop_trigger_of_ledger("refuse");
    end(&relay);
    assert_eq!(database.count("delivered"), 85);
    assert_eq!(receiver.count(), 85, "nothing was sent twice");
}

/// A dispatcher that asks for an endless wait.
struct Never;

impl Dispatcher for Never {
    fn dispatch(&self, _: &Message) -> Outcome {
        let mut failure = Failure::new(ReasonCode::Failed, "come back never");
        failure.retry_after = Some(Duration::MAX);
        Outcome::Retry(failure)
    }
}

#[test]
fn an_endless_wait_is_a_long_one() {
    let database = Database::new();
    database.enqueue("order.paid", json!(1));
    let relay = database.relay().dispatcher(Never).start().expect("a relay");
    eventually("the message waits", || database.count("retrying") == 1);
    end(&relay);
    assert_eq!(
        database.number("SELECT (available_at > now() + interval '99 years')::int FROM {o}"),
        1
    );
}

#[test]
fn a_key_that_is_settled_while_it_is_enqueued_again_is_new() {
    let database = Database::new();
    let message = |n: i32| {
        NewMessage::new("order.paid", &n)
            .expect("JSON")
            .idempotency_key("key")
    };
    database.enqueue_message(message(1));
    let outbox = database.outbox();
    // The row is deleted by a transaction that is still open when the key is enqueued again.
    let mut settler = database.connect();
    settler.batch_execute("BEGIN").expect("begun");
    settler
        .batch_execute(&format!("DELETE FROM {}", database.name()))
        .expect("deleted");
    let mut conn = database.connect();
    let enqueuer = std::thread::spawn(move || {
        conn.transaction::<_, EnqueueError, _>(|conn| outbox.enqueue(conn, message(2)))
    });
    eventually("the insert waits for the settle", || {
        database.number("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'WITH inserted AS%'") > 0
    });
    settler.batch_execute("COMMIT").expect("committed");
    let enqueued = enqueuer
        .join()
        .expect("no panic")
        .expect("no conflict: the first message is gone");
    assert!(enqueued.is_new);
    assert_eq!(
        database.text("SELECT payload FROM {o}").as_deref(),
        Some("2")
    );
}

#[test]
fn a_policy_that_hides_rows_is_an_error_and_not_an_empty_outbox() {
    let database = Database::new();
    let schema = database.schema().to_owned();
    let role = format!("r_{}", uuid::Uuid::now_v7().simple());
    database.execute(&format!("CREATE ROLE {role} LOGIN"));
    database.execute(&format!("GRANT USAGE ON SCHEMA {schema} TO {role}"));
    database.execute(&format!(
        "GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}"
    ));
    database.execute("ALTER TABLE {o} ENABLE ROW LEVEL SECURITY");
    let mut url = url::Url::parse(&database.url).expect("a URL");
    url.set_username(&role).expect("a user");
    let mut status = database.binary(&["status"]);
    status.env("DATABASE_URL", url.as_str());
    let status = finish(status).code(1);
    database.execute(&format!("DROP OWNED BY {role}"));
    database.execute(&format!("DROP ROLE {role}"));
    assert!(
        status.stderr.contains("row-level security"),
        "{}",
        status.stderr
    );
}

/// R50: the server's clock was 30 days ahead for a moment, and a relay wrote a pause and a retry then.
#[test]
fn a_pause_and_a_retry_of_a_clock_that_has_gone_back_last_as_long_as_they_were_to_last() {
    let database = Database::new();
    let conn = &mut database.connect();
    database.enqueue("paused", json!(1));
    database.enqueue("retried", json!(2));
    let (outbox, moment) = (database.outbox_name(), Some(Duration::from_secs(1)));
    admin::pause(conn, &outbox, Pausable::Topic, "paused", "why", moment).expect("paused");
    database.execute(
        "UPDATE {o}_pause SET paused_at = paused_at + interval '30 days', paused_until = paused_until + interval '30 days'",
    );
    database.execute(
        "UPDATE {o} SET attempts = 1, last_attempt_at = now() + interval '30 days',
                available_at = now() + interval '30 days 1 second' WHERE topic = 'retried'",
    );
    let delayed = database.enqueue("delayed", json!(3));
    database.execute(&format!(
        "UPDATE {{o}} SET available_at = now() + interval '30 days' WHERE sequence = {delayed}"
    ));
    let receiver = Receiver::ok();
    let relay = (database.relay())
        .url(&receiver.url())
        .start()
        .expect("a relay");
    eventually("both are delivered", || database.count("delivered") == 2);
    assert_eq!(database.count("pending"), 1, "a message may be delayed");
    end(&relay);
}
