//! Orders, and the messages about them.

use diesel::prelude::*;
use diesel_outbox::{EnqueueError, NewMessage};
use rouille::{Request, Response, post_input};
use serde::Serialize;
use uuid::Uuid;

use crate::{AnyError, Shop};

const PLACED: &str = "order.placed";
const PAID: &str = "order.paid";
/// The topics that customers can choose.
pub const TOPICS: [&str; 2] = [PLACED, PAID];

diesel::table! {
    orders (id) {
        id -> Integer,
        customer_id -> Uuid,
        euro -> Integer,
    }
}

#[derive(Serialize)]
struct Order {
    order_id: i32,
    euro: i32,
}

/// Writes an order and its messages: all, or nothing.
pub fn place(shop: &Shop, customer: Uuid, request: &Request) -> Result<Response, AnyError> {
    let Ok(form) = post_input!(request, { euro: i32, is_paid: bool }) else {
        return Ok(Response::empty_400());
    };
    let euro = form.euro;
    shop.pool.get()?.transaction(|conn| {
        let order_id = diesel::insert_into(orders::table)
            .values((orders::customer_id.eq(customer), orders::euro.eq(euro)))
            .returning(orders::id)
            .get_result(conn)?;
        for topic in [PLACED].into_iter().chain(form.is_paid.then_some(PAID)) {
            let message = NewMessage::new(topic, &Order { order_id, euro })?;
            shop.outbox.enqueue(conn, message.tenant_id(customer))?;
        }
        Ok::<_, EnqueueError>(())
    })?;
    Ok(Response::redirect_303("/"))
}
