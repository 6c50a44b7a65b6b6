//! A transactional outbox for synchronous Rust.
//!
//! An application that uses [Diesel](diesel) writes a message in the transaction that changes its
//! data ([`Outbox::enqueue`]). A [`Relay`] reads committed messages from PostgreSQL and delivers them
//! over blocking HTTP, at least once. The relay is a group of plain threads, inside the application or
//! in the separate binary `diesel-outbox`. Nothing needs an async runtime.
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
//! // Deliver in the background.
//! let relay = Relay::builder(database_url).url("http://localhost:8080/events").start()?;
//!
//! // Enqueue in the transaction that changes the application's data.
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
//! | To | use |
//! |---|---|
//! | enqueue | [`Outbox`], [`Event`], [`NewMessage`]; [`Aggregate`] for domain events |
//! | cancel or reschedule | [`Outbox::cancel`], [`Outbox::reschedule`] |
//! | deliver | [`Relay`], [`Destination`], [`config`]; [`handlers`] inside the process; [`Observer`] |
//! | receive | [`receive`] verifies and reads requests; [`inbox`] handles each message once |
//! | read a feed | [`feed::consume`] does the work of each event once; [`feed::Reader`] |
//! | test an application | [`testing`] |
//! | query the tables | [`schema`], [`rows`] |
//! | operate an outbox | [`admin`], and the binary `diesel-outbox` |
//!
//! The README lists the guarantees and the causes of duplicates. The [`guide`] describes
//! everything else, including all settings. ARCHITECTURE.md explains how the library works inside.

// Without the relay, HTTP or the program, items of other modules that only they use are dead code.
#![cfg_attr(
    not(all(feature = "http", feature = "program")),
    allow(dead_code, unused_imports, unused_macros, unreachable_pub)
)]
// docs.rs shows which feature each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

// The face.
#[cfg(feature = "operate")]
pub mod admin;
#[cfg(feature = "relay")]
mod builder;
#[cfg(feature = "http")]
pub mod guide;
#[cfg(feature = "program")]
pub mod program;
pub mod testing;

// Migrations as applications call them, and the doctor.
#[cfg(feature = "relay")]
mod doctor;
mod migrations;

// Acts and questions of operators.
#[cfg(feature = "operate")]
mod operate;

// Feeds: destinations that are read.
#[cfg(feature = "feeds")]
pub mod feed;

// Endpoints: rows that somebody registered.
#[cfg(feature = "endpoints")]
pub mod endpoints;
#[cfg(feature = "endpoints")]
pub mod filter;

// Handlers and receivers.
#[cfg(feature = "schemars")]
pub mod catalogue;
#[cfg(feature = "relay")]
pub mod handlers;
pub mod inbox;
#[cfg(feature = "http")]
pub mod receive;

// One message out over HTTP, one outcome back.
#[cfg(feature = "http")]
mod http;
#[cfg(all(feature = "relay", not(feature = "http")))]
#[path = "without_http.rs"]
mod http;

// Settings.
#[cfg(feature = "relay")]
pub mod config;

// Migrations, and whether an outbox has all its parts.
mod setup;

// The engine: claims, sends, settles.
#[cfg(feature = "relay")]
mod engine;

// Enqueueing.
mod aggregate;
mod event;
mod outbox;

// What statements are made of.
mod sql;

// The simulation of the engine with endpoints, above all rooms.
#[cfg(all(test, feature = "operate", feature = "feeds"))]
mod simulation;

// Plain types and functions.
#[cfg(feature = "relay")]
mod backoff;
#[cfg(feature = "relay")]
mod clock;
#[cfg(feature = "relay")]
mod config_error;
#[cfg(feature = "relay")]
mod deadline;
#[cfg(feature = "relay")]
mod delivery;
#[cfg(feature = "relay")]
mod dispatch;
mod error;
mod hand;
mod header;
#[cfg(feature = "relay")]
mod ledger_payload;
#[cfg(feature = "relay")]
mod lock;
#[cfg(feature = "relay")]
mod log;
mod message;
mod metrics;
mod name;
#[cfg(feature = "relay")]
mod own_topics;
#[cfg(feature = "http")]
mod provider;
#[cfg(feature = "relay")]
mod route;
pub mod rows;
pub mod schema;
mod shows;
mod status;
mod words;

pub use crate::aggregate::{Aggregate, Events};
#[cfg(feature = "relay")]
pub use crate::backoff::{Backoff, BadBackoff};
#[cfg(feature = "relay")]
pub use crate::builder::{Relay, RelayBuilder};
#[cfg(feature = "relay")]
pub use crate::config::destination::Destination;
#[cfg(feature = "relay")]
pub use crate::config_error::ConfigError;
#[cfg(feature = "relay")]
pub use crate::dispatch::{Dispatcher, Failure, Outcome, Pause, Response};
#[cfg(feature = "relay")]
pub use crate::engine::host::{Observer, RelayHandle, Settled, ShutdownError, StartError, Stats};
#[cfg(feature = "relay")]
pub use crate::engine::observe::health::{Health, Problem, ProblemKind};
pub use crate::error::{DatabaseError, EnqueueError};
pub use crate::event::{DecodeError, Event, IntoMessage, decode_current};
#[cfg(feature = "http")]
pub use crate::http::HttpDispatcher;
pub use crate::message::{Due, MAX_PAYLOAD_BYTES, Message, MessageError, NewMessage, Sequence};
pub use crate::migrations::{Direction, MIGRATIONS, Migrations, migrate};
pub use crate::name::{BadName, OutboxName};
pub use crate::outbox::sql::insert::Insert;
pub use crate::outbox::sql::waiting::{Answer, Changed, MessageRef, Part, PartState};
pub use crate::outbox::{Enqueued, Outbox, TraceContext};
#[cfg(feature = "relay")]
pub use crate::route::Route;
pub use crate::status::{ReasonCode, Status};
pub use crate::words::UnknownWord;

/// Runs the examples of the README as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
