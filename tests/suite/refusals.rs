//! Messages that the database refuses to settle: a trigger, a constraint, odd text. They cost the other messages
//! nothing.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_outbox::ProblemKind;
use serde_json::json;

use crate::support::{Database, Receiver, end, eventually};

/// Refuses every row of the ledger for which `condition` is true.
fn refuse(database: &Database, condition: &str) {
    let schema = database.schema().to_owned();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN IF {condition} THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    ));
    database.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}}_ledger FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    ));
}

fn refuse_no_more(database: &Database) {
    database.drop_trigger_of_ledger("refuse");
}

/// Enqueues messages in one statement, with the payloads 1, 2, …
fn enqueue(database: &Database, topic: &str, count: usize) {
    let enqueued = database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload, idempotency_key)
         SELECT '{topic}', to_json(n), '{topic}-' || n FROM generate_series(1, {count}) AS n ORDER BY n"
    ));
    assert_eq!(enqueued, count);
}

fn delivered(database: &Database, topic: &str) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM {{o}}_ledger WHERE topic = '{topic}' AND status = 'delivered'"
    ))
}

/// Fails unless each message was sent exactly once.
fn once_each(receiver: &Receiver, count: usize) {
    assert_eq!((receiver.count(), receiver.ids().len()), (count, count));
}

/// G2, R23: once, none of 5,000 other messages was settled within 100 s.
#[test]
fn a_topic_whose_settles_are_refused_costs_others_nothing() {
    let database = Database::new();
    refuse(&database, "NEW.topic = 'refused'");
    enqueue(&database, "refused", 200);
    enqueue(&database, "order.paid", 5000);
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    let began = Instant::now();
    eventually("the other messages are settled", || {
        delivered(&database, "order.paid") == 5000
    });
    eprintln!("5,000 beside 200 refused ones: {:?}", began.elapsed());
    assert!(relay.wait_until_idle(Duration::from_secs(30)));
    assert_eq!(delivered(&database, "refused"), 0);
    assert_eq!(relay.health().to_string(), "ok");
    refuse_no_more(&database);
    eventually("the refused messages are settled", || {
        delivered(&database, "refused") == 200
    });
    end(&relay);
    once_each(&receiver, 5200);
}

/// R23: a timeout is no refusal. Once, a row that a person had locked was taken for a refused one: the results of its
/// whole topic were tried in halves, each for 10 s. Then the others waited 10 s once.
#[test]
fn a_message_that_a_person_has_locked_holds_no_others() {
    lock_one_of_200("NULL");
}

/// R23: the same for messages that are settled one by one, with the next message of their key.
#[test]
fn a_message_with_a_key_that_a_person_has_locked_holds_no_others() {
    lock_one_of_200("'key-' || n");
}

/// `key`: SQL for the ordering key of the nth message.
fn lock_one_of_200(key: &str) {
    let database = Database::new();
    let (receiver, gate) = Receiver::held();
    let relay = database.relay().url(&receiver.url());
    let relay = relay.send_timeout(Duration::from_secs(20));
    let relay = relay.lease(Duration::from_secs(60));
    let relay = relay.start().expect("a relay");
    database.execute(&format!(
        "INSERT INTO {{o}} (topic, payload, ordering_key)
         SELECT 'order.paid', to_json(n), {key} FROM generate_series(1, 200) AS n"
    ));
    receiver.wait_for(1);
    // One that is in flight.
    let lock = "BEGIN; SELECT FROM {o} WHERE sequence = (SELECT min(sequence) FROM {o} WHERE locked_by IS NOT NULL) FOR UPDATE";
    let mut person = database.connect();
    person
        .batch_execute(&lock.replace("{o}", &database.name()))
        .expect("locked");
    let began = Instant::now();
    drop(gate);
    eventually("the other messages are settled", || {
        delivered(&database, "order.paid") == 199
    });
    let took = began.elapsed();
    eprintln!("199 beside a locked message: {took:?}");
    // Nothing waits for the lock again.
    let began = Instant::now();
    database.enqueue("order.late", json!(1));
    eventually("a later message is settled", || {
        delivered(&database, "order.late") == 1
    });
    eprintln!("a later message: {:?}", began.elapsed());
    // The limit of a lock is 0.5 s, and was 10 s.
    let most = Duration::from_secs(5);
    assert!(took < most && began.elapsed() < most, "{took:?}");
    let health = relay.health();
    assert!(health.is_ready(), "{health}");
    let mut problems = health.problems().iter();
    assert!(
        problems.all(|one| one.kind != ProblemKind::SettlesRefused),
        "{health}"
    );
    person.batch_execute("COMMIT").expect("free");
    eventually("the locked message is settled", || {
        delivered(&database, "order.paid") == 200
    });
    end(&relay);
    once_each(&receiver, 201);
}

/// R23: once, 30 refused messages raised the median to 5.5 s.
#[test]
fn beside_refused_messages_a_settle_takes_no_longer() {
    let database = Database::new();
    refuse(&database, "NEW.topic = 'refused'");
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    enqueue(&database, "refused", 30);
    eventually("the refused messages are sent", || receiver.count() == 30);
    let mut took: Vec<Duration> = (1..=40)
        .map(|n| {
            let began = Instant::now();
            database.enqueue("order.paid", json!(n));
            eventually("the message is settled", || {
                delivered(&database, "order.paid") == n
            });
            began.elapsed()
        })
        .collect();
    took.sort_unstable();
    eprintln!(
        "next to 30 refused messages: median {:?}, most {:?}",
        took[20], took[39]
    );
    assert!(took[20] < Duration::from_millis(500), "{took:?}");
    assert!(took[39] < Duration::from_secs(4), "{took:?}");
    refuse_no_more(&database);
    end(&relay);
    assert_eq!(delivered(&database, "refused"), 30);
    once_each(&receiver, 70);
}

/// R23: the good messages of the same topic are settled, and so are the refused messages once the database accepts
/// them.
#[test]
fn single_messages_that_are_refused_hold_none_of_their_topic() {
    let database = Database::new();
    refuse(
        &database,
        "(regexp_match(NEW.idempotency_key, '[0-9]+$'))[1]::int % 100 = 7",
    );
    enqueue(&database, "order.paid", 1000);
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    eventually("the other messages are settled", || {
        delivered(&database, "order.paid") == 990
    });
    assert!(relay.wait_until_idle(Duration::from_secs(30)));
    assert_eq!(database.count("sending"), 10);
    enqueue(&database, "order.sent", 6);
    eventually("later messages are settled", || {
        delivered(&database, "order.sent") == 6
    });
    refuse_no_more(&database);
    eventually("all messages are settled", || {
        delivered(&database, "order.paid") == 1000
    });
    end(&relay);
    once_each(&receiver, 1006);
}

/// G2, R14: messages that cannot be settled are not sent again and again.
#[test]
fn a_refused_topic_is_not_claimed_until_the_refusal_ends() {
    let database = Database::new();
    refuse(&database, "NEW.topic = 'refused'");
    enqueue(&database, "refused", 3000);
    let receiver = Receiver::ok();
    let relay = database.relay().batch(50).url(&receiver.url());
    let relay = relay.start().expect("a relay");
    eventually("the relay reports the topic", || {
        let health = relay.health();
        health
            .problems()
            .iter()
            .any(|one| one.kind == ProblemKind::SettlesRefused)
    });
    let health = relay.health();
    assert!(
        health.is_ready() && health.to_string().contains("refused"),
        "{health}"
    );
    database.enqueue_many(100);
    eventually("other messages are sent and settled", || {
        database.count("delivered") == 100
    });
    let sent = receiver.count() - 100;
    assert!(sent < 1000, "{sent} refused messages were sent");
    // Each claim of these messages could have taken refused messages as well.
    for others in (200..=1000).step_by(100) {
        database.enqueue_many(100);
        eventually("other messages are sent and settled", || {
            database.count("delivered") == others
        });
    }
    assert_eq!(
        receiver.count() - 1000,
        sent,
        "no more refused messages are sent"
    );
    refuse_no_more(&database);
    eventually("all messages are delivered", || {
        database.count("delivered") == 4000
    });
    eventually("the relay is healthy again", || {
        relay.health().to_string() == "ok"
    });
    end(&relay);
    once_each(&receiver, 4000);
}

/// G5, R28: no later message of a refused message's key is sent. Other keys continue, and the relay shuts down in
/// time.
#[test]
fn a_refused_message_keeps_its_key_and_no_other() {
    let database = Database::new();
    refuse(&database, "NEW.topic = 'refused'");
    for n in 0..20 {
        for topic in ["refused", "order.paid"] {
            database.execute(&format!(
                "INSERT INTO {{o}} (topic, payload, ordering_key) VALUES ('{topic}', '{n}', 'bad-{n}')"
            ));
        }
    }
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key)
         SELECT 'order.paid', to_json(n), 'good-' || n % 100 FROM generate_series(1, 2000) AS n",
    );
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url());
    let relay = relay.start().expect("a relay");
    eventually("the other keys continue", || {
        delivered(&database, "order.paid") == 2000
    });
    assert_eq!(
        receiver.count(),
        2020,
        "no message behind a refused one is sent"
    );
    let began = Instant::now();
    let ended = relay.shutdown(Duration::from_secs(15));
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "{:?}",
        began.elapsed()
    );
    let error = ended.expect_err("20 messages are not settled");
    assert!(error.to_string().contains("20 messages"), "{error}");
}
