//! The heartbeat thread: one UPDATE per beat keeps every claimed message of the relay.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, select};

use super::shared::Shared;
use super::stats::add;
use crate::store::connection::Plans;
use crate::store::lease::{self, LeaseId};

/// What the last message to the heartbeat says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Everything is settled or released: the lease ends now.
    Clean,
    /// Something is left: the lease ends by time, and then others take it.
    LeaveLease,
}

/// Beats until it is told how to end. A relay that dies otherwise leaves its lease to expire.
pub(crate) fn run(
    shared: &Shared,
    relay_name: &str,
    first: LeaseId,
    ending: &Receiver<Ending>,
    pulse: &Receiver<()>,
) {
    let lease = shared.config.lease;
    let beat = lease / 3;
    let name = &shared.config.table;
    let single_active = shared.config.single_active;
    let mut session = shared.session(&shared.progress.heartbeat, beat, Plans::Any);
    let mut current = Some(first);
    let mut wait = beat;
    loop {
        let told = select! {
            recv(ending) -> told => told.map_err(|_| RecvTimeoutError::Disconnected),
            recv(pulse) -> _ => Err(RecvTimeoutError::Timeout),
            default(wait) => Err(RecvTimeoutError::Timeout),
        };
        match told {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Ending::Clean) => {
                if let Some(id) = current
                    && let Err(error) = session.run(|conn| lease::end(conn, name, id))
                {
                    log::warn!(event = "lease_left", lease = id.0, error:% = error; "the lease could not be ended and will expire");
                }
                return;
            }
            Ok(Ending::LeaveLease) | Err(RecvTimeoutError::Disconnected) => return,
        }
        let asked = Instant::now();
        let result = session.run(|conn| match current {
            Some(id) => Ok(lease::renew(conn, name, id, lease)?.then_some(id)),
            None => lease::register(conn, name, relay_name, lease, single_active).map(Some),
        });
        wait = match result {
            Ok(Some(id)) => {
                if current.is_none() {
                    log::info!(event = "lease_registered", lease = id.0; "the relay has a lease again");
                }
                current = Some(id);
                shared.lease.renewed(id, asked);
                beat.saturating_sub(asked.elapsed())
            }
            Ok(None) => {
                let lost = current.take().unwrap_or(first);
                // Otherwise the claimer gave it up.
                if shared.lease.is(lost) {
                    shared.lease.lost();
                    add(&shared.stats.leases_lost, 1);
                    shared.metrics.leases_lost.increment(1);
                    log::error!(event = "lease_lost", lease = lost.0; "the lease was over before it was renewed: nothing is sent under it any more");
                }
                Duration::ZERO
            }
            Err(_) => session.wait().min(beat),
        };
    }
}
