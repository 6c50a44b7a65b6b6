//! SQL: leases, and the server processes of their connections.

pub(crate) mod backend;
pub(crate) mod lease;
