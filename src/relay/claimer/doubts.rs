//! Claims whose answers are lost.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::Claimer;
use crate::error::DatabaseError;
use crate::relay::bulkhead::claim_bytes;
use crate::relay::doubt::Doubt;
use crate::relay::ranges::Ranges;
use crate::store::brief::briefly;
use crate::store::relay::claim::{Claimant, Claimed};
use crate::store::relay::lease::{self, LeaseId};
use crate::store::relay::{connection, settle};

/// How long a relay that ends goes on to give back what nobody knows of.
const MOST_AT_END: Duration = Duration::from_secs(2);

impl Claimer<'_> {
    /// Runs a claim. One without an answer may have worked, or be at work still.
    pub(super) fn claiming<T>(
        &mut self,
        lease: LeaseId,
        claim: impl FnOnce(&mut PgConnection, Claimant<'_>) -> QueryResult<T>,
    ) -> Result<T, DatabaseError> {
        let claimant = Claimant {
            lease,
            expired: &self.expired,
            max_attempts: self.shared.config.max_attempts,
            bytes: claim_bytes(&self.shared.bulkheads),
        };
        let result = self.session.run(|conn| claim(conn, claimant));
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            let backend = self.session.backend();
            self.shared.begin_doubt(Doubt { lease, backend });
            // What it took may be where a pass has been.
            self.undoing = None;
        }
        result
    }

    /// After a claim without an answer the lease may hold messages that nobody here knows of.
    /// Once everything known is settled, what the lease still holds are those: they are given back, part by
    /// part. Where the claim may be at work in the server still, its lease is ended before, so that what it
    /// takes later is taken over. `false`: nothing can be claimed under this lease now.
    pub(super) fn resolve(&mut self, doubt: Doubt, lease: LeaseId) -> bool {
        if doubt.lease != lease {
            // That lease is over: what it held is taken over.
            self.shared.ring_when_settled(false);
            self.shared.end_doubt(doubt.lease);
            return true;
        }
        if self.undoing.as_ref().is_some_and(|one| one.is_of(lease)) {
            return true;
        }
        self.shared.ring_when_settled(true);
        let Some(aside) = self.shared.only_aside() else {
            self.wait(self.shared.config.poll_interval);
            return false;
        };
        self.shared.ring_when_settled(false);
        // Another one may have lost its answer since it was asked, and settled all the same.
        let doubt = self.shared.doubt().unwrap_or(doubt);
        let name = &self.shared.config.table;
        let result = self.session.run(|conn| {
            let is_at_work = match doubt.backend {
                Some(backend) => connection::is_at_work(conn, backend)?,
                None => true,
            };
            if is_at_work {
                lease::expire(conn, name, lease)?;
            }
            Ok(is_at_work)
        });
        let Ok(is_at_work) = result else {
            // The next connection may be to another server: which leases have ended is looked for anew.
            self.surveyed = None;
            self.shared.pause(self.session.wait());
            return false;
        };
        self.undoing = Some(Undoing::new(lease, aside));
        if is_at_work {
            self.shared.end_doubt(lease);
            self.shared.lease.lost(lease);
            self.shared.beat_now();
        }
        !is_at_work
    }

    /// At the end of the relay: what is left of a pass is done, if that takes no longer than a moment. Otherwise
    /// the lease is in doubt still, and is left to expire.
    pub(super) fn finish_undoing(&mut self) {
        let until = Instant::now() + MOST_AT_END;
        while self.undoing.is_some() && Instant::now() < until && !self.shared.is_abandoned() {
            if self.undo_a_part().is_err() {
                return;
            }
        }
    }

    /// Gives back a part of what a lease holds that nobody knows of. Claims go on between the parts.
    pub(super) fn undo_a_part(&mut self) -> Result<(), DatabaseError> {
        let Some(undoing) = &mut self.undoing else {
            return Ok(());
        };
        let lease = undoing.lease;
        let Some(range) = undoing.ranges.next() else {
            log::warn!(event = "claim_undone", lease = lease.0, messages = undoing.count; "a claim had no answer: what it took was given back");
            self.undoing = None;
            self.shared.end_doubt(lease);
            self.lanes.forget_places();
            self.walk.restart();
            self.surveyed = None;
            return Ok(());
        };
        let known: Vec<i64> = undoing
            .known
            .range(range.after..=range.upto)
            .copied()
            .collect();
        let (name, began) = (&self.shared.config.table, Instant::now());
        let count = self.session.run(|conn| {
            briefly(conn, self.shared.moment(), |conn| {
                settle::release_unknown(conn, name, lease, &known, range)
            })
        })?;
        match count {
            Some(count) => {
                undoing.count += count;
                undoing.ranges.read(range.upto, began.elapsed());
                undoing.known = undoing.known.split_off(&range.upto);
            }
            None => undoing.ranges.was_too_wide(),
        }
        Ok(())
    }
}

/// What a lease holds is gone through, for messages that nobody knows of.
pub(super) struct Undoing {
    lease: LeaseId,
    ranges: Ranges,
    /// Claimed under the lease since, or put aside before: of those that are not gone through yet.
    known: BTreeSet<i64>,
    /// Given back.
    count: usize,
}

impl Undoing {
    fn new(lease: LeaseId, aside: Vec<i64>) -> Self {
        Self {
            lease,
            ranges: Ranges::new(),
            known: aside.into_iter().collect(),
            count: 0,
        }
    }

    pub(super) fn is_of(&self, lease: LeaseId) -> bool {
        self.lease == lease
    }

    /// These were claimed, and their claims had answers.
    pub(super) fn knows(&mut self, claimed: &[Claimed], lease: LeaseId) {
        if let Some(range) = self.ranges.next().filter(|_| self.is_of(lease)) {
            let sequences = claimed.iter().map(|one| one.message.sequence.0);
            self.known
                .extend(sequences.filter(|one| *one > range.after));
        }
    }
}
