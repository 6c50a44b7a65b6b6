//! SQL: what relays serve, and what is recorded of topics.

pub(crate) mod topics;
