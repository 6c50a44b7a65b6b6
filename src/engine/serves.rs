//! What a relay serves: its routes, and the topics that relays have recorded.

pub(crate) mod configured;
pub(crate) mod routes;
pub(crate) mod sql;
