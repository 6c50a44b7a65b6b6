//! SQL: settles and fan-outs.

pub(crate) mod into_feeds;
pub(crate) mod log;
pub(crate) mod settle;
pub(crate) mod split;
pub(crate) mod whereabouts;
pub(crate) mod witness;
