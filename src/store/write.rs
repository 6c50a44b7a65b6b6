//! The writes of applications: enqueueing, the inbox, and changes to waiting messages.

pub(crate) mod enqueue;
pub(crate) mod inbox;
pub(crate) mod insert;
pub(crate) mod waiting;
