//! Facts for the doctor about an outbox, its server and its sessions. Each query runs in a transaction that is rolled
//! back. `admin::diagnose` judges the facts.

pub(crate) mod disabled;
pub(crate) mod drift;
pub(crate) mod server;
pub(crate) mod snapshots;
pub(crate) mod tables;

use super::inspect::parts;

/// The suffixes of the tables of an outbox, and of the parts of its ring (ledger and history, divided by time).
pub(crate) fn suffixes() -> impl Iterator<Item = String> {
    let tables = [
        "",
        "_part",
        "_ledger",
        "_attempt",
        "_dead",
        "_lease",
        "_lock",
        "_pause",
        "_topic",
        "_audit",
        "_request",
        "_destination",
        "_registration",
    ];
    let parts = parts().map(|(table, part)| format!("{table}_{part}"));
    tables.into_iter().map(str::to_owned).chain(parts)
}
