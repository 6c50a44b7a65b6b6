//! Enqueues on every kind of Diesel connection, in a build without the relay and without HTTP.

use std::time::Duration;

use diesel::connection::LoadConnection;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_outbox::{EnqueueError, NewMessage, Outbox, Sequence, testing};
use enqueuer::wrapper::Wrapper;

#[derive(diesel::MultiConnection)]
enum AnyConnection {
    Postgres(PgConnection),
}

fn url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is set: run `make examples`")
}

fn message() -> NewMessage {
    NewMessage::new("order.paid", &7)
        .expect("JSON")
        .idempotency_key("order-7")
        .header("x-shop", "berlin")
}

fn migrated() -> Outbox {
    let mut conn = PgConnection::establish(&url()).expect("PostgreSQL is there");
    let outbox = Outbox::default();
    diesel_outbox::migrate(&mut conn, outbox.name()).expect("migrated");
    outbox
}

/// Runs `insert` and every method that writes on any connection, in a transaction that is rolled back.
fn enqueues<C: LoadConnection<Backend = Pg>>(conn: &mut C, sees: fn(&mut C) -> &mut PgConnection) {
    let outbox = migrated();
    let refused = outbox.enqueue(conn, message());
    assert!(
        matches!(refused, Err(EnqueueError::NotInTransaction)),
        "{refused:?}"
    );
    conn.test_transaction(|conn| {
        let inserted: Sequence = outbox.insert(message())?.get_result(conn)?;
        let again = outbox.enqueue(conn, message())?;
        assert!(!again.is_new);
        assert_eq!(again.sequence, inserted);
        let other = message().idempotency_key("order-8");
        assert!(outbox.enqueue(conn, other)?.is_new);
        let two = ["order-8", "order-9"].map(|key| message().idempotency_key(key));
        assert_eq!(outbox.enqueue_batch(conn, two.clone())?.len(), 2);
        let three = two
            .into_iter()
            .chain([message().idempotency_key("order-10")]);
        assert_eq!(outbox.enqueue_bulk(conn, three)?, 1);
        assert_eq!(testing::messages(sees(conn), &outbox)?.len(), 4);
        Ok::<_, EnqueueError>(())
    });
}

#[test]
fn a_plain_connection_enqueues() {
    enqueues(
        &mut PgConnection::establish(&url()).expect("connected"),
        |conn| conn,
    );
}

#[test]
fn a_pooled_connection_enqueues() {
    let manager = ConnectionManager::<PgConnection>::new(url());
    let pool = Pool::builder().max_size(1).build(manager).expect("a pool");
    enqueues(&mut pool.get().expect("connected"), |conn| conn);
}

#[test]
fn a_wrapper_enqueues_and_sees_each_statement() {
    let mut conn = Wrapper::establish(&url()).expect("connected");
    enqueues(&mut conn, |conn| &mut conn.inner);
    assert!(conn.statements >= 5, "{}", conn.statements);
}

#[test]
fn an_enum_of_connections_executes_an_insert() {
    let outbox = migrated();
    let conn = PgConnection::establish(&url()).expect("connected");
    AnyConnection::Postgres(conn).test_transaction(|conn| {
        assert_eq!(outbox.insert(message())?.execute(conn)?, 1);
        assert_eq!(outbox.insert(message())?.execute(conn)?, 0);
        let later = message()
            .idempotency_key("order-8")
            .delay(Duration::from_secs(1));
        let sequence: Sequence = outbox.insert(later)?.get_result(conn)?;
        assert!(sequence.0 > 0);
        Ok::<_, EnqueueError>(())
    });
}
