//! SQL: creates the tables and roles, and checks them.

pub(crate) mod catalogue;
pub(crate) mod inspect;
pub(crate) mod migrate;
