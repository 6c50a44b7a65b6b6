//! The doctor and migrations: what is wrong with an outbox and its database.

pub(crate) mod diagnose;
pub(crate) mod migrations;
pub(crate) mod sql;
