//! The receiver, which ships the orders.

use std::convert::Infallible;

use diesel::prelude::*;
use diesel_outbox::receive::{self, CloudEvent, Headers};
use diesel_outbox::{Event, inbox};
use rocket::http::Status;
use rocket::request::{FromRequest, Outcome, Request};
use rocket::response::Debug;
use rocket::serde::json::Json;
use rocket::{error, get, post};

use crate::Db;
use crate::orders::OrderPlaced;

diesel::table! {
    shipments (id) {
        id -> Integer,
        order_id -> Integer,
    }
}

/// The headers of a request, for `diesel_outbox::receive`.
pub struct EventHeaders(Headers);

#[rocket::async_trait]
impl<'r> FromRequest<'r> for EventHeaders {
    type Error = Infallible;

    async fn from_request(request: &'r Request<'_>) -> Outcome<Self, Infallible> {
        let headers = request.headers().iter();
        Outcome::Success(Self(Headers::new(
            headers.map(|header| (header.name().to_string(), header.value().to_owned())),
        )))
    }
}

/// A receiver that others can reach must verify each request (`receive::Verifier`), as examples/shop does.
#[post("/events", data = "<body>")]
pub async fn take(db: Db, headers: EventHeaders, body: Vec<u8>) -> Status {
    db.run(move |conn| ship_all(conn, &headers.0, &body)).await
}

fn ship_all(conn: &mut PgConnection, headers: &Headers, body: &[u8]) -> Status {
    let events = match receive::events(headers, body) {
        Ok(events) => events,
        Err(error) => {
            error!("not an event: {error}");
            return Status::BadRequest;
        }
    };
    for event in &events {
        if event.event_type != OrderPlaced::TOPIC {
            continue;
        }
        let placed: OrderPlaced = match event.decode() {
            Ok(placed) => placed,
            Err(error) => {
                error!("event {}: {error}", event.id);
                return Status::UnprocessableEntity;
            }
        };
        if let Err(error) = ship(conn, event, &placed) {
            error!("event {}: {error}", event.id);
            // 503 makes the relay retry.
            return Status::ServiceUnavailable;
        }
    }
    Status::NoContent
}

/// Ships an order once, even if its event arrives twice.
fn ship(conn: &mut PgConnection, event: &CloudEvent<'_>, placed: &OrderPlaced) -> QueryResult<()> {
    inbox::once(conn, &event.source, &event.id, |conn| {
        diesel::insert_into(shipments::table)
            .values(shipments::order_id.eq(placed.order_id))
            .execute(conn)
    })?;
    Ok(())
}

/// Lists the shipped orders.
#[get("/shipments")]
pub async fn list(db: Db) -> Result<Json<Vec<i32>>, Debug<diesel::result::Error>> {
    let shipped = db
        .run(|conn| {
            shipments::table
                .select(shipments::order_id)
                .order(shipments::order_id)
                .load(conn)
        })
        .await?;
    Ok(Json(shipped))
}
