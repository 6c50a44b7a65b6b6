//! What the doctor looks at: facts about an outbox, its server and its sessions. Every look is undone, and
//! judged in `admin::diagnose`.

pub(crate) mod drift;
pub(crate) mod server;
pub(crate) mod snapshots;
pub(crate) mod tables;

use super::inspect::parts;

/// The suffixes of the tables of an outbox, with those of the parts of its ring.
pub(crate) fn suffixes() -> impl Iterator<Item = String> {
    let tables = [
        "",
        "_part",
        "_ledger",
        "_attempt",
        "_dead",
        "_lease",
        "_pause",
        "_destination",
    ];
    let parts = parts().map(|(table, part)| format!("{table}_{part}"));
    tables.into_iter().map(str::to_owned).chain(parts)
}
