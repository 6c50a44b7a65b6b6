//! Pays an order with diesel-async and enqueues its message in the same transaction. The relay is a separate
//! program: `diesel-outbox run`, or an application that contains a relay.
//!
//! ```sh
//! scripts/with-postgres cargo run --manifest-path examples/async-shop/Cargo.toml
//! ```

use diesel::connection::Connection;
use diesel::result::Error;
use diesel::{ExpressionMethods, PgConnection, QueryDsl};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use diesel_outbox::{Event, Outbox, Sequence};
use serde::Serialize;

diesel::table! {
    orders (id) {
        id -> BigInt,
        paid -> Bool,
    }
}

#[derive(Serialize)]
struct OrderPaid {
    order_id: i64,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

/// Marks an order as paid and enqueues its message: both happen, or neither.
async fn pay(
    conn: &mut AsyncPgConnection,
    outbox: &Outbox,
    order_id: i64,
) -> Result<Sequence, Error> {
    conn.transaction(async |conn| {
        diesel::update(orders::table.find(order_id))
            .set(orders::paid.eq(true))
            .execute(conn)
            .await?;
        outbox
            .insert(&OrderPaid { order_id })?
            .get_result(conn)
            .await
    })
    .await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let outbox = Outbox::default();
    // Once, at the start, on a blocking connection.
    diesel_outbox::migrate(&mut PgConnection::establish(&url)?, outbox.name())?;

    let mut conn = AsyncPgConnection::establish(&url).await?;
    conn.batch_execute(
        "CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, paid bool NOT NULL);
         INSERT INTO orders VALUES (7, false) ON CONFLICT DO NOTHING",
    )
    .await?;
    let sequence = pay(&mut conn, &outbox, 7).await?;
    println!("order 7 is paid: message {sequence}");
    Ok(())
}
