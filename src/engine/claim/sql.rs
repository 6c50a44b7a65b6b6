//! SQL: claims, and the searches for messages to claim.

pub(crate) mod claim;
pub(crate) mod claimable;
pub(crate) mod glance;
pub(crate) mod late;
pub(crate) mod namesakes;
pub(crate) mod page;
pub(crate) mod search;
pub(crate) mod streams;
mod unserved;
mod walk;
