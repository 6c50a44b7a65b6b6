//! The heartbeat thread: renews the relay's lease. One UPDATE per renewal keeps all claimed messages.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, select};

use super::sql::lease::{LeaseId, Registration};
use crate::clock::BootTime;
use crate::engine::host::database::{Database, DatabaseResult};
use crate::engine::host::shared::Shared;
use crate::engine::host::sql::connection::Plans;
use crate::engine::host::threads::Post;
use crate::log;

/// How the heartbeat ends the lease, as the last message to the heartbeat says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// All messages are settled or released: the lease ends now.
    Clean,
    /// Unsettled messages remain: the lease expires, and other relays take the messages over.
    LeaveLease,
}

/// The longest interval between checks of the lease while the relay has messages. The lease can end early in the
/// database, because its clock jumps or an operator ends the lease. Other relays may then take over the messages at
/// once.
const LOOK: Duration = Duration::from_millis(250);

/// The longest wait between attempts to reach the database. A relay that is cut off must be back before its lease
/// expires.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Beats until it is told how to end. If the relay crashes instead, the lease expires.
pub(crate) fn run(
    shared: &Shared,
    registration: Registration,
    first: LeaseId,
    ending: &Receiver<Ending>,
) {
    let beat = shared.settings.lease / 3;
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

/// Keeps the lease: a beat renews the lease, checks it, or registers a new one.
pub(crate) struct Heartbeat<'a, D> {
    shared: &'a Shared,
    db: D,
    /// Registers a new lease after a loss.
    registration: Registration,
    /// How often the lease is renewed.
    every: Duration,
    current: Option<LeaseId>,
    /// Whether a check has shown that this session holds the lease's lock. A renewal then records in the lease's row
    /// how soon other relays may end the lease after the session has ended.
    is_locked: bool,
    /// The time of the next renewal.
    next: BootTime,
    /// Until when a relay without messages leaves its lease unseen.
    quiet_until: BootTime,
}

impl<'a, D: Database> Heartbeat<'a, D> {
    pub(crate) fn new(
        shared: &'a Shared,
        registration: Registration,
        current: Option<LeaseId>,
        db: D,
    ) -> Self {
        let every = shared.settings.lease / 3;
        Self {
            shared,
            db,
            registration,
            every,
            current,
            is_locked: false,
            next: BootTime::now().after(every),
            quiet_until: BootTime::now(),
        }
    }

    /// Renews or checks the lease, or registers one if there is none. Returns the time until the next beat.
    ///
    /// A relay without messages asks the database less often, except while the lease of another relay ends, or has ended.
    pub(crate) fn beat(&mut self) -> Duration {
        let asked = BootTime::now();
        // The claimer may have given the lease up.
        self.current = self.current.filter(|id| self.shared.lease.is(*id));
        let beaten = match self.current {
            Some(_) if self.is_quiet(asked) => Ok(Some(LOOK.min(self.every))),
            Some(id) if asked < self.next => self.look(id, asked),
            Some(id) => self.renew(id, asked),
            None => self.register(asked).map(Some),
        };
        match beaten {
            Ok(Some(wait)) => wait,
            Ok(None) => {
                if let Some(lost) = self.current.take() {
                    self.shared.lose_lease(lost);
                }
                Duration::ZERO
            }
            Err(_) => {
                // The lock is lost with the session. Another relay may be shortening the lease in a transaction that a
                // check sees only after the commit. A renewal waits for that transaction at the row.
                self.is_locked = false;
                self.next = asked;
                self.db.after().wait.min(self.every).min(LONGEST_WAIT)
            }
        }
    }

    /// Whether the relay may leave its lease unseen now.
    fn is_quiet(&self, asked: BootTime) -> bool {
        asked < self.quiet_until.min(self.next)
            && self.shared.is_listener_named()
            && !self.shared.custody.has_messages()
    }

    /// Checks the lease. If that finds that the lease was shortened, because its connection was lost, the next beat renews at
    /// once. Returns the time until the next beat; `None`: the lease has ended.
    fn look(&mut self, id: LeaseId, asked: BootTime) -> DatabaseResult<Option<Duration>> {
        let shared = self.shared;
        let Some(seen) = self.db.look(id)? else {
            return Ok(None);
        };
        shared.lease.seen(id, asked, seen.left);
        let is_its_turn = !seen.stands_by && shared.threads.stands_by();
        self.quiet_until = asked;
        if seen.others_end || is_its_turn {
            // The claimer may sleep for as long as nothing is committed.
            shared.signals.news.ring();
        } else {
            self.quiet_until = asked.after(shared.lease.quiet_for());
        }
        let is_newly_locked = seen.is_locked && !self.is_locked;
        self.is_locked |= seen.is_locked;
        let has_news = is_newly_locked || !shared.is_listener_named();
        if !has_news && seen.left >= shared.settings.lease / 2 {
            return Ok(Some(LOOK.min(self.every)));
        }
        self.next = asked;
        Ok(Some(Duration::ZERO))
    }

    /// Renews the lease. Returns the time until the next beat; `None`: the lease has ended.
    fn renew(&mut self, id: LeaseId, asked: BootTime) -> DatabaseResult<Option<Duration>> {
        let shared = self.shared;
        let takeover_after = shared.lease.takeover_after().filter(|_| self.is_locked);
        let listener = shared.listener();
        let lease = shared.settings.lease;
        let is_there = self.db.renew(id, lease, takeover_after, listener);
        shared.set_named_listener(listener.filter(|_| matches!(is_there, Ok(true))));
        if !is_there? {
            return Ok(None);
        }
        shared.lease.renewed(id, asked);
        self.next = asked.after(self.every);
        Ok(Some(LOOK.min(self.every)))
    }

    /// Registers a new lease. Returns the time until the next beat.
    fn register(&mut self, asked: BootTime) -> DatabaseResult<Duration> {
        self.is_locked = false;
        self.shared.set_named_listener(None);
        self.quiet_until = asked;
        let id = self.db.register(&self.registration)?;
        log::info!(event = "lease_registered", lease = id.0; "registered a new lease ({}): the relay claims and sends again", id.0);
        self.shared.lease.registered(id, asked);
        self.current = Some(id);
        self.next = asked.after(self.every);
        Ok(LOOK.min(self.every))
    }

    /// Leaves the lease to expire. The connection and the lock of the lease stay open until the process exits: other
    /// relays would take the end of the session for the end of the process, which may still be sending.
    fn leave(self) {
        if let Some(id) = self.current {
            log::warn!(event = "lease_left", lease = id.0; "left lease {} to expire: it may still hold messages, which other relays then take over", id.0);
        }
        std::mem::forget(self.db);
    }

    /// Ends the lease, because all messages are settled or released. Other relays need not wait for the expiry.
    pub(crate) fn end(mut self) {
        // Two tries: the connection may have been lost since the last beat.
        let mut end = |id| self.db.end(id);
        if let Some(id) = self.current
            && let Err(error) = end(id).or_else(|_| end(id))
        {
            log::warn!(event = "lease_left", lease = id.0, error:% = error; "could not end lease {}: other relays wait until it expires: {error}", id.0);
        }
    }
}
