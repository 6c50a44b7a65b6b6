//! What sets the tables up, and looks whether they are as they must be.

#[cfg(feature = "relay")]
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod migrate;
#[cfg(feature = "relay")]
pub(crate) mod rights;
