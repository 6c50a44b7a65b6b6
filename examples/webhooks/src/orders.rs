//! Orders, and the messages about them.

use diesel::prelude::*;
use diesel_outbox::catalogue::Catalogue;
use diesel_outbox::{EnqueueError, Event, NewMessage, catalogue};
use rouille::{Request, Response, post_input};
use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use crate::{AnyError, Shop};

diesel::table! {
    orders (id) {
        id -> Integer,
        customer_id -> Uuid,
        euro -> Integer,
    }
}

/// An order was placed.
#[derive(Serialize, JsonSchema)]
struct OrderPlaced {
    order_id: i32,
    /// The amount in euro.
    euro: i32,
}

impl Event for OrderPlaced {
    const TOPIC: &'static str = "order.placed";
}

/// An order was paid.
#[derive(Serialize, JsonSchema)]
struct OrderPaid {
    order_id: i32,
    /// The amount in euro.
    euro: i32,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

/// What customers can receive. `catalogue.json` has the same.
pub fn events() -> Catalogue {
    catalogue![OrderPlaced, OrderPaid]
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
        let placed = NewMessage::of(&OrderPlaced { order_id, euro })?;
        shop.outbox.enqueue(conn, placed.tenant_id(customer))?;
        if form.is_paid {
            let paid = NewMessage::of(&OrderPaid { order_id, euro })?;
            shop.outbox.enqueue(conn, paid.tenant_id(customer))?;
        }
        Ok::<_, EnqueueError>(())
    })?;
    Ok(Response::redirect_303("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What changes for customers is seen in a review. After a change: `WRITE=1 cargo test catalogue`.
    #[test]
    fn the_file_with_the_catalogue_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/catalogue.json");
        let current = serde_json::to_string_pretty(&events()).expect("JSON") + "\n";
        if std::env::var_os("WRITE").is_some() {
            std::fs::write(path, &current).expect("written");
        }
        assert_eq!(std::fs::read_to_string(path).expect("the file"), current);
    }
}
