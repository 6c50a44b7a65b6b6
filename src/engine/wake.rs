//! How the claimer sleeps, and what wakes it.

pub(crate) mod bell;
pub(super) mod listener;
pub(super) mod sleep;
pub(crate) mod sql;
