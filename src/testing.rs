//! Tools for testing an application: assertions on enqueued messages, and a relay in the test's own thread.
//!
//! Everything works on the test's connection, also inside Diesel's
//! [`begin_test_transaction`](diesel::Connection::begin_test_transaction). Tests can then share a database
//! and run in parallel: each test sees only its own messages, and leaves nothing behind. The database must
//! have the outbox's tables ([`migrate`](crate::migrate)), but no committed messages, because every test
//! would see them. Tests that enqueue the same idempotency key wait for one another, as with any unique
//! index, so give each test its own keys.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::{Event, Outbox, Relay, assert_enqueued, assert_not_enqueued};
//! use diesel_outbox::testing::{RecordingDispatcher, TestRelay};
//! use serde::{Deserialize, Serialize};
//! use std::time::Duration;
//!
//! #[derive(Debug, Serialize, Deserialize)]
//! struct OrderPaid { order_id: i64 }
//!
//! impl Event for OrderPaid {
//!     const TOPIC: &'static str = "order.paid";
//! }
//!
//! // The code under test.
//! fn pay(conn: &mut PgConnection, order_id: i64) -> QueryResult<()> {
//!     let outbox = Outbox::default();
//!     conn.transaction(|conn| {
//!         diesel::sql_query("UPDATE orders SET paid = true").execute(conn)?;
//!         outbox.enqueue(conn, &OrderPaid { order_id })?;
//!         Ok(())
//!     })
//! }
//!
//! # fn test() -> Result<(), Box<dyn std::error::Error>> {
//! let mut conn = PgConnection::establish("postgres://localhost/shop_test")?;
//! conn.begin_test_transaction()?;
//! let outbox = Outbox::default();
//!
//! pay(&mut conn, 7)?;
//!
//! // The event was enqueued …
//! assert_enqueued!(&mut conn, outbox, OrderPaid { order_id: 7 });
//! assert_not_enqueued!(&mut conn, outbox, OrderPaid { order_id: 8 });
//!
//! // … and a receiver gets it. A relay with the application's own handlers also works.
//! let receiver = RecordingDispatcher::new();
//! let relay = TestRelay::new(Relay::in_test().dispatcher(receiver.clone()))?;
//! relay.drain(&mut conn)?.assert_all_delivered();
//! assert_eq!(receiver.messages().len(), 1);
//! # Ok(())
//! # }
//! ```
//!
//! The test's transaction counts as a transaction. Code that forgets its own transaction is refused in
//! production ([`NotInTransaction`](crate::EnqueueError::NotInTransaction)), but not in such a test.

#[cfg(feature = "relay")]
mod recording;
#[cfg(feature = "operate")]
mod relay;
pub(crate) mod sql;

use std::time::Duration;

use diesel::PgConnection;
use diesel::result::QueryResult;
use serde::de::DeserializeOwned;

#[cfg(feature = "relay")]
pub use self::recording::RecordingDispatcher;
#[cfg(feature = "operate")]
pub use self::relay::{Drained, NotDelivered, TestRelay, Waiting};
use self::sql as rows;
use crate::event::Event;
use crate::message::Message;
use crate::outbox::Outbox;

/// The live messages of the outbox (neither delivered nor dead), as this connection sees them, in the
/// order of their sequences.
///
/// ```
/// # use diesel::prelude::*;
/// # use diesel_outbox::Outbox;
/// use diesel_outbox::testing;
///
/// fn check(conn: &mut PgConnection, outbox: &Outbox) -> QueryResult<()> {
///     let messages = testing::messages(conn, outbox)?;
///     let topics: Vec<&str> = messages.iter().map(|one| one.topic.as_str()).collect();
///     assert_eq!(topics, ["order.paid", "mail.wanted"]);
///     assert_eq!(messages[0].ordering_key.as_deref(), Some("order-7"));
///     Ok(())
/// }
/// ```
///
/// # Errors
/// Diesel's error if the database fails.
pub fn messages(conn: &mut PgConnection, outbox: &Outbox) -> QueryResult<Vec<Message>> {
    rows::live(conn, outbox.name())
}

/// The events of one type in the outbox, like [`messages`].
///
/// ```
/// # use diesel::prelude::*;
/// # use diesel_outbox::{Event, Outbox};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct OrderPaid { order_id: i64, euro: u32 }
/// # impl Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
/// use diesel_outbox::testing;
///
/// fn sum(conn: &mut PgConnection, outbox: &Outbox) -> QueryResult<u32> {
///     let paid: Vec<OrderPaid> = testing::events(conn, outbox)?;
///     Ok(paid.iter().map(|order| order.euro).sum())
/// }
/// ```
///
/// # Panics
/// If a message of the type's topic does not have the type's shape.
///
/// # Errors
/// Diesel's error if the database fails.
pub fn events<E: Event + DeserializeOwned>(
    conn: &mut PgConnection,
    outbox: &Outbox,
) -> QueryResult<Vec<E>> {
    Ok(messages(conn, outbox)?.iter().filter_map(decoded).collect())
}

fn decoded<E: Event + DeserializeOwned>(message: &Message) -> Option<E> {
    if message.topic != E::TOPIC {
        return None;
    }
    match message.decode() {
        Ok(event) => Some(event),
        Err(error) => panic!(
            "message {} of topic {} does not match its type: {error}: {}",
            message.sequence, message.topic, message.payload
        ),
    }
}

/// For the macros.
#[doc(hidden)]
pub type Conn = PgConnection;

/// The messages of the outbox, for the text of a failed assertion.
#[doc(hidden)]
pub fn shown(conn: &mut PgConnection, outbox: &Outbox) -> String {
    match messages(conn, outbox) {
        Ok(messages) if messages.is_empty() => "the outbox is empty".to_owned(),
        Ok(messages) => messages
            .iter()
            .fold("the outbox contains:".to_owned(), |text, message| {
                format!("{text}\n  {} {}", message.topic, message.payload)
            }),
        Err(error) => format!("the outbox cannot be read: {error}"),
    }
}

/// Asserts that the outbox contains an event that matches the pattern.
///
/// Also panics if the outbox cannot be read, or if a message of the event's topic does not have its shape.
///
/// ```no_run
/// # use diesel::prelude::*;
/// # use diesel_outbox::{Event, Outbox, assert_enqueued};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct OrderPaid { order_id: i64, euro: u32 }
/// # impl Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
/// # let mut conn = PgConnection::establish("")?;
/// let outbox = Outbox::default();
/// assert_enqueued!(&mut conn, outbox, OrderPaid { order_id: 7, .. });
/// assert_enqueued!(&mut conn, outbox, OrderPaid { euro, .. } if euro > 40);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! assert_enqueued {
    ($conn:expr, $outbox:expr, $event:pat $(if $guard:expr)? $(,)?) => {{
        let (conn, outbox): (&mut $crate::testing::Conn, &$crate::Outbox) =
            ($conn, &$outbox);
        let events = $crate::testing::events(conn, outbox).expect("the outbox can be read");
        let is_it = |event| matches!(event, $event $(if $guard)?);
        if !events.into_iter().any(is_it) {
            panic!(
                "no event {} was enqueued; {}",
                stringify!($event $(if $guard)?),
                $crate::testing::shown(conn, outbox)
            );
        }
    }};
}

/// Asserts that the outbox contains no event that matches the pattern. See
/// [`assert_enqueued!`](crate::assert_enqueued).
///
/// ```no_run
/// # use diesel::prelude::*;
/// # use diesel_outbox::{Event, Outbox, assert_not_enqueued};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct OrderPaid { order_id: i64 }
/// # impl Event for OrderPaid { const TOPIC: &'static str = "order.paid"; }
/// # let mut conn = PgConnection::establish("")?;
/// # let outbox = Outbox::default();
/// assert_not_enqueued!(&mut conn, outbox, OrderPaid { .. });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! assert_not_enqueued {
    ($conn:expr, $outbox:expr, $event:pat $(if $guard:expr)? $(,)?) => {{
        let (conn, outbox): (&mut $crate::testing::Conn, &$crate::Outbox) =
            ($conn, &$outbox);
        let events = $crate::testing::events(conn, outbox).expect("the outbox can be read");
        let is_it = |event| matches!(event, $event $(if $guard)?);
        if events.into_iter().any(is_it) {
            panic!(
                "an event {} was enqueued; {}",
                stringify!($event $(if $guard)?),
                $crate::testing::shown(conn, outbox)
            );
        }
    }};
}

/// Moves the outbox's clock forward by `duration`, for delays, retries and expiry.
///
/// ```
/// # use diesel::prelude::*;
/// use diesel_outbox::testing::{self, TestRelay};
/// use diesel_outbox::{NewMessage, Outbox, Relay};
/// use std::time::Duration;
///
/// # fn test(conn: &mut PgConnection) -> Result<(), Box<dyn std::error::Error>> {
/// // `conn` is in the test's transaction.
/// let outbox = Outbox::default();
/// let relay = TestRelay::new(Relay::in_test().on_topic("reminder", |_, _| Ok(())))?;
/// outbox.enqueue(conn, NewMessage::new("reminder", &7)?.delay(Duration::from_secs(3600)))?;
///
/// assert!(relay.drain(conn)?.delivered.is_empty());
/// testing::advance(conn, &outbox, Duration::from_secs(3600))?;
/// assert_eq!(relay.drain(conn)?.delivered.len(), 1);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Diesel's error if the database fails.
pub fn advance(conn: &mut PgConnection, outbox: &Outbox, duration: Duration) -> QueryResult<()> {
    rows::advance(conn, outbox.name(), duration)
}
