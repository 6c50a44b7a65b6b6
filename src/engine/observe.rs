//! What others see of a running relay: metrics, observers, and the thread that watches the others.

pub(crate) mod health;
pub(crate) mod lately;
pub(crate) mod metrics;
pub(crate) mod monitor;
pub(crate) mod observer;
pub(crate) mod spans;
