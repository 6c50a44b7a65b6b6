//! Orders, and the messages about them.

use diesel::prelude::*;
use diesel_outbox::{EnqueueError, Event, Outbox};
use rocket::response::Debug;
use rocket::serde::json::Json;
use rocket::serde::{Deserialize, Serialize};
use rocket::{State, post};

use crate::Db;

diesel::table! {
    orders (id) {
        id -> Integer,
        euro -> Integer,
    }
}

#[derive(Deserialize)]
#[serde(crate = "rocket::serde")]
pub struct NewOrder {
    euro: i32,
}

#[derive(Serialize, Deserialize)]
#[serde(crate = "rocket::serde")]
pub struct OrderPlaced {
    pub order_id: i32,
    pub euro: i32,
}

impl Event for OrderPlaced {
    const TOPIC: &'static str = "order.placed";
}

#[post("/orders", data = "<order>")]
pub async fn place(
    db: Db,
    outbox: &State<Outbox>,
    order: Json<NewOrder>,
) -> Result<Json<OrderPlaced>, Debug<EnqueueError>> {
    let outbox = outbox.inner().clone();
    let placed = db
        .run(move |conn| insert(conn, &outbox, order.euro))
        .await?;
    Ok(Json(placed))
}

/// Writes an order and its message: both, or neither.
fn insert(
    conn: &mut PgConnection,
    outbox: &Outbox,
    euro: i32,
) -> Result<OrderPlaced, EnqueueError> {
    conn.transaction(|conn| {
        let order_id = diesel::insert_into(orders::table)
            .values(orders::euro.eq(euro))
            .returning(orders::id)
            .get_result(conn)?;
        let placed = OrderPlaced { order_id, euro };
        outbox.enqueue(conn, &placed)?;
        Ok(placed)
    })
}
