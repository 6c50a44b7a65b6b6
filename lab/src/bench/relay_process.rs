//! A relay in its own process. It reports its counts line by line, and ends when its standard input is closed.

use std::io::{BufRead, Read};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use diesel_outbox::config::Config;
use diesel_outbox::{Relay, Stats, program};
use serde::{Deserialize, Serialize};

use super::measures::cpu_seconds;
use diesel_outbox_cli::admin::Bound;
use diesel_outbox_cli::output;
use diesel_outbox_cli::threads::spawn;

/// The interval of reports.
const TICK: Duration = Duration::from_millis(20);

/// The counts of a relay, reported as a line.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Done {
    pub(super) delivered: u64,
    /// Sends that failed.
    pub(super) failed: u64,
    pub(super) claims: u64,
    pub(super) claim_micros: u64,
    pub(super) conflicts: u64,
    pub(super) cpu_seconds: f64,
}

impl Done {
    pub(super) fn add(&mut self, other: Self) {
        self.delivered += other.delivered;
        self.failed += other.failed;
        self.claims += other.claims;
        self.claim_micros += other.claim_micros;
        self.conflicts += other.conflicts;
        self.cpu_seconds += other.cpu_seconds;
    }

    fn of(stats: Stats) -> Result<Self> {
        let statements = program::statements(&stats);
        Ok(Self {
            delivered: stats.delivered,
            failed: stats.retried + stats.dead,
            claims: statements.claims,
            claim_micros: statements.claim_micros,
            conflicts: stats.conflicts,
            cpu_seconds: cpu_seconds()?,
        })
    }
}

/// Reports that it is ready, waits for a line, and delivers until standard input is closed.
pub(super) fn run(config: Config) -> Result<()> {
    tell(Stats::default())?;
    let mut line = String::new();
    if std::io::stdin().lock().read_line(&mut line)? == 0 {
        return Ok(());
    }
    let shutdown_timeout = config.shutdown_timeout;
    let end = end_of_input()?;
    let page = Bound::new(&config)?;
    let relay = Arc::new(Relay::from_config(config).start()?);
    let _page = page
        .map(|page| page.serve(Some(Arc::clone(&relay))))
        .transpose()?;
    while end.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        tell(relay.stats())?;
    }
    relay.shutdown(shutdown_timeout)?;
    tell(relay.stats())
}

fn tell(stats: Stats) -> Result<()> {
    output::line(serde_json::to_string(&Done::of(stats)?)?)
}

/// A channel that disconnects when standard input is closed.
fn end_of_input() -> Result<Receiver<()>> {
    let (alive, end) = bounded(0);
    spawn("input", move || {
        let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
        drop(alive);
    })?;
    Ok(end)
}
