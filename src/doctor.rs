//! The doctor and migrations: what is wrong with an outbox and its database.

#[cfg(feature = "operate")]
pub(crate) mod diagnose;
#[cfg(feature = "operate")]
pub(crate) mod migrations;
pub(crate) mod sql;
