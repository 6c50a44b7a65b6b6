//! The heartbeat thread: one UPDATE per beat keeps every claimed message of the relay.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, select};

use super::lease_clock::BootTime;
use super::shared::Shared;
use crate::store::relay::connection::Plans;
use crate::store::relay::lease::{self, LeaseId};

/// What the last message to the heartbeat says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Everything is settled or released: the lease ends now.
    Clean,
    /// Something is left: the lease ends by time, and then others take it.
    LeaveLease,
}

/// How often the lease is looked at, at least. It can end in the database before its time: by a step of the
/// clock there, or by hand. Then others may take its messages at once.
const LOOK: Duration = Duration::from_millis(250);

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
    let serves = super::serves(&shared.config);
    let mut session = shared.session(&shared.progress.heartbeat, beat, Plans::Any);
    let mut current = Some(first);
    let mut next = BootTime::now().after(beat);
    let look = LOOK.min(beat);
    let mut wait = look;
    loop {
        let told = select! {
            recv(ending) -> told => told.map_err(|_| RecvTimeoutError::Disconnected),
            recv(pulse) -> _ => Err(RecvTimeoutError::Timeout),
            default(wait) => Err(RecvTimeoutError::Timeout),
        };
        match told {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Ending::Clean) => {
                // Twice: the connection may have died since the last beat.
                let mut end = |id| session.run(|conn| lease::end(conn, name, id));
                if let Some(id) = current
                    && let Err(error) = end(id).or_else(|_| end(id))
                {
                    log::warn!(event = "lease_left", lease = id.0, error:% = error; "the lease could not be ended and will expire");
                }
                return;
            }
            Ok(Ending::LeaveLease) | Err(RecvTimeoutError::Disconnected) => return,
        }
        let asked = BootTime::now();
        // The claimer may have given it up.
        current = current.filter(|id| shared.lease.is(*id));
        let is_looking = asked < next;
        let result = session.run(|conn| match current {
            Some(id) if is_looking => Ok(lease::is_there(conn, name, id)?.then_some(id)),
            Some(id) => Ok(lease::renew(conn, name, id, lease)?.then_some(id)),
            None => {
                let serves = serves.as_deref();
                lease::register(conn, name, relay_name, lease, single_active, serves).map(Some)
            }
        });
        wait = match result {
            Ok(Some(_)) if is_looking && current.is_some() => look,
            Ok(Some(id)) => {
                if current.is_none() {
                    log::info!(event = "lease_registered", lease = id.0; "the relay has a lease again");
                    shared.lease.registered(id, asked);
                } else {
                    shared.lease.renewed(id, asked);
                }
                current = Some(id);
                next = asked.after(beat);
                look
            }
            Ok(None) => {
                if let Some(lost) = current.take() {
                    shared.lose_lease(lost);
                }
                Duration::ZERO
            }
            Err(_) => session.wait().min(beat),
        };
    }
}
