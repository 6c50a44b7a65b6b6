//! SQL: the tables of feeds.

pub(crate) mod keeping;
pub(crate) mod read;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod token;

#[cfg(test)]
mod tests;
