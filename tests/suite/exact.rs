//! Which messages an endpoint gets: those of the transaction that registers it, and of later ones.

use diesel::connection::{AnsiTransactionManager as Manager, TransactionManager};
use diesel::{Connection, PgConnection};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::{NewMessage, RelayHandle};
use serde_json::json;

use crate::support::{Database, Receiver, end, eventually};

fn started(database: &Database) -> RelayHandle {
    let relay = database.relay().endpoint_threads(8);
    relay.start().expect("a relay")
}

fn register(database: &Database, conn: &mut PgConnection, name: &str, receiver: &Receiver) {
    let hook = Endpoint::new(name, format!("{}/{name}", receiver.url()));
    let destinations = database.outbox();
    destinations.endpoints().put(conn, &hook).expect("put");
}

fn enqueue(database: &Database, conn: &mut PgConnection, number: usize) {
    let message = NewMessage::new("order.paid", &json!({ "n": number })).expect("JSON");
    database.outbox().enqueue(conn, message).expect("enqueued");
}

/// The numbers of the messages that a destination got, in order.
fn got(receiver: &Receiver, name: &str) -> Vec<u64> {
    let requests = receiver.requests();
    let path = format!("/events/{name} ");
    let of_name = requests.iter().filter(|one| one.line.contains(&path));
    let mut numbers: Vec<u64> = of_name.filter_map(|one| one.json()["n"].as_u64()).collect();
    numbers.sort_unstable();
    numbers
}

/// R57: the relays are busy, so they have claimed the message before they would look at the rows again.
#[test]
fn a_destination_gets_the_messages_of_its_own_transaction_and_later_ones_from_each_relay() {
    const COUNT: usize = 30;
    let database = Database::new();
    let receiver = Receiver::ok();
    let relays = [started(&database), started(&database)];
    let conn = &mut database.connect();
    for number in 0..COUNT {
        conn.transaction(|conn| {
            // The message may be older than the row.
            if number % 2 == 0 {
                enqueue(&database, conn, number);
            }
            register(&database, conn, &format!("hook-{number}"), &receiver);
            if number % 2 == 1 {
                enqueue(&database, conn, number);
            }
            diesel::QueryResult::Ok(())
        })
        .expect("committed");
    }
    receiver.wait_for(COUNT * (COUNT + 1) / 2);
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    relays.iter().for_each(end);
    for number in 0..COUNT {
        let expected: Vec<u64> = (number as u64..COUNT as u64).collect();
        assert_eq!(
            got(&receiver, &format!("hook-{number}")),
            expected,
            "hook-{number}"
        );
    }
}

/// R57.
#[test]
fn a_registration_that_commits_late_gets_its_own_messages_and_none_of_earlier_transactions() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let relay = started(&database);
    let (conn, earlier) = (&mut database.connect(), &mut database.connect());
    register(&database, conn, "first", &receiver);
    let begin = |conn: &mut PgConnection| Manager::begin_transaction(conn).expect("begun");
    let commit = |conn: &mut PgConnection| Manager::commit_transaction(conn).expect("committed");
    begin(earlier);
    enqueue(&database, earlier, 1);
    begin(conn);
    enqueue(&database, conn, 2);
    register(&database, conn, "late", &receiver);
    // Nothing waits for the open transaction.
    database.enqueue("order.paid", json!({ "n": 3 }));
    eventually("the message is delivered", || {
        got(&receiver, "first") == [3]
    });
    commit(conn);
    commit(earlier);
    database.enqueue("order.paid", json!({ "n": 4 }));
    eventually("all are delivered", || {
        got(&receiver, "first") == [1, 2, 3, 4]
    });
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(got(&receiver, "late"), [2, 4]);
}

/// R57.
#[test]
fn removing_and_registering_again_gives_the_new_destination_no_earlier_message() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let conn = &mut database.connect();
    register(&database, conn, "hook", &receiver);
    database.enqueue("order.paid", json!({ "n": 1 }));
    conn.transaction(|conn| {
        let outbox = database.outbox();
        outbox.endpoints().remove(conn, "hook").expect("removed");
        register(&database, conn, "hook", &receiver);
        diesel::QueryResult::Ok(())
    })
    .expect("committed");
    database.enqueue("order.paid", json!({ "n": 2 }));
    let relay = started(&database);
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    assert_eq!(got(&receiver, "hook"), [2]);
}
