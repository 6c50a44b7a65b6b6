//! The lease: the relay's right to the messages that it has claimed, and the time for which it holds.

pub(crate) mod clock;
pub(crate) mod heartbeat;
pub(super) mod holders;
pub(crate) mod sql;
