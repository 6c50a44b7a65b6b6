//! SQL: the writes of applications, which enqueue and change waiting messages.

pub(crate) mod enqueue;
pub(crate) mod insert;
pub(crate) mod searched;
pub(crate) mod seek;
pub(crate) mod waiting;
pub(crate) mod whole;
