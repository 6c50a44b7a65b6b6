//! The janitor thread: retention of the ledger, and leases and pauses that nobody needs any more.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;

use super::session::Session;
use super::shared::Shared;
use crate::error::DatabaseError;
use crate::store::connection::Plans;
use crate::store::{clean, lease, pause};

/// How often the ledger is cleaned, at most.
const CLEAN_INTERVAL: Duration = Duration::from_secs(60);
/// Ledger rows removed by one statement.
const CLEAN_BATCH: i64 = 1000;
/// How often the leases are gone through, which reads the outbox.
const LEASE_INTERVAL: Duration = Duration::from_secs(3600);
/// How long a lease, or a pause, is remembered after it was over.
const LEASE_AGE: Duration = Duration::from_secs(3600);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Keeps house until the relay stops.
pub(crate) fn run(shared: &Shared) {
    let mut session = shared.session("janitor", STATEMENT_TIMEOUT, Plans::Any);
    // A short retention is kept more exactly.
    let interval = CLEAN_INTERVAL
        .min(shared.config.retention / 2)
        .max(Duration::from_millis(200));
    let mut leases_seen: Option<Instant> = None;
    loop {
        let result = keep_house(shared, &mut session, &mut leases_seen);
        let wait = if result.is_ok() {
            interval
        } else {
            session.wait()
        };
        match shared.stop_signal().recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn keep_house(
    shared: &Shared,
    session: &mut Session,
    leases_seen: &mut Option<Instant>,
) -> Result<(), DatabaseError> {
    let name = &shared.config.table;
    if leases_seen.is_none_or(|at| at.elapsed() >= LEASE_INTERVAL) {
        let vanished = session.run(|conn| {
            lease::forget(conn, name, LEASE_AGE)?;
            pause::forget(conn, name, LEASE_AGE)?;
            lease::vanished(conn, name)
        })?;
        if !vanished.is_empty() {
            log::warn!(event = "lease_vanished", leases:? = vanished; "messages name leases that were removed: they are taken over");
        }
        *shared
            .vanished
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = vanished;
        *leases_seen = Some(Instant::now());
    }
    if !shared.config.cleaner {
        return Ok(());
    }
    let mut removed = 0;
    while !shared.is_stopping() {
        let rows = session.run(|conn| {
            clean::remove_old_ledger_rows(conn, name, shared.config.retention, CLEAN_BATCH)
        })?;
        removed += rows;
        if rows == 0 {
            break;
        }
    }
    if removed > 0 {
        log::info!(event = "cleaned", rows = removed; "old ledger rows were removed");
    }
    Ok(())
}
