//! Ordering keys: the claims of keyed messages, the next message of a key, and the lock of keyed claims.

pub(crate) mod sql;
