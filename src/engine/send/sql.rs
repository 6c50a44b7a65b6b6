//! SQL: pauses, which all relays share.

pub(crate) mod pause;
