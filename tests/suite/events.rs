//! Messages as types, and aggregates that collect them.

use diesel::prelude::*;
use diesel_outbox::{
    Aggregate, DecodeError, EnqueueError, Event, Events, NewMessage, decode_current,
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

    fn ordering_key(&self) -> Option<String> {
        Some(format!("order-{}", self.order_id))
    }

    fn idempotency_key(&self) -> Option<String> {
        Some(format!("order-{}-paid", self.order_id))
    }
}

/// One that borrows what it says: it can be enqueued, and needs not be read.
#[derive(Serialize)]
struct OrderNamed<'a> {
    name: &'a str,
}

impl Event for OrderNamed<'_> {
    const TOPIC: &'static str = "order.named";
    const VERSION: u32 = 3;
}

/// Has a payload that no JSON can hold.
#[derive(Serialize)]
struct Unwritable {
    by_pair: std::collections::HashMap<(u8, u8), u8>,
}

impl Event for Unwritable {
    const TOPIC: &'static str = "order.unwritable";
}

fn unwritable() -> Unwritable {
    Unwritable {
        by_pair: [((1, 2), 3)].into(),
    }
}

#[test]
fn an_event_is_enqueued_as_it_is_by_reference_and_by_value() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let paid = OrderPaid {
        order_id: 7,
        euro: 42,
    };
    let first = outbox.enqueue(conn, &paid).expect("enqueued");
    let again = outbox.enqueue(conn, paid).expect("the same message");
    assert!(first.is_new && !again.is_new);
    assert_eq!(again.sequence, first.sequence);
    assert_eq!(
        database.text(
            "SELECT topic || ' ' || ordering_key || ' ' || idempotency_key || ' ' || payload || coalesce(' ' || headers, '') FROM {o}"
        ),
        Some(r#"order.paid order-7 order-7-paid {"order_id":7,"euro":42}"#.to_owned())
    );
}

#[test]
fn a_version_other_than_1_travels_as_an_attribute() {
    let database = Database::new();
    let named = OrderNamed { name: "Ada" };
    database
        .outbox()
        .enqueue(&mut database.connect(), &named)
        .expect("enqueued");
    assert_eq!(
        database.text("SELECT headers->>'ce-dataversion' FROM {o}"),
        Some("3".to_owned())
    );
}

#[test]
fn events_of_an_iterator_are_one_batch() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let orders: Vec<OrderPaid> = (0..3)
        .map(|order_id| OrderPaid { order_id, euro: 1 })
        .collect();
    assert_eq!(outbox.enqueue_batch(conn, &orders).expect("all").len(), 3);
    assert_eq!(outbox.enqueue_bulk(conn, orders).expect("none is new"), 0);
    let names = ["a", "b"];
    let named = names.iter().map(|name| OrderNamed { name });
    assert_eq!(outbox.enqueue_bulk(conn, named).expect("both"), 2);
    assert_eq!(database.count("pending"), 5);
}

#[test]
fn an_event_that_cannot_be_serialised_is_an_error_before_any_sql() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut database.connect();
    conn.transaction(|conn| {
        let error = outbox.enqueue(conn, unwritable()).expect_err("no JSON");
        assert!(matches!(error, EnqueueError::Message(_)), "{error:?}");
        let error = outbox
            .enqueue_bulk(conn, [unwritable()])
            .expect_err("no JSON");
        assert!(
            matches!(error, EnqueueError::MessageAt { index: 0, .. }),
            "{error:?}"
        );
        // The transaction is usable.
        outbox.enqueue(conn, OrderNamed { name: "b" })
    })
    .expect("committed");
    assert_eq!(database.count("pending"), 1);
}

#[test]
fn a_transaction_that_returns_diesels_error_takes_that_of_enqueueing() {
    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let result = conn.transaction(|conn| -> QueryResult<()> {
        outbox.enqueue(
            conn,
            NewMessage::new("a", &1).expect("JSON").idempotency_key("k"),
        )?;
        outbox.enqueue(
            conn,
            NewMessage::new("a", &2).expect("JSON").idempotency_key("k"),
        )?;
        Ok(())
    });
    let Err(diesel::result::Error::QueryBuilderError(error)) = result else {
        panic!("{result:?}");
    };
    let error = error.downcast::<EnqueueError>().expect("it is inside");
    assert!(matches!(*error, EnqueueError::Conflict { .. }), "{error}");
    assert_eq!(database.count("pending"), 0);
}

#[test]
fn an_older_version_is_read_by_who_knows_it_and_no_error_quotes_a_payload() {
    #[derive(Debug, Serialize, Deserialize)]
    struct Cents {
        cents: u64,
    }
    impl Event for Cents {
        const TOPIC: &'static str = "order.paid";
        const VERSION: u32 = 2;

        fn decode(version: u32, json: &str) -> Result<Self, DecodeError> {
            if version == 1 {
                let old: OrderPaid = serde_json::from_str(json)?;
                return Ok(Self {
                    cents: u64::from(old.euro) * 100,
                });
            }
            decode_current(version, json)
        }
    }
    let old = Cents::decode(1, r#"{"order_id":1,"euro":3}"#).expect("version 1");
    assert_eq!(old.cents, 300);
    assert_eq!(Cents::decode(2, r#"{"cents":5}"#).expect("2").cents, 5);
    let error = Cents::decode(3, "{}").expect_err("not yet");
    assert_eq!(
        error,
        DecodeError::Version {
            version: 3,
            known: 2
        }
    );
    let error = Cents::decode(2, r#"{"cents":"my secret"}"#).expect_err("a text");
    assert!(!error.to_string().contains("secret"), "{error}");
}

// --- Aggregates ---------------------------------------------------------------------------

struct Order {
    id: i64,
    is_paid: bool,
    events: Events,
}

impl Order {
    fn new(id: i64) -> Self {
        Self {
            id,
            is_paid: false,
            events: Events::new(),
        }
    }

    fn pay(&mut self) {
        self.is_paid = true;
        self.events.record(OrderPaid {
            order_id: self.id,
            euro: 42,
        });
        self.events.record(OrderNamed { name: "paid" });
    }
}

impl Aggregate for Order {
    fn events(&mut self) -> &mut Events {
        &mut self.events
    }
}

fn table_of_orders(database: &Database) {
    database.execute(&format!(
        "CREATE TABLE {}.orders (id bigint PRIMARY KEY, is_paid boolean NOT NULL)",
        database.schema()
    ));
}

fn store(database: &Database) -> impl Fn(&mut PgConnection, &mut Order) -> QueryResult<usize> {
    let insert = format!("INSERT INTO {}.orders VALUES ($1, $2)", database.schema());
    move |conn, order| {
        diesel::sql_query(&insert)
            .bind::<diesel::sql_types::BigInt, _>(order.id)
            .bind::<diesel::sql_types::Bool, _>(order.is_paid)
            .execute(conn)
    }
}

fn orders(database: &Database) -> i64 {
    database.number(&format!(
        "SELECT count(*) FROM {}.orders",
        database.schema()
    ))
}

/// R5
#[test]
fn an_aggregate_is_saved_with_the_events_that_it_has_collected_in_one_call() {
    let database = Database::new();
    table_of_orders(&database);
    let mut order = Order::new(7);
    order.pay();
    let stored = database
        .outbox()
        .save(&mut database.connect(), &mut order, store(&database))
        .expect("saved");
    assert_eq!(stored, 1);
    assert!(order.events.is_empty());
    assert_eq!(orders(&database), 1);
    assert_eq!(
        database.text("SELECT string_agg(topic, ' ' ORDER BY sequence) FROM {o}"),
        Some("order.paid order.named".to_owned())
    );
    // Nothing has happened since.
    let saved = database
        .outbox()
        .save(&mut database.connect(), &mut order, |_, _| {
            QueryResult::Ok(())
        });
    saved.expect("saved");
    assert_eq!(database.count("pending"), 2);
}

/// R5
#[test]
fn where_the_aggregate_or_an_event_cannot_be_written_neither_is_and_the_events_are_kept() {
    let database = Database::new();
    table_of_orders(&database);
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let mut order = Order::new(7);
    order.pay();

    let refused = outbox.save(conn, &mut order, |_, _| {
        Err::<(), _>(diesel::result::Error::RollbackTransaction)
    });
    refused.expect_err("not stored");
    assert_eq!(order.events.len(), 2);

    // The key of its first event is taken by another message.
    let taken = NewMessage::new("order.paid", &0)
        .expect("JSON")
        .idempotency_key("order-7-paid");
    database.enqueue_message(taken);
    let refused: Result<usize, EnqueueError> = outbox.save(conn, &mut order, |conn, order| {
        Ok(store(&database)(conn, order)?)
    });
    let error = refused.expect_err("a conflict");
    assert!(matches!(error, EnqueueError::Conflict { .. }), "{error}");
    assert_eq!((orders(&database), order.events.len()), (0, 2));

    database.execute("DELETE FROM {o}");
    outbox
        .save(conn, &mut order, store(&database))
        .expect("saved at last");
    assert_eq!((orders(&database), order.events.len()), (1, 0));
    assert_eq!(database.count("pending"), 2);
}

/// R5, G1
#[test]
fn an_aggregate_that_ignores_an_error_of_the_database_is_not_saved() {
    let database = Database::new();
    let mut order = Order::new(7);
    let saved = database
        .outbox()
        .save(&mut database.connect(), &mut order, |conn, _| {
            let _ = diesel::sql_query("SELECT 1 / 0").execute(conn);
            QueryResult::Ok(())
        });
    let error = saved.expect_err("PostgreSQL keeps nothing of it");
    assert!(error.to_string().contains("aborted"), "{error}");
}

/// R5, G1
#[test]
fn a_rolled_back_aggregate_leaves_no_event_and_one_that_cannot_be_serialised_is_told_each_time() {
    let database = Database::new();
    table_of_orders(&database);
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let mut order = Order::new(7);
    order.pay();
    conn.transaction(|conn| -> QueryResult<()> {
        outbox.save(conn, &mut order, store(&database))?;
        Err(diesel::result::Error::RollbackTransaction)
    })
    .expect_err("rolled back");
    assert_eq!((orders(&database), database.count("pending")), (0, 0));

    let mut order = Order::new(8);
    order.events.record(OrderNamed { name: "good" });
    order.events.record(unwritable());
    for _ in 0..2 {
        let error: EnqueueError = outbox
            .save(conn, &mut order, |_, _| Ok(()))
            .expect_err("no JSON");
        assert!(
            matches!(error, EnqueueError::MessageAt { index: 1, .. }),
            "{error}"
        );
    }
    assert_eq!(database.count("pending"), 0);
}
