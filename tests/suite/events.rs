//! Messages as types, and aggregates that collect events.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::prelude::*;
use diesel_outbox::admin::{self, Selection};
use diesel_outbox::config::Mode;
use diesel_outbox::program::{self, MessageKey};
use diesel_outbox::{
    Aggregate, DecodeError, Destination, EnqueueError, Event, Events, NewMessage, OutboxName,
    decode_current,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::support::{Database, Receiver, end, eventually, finish};

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

/// An event that borrows its content: it can be enqueued, and need not be readable.
#[derive(Serialize)]
struct OrderNamed<'a> {
    name: &'a str,
}

impl Event for OrderNamed<'_> {
    const TOPIC: &'static str = "order.named";
    const VERSION: u32 = 3;
}

/// An event whose payload cannot be serialized to JSON.
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
fn a_type_says_the_tenant_the_headers_and_the_delay_of_its_messages() {
    const TENANT: Uuid = Uuid::from_u128(7);

    #[derive(Serialize)]
    struct Invited {
        name: &'static str,
    }

    impl Event for Invited {
        const TOPIC: &'static str = "member.invited";
        const VERSION: u32 = 2;

        fn tenant_id(&self) -> Option<Uuid> {
            Some(TENANT)
        }

        fn headers(&self) -> Vec<(String, String)> {
            vec![("CE-Subject".to_owned(), self.name.to_owned())]
        }

        fn delay(&self) -> Option<Duration> {
            Some(Duration::from_secs(60))
        }
    }

    let database = Database::new();
    let outbox = database.outbox();
    let conn = &mut database.connect();
    let (ada, bob) = (Invited { name: "ada" }, Invited { name: "bob" });
    outbox.enqueue(conn, &ada).expect("enqueued");
    // A single message may still differ.
    let bob = NewMessage::of(&bob).expect("JSON");
    let bob = bob.header("ce-subject", "Bob").delay(Duration::ZERO);
    outbox.enqueue(conn, bob).expect("enqueued");
    assert_eq!(
        database.text(
            "SELECT string_agg(concat_ws(' ', tenant_id, headers, available_at - created_at), ', ' ORDER BY sequence) FROM {o}"
        ),
        Some(
            format!(
                "{TENANT} {{\"ce-dataversion\":\"2\",\"ce-subject\":\"ada\"}} 00:01:00, \
                 {TENANT} {{\"ce-dataversion\":\"2\",\"ce-subject\":\"Bob\"}} 00:00:00"
            )
        )
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
    assert_eq!(outbox.enqueue_bulk(conn, orders).expect("no key is new"), 0);
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
        // The transaction is still usable.
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
    let error = error
        .downcast::<EnqueueError>()
        .expect("an enqueue error inside");
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

// --- When an event occurred ---------------------------------------------------------------

/// An event that occurred in the past.
#[derive(Serialize)]
struct Measured {
    degrees: i32,
    #[serde(skip)]
    at: Option<SystemTime>,
}

impl Event for Measured {
    const TOPIC: &'static str = "temperature.measured";

    fn occurred_at(&self) -> Option<SystemTime> {
        self.at
    }
}

/// The `ce-time` of each message in any mode, by its sequence.
fn times(receiver: &Receiver) -> BTreeMap<String, String> {
    let of_document = |event: &Value| {
        let text = |name: &str| event[name].as_str().expect(name).to_owned();
        (text("sequence"), text("time"))
    };
    let mut times = BTreeMap::new();
    for request in receiver.requests() {
        match request.header("content-type") {
            Some("application/json") => {
                let header = |name| request.header(name).expect("a header").to_owned();
                times.insert(header("ce-sequence"), header("ce-time"));
            }
            Some("application/cloudevents+json") => times.extend([of_document(&request.json())]),
            _ => {
                let events = request.json();
                times.extend(events.as_array().expect("an array").iter().map(of_document));
            }
        }
    }
    times
}

/// R35
#[test]
fn the_time_of_an_event_is_when_it_occurred_in_each_mode_and_however_it_was_enqueued() {
    let at = |seconds: u64| UNIX_EPOCH + Duration::from_micros(seconds * 1_000_000 + 123_456);
    let measured = |seconds| Measured {
        degrees: 21,
        at: Some(at(seconds)),
    };
    for mode in [Mode::Binary, Mode::Structured, Mode::Batched] {
        let database = Database::new();
        let outbox = database.outbox();
        let receiver = Receiver::ok();
        let mut station = Order::new(1);
        station.events.record(measured(3));
        let late = NewMessage::of(&measured(0)).expect("JSON");
        station.events.record(late.occurred_at(at(4)));
        database
            .connect()
            .transaction(|conn| {
                let plain = NewMessage::new("a", &1).expect("JSON");
                outbox.enqueue(conn, plain.occurred_at(at(1)))?;
                outbox.enqueue(conn, measured(2))?;
                outbox.enqueue_events(conn, &mut station)?;
                outbox.enqueue_batch(conn, [measured(5), measured(6)])?;
                outbox.enqueue_bulk(conn, [measured(7), measured(8)])?;
                let now = Measured {
                    degrees: 22,
                    at: None,
                };
                outbox.enqueue(conn, now)
            })
            .expect("enqueued");
        database.execute(
            "INSERT INTO {o} (topic, payload, occurred_at) VALUES ('a', '1', '1970-01-01 00:00:10.123456Z'),
                 ('a', '1', '1955-11-05Z'), ('a', '1', NULL)",
        );
        let destination = Destination::new("hook", &receiver.url()).map(|mut destination| {
            destination.policy.mode = Some(mode);
            destination
        });
        let relay = database
            .relay()
            .destination(destination.expect("a URL"))
            .route("*", "hook")
            .start()
            .expect("a relay");
        eventually("all messages are delivered", || {
            database.count("delivered") == 12
        });
        end(&relay);
        let expected = database
            .text(
                "SELECT json_object_agg(sequence, to_char(greatest(coalesce(occurred_at, created_at), 'epoch')
                     AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')) FROM {o}_ledger",
            )
            .expect("rows");
        let expected: BTreeMap<String, String> =
            serde_json::from_str(&expected).expect("an object");
        let times = times(&receiver);
        assert_eq!(times, expected, "{mode}");
        let past = times.values().filter(|time| time.starts_with("1970-01-01"));
        let seconds: Vec<&str> = past.map(|time| &time[17..]).collect();
        let given = [1, 2, 3, 4, 5, 6, 7, 8, 10].map(|n| format!("{n:02}.123456Z"));
        for second in &given {
            assert!(
                seconds.contains(&&**second),
                "{mode}: {second} of {seconds:?}"
            );
        }
        assert_eq!(seconds.len(), given.len() + 1, "and 1955 is sent as 1970");
    }
}

/// R35: an event keeps the time at which it occurred through fan-out, dead letter, requeue and replay.
#[test]
fn an_event_keeps_the_time_at_which_it_occurred_until_it_is_settled() {
    let database = Database::new();
    let (good, bad) = (Receiver::ok(), Receiver::answering(|_| 500));
    let at = UNIX_EPOCH + Duration::from_secs(86_400);
    let message = NewMessage::new("a", &1).expect("JSON").occurred_at(at);
    let id = message.message_id();
    database.enqueue_message(message);
    let is_kept = |table: &str| {
        database.number(&format!(
            "SELECT count(*) FROM {{o}}{table} WHERE occurred_at = '1970-01-02Z'"
        ))
    };
    assert_eq!((is_kept(""), is_kept("_messages")), (1, 1));
    let relay = database
        .relay()
        .max_attempts(1)
        .destination(Destination::new("good", &good.url()).expect("a URL"))
        .destination(Destination::new("bad", &bad.url()).expect("a URL"))
        .route_to_each("*", &["good", "bad"])
        .start()
        .expect("a relay");
    eventually("one part is delivered, the other dead-lettered", || {
        is_kept("_ledger") == 2 && is_kept("_dead") == 1
    });
    end(&relay);
    assert_eq!(is_kept("_messages"), 2);

    let conn = &mut database.connect();
    let name: OutboxName = database.outbox_name();
    let records = program::message(conn, &name, &MessageKey::Id(id)).expect("found");
    assert_eq!(records.rows.len(), 3);
    for record in &records.rows {
        assert_eq!(
            record.occurred_at.as_deref(),
            Some("1970-01-02T00:00:00.000Z"),
            "{record:?}"
        );
    }
    let letters = program::dead_letters(conn, &name, &Selection::default(), 10).expect("a list");
    assert_eq!(
        letters[0].occurred_at.as_deref(),
        Some("1970-01-02T00:00:00.000Z")
    );
    assert_eq!(
        admin::requeue(
            conn,
            &name,
            &[letters[0].id()],
            &admin::Note::new("alice", "")
        )
        .expect("requeued"),
        1
    );
    assert_eq!(is_kept(""), 1);
    database.execute("UPDATE {o}_ledger SET payload = '1'");
    finish(database.binary(&["replay", "--since", "1h", "--yes"])).code(0);
    assert_eq!(is_kept(""), 2);
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
    // No new events since the last save.
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

    // Another message already has the key of the first event.
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
    let error = saved.expect_err("PostgreSQL rolls everything back");
    assert!(error.to_string().contains("aborted"), "{error}");
}

/// R5, G1
#[test]
fn a_rolled_back_aggregate_leaves_no_event_and_an_unserialisable_one_is_an_error_each_time() {
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
        let error = outbox
            .enqueue_events(conn, &mut order)
            .expect_err("no JSON");
        assert!(
            matches!(error, EnqueueError::MessageAt { index: 1, .. }),
            "{error}"
        );
    }
    assert_eq!(database.count("pending"), 0);
}
