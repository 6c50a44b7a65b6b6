//! Creates the tables and roles, and checks them.

pub(crate) mod inspect;
pub(crate) mod migrate;
