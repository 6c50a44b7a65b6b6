//! Tools for receivers in Rust, with any framework: verify a request and read its events.
//!
//! The relay sends [CloudEvents 1.0](https://cloudevents.io) in one of three modes, signed according to
//! [Standard Webhooks](https://www.standardwebhooks.com). A [`Verifier`] accepts all three modes:
//!
//! ```
//! use diesel_outbox::Event;
//! use diesel_outbox::receive::{Headers, ReceiveError, Verifier};
//!
//! #[derive(serde::Serialize, serde::Deserialize)]
//! struct OrderPaid { order_id: i64 }
//!
//! impl Event for OrderPaid {
//!     const TOPIC: &'static str = "order.paid";
//! }
//!
//! /// Returns the status of the response. `pairs`: the request's headers; `body`: its unchanged body.
//! fn receive<'a>(
//!     verifier: &Verifier,
//!     pairs: impl Iterator<Item = (&'a str, &'a str)>,
//!     body: &[u8],
//! ) -> u16 {
//!     let headers = Headers::new(pairs);
//!     let events = match verifier.events(&headers, body) {
//!         Ok(events) => events,
//!         Err(error) => return error.status(),
//!     };
//!     for event in &events {
//!         match event.event_type.as_ref() {
//!             OrderPaid::TOPIC => match event.decode::<OrderPaid>() {
//!                 Ok(paid) => println!("order {} is paid", paid.order_id),
//!                 Err(_) => return 422,
//!             },
//!             // A topic that this receiver does not use.
//!             _ => {}
//!         }
//!     }
//!     204
//! }
//! # let verifier: Verifier = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse()?;
//! # assert_eq!(receive(&verifier, [("webhook-id", "1")].into_iter(), b"{}"), 401);
//! # Ok::<(), diesel_outbox::ConfigError>(())
//! ```
//!
//! Delivery is at least once. Use [`inbox::once`](crate::inbox::once) to handle each message once.

mod attributes;
mod cloudevent;
mod error;
mod headers;
mod json;
mod request;
mod verifier;

pub use self::cloudevent::{CloudEvent, Data};
pub use self::error::CloudEventError;
pub use self::headers::Headers;
pub use self::request::events;
pub use self::verifier::{Verified, Verifier, VerifyError};

/// Why a request cannot be handled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The request cannot be verified.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The request is in binary mode, and the event's id differs from the signed id.
    #[error("ce-id differs from webhook-id, which is signed")]
    OtherId,
    /// The request is in binary mode, which the verifier refuses.
    #[error("binary mode is refused, because its headers are not signed")]
    Binary,
    /// The request is verified, but does not contain valid CloudEvents 1.0.
    #[error(transparent)]
    Event(#[from] CloudEventError),
}

impl ReceiveError {
    /// The status of the response: 401, after which the relay retries, or 400, after which the relay
    /// dead-letters the message.
    pub fn status(&self) -> u16 {
        match self {
            Self::Verify(_) | Self::OtherId | Self::Binary => 401,
            Self::Event(_) => 400,
        }
    }
}
