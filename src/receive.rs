//! For receivers written in Rust, with any framework: verify a request and read its events.
//!
//! The relay sends [CloudEvents 1.0](https://cloudevents.io) in one of three modes, signed as
//! [Standard Webhooks](https://www.standardwebhooks.com) says. A [`Verifier`] takes all of them:
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
//! /// Gives the status to answer with. `pairs` are the request's headers, `body` its body as it came.
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
//!             // A topic that this receiver has no use for.
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
//! Delivery is at least once: [`inbox::once`](crate::inbox::once) handles each message once.

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

/// Why nothing of a request can be handled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// It is not verified.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// It is in binary mode, and its event has another id than the one that is signed.
    #[error("ce-id is not webhook-id, which is signed")]
    OtherId,
    /// It is in binary mode, which the verifier was told to refuse.
    #[error("it is in binary mode: what its headers say is not signed")]
    Binary,
    /// It is verified, and no events of CloudEvents 1.0.
    #[error(transparent)]
    Event(#[from] CloudEventError),
}

impl ReceiveError {
    /// The status to answer with: 401, after which the relay tries again, or 400, after which the
    /// message is dead.
    pub fn status(&self) -> u16 {
        match self {
            Self::Verify(_) | Self::OtherId | Self::Binary => 401,
            Self::Event(_) => 400,
        }
    }
}
