//! Endpoints: webhooks that the customers of an application register.
//!
//! Other destinations are *configured*: in `outbox.toml` or the builder. Endpoints are rows of `outbox_endpoint`. They
//! can be added, changed and removed while relays run.
//! [`Outbox::endpoints`](crate::Outbox::endpoints) writes them in the application's transaction. See the chapter
//! [webhooks](https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/webhooks.md) of the guide.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::endpoints::{DeliveryFilter, EndpointFilter, Endpoint};
//! use diesel_outbox::{Outbox, Status};
//! use std::time::Duration;
//!
//! # let tenant = uuid::Uuid::nil();
//! let outbox = Outbox::new("outbox")?;
//! let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//! let endpoints = outbox.endpoints();
//!
//! let hook = Endpoint::new("acme", "https://acme.example/hooks")
//!     .topics(["order.*"])
//!     .tenant(tenant);
//! endpoints.put(&mut conn, &hook)?;
//! // The customer verifies requests with this secret.
//! let secret = endpoints.secret(&mut conn, "acme")?;
//!
//! // A new secret. For a day, the old secret also signs.
//! let secret = endpoints.rotate(&mut conn, "acme", Duration::from_secs(24 * 3600))?;
//!
//! // For the customer's own page.
//! let of_tenant = EndpointFilter::default().tenant_id(tenant);
//! for hook in endpoints.list(&mut conn, &of_tenant, 100)? {
//!     println!("{} {} {}", hook.name, hook.url, hook.state);
//! }
//! endpoints.disable(&mut conn, "acme", "the customer asked for it")?;
//! endpoints.enable(&mut conn, "acme")?;
//! endpoints.change(&mut conn, "acme", |hook| hook.url = "https://acme.example/new".to_owned())?;
//! let hook = endpoints.get(&mut conn, "acme")?;
//!
//! // Show the latest deliveries, and send dead letters again.
//! let page = endpoints.deliveries(&mut conn, "acme", &DeliveryFilter::default(), 20)?;
//! for delivery in page.rows.iter().filter(|delivery| delivery.state == Status::Dead) {
//!     println!("{} {:?}", delivery.topic, delivery.public_error());
//!     endpoints.send_again(&mut conn, "acme", delivery.message_id)?;
//! }
//! endpoints.remove(&mut conn, "acme")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A limit for each tenant
//!
//! A tenant may have at most 1,000 endpoints; endpoints without a tenant have no limit. Beyond the
//! limit, the tenant gets no more endpoints ([`EndpointError::TooMany`]). The table enforces the limit, also
//! against plain SQL. The owner of the outbox can set another limit: `SELECT outbox_endpoint_limit('outbox', 5000)`.
//! Lowering the limit removes no endpoints.

mod acts;
pub(crate) mod database;
pub(crate) mod endpoint;
mod failing;
mod fair;
mod filter_troubles;
pub(crate) mod keeper;
mod old_records;
mod overdue;
mod pool;
pub(crate) mod public_error;
pub(crate) mod roster;
mod sealed;
pub(crate) mod serving;
pub(crate) mod sql;
pub(crate) mod turns;
mod unread;
mod verifications;
pub(crate) mod workers;

pub use self::acts::{Encryption, EndpointError, Endpoints};
pub use self::endpoint::{Endpoint, EndpointKind, EndpointState};
pub use self::sql::rows::EndpointFilter;
pub use crate::hand::Hand;
#[cfg(feature = "operate")]
pub use crate::operate::endpoints::recover::Recover;
#[cfg(all(feature = "http", feature = "operate"))]
pub use crate::operate::endpoints::trial::{EndpointTest, TestAnswer};
#[cfg(all(feature = "http", feature = "operate"))]
pub use crate::operate::endpoints::verification::{EndpointAnswer, EndpointCheck};
#[cfg(feature = "operate")]
pub use crate::operate::sql::deliveries::{
    Deliveries, Delivery, DeliveryDetails, DeliveryFilter, FailedAttempt,
};
#[cfg(feature = "operate")]
pub use crate::operate::sql::ledger::DeliveryCount;
