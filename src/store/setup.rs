//! Creates the tables and roles, and checks them.

#[cfg(feature = "relay")]
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod migrate;
#[cfg(feature = "relay")]
pub(crate) mod rights;
