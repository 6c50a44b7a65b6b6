//! The heartbeat thread: one UPDATE per beat keeps every claimed message of the relay.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, select};

use super::database::Database;
use super::lease_clock::BootTime;
use super::shared::Shared;
use super::threads::Post;
use crate::store::relay::connection::Plans;
use crate::store::relay::lease::{LeaseId, Registration};

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

/// The longest wait between tries to reach the database. A relay that is cut off has to be back before its lease has
/// ended.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Beats until it is told how to end. A relay that dies otherwise leaves its lease to expire.
pub(crate) fn run(
    shared: &Shared,
    registration: Registration,
    first: LeaseId,
    ending: &Receiver<Ending>,
) {
    let beat = shared.config.lease / 3;
    let session = shared.session(Post::Heartbeat, beat, Plans::Any);
    let mut heartbeat = Heartbeat::new(shared, registration, Some(first), session);
    let mut wait = LOOK.min(beat);
    loop {
        let told = select! {
            recv(ending) -> told => told.map_err(|_| RecvTimeoutError::Disconnected),
            recv(shared.signals.pulse.ear) -> _ => Err(RecvTimeoutError::Timeout),
            default(wait) => Err(RecvTimeoutError::Timeout),
        };
        match told {
            Err(RecvTimeoutError::Timeout) => wait = heartbeat.beat(),
            Ok(Ending::Clean) => return heartbeat.end(),
            Ok(Ending::LeaveLease) => return heartbeat.leave(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// What keeps the lease.
pub(super) struct Heartbeat<'a, D> {
    shared: &'a Shared,
    db: D,
    /// For when the lease was lost.
    registration: Registration,
    /// How often the lease is renewed.
    every: Duration,
    current: Option<LeaseId>,
    /// This session has its lock: then its row says how soon others may end it, and nobody does before a look shows it.
    is_locked: bool,
    /// When it is renewed next.
    next: BootTime,
}

impl<'a, D: Database> Heartbeat<'a, D> {
    pub(super) fn new(
        shared: &'a Shared,
        registration: Registration,
        current: Option<LeaseId>,
        db: D,
    ) -> Self {
        let every = shared.config.lease / 3;
        Self {
            shared,
            db,
            registration,
            every,
            current,
            is_locked: false,
            next: BootTime::now().after(every),
        }
    }

    /// Renews the lease, or looks at it, or gets one where there is none. Returns when to beat again.
    ///
    /// Where a look finds that the lease was shortened, because its connection was gone, it renews at once.
    pub(super) fn beat(&mut self) -> Duration {
        let shared = self.shared;
        let asked = BootTime::now();
        // The claimer may have given it up.
        self.current = self.current.filter(|id| shared.lease.is(*id));
        let lease = shared.config.lease;
        let look = LOOK.min(self.every);
        let result = match self.current {
            Some(id) if asked < self.next => match self.db.look(id) {
                Ok(Some(seen)) => {
                    shared.lease.seen(id, asked, seen.left);
                    let is_newly_locked = seen.is_locked && !self.is_locked;
                    self.is_locked |= seen.is_locked;
                    if !is_newly_locked && seen.left >= lease / 2 {
                        return look;
                    }
                    self.next = asked;
                    return Duration::ZERO;
                }
                answer => answer.map(|_| None),
            },
            Some(id) => {
                let config = &shared.config;
                let takeover_after = config.takeover_after().filter(|_| self.is_locked);
                let is_there = self.db.renew(id, lease, takeover_after);
                is_there.map(|is_there| is_there.then_some(id))
            }
            None => {
                self.is_locked = false;
                self.db.register(&self.registration).map(Some)
            }
        };
        match result {
            Ok(Some(id)) => {
                if self.current.is_none() {
                    log::info!(event = "lease_registered", lease = id.0; "registered a new lease ({}): the relay works again", id.0);
                    shared.lease.registered(id, asked);
                } else {
                    shared.lease.renewed(id, asked);
                }
                self.current = Some(id);
                self.next = asked.after(self.every);
                look
            }
            Ok(None) => {
                if let Some(lost) = self.current.take() {
                    shared.lose_lease(lost);
                }
                Duration::ZERO
            }
            Err(_) => {
                // Its lock is gone with its session, and others may be shortening the lease, which no look sees before
                // their commit. A renewal meets them at the row.
                self.is_locked = false;
                self.next = asked;
                self.db.wait().min(self.every).min(LONGEST_WAIT)
            }
        }
    }

    /// This process may go on with what it has begun, and others would take the end of this session for its end: so
    /// the connection stays open, with the lease's lock, for as long as the process lives.
    fn leave(self) {
        std::mem::forget(self.db);
    }

    /// Everything is settled or released: others need not wait for the end of the lease.
    pub(super) fn end(mut self) {
        // Twice: the connection may have died since the last beat.
        let mut end = |id| self.db.end(id);
        if let Some(id) = self.current
            && let Err(error) = end(id).or_else(|_| end(id))
        {
            log::warn!(event = "lease_left", lease = id.0, error:% = error; "could not end lease {}: other relays wait until it expires: {error}", id.0);
        }
    }
}
