//! SQL: the tables of feeds.

mod all;
pub(crate) mod keeping;
#[cfg(feature = "http")]
pub(crate) mod position;
pub(crate) mod read;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod token;

#[cfg(test)]
mod tests;
