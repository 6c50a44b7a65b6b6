//! Orders, and the messages about them.

use diesel::prelude::*;
use diesel_outbox::{EnqueueError, Event};
use rouille::{Request, Response};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{AnyError, Shop};

diesel::table! {
    orders (id) {
        id -> Integer,
        euro -> Integer,
    }
}

#[derive(Deserialize)]
struct NewOrder {
    euro: i32,
    customer: Option<Uuid>,
}

#[derive(Serialize, Deserialize)]
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

/// Writes an order and its message: both, or neither.
pub fn place(shop: &Shop, request: &Request) -> Result<Response, AnyError> {
    let order: NewOrder = match rouille::input::json_input(request) {
        Ok(order) => order,
        Err(error) => return Ok(Response::text(error.to_string()).with_status_code(400)),
    };
    let placed = shop.pool.get()?.transaction(|conn| {
        let order_id = diesel::insert_into(orders::table)
            .values(orders::euro.eq(order.euro))
            .returning(orders::id)
            .get_result(conn)?;
        let placed = OrderPlaced {
            order_id,
            euro: order.euro,
            customer: order.customer,
        };
        shop.outbox.enqueue(conn, &placed)?;
        Ok::<_, EnqueueError>(placed)
    })?;
    Ok(Response::json(&placed).with_status_code(201))
}
