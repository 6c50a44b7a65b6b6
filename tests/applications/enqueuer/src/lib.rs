//! An application that only enqueues. See `tests/`.

pub mod wrapper;
