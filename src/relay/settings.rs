//! What the threads of a relay need of the settings: a value, made once.

use std::time::Duration;

use secrecy::SecretString;

use crate::delivery::OnDead;
use crate::ledger_payload::LedgerPayload;
use crate::name::{OutboxName, label_of};
use crate::routes::Serves;
use crate::store::relay::witness::OwnWitness;

/// The settings of a relay that hold for all its destinations. The fields have the names of the settings.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) table: OutboxName,
    /// The name of the relay among those of this process.
    pub(super) label: Option<String>,
    pub(super) enabled: bool,
    pub(super) batch: usize,
    pub(super) poll_interval: Duration,
    pub(super) lease: Duration,
    pub(super) on_dead: OnDead,
    pub(super) single_active: bool,
    pub(super) share_connection: bool,
    pub(super) listener: bool,
    pub(super) listener_url: Option<SecretString>,
    pub(super) shutdown_timeout: Duration,
    pub(super) retention: Duration,
    pub(super) inbox_retention: Option<Duration>,
    pub(super) cleaner: bool,
    pub(super) ledger_payload: LedgerPayload,
    pub(super) witness: OwnWitness,
    pub(super) sends: Sends,
    /// What the relay serves, without members.
    pub(super) serves: Serves,
    /// The settings that other relays must have, too.
    pub(super) published: String,
}

/// What a relay knows of its sends before they begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sends {
    /// The longest.
    pub(super) longest: Duration,
    /// Whether the relay can close their connections.
    pub(super) can_close: bool,
}

impl Settings {
    /// The label `outbox` of the relay's metrics.
    pub(super) fn metrics_label(&self) -> String {
        label_of(self.label.as_deref(), &self.table, ":")
    }

    /// The name of a thread.
    pub(super) fn thread_name(&self, thread: &str) -> String {
        label_of(self.label.as_deref(), thread, " ")
    }
}
