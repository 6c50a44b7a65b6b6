//! A transactional outbox for synchronous Rust.
//!
//! An application that uses [Diesel](diesel) writes a message in the transaction that changes its
//! data ([`Outbox::enqueue`]). A [`Relay`], a group of plain threads inside the application or
//! in the `diesel-outbox` binary beside it, takes committed messages out of PostgreSQL and
//! delivers them over blocking HTTP, at least once. No async runtime anywhere.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::{Event, Outbox, Relay};
//! use serde::Serialize;
//! use std::time::Duration;
//!
//! #[derive(Serialize)]
//! struct OrderPaid { order_id: i64 }
//!
//! impl Event for OrderPaid {
//!     const TOPIC: &'static str = "order.paid";
//! }
//!
//! let database_url = "postgres://localhost/shop";
//! let mut conn = PgConnection::establish(database_url)?;
//! diesel_outbox::migrate(&mut conn, &"outbox".parse()?)?;
//!
//! // Deliver, in the background.
//! let relay = Relay::builder(database_url).url("http://localhost:8080/events").start()?;
//!
//! // Enqueue, in the transaction that changes the application's data.
//! let outbox = Outbox::default();
//! conn.transaction(|conn| -> QueryResult<()> {
//!     diesel::sql_query("UPDATE orders SET paid = true WHERE id = 7").execute(conn)?;
//!     outbox.enqueue(conn, &OrderPaid { order_id: 7 })?;
//!     Ok(())
//! })?;
//!
//! relay.shutdown(Duration::from_secs(30))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | for | see |
//! |---|---|
//! | enqueueing | [`Outbox`], [`Event`], [`NewMessage`]; [`Aggregate`] for domain events |
//! | cancelling, rescheduling | [`Outbox::cancel`], [`Outbox::reschedule`] |
//! | delivering | [`Relay`], [`Destination`], [`config`]; [`handlers`] inside the process; [`Observer`] |
//! | receiving | [`receive`] verifies and reads requests, [`inbox`] handles each message once |
//! | testing an application | [`testing`] |
//! | queries of one's own | [`schema`] |
//! | operating | [`admin`], and the binary `diesel-outbox` |
//!
//! The promises, the three ways in which a duplicate can come about, and all settings stand in
//! the README; what comes after it in the [`guide`]; how it works inside, in ARCHITECTURE.md.

// Floor 0: plain types and pure functions.
mod aggregate;
mod backoff;
pub mod config;
mod error;
mod event;
mod header;
mod message;
mod metrics;
mod name;
mod routes;
mod status;

// Floor 1: the database, and the way out.
mod dispatch;
pub mod schema;
mod store;

// Floor 2: the tables, enqueueing and relaying.
mod migrations;
mod outbox;
mod relay;

// Floor 3: for whoever operates an outbox, for who receives, in the process or elsewhere, and for
// tests.
pub mod admin;
pub mod guide;
pub mod handlers;
pub mod inbox;
pub mod receive;
pub mod testing;

pub use crate::admin::migrate;
pub use crate::aggregate::{Aggregate, Events};
pub use crate::backoff::{Backoff, BadBackoff};
pub use crate::config::{Config, ConfigError, Destination, Route};
pub use crate::dispatch::{Dispatcher, Failure, HttpDispatcher, Outcome, Pause, Response};
pub use crate::error::{DatabaseError, EnqueueError};
pub use crate::event::{DecodeError, Event, IntoMessage, decode_current};
pub use crate::handlers::{HandlerError, Handlers};
pub use crate::message::{Due, MAX_PAYLOAD_BYTES, Message, MessageError, NewMessage, Sequence};
pub use crate::migrations::{MIGRATIONS, Migrations};
pub use crate::name::{BadName, OutboxName};
pub use crate::outbox::{Enqueued, Outbox, TraceContext};
pub use crate::relay::{
    DestinationState, Health, Observer, Problem, ProblemKind, Relay, RelayBuilder, RelayHandle,
    Settled, ShutdownError, StartError, Stats,
};
pub use crate::status::{ReasonCode, Status, UnknownWord};
pub use crate::store::waiting::{Answer, Changed, MessageRef, Part, PartState};

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
