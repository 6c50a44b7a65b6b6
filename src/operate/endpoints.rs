//! Acts on endpoints that send messages or ask receivers.

mod deliveries;
#[cfg(feature = "http")]
pub(crate) mod forward;
pub(crate) mod recover;
#[cfg(feature = "http")]
pub(crate) mod trial;
#[cfg(feature = "http")]
pub(crate) mod verification;
