//! What the doctor looks at: facts about an outbox, its server and its sessions. Every look is undone, and
//! judged in `admin::diagnose`.

pub(crate) mod drift;
pub(crate) mod holders;
pub(crate) mod server;
pub(crate) mod tables;

/// The suffixes of an outbox's tables, the outbox itself first.
pub(crate) const TABLES: [&str; 5] = ["", "_ledger", "_dead", "_lease", "_pause"];
