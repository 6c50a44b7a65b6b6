//! The tables of an outbox: migrations, and whether an outbox has all that this version uses.

pub(crate) mod sql;
