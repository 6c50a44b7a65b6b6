//! Facts for the doctor about an outbox, its server and its sessions. Each query runs in a transaction that is rolled
//! back. `admin::diagnose` judges the facts.

pub(crate) mod disabled;
pub(crate) mod drift;
pub(crate) mod server;
pub(crate) mod snapshots;
pub(crate) mod tables;

use super::inspect::{TABLES_AND_VIEW, parts};

/// The suffixes of the tables of an outbox and its view, and of the parts of its ring (ledger and history, divided by
/// time).
pub(crate) fn suffixes() -> impl Iterator<Item = String> {
    let parts = parts().map(|(table, part)| format!("{table}_{part}"));
    let tables = TABLES_AND_VIEW
        .iter()
        .map(|(suffix, _)| (*suffix).to_owned());
    tables.chain(parts)
}
