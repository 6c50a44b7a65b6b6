//! What applications write.

pub(crate) mod enqueue;
pub(crate) mod inbox;
pub(crate) mod insert;
pub(crate) mod waiting;
