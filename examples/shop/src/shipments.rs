//! The receiver, which ships the orders.

use std::io::Read;

use diesel::prelude::*;
use diesel_outbox::receive::{CloudEvent, Headers};
use diesel_outbox::{Event, inbox};
use rouille::{Request, Response};

use crate::orders::OrderPlaced;
use crate::{AnyError, Shop};

/// Payloads of an outbox have at most 1 MiB; the rest is room for the envelope.
const MAX_BODY_BYTES: u64 = 2 * 1024 * 1024;

diesel::table! {
    shipments (id) {
        id -> Integer,
        order_id -> Integer,
    }
}

pub fn receive(shop: &Shop, request: &Request) -> Result<Response, AnyError> {
    let mut body = Vec::new();
    let data = request.data().ok_or("the body has already been read")?;
    data.take(MAX_BODY_BYTES).read_to_end(&mut body)?;
    let headers = Headers::new(request.headers());
    let events = match shop.verifier.events(&headers, &body) {
        Ok(events) => events,
        Err(error) => {
            log::warn!("refused: {error}");
            return Ok(Response::text(error.to_string()).with_status_code(error.status()));
        }
    };
    for event in &events {
        match event.event_type.as_ref() {
            OrderPlaced::TOPIC => match event.decode::<OrderPlaced>() {
                Ok(placed) => ship(shop, event, &placed)?,
                Err(error) => return Ok(Response::text(error.to_string()).with_status_code(422)),
            },
            // Other events are ignored.
            _ => {}
        }
    }
    Ok(Response::empty_204())
}

/// Ships an order once, even if its event arrives twice.
fn ship(shop: &Shop, event: &CloudEvent<'_>, placed: &OrderPlaced) -> Result<(), AnyError> {
    let mut conn = shop.pool.get()?;
    inbox::once(&mut conn, &event.source, &event.id, |conn| {
        diesel::insert_into(shipments::table)
            .values(shipments::order_id.eq(placed.order_id))
            .execute(conn)
    })?;
    Ok(())
}

/// Lists the shipped orders.
pub fn list(shop: &Shop) -> Result<Response, AnyError> {
    let shipped: Vec<i32> = shipments::table
        .select(shipments::order_id)
        .order(shipments::order_id)
        .load(&mut shop.pool.get()?)?;
    Ok(Response::json(&shipped))
}
