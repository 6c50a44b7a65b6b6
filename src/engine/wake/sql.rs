//! SQL: notifications, and who sleeps.

pub(crate) mod notifications;
pub(crate) mod sleep_lock;
