//! What operators read and change: live messages, dead letters, the history, the ledger, replays.

#[cfg(feature = "relay")]
pub(crate) mod activity;
#[cfg(feature = "relay")]
pub(crate) mod blocked;
#[cfg(feature = "relay")]
pub(crate) mod dead;
#[cfg(feature = "relay")]
pub(crate) mod deliveries;
#[cfg(feature = "relay")]
pub(crate) mod depths;
#[cfg(feature = "relay")]
pub(crate) mod forget;
#[cfg(feature = "relay")]
pub(crate) mod history;
#[cfg(feature = "relay")]
pub(crate) mod ledger;
pub(crate) mod messages;
#[cfg(feature = "relay")]
pub(crate) mod replay;
mod replay_keys;
#[cfg(feature = "relay")]
pub(crate) mod status;
#[cfg(feature = "relay")]
pub(crate) mod troubles;
#[cfg(feature = "relay")]
pub(crate) mod waiting;
#[cfg(feature = "relay")]
pub(crate) mod why;
