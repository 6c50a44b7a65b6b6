//! Scans the outbox from time to time for the leases that hold messages. The scan finds leases that can be removed, and
//! messages whose lease is gone. If the row of a lease disappears that had not ended, a scan begins as soon as its relay
//! sends nothing more. Its relay has removed the row when it ended, or somebody else has.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::sql::lease;
use crate::clock;
use crate::engine::claim::told::Told;
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::engine::keys::sql::lock;
use crate::engine::plan::Report;
use crate::engine::plan::pace::{Last, Pace};
use crate::engine::send::sql::pause;
use crate::engine::wake::sql::sleep_lock;
use crate::error::DatabaseError;
use crate::log;

/// The interval between two scans.
const INTERVAL: Duration = Duration::from_secs(3600);
/// The interval between two checks for leases whose rows have disappeared.
const WATCH: Duration = Duration::from_secs(5);
/// The interval between two looks at the lock of keyed claims.
const LOCK: Duration = Duration::from_secs(60);
/// The interval between two searches for sessions that keep inserts notifying.
const SEARCH: Duration = Duration::from_secs(60);
/// How long a lease or a pause is kept after its end.
const AGE: Duration = Duration::from_secs(3600);
/// The server's clock goes back if it loses more than this, and a second, between two checks.
const TOLERANCE: Duration = Duration::from_secs(1);
const MICROS: i64 = 1_000_000;
/// The most messages that one statement scans.
const PART: i64 = 10_000;
/// After `A_LITTLE` of work, the scan rests, so that it takes at most a hundredth of the time.
const PACE: Pace = Pace::new(Duration::ZERO, 100);
const A_LITTLE: Duration = Duration::from_millis(100);

/// Scans the outbox part by part.
pub(crate) struct LeasesScan {
    round: Option<ScanRound>,
    next: Instant,
    /// The leases that had not ended at the last check, and for how long their relays may send without a row.
    alive: BTreeMap<i64, Duration>,
    next_check: Instant,
    /// The leases that had ended at the last check.
    ended: BTreeSet<i64>,
    next_search: Instant,
    /// The sessions that keep inserts notifying, and that are logged.
    noisy: BTreeSet<i32>,
    next_lock: Instant,
    /// When to scan for messages of a lease that has disappeared, or after the server's clock has gone back.
    wanted_at: Option<Instant>,
    /// The server's clock at the last check, in microseconds, and when it was read.
    clock: Option<(i64, Instant)>,
}

struct ScanRound {
    began: Instant,
    after: i64,
    holders: BTreeSet<i64>,
    vanished: BTreeSet<i64>,
}

impl LeasesScan {
    pub(crate) fn new() -> Self {
        Self {
            round: None,
            next: Instant::now(),
            alive: BTreeMap::new(),
            next_check: Instant::now(),
            ended: BTreeSet::new(),
            next_search: Instant::now(),
            noisy: BTreeSet::new(),
            next_lock: Instant::now(),
            wanted_at: None,
            clock: None,
        }
    }

    pub(crate) fn next(&self) -> Instant {
        let next = self.next.min(self.next_check);
        // A scan that has begun ends first: it may have passed the messages.
        match self.wanted_at.filter(|_| self.round.is_none()) {
            Some(wanted) => next.min(wanted),
            None => next,
        }
    }

    /// Wants a scan if the row of a lease has disappeared that had not ended.
    fn check(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now >= self.next_check {
            let leases = session.run(lease::all)?;
            let is_gone = |id: &i64| leases.iter().all(|lease| lease.id != *id);
            let gone = self.alive.iter().filter(|(id, _)| is_gone(id));
            let quiet_at = gone.map(|(_, sends_for)| clock::after(now, *sends_for));
            self.wanted_at = self.wanted_at.into_iter().chain(quiet_at).max();
            if let Some(read_at) = leases.first().map(|lease| lease.read_at)
                && self.has_gone_back(read_at, now)
            {
                log::warn!(event = "clock_went_back"; "the clock of the database server went back: looking for messages whose retry lies too far ahead");
                self.wanted_at = Some(now);
            }
            let alive = leases.iter().filter(|lease| !lease.has_ended);
            self.alive = alive.map(|lease| (lease.id, lease.sends_for)).collect();
            let ended = leases.iter().filter(|lease| lease.has_ended);
            self.end_sessions(session, ended.map(|lease| lease.id).collect())?;
            if now >= self.next_lock {
                session.run(lock::keep_lock)?;
                self.next_lock = now + LOCK;
            }
            self.next_check = now + WATCH;
        }
        if self.round.is_none() && self.wanted_at.is_some_and(|at| now >= at) {
            (self.wanted_at, self.next) = (None, now);
        }
        Ok(())
    }

    /// Whether the server's clock, which has been read after `now`, shows less than it must since the last time.
    fn has_gone_back(&mut self, read_at: i64, now: Instant) -> bool {
        let before = self.clock.replace((read_at, now));
        before.is_some_and(|(before, at)| {
            let passed = now.saturating_duration_since(at).saturating_sub(TOLERANCE);
            let passed = i64::try_from(passed.as_micros()).unwrap_or(i64::MAX);
            read_at < before.saturating_add(passed).saturating_sub(MICROS)
        })
    }

    /// Ends the sessions of ended leases that keep inserts notifying, and names the others.
    fn end_sessions(
        &mut self,
        session: &mut Session,
        ended: BTreeSet<i64>,
    ) -> Result<(), DatabaseError> {
        let now = Instant::now();
        let has_news = !ended.is_subset(&self.ended);
        self.ended = ended;
        if !has_news && now < self.next_search {
            return Ok(());
        }
        let kept = session.run(sleep_lock::end_holders)?;
        for one in kept.iter().filter(|one| !self.noisy.contains(&one.pid)) {
            let (pid, who) = (one.pid, &one.who);
            match one.lease {
                Some(lease) => {
                    log::warn!(event = "sleep_lock_kept", pid = pid, lease = lease; "the lease of a sleeping relay has ended, but not its session {pid} ({who}), and this role may not end it: each commit notifies relays, and commits wait for one another, until the session ends")
                }
                None => {
                    log::warn!(event = "sleep_lock_taken", pid = pid; "the session {pid} ({who}) holds the lock of sleeping relays, and is no relay's: each commit notifies relays, and commits wait for one another, until the session ends")
                }
            }
        }
        self.noisy = kept.iter().map(|one| one.pid).collect();
        self.next_search = now + SEARCH;
        Ok(())
    }

    /// Checks the leases, and continues the scan, if that is due.
    pub(crate) fn look(
        &mut self,
        shared: &Shared,
        session: &mut Session,
    ) -> Result<(), DatabaseError> {
        self.check(session)?;
        if Instant::now() < self.next {
            return Ok(());
        }
        let began = Instant::now();
        let round = self.round.get_or_insert_with(|| ScanRound {
            began,
            after: i64::MIN,
            holders: BTreeSet::new(),
            vanished: BTreeSet::new(),
        });
        while began.elapsed() < A_LITTLE && !shared.is_stopping() {
            let part = session.run(|conn, name| lease::holders(conn, name, round.after, PART))?;
            round.holders.extend(part.holders);
            round.vanished.extend(part.vanished);
            if !part.ahead.is_empty() {
                let count = session.run(|conn, name| lease::bring_back(conn, name, &part.ahead))?;
                log::warn!(event = "retries_brought_back", messages = count; "{count} messages were to be retried later than their retries ever are, because the clock of the database server went back: they wait as long as they were to wait, from now on");
            }
            if let Some(last) = part.last {
                round.after = last;
                continue;
            }
            round.end(shared, session)?;
            self.round = None;
            self.next = Instant::now() + INTERVAL;
            return Ok(());
        }
        self.next = PACE.next(Last::since(began));
        Ok(())
    }
}

impl ScanRound {
    fn end(&self, shared: &Shared, session: &mut Session) -> Result<(), DatabaseError> {
        // A lease that ended before the scan began claims nothing during the scan.
        let age = AGE.max(self.began.elapsed());
        let holders: Vec<i64> = self.holders.iter().copied().collect();
        session.run(|conn, name| {
            lease::forget(conn, name, age, &holders)?;
            pause::forget(conn, name, AGE)
        })?;
        let vanished: Vec<i64> = self.vanished.iter().copied().collect();
        if !vanished.is_empty() {
            log::warn!(event = "lease_vanished", leases:? = vanished; "the leases {vanished:?} hold messages, but their rows were removed: taking the messages over");
        }
        shared.tell_claimer(Told::Report(Report::Vanished(vanished)));
        Ok(())
    }
}
