//! Every method that writes messages requires the caller's transaction, unless that check is disabled by name.

use std::sync::mpsc;

use diesel::connection::SimpleConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::result::Error;
use diesel::{Connection, PgConnection};
use diesel_outbox::{Aggregate, EnqueueError, Event, Events, NewMessage, Outbox};
use serde::{Deserialize, Serialize};

use crate::support::{Database, PATIENCE, end, eventually};

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    order_id: i64,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

struct Order(Events);

impl Aggregate for Order {
    fn events(&mut self) -> &mut Events {
        &mut self.0
    }
}

impl Order {
    fn paid() -> Self {
        let mut order = Self(Events::new());
        order.0.record(OrderPaid { order_id: 7 });
        order
    }
}

/// An outbox with the default settings: it refuses writes outside a transaction.
fn outbox(database: &Database) -> Outbox {
    Outbox::new(&database.name()).expect("a name")
}

type Write = fn(&Outbox, &mut PgConnection) -> Result<(), EnqueueError>;

/// Every method that writes messages, each with one message.
const WAYS: [(&str, Write); 4] = [
    ("enqueue", |outbox, conn| {
        outbox.enqueue(conn, OrderPaid { order_id: 7 }).map(drop)
    }),
    ("enqueue_batch", |outbox, conn| {
        let batch = [OrderPaid { order_id: 7 }];
        outbox.enqueue_batch(conn, batch).map(drop)
    }),
    ("enqueue_bulk", |outbox, conn| {
        let bulk = [OrderPaid { order_id: 7 }];
        outbox.enqueue_bulk(conn, bulk).map(drop)
    }),
    ("save", |outbox, conn| {
        outbox.save(conn, &mut Order::paid(), |_, _| Ok(()))
    }),
];

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, EnqueueError>, what: &str) {
    assert!(
        matches!(result, Err(EnqueueError::NotInTransaction)),
        "{what}: {result:?}"
    );
}

fn stored(database: &Database) -> i64 {
    database.number("SELECT count(*) FROM {o}")
}

/// R1
#[test]
fn outside_of_a_transaction_nothing_is_written() {
    let database = Database::new();
    let outbox = outbox(&database);
    let conn = &mut database.connect();
    for (way, write) in WAYS {
        assert_refused(write(&outbox, conn), way);
    }
    assert_eq!(stored(&database), 0);
    // The mistake is found even if there is nothing to write.
    let none: [NewMessage; 0] = [];
    assert_refused(outbox.enqueue_batch(conn, none.clone()), "an empty batch");
    assert_refused(outbox.enqueue_bulk(conn, none), "an empty bulk");
}

/// R1
#[test]
fn once_a_transaction_has_ended_the_next_message_is_refused() {
    let database = Database::new();
    let outbox = outbox(&database);
    let conn = &mut database.connect();
    for (way, write) in WAYS {
        conn.transaction(|conn| write(&outbox, conn)).expect(way);
        assert_refused(write(&outbox, conn), way);
        let undone = conn.transaction::<(), Error, _>(|conn| {
            write(&outbox, conn)?;
            Err(Error::RollbackTransaction)
        });
        assert_eq!(undone, Err(Error::RollbackTransaction), "{way}");
        assert_refused(write(&outbox, conn), way);
    }
    assert_eq!(stored(&database), WAYS.len() as i64);
}

/// R5
#[test]
fn an_aggregate_that_is_refused_is_not_stored_and_keeps_its_events() {
    let database = Database::new();
    let mut order = Order::paid();
    let mut is_stored = false;
    let refused = outbox(&database).save(&mut database.connect(), &mut order, |_, _| {
        is_stored = true;
        Ok(())
    });
    assert_refused(refused, "save");
    assert!(!is_stored);
    assert_eq!(order.0.len(), 1);
}

/// R1
#[test]
fn every_transaction_that_diesel_begins_is_one() {
    let database = Database::new();
    let outbox = outbox(&database);
    let manager = ConnectionManager::<PgConnection>::new(&database.url);
    let pool = Pool::builder().max_size(1).build(manager).expect("a pool");
    for (before, (way, write)) in (0..).zip(WAYS) {
        let conn = &mut database.connect();
        conn.build_transaction()
            .serializable()
            .run(|conn| write(&outbox, conn))
            .expect(way);
        let mut pooled = pool.get().expect("a connection");
        pooled.transaction(|conn| write(&outbox, conn)).expect(way);
        conn.transaction::<_, EnqueueError, _>(|conn| {
            conn.transaction(|conn| write(&outbox, conn))?;
            let undone = conn.transaction::<(), Error, _>(|conn| {
                write(&outbox, conn)?;
                Err(Error::RollbackTransaction)
            });
            assert_eq!(undone, Err(Error::RollbackTransaction), "{way}");
            // The savepoint is rolled back, and the transaction continues.
            write(&outbox, conn)
        })
        .expect(way);
        assert_eq!(stored(&database), 4 * (before + 1), "{way}");
        conn.begin_test_transaction().expect("begun");
        write(&outbox, conn).expect(way);
        conn.transaction(|conn| write(&outbox, conn)).expect(way);
    }
}

/// R1
#[test]
fn switched_off_by_name_each_call_commits_by_itself() {
    let database = Database::new();
    let outbox = outbox(&database).allow_outside_transaction();
    let conn = &mut database.connect();
    for (written, (way, write)) in (1..).zip(WAYS) {
        write(&outbox, conn).expect(way);
        assert_eq!(stored(&database), written, "{way}");
    }
}

#[test]
fn a_transaction_begun_by_sql_is_refused_and_stays_as_it_was() {
    let database = Database::new();
    let outbox = outbox(&database);
    let conn = &mut database.connect();
    let insert = format!(
        "INSERT INTO {} (topic, payload) VALUES ('t', '1')",
        database.name()
    );
    conn.batch_execute(&format!("BEGIN; {insert}"))
        .expect("begun");
    for (way, write) in WAYS {
        assert_refused(write(&outbox, conn), way);
    }
    assert_eq!(stored(&database), 0);
    conn.batch_execute("COMMIT").expect("committed");
    assert_eq!(stored(&database), 1);
}

#[test]
fn the_error_names_both_ways_out() {
    let database = Database::new();
    let conn = &mut database.connect();
    let error = outbox(&database)
        .enqueue(conn, OrderPaid { order_id: 7 })
        .expect_err("refused");
    // The hint survives the conversion to Diesel's own error.
    for text in [error.to_string(), Error::from(error).to_string()] {
        assert!(text.contains("conn.transaction("), "{text}");
        assert!(text.contains("allow_outside_transaction"), "{text}");
    }
}

/// R33
#[test]
fn a_handlers_work_that_is_done_once_is_in_a_transaction_and_its_connection_is_not() {
    let database = Database::new();
    let (url, outbox) = (database.url.clone(), outbox(&database));
    let (tell, told) = mpsc::channel();
    let relay = database
        .relay()
        .connections(move || PgConnection::establish(&url).map(Box::new))
        .on_topic_pooled("order.placed", move |_, context| {
            let refused = outbox.enqueue(&mut *context.connection()?, OrderPaid { order_id: 7 });
            tell.send(refused).expect("the test listens");
            context.once(|conn| Ok(outbox.enqueue(conn, OrderPaid { order_id: 7 })?))?;
            Ok(())
        })
        .on::<OrderPaid>(|_, _| Ok(()))
        .start()
        .expect("a relay");
    database.enqueue("order.placed", serde_json::json!(7));
    let refused = told.recv_timeout(PATIENCE).expect("the handler is called");
    assert_refused(refused, "on the handler's connection");
    eventually("both messages are handled", || {
        database.count("delivered") == 2
    });
    end(&relay);
}
