//! SQL: facts for the doctor about an outbox, its server and its sessions. Each query runs in a transaction that is rolled
//! back. `doctor::diagnose` judges the facts.

#[cfg(feature = "operate")]
pub(super) mod disabled;
#[cfg(feature = "operate")]
pub(super) mod drift;
pub(crate) mod rights;
#[cfg(feature = "operate")]
pub(super) mod server;
#[cfg(feature = "operate")]
pub(super) mod snapshots;
#[cfg(feature = "operate")]
pub(super) mod tables;

use crate::setup::sql::inspect::{TABLES_AND_VIEW, parts};

/// The suffixes of the tables of an outbox and its view, and of the parts of its ring (ledger and history, divided by
/// time).
pub(crate) fn suffixes() -> impl Iterator<Item = String> {
    let parts = parts().map(|(table, part)| format!("{table}_{part}"));
    let tables = TABLES_AND_VIEW
        .iter()
        .map(|(suffix, _)| (*suffix).to_owned());
    tables.chain(parts)
}
