//! Orders, and the messages about them.

use diesel::prelude::*;
use diesel_outbox::{EnqueueError, Event, Outbox};
use rocket::response::Debug;
use rocket::serde::json::Json;
use rocket::serde::uuid::Uuid;
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
    customer: Option<Uuid>,
}

#[derive(Serialize, Deserialize)]
#[serde(crate = "rocket::serde")]
pub struct OrderPlaced {
    pub order_id: i32,
    pub euro: i32,
    /// Whose webhooks get the event.
    #[serde(skip)]
    pub customer: Option<Uuid>,
}

impl Event for OrderPlaced {
    const TOPIC: &'static str = "order.placed";

    fn tenant_id(&self) -> Option<Uuid> {
        self.customer
    }
}

#[post("/orders", data = "<order>")]
pub async fn place(
    db: Db,
    outbox: &State<Outbox>,
    order: Json<NewOrder>,
) -> Result<Json<OrderPlaced>, Debug<EnqueueError>> {
    let outbox = outbox.inner().clone();
    let placed = db.run(move |conn| insert(conn, &outbox, &order)).await?;
    Ok(Json(placed))
}

/// Writes an order and its message: both, or neither.
fn insert(
    conn: &mut PgConnection,
    outbox: &Outbox,
    order: &NewOrder,
) -> Result<OrderPlaced, EnqueueError> {
    conn.transaction(|conn| {
        let order_id = diesel::insert_into(orders::table)
            .values(orders::euro.eq(order.euro))
            .returning(orders::id)
            .get_result(conn)?;
        let placed = OrderPlaced {
            order_id,
            euro: order.euro,
            customer: order.customer,
        };
        outbox.enqueue(conn, &placed)?;
        Ok(placed)
    })
}
