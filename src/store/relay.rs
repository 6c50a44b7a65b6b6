//! The statements of relays.

mod address;
pub(crate) mod backend;
pub(crate) mod claim;
pub(crate) mod claimable;
pub(crate) mod clean;
pub(crate) mod connection;
pub(crate) mod failing;
pub(crate) mod keyed_lock;
pub(crate) mod late;
pub(crate) mod lease;
pub(crate) mod notifications;
pub(crate) mod ordered;
pub(crate) mod own;
pub(crate) mod page;
pub(crate) mod patrol;
pub(crate) mod pause;
pub(crate) mod registrations;
pub(crate) mod search;
pub(crate) mod served;
pub(crate) mod settle;
pub(crate) mod sleep_lock;
pub(crate) mod split;
pub(crate) mod streams;
pub(crate) mod topics;
mod unserved;
mod walk;
pub(crate) mod whereabouts;
