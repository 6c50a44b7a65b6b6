//! SQL: rows of endpoints, and what is recorded of them.

pub(crate) mod failing;
pub(crate) mod filter;
pub(crate) mod missed;
pub(crate) mod own;
pub(crate) mod paused;
pub(crate) mod recipient;
pub(crate) mod registrations;
pub(crate) mod removed;
pub(crate) mod rows;
pub(crate) mod served;
pub(crate) mod silent;
pub(crate) mod subscribers;
pub(crate) mod unread;
pub(crate) mod verification;
