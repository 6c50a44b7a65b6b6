//! SQL: claims by ordering key, and their lock.

pub(crate) mod lock;
pub(crate) mod ordered;
