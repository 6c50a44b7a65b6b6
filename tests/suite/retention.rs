//! How long the ledger and the history are kept, and the causes that delay their removal.

use diesel::connection::SimpleConnection;
use serde_json::json;

use crate::support::{Database, Receiver, Running, end, eventually};

/// With the parts of the ring listed, as by a relay.
fn listed() -> Database {
    let database = Database::new();
    database.number("SELECT emptied FROM {o}_rotate('30 days')");
    database
}

/// Gives each of these parts, closed long ago, one entry of the ledger and one of the history.
fn with_old_parts(parts: &[i16]) -> Database {
    let database = listed();
    for part in parts {
        enter(&database, &part.to_string(), 0, "1 day");
        database.execute(&format!(
            "UPDATE {{o}}_part SET opened_at = now() - interval '2 days', closed_at = now() - interval '1 day'
              WHERE part = {part}"
        ));
    }
    database
}

/// Writes an entry of the ledger and one of the history, numbered `n` and dated `ago`.
fn enter(database: &Database, part: &str, n: i64, ago: &str) {
    database.execute(&format!(
        "INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, status, attempts, created_at, settled_at)
         VALUES ({part}, {n}, gen_random_uuid(), 't', '', 'delivered', 1, now(), now() - interval '{ago}')"
    ));
    database.execute(&format!(
        "INSERT INTO {{o}}_attempt (part, sequence, message_id, topic, destination, event, happened_at)
         VALUES ({part}, {n}, gen_random_uuid(), 't', '', 'failed', now() - interval '{ago}')"
    ));
}

const OPEN: &str = "(SELECT part FROM {o}_part WHERE opened_at IS NOT NULL AND closed_at IS NULL)";

/// R26: the server's clock was 30 days ahead for a moment.
#[test]
fn parts_of_the_future_are_kept_no_longer_than_others() {
    let database = with_old_parts(&[3]);
    database.execute("UPDATE {o}_part SET opened_at = now() + interval '30 days' WHERE part = 0");
    enter(&database, "5", 1, "1 second");
    database.execute(
        "UPDATE {o}_part SET opened_at = now() + interval '29 days', closed_at = now() + interval '30 days'
          WHERE part = 5",
    );
    assert_eq!(
        database.number("SELECT emptied FROM {o}_rotate('1 hour')"),
        1,
        "part 3"
    );
    let ahead =
        "SELECT count(*) FROM {o}_part WHERE greatest(opened_at, closed_at) > clock_timestamp()";
    assert_eq!(database.number(ahead), 0);
    database.execute(
        "UPDATE {o}_part SET opened_at = opened_at - interval '2 hours', closed_at = closed_at - interval '2 hours'",
    );
    assert_eq!(
        database.number("SELECT emptied FROM {o}_rotate('1 hour')"),
        1,
        "part 5"
    );
}

/// R26.
#[test]
fn a_long_report_on_the_ledger_delays_retention_and_nothing_else() {
    let database = with_old_parts(&[3, 5]);
    // The open part is due to be closed.
    enter(&database, "0", 1, "1 second");
    database.execute("UPDATE {o}_part SET opened_at = now() - interval '1 hour' WHERE part = 0");
    let mut report = database.connect();
    let begin = format!("BEGIN; SELECT count(*) FROM {}_ledger", database.name());
    report.batch_execute(&begin).expect("a report");

    let receiver = Receiver::ok();
    let mut relay = database.binary(&["run"]);
    relay
        .env("OUTBOX_URL", receiver.url())
        .env("OUTBOX_RETENTION", "12s");
    let relay = Running::start(relay);
    relay.wait_for_log("ledger_in_use");
    eventually("another part is open", || database.number(OPEN) == 1);
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the message is settled in the new part", || {
        database.number("SELECT count(*) FROM {o}_ledger WHERE part = 1") == 1
    });
    let old = "SELECT count(*) FROM {o}_ledger WHERE part IN (3, 5)";
    assert_eq!(database.number(old), 2);
    report.batch_execute("COMMIT").expect("the report ends");

    let in_use = "SELECT count(*) FROM {o}_part WHERE part IN (3, 5) AND opened_at IS NOT NULL";
    eventually("both parts are emptied", || database.number(in_use) == 0);
    assert_eq!(database.number(old), 0);
    let history = "SELECT count(*) FROM {o}_attempt WHERE part IN (3, 5)";
    assert_eq!(database.number(history), 0);
    relay.wait_for_log("emptied 2 old parts of the ledger");
    let log = relay.log();
    assert_eq!(log.matches("ledger_in_use").count(), 1, "{log}");
    assert!(!log.contains("the database failed"), "{log}");
}

/// In hours.
const RETENTION: i64 = 24;
/// A part stays open for a sixth of the retention.
const PART: i64 = RETENTION / 6;

/// R26. Three days: every hour an entry is written, all entries grow older by an hour, and the relay cleans.
#[test]
fn an_entry_is_kept_for_the_retention_and_goes_one_part_later_at_most() {
    let database = listed();
    for now in 0..3 * RETENTION {
        enter(&database, OPEN, now, "0");
        for (table, column) in [
            ("_ledger", "settled_at"),
            ("_attempt", "happened_at"),
            ("_part", "opened_at"),
            ("_part", "closed_at"),
        ] {
            database.execute(&format!(
                "UPDATE {{o}}{table} SET {column} = {column} - interval '1 hour'"
            ));
        }
        let turn = format!("SELECT emptied FROM {{o}}_rotate('{RETENTION} hours')");
        database.number(&turn);
        for table in ["_ledger", "_attempt"] {
            let oldest = database.number(&format!("SELECT min(sequence) FROM {{o}}{table}"));
            let age = now - oldest + 1;
            let all = database.number(&format!("SELECT count(*) FROM {{o}}{table}"));
            assert_eq!(all, age, "{table} at {now}: entries are missing");
            let least = (now + 1).min(RETENTION - 1);
            let most = RETENTION + PART;
            assert!(
                (least..=most).contains(&age),
                "{table} at {now}: the oldest entry is {age} hours old"
            );
        }
    }
    let full = "SELECT count(*) FROM {o}_part WHERE opened_at IS NOT NULL";
    assert!(database.number(full) > RETENTION / PART);
}

/// R26: the list of the parts was lost, for example when a dump of the data was restored in part.
#[test]
fn an_entry_of_a_part_that_is_not_listed_is_kept_for_the_retention() {
    let database = Database::new();
    enter(&database, "3", 1, "1 day");
    database.number("SELECT emptied FROM {o}_rotate('1 day')");
    let closed = "SELECT part FROM {o}_part WHERE closed_at IS NOT NULL";
    assert_eq!((database.number(closed), database.number(OPEN)), (3, 0));
    database.execute("UPDATE {o}_part SET closed_at = now() - interval '2 days' WHERE part = 3");
    let emptied = database.number("SELECT emptied FROM {o}_rotate('1 day')");
    assert_eq!(emptied, 1);
}

/// R3, G2: as in a new outbox, or in a copy of the schema without its data.
#[test]
fn a_ledger_whose_parts_are_not_listed_is_written_and_listed() {
    let database = Database::new();
    assert_eq!(database.number("SELECT count(*) FROM {o}_part"), 0);
    let receiver = Receiver::ok();
    let mut relay = database.binary(&["run"]);
    relay.env("OUTBOX_URL", receiver.url());
    let _relay = Running::start(relay);
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    let open = format!("SELECT coalesce({OPEN}, -1)");
    eventually("a part is open", || database.number(&open) == 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_part"), 8);
}

/// G3: messages that are sent but cannot be recorded would be sent again.
#[test]
fn a_relay_that_lacks_the_open_part_sends_no_more_until_the_part_is_there() {
    const MESSAGES: usize = 20_000;
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = database.relay().url(&receiver.url()).start();
    let relay = relay.expect("a relay");
    database.execute("DROP TABLE {o}_ledger_0");
    database.enqueue_many(MESSAGES);
    let mut looks = 0;
    eventually("the relay stops and is not ready", || {
        looks = if relay.health().is_ready() {
            0
        } else {
            looks + 1
        };
        looks == 100
    });
    assert!(receiver.count() < MESSAGES, "{}", receiver.count());
    database.execute("CREATE TABLE {o}_ledger_0 PARTITION OF {o}_ledger FOR VALUES IN (0)");
    let delivered = i64::try_from(MESSAGES).expect("a number");
    eventually("all messages are settled", || {
        database.count("delivered") == delivered
    });
    end(&relay);
    assert_eq!(receiver.count(), MESSAGES, "nothing was sent twice");
}

/// R63: payloads are blanked after their own time, in steps, and the entries stay. Entries of all parts are found, also
/// those that were written before the relay started.
#[test]
fn payloads_are_kept_for_a_shorter_time_than_their_entries() {
    let database = listed();
    database.execute(
        "UPDATE {o}_part SET opened_at = now() - interval '3 hours',
                closed_at = CASE part WHEN 6 THEN now() - interval '2 hours' END
          WHERE part IN (0, 6)",
    );
    let enter = |part: i16, count: i64, ago: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}}_ledger (part, sequence, message_id, topic, destination, status, attempts, payload, headers,
                 created_at, settled_at)
             SELECT {part}, n, gen_random_uuid(), 't', '', 'delivered', 1, '1', '{{}}', now(), now() - interval '{ago}'
               FROM generate_series(1, {count}) n"
        ));
    };
    enter(6, 1200, "170 min");
    enter(0, 2500, "90 min");
    enter(0, 10, "1 min");
    let mut relay = database.binary(&["run", "--url", "http://127.0.0.1:9"]);
    relay.env("OUTBOX_LEDGER_PAYLOAD", "1h");
    let relay = Running::start(relay);
    relay.wait_for_log("blanked 3700 old payloads of the ledger");
    let kept = "SELECT count(*) FROM {o}_ledger WHERE payload IS NOT NULL AND headers IS NOT NULL";
    assert_eq!(database.number(kept), 10);
    let blank =
        "SELECT count(*) FROM {o}_ledger WHERE payload IS NULL AND headers IS NULL AND topic = 't'";
    assert_eq!(database.number(blank), 3700);
}

/// R63: `true`, `false`, and a time that is shorter than the retention.
#[test]
fn a_time_for_payloads_is_shorter_than_the_retention() {
    let mut config = diesel_outbox::config::Config::default();
    config
        .set("DATABASE_URL", "postgres://db/shop")
        .expect("set");
    config.set("OUTBOX_URL", "https://a.example").expect("set");
    for (value, is_good) in [
        ("true", true),
        ("false", true),
        ("167h", true),
        ("168h", false),
        ("0s", false),
    ] {
        config.set("OUTBOX_LEDGER_PAYLOAD", value).expect(value);
        assert_eq!(config.validate().is_ok(), is_good, "{value}");
    }
    let error = config
        .set("OUTBOX_LEDGER_PAYLOAD", "yes")
        .expect_err("no value");
    assert!(error.to_string().contains("72h"), "{error}");
}
