//! A relay in a build without HTTP.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_outbox::{Event, Outbox, Relay};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    order_id: i64,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

const PATIENCE: Duration = Duration::from_secs(60);

fn url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is set: run `make examples`")
}

#[test]
fn a_relay_without_http_gives_messages_to_handlers_and_no_url() {
    let mut conn = PgConnection::establish(&url()).expect("PostgreSQL is there");
    let outbox = Outbox::default();
    diesel_outbox::migrate(&mut conn, outbox.name()).expect("migrated");

    let by_url = Relay::builder(url()).url("http://127.0.0.1:9/").start();
    let refused = by_url.err().expect("an error without HTTP").to_string();
    assert!(refused.contains("`http`"), "{refused}");
    let by_endpoints = Relay::builder(url()).endpoint_threads(2).start();
    let refused = by_endpoints.err().expect("an error without endpoints");
    let refused = refused.to_string();
    assert!(refused.contains("feature `endpoints`"), "{refused}");

    let (paid, orders) = mpsc::channel();
    let relay = Relay::builder(url())
        .on::<OrderPaid>(move |event, _| Ok(paid.send(event.order_id)?))
        .start()
        .expect("started");
    // An endpoint may want what this program cannot give it, so the message waits, with the reason.
    diesel::sql_query(
        "INSERT INTO outbox_endpoint (name, url) VALUES ('acme', 'https://acme.example/')",
    )
    .execute(&mut conn)
    .expect("registered");
    conn.transaction(|conn| outbox.enqueue(conn, &OrderPaid { order_id: 7 }))
        .expect("enqueued");
    let reason = |conn: &mut PgConnection| {
        diesel_outbox::schema::outbox::table
            .select(diesel_outbox::schema::outbox::last_error_code)
            .first::<Option<String>>(conn)
            .expect("the message")
    };
    let began = Instant::now();
    while reason(&mut conn).as_deref() != Some("NOT_FANNED_OUT") {
        assert!(began.elapsed() < PATIENCE, "the message waits");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(orders.try_recv().is_err(), "the endpoint would get nothing");
    let said = relay.health().to_string();
    assert!(said.contains("feature `endpoints`"), "{said}");
    diesel::sql_query("DELETE FROM outbox_endpoint")
        .execute(&mut conn)
        .expect("removed");
    assert_eq!(orders.recv_timeout(PATIENCE), Ok(7));
    relay.shutdown(PATIENCE).expect("a clean shutdown");
    assert_eq!(relay.stats().delivered, 1);
}

/// R70: an outbox that `outbox_create` alone has made.
#[test]
fn a_relay_without_http_needs_no_tables_of_endpoints() {
    let mut conn = PgConnection::establish(&url()).expect("PostgreSQL is there");
    diesel_outbox::migrate(&mut conn, Outbox::default().name()).expect("migrated");
    diesel::sql_query("SELECT outbox_create('bare')")
        .execute(&mut conn)
        .expect("an outbox");
    let outbox = Outbox::new("bare").expect("a name");
    let (paid, orders) = mpsc::channel();
    let relay = Relay::builder(url())
        .outbox("bare")
        .on::<OrderPaid>(move |event, _| Ok(paid.send(event.order_id)?))
        .start()
        .expect("started");
    conn.transaction(|conn| outbox.enqueue(conn, &OrderPaid { order_id: 8 }))
        .expect("enqueued");
    assert_eq!(orders.recv_timeout(PATIENCE), Ok(8));
    // Tables that are added are no reason to wait while nobody is registered.
    diesel::sql_query("SELECT outbox_create_endpoints('bare')")
        .execute(&mut conn)
        .expect("the tables of endpoints");
    conn.transaction(|conn| outbox.enqueue(conn, &OrderPaid { order_id: 9 }))
        .expect("enqueued");
    assert_eq!(orders.recv_timeout(PATIENCE), Ok(9));
    relay.shutdown(PATIENCE).expect("a clean shutdown");
    assert_eq!(relay.stats().delivered, 2);
}
