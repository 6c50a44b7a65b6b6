//! SQL: the connections of a relay, with their limits.

pub(crate) mod address;
pub(crate) mod connection;
pub(crate) mod libpq;
pub(crate) mod logins;
pub(crate) mod socket;
