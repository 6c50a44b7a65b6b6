//! What the threads of a relay need of the settings: a value, made once.

use std::time::Duration;

use secrecy::SecretString;

use crate::delivery::OnDead;
use crate::engine::serves::routes::Serves;
use crate::engine::settle::sql::log::OwnLog;
use crate::engine::settle::sql::witness::OwnWitness;
use crate::ledger_payload::LedgerPayload;
use crate::name::{OutboxName, label_of};

/// The settings of a relay that hold for all its destinations. The fields have the names of the settings.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) table: OutboxName,
    /// The name of the relay among those of this process.
    pub(crate) label: Option<String>,
    pub(crate) enabled: bool,
    pub(crate) batch: usize,
    pub(crate) poll_interval: Duration,
    pub(crate) lease: Duration,
    pub(crate) on_dead: OnDead,
    pub(crate) single_active: bool,
    pub(crate) share_connection: bool,
    pub(crate) listener: bool,
    pub(crate) listener_url: Option<SecretString>,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) retention: Duration,
    pub(crate) inbox_retention: Option<Duration>,
    pub(crate) feed_retention: Duration,
    pub(crate) feed_max_bytes: Option<u64>,
    pub(crate) feed_unread_after: Duration,
    pub(crate) cleaner: bool,
    pub(crate) ledger_payload: LedgerPayload,
    pub(crate) witness: OwnWitness,
    pub(crate) log: OwnLog,
    pub(crate) sends: Sends,
    /// What the relay serves, without members.
    pub(crate) serves: Serves,
    /// The settings that other relays must have, too.
    pub(crate) published: String,
}

/// What a relay knows of its sends before they begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sends {
    /// The longest.
    pub(crate) longest: Duration,
    /// Whether the relay can close their connections.
    pub(crate) can_close: bool,
}

impl Settings {
    /// The label `outbox` of the relay's metrics.
    pub(super) fn metrics_label(&self) -> String {
        label_of(self.label.as_deref(), &self.table, ":")
    }

    /// The name of a thread.
    pub(crate) fn thread_name(&self, thread: &str) -> String {
        label_of(self.label.as_deref(), thread, " ")
    }
}
