//! The engine: claims committed messages, sends them, and settles (records) the results. It reads no setting and no
//! `outbox.toml`; endpoints, operators' acts, HTTP and handlers are rooms above it.

pub(crate) mod claim;
pub(crate) mod clean;
pub(crate) mod directory;
pub(crate) mod host;
pub(crate) mod keys;
pub(crate) mod lease;
pub(crate) mod observe;
pub(crate) mod plan;
pub(crate) mod send;
pub(crate) mod serves;
pub(crate) mod settle;
#[cfg(test)]
mod tests;
pub(crate) mod wake;
pub(crate) mod workers;
