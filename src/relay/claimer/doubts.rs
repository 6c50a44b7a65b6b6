//! Claims whose answers are lost.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::Claimer;
use crate::error::DatabaseError;
use crate::relay::doubt::Doubt;
use crate::store::claim::Claimant;
use crate::store::lease::{self, LeaseId};
use crate::store::{connection, settle};

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
        };
        let result = self.session.run(|conn| claim(conn, claimant));
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            let backend = self.session.backend();
            self.shared.begin_doubt(Doubt { lease, backend });
        }
        result
    }

    /// After a claim without an answer the lease may hold messages that nobody here knows of.
    /// Once everything known is settled, what the lease still holds are those: they are given
    /// back. Where the claim may be at work in the server still, its lease is ended before, so
    /// that what it takes later is taken over. `false`: not yet.
    pub(super) fn resolve(&mut self, doubt: Doubt, lease: LeaseId) -> bool {
        if doubt.lease != lease {
            // That lease is over: what it held is taken over.
            self.shared.ring_when_settled(false);
            self.shared.end_doubt(doubt.lease);
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
            Ok((is_at_work, settle::release_all(conn, name, lease, &aside)?))
        });
        let (is_at_work, count) = match result {
            Ok(done) => done,
            Err(_) => {
                self.shared.pause(self.session.wait());
                return false;
            }
        };
        if count > 0 || is_at_work {
            log::warn!(event = "claim_undone", lease = lease.0, messages = count, new_lease = is_at_work; "a claim had no answer: what it took was given back");
        }
        self.shared.end_doubt(lease);
        self.lanes.forget_places();
        self.walk.restart();
        if is_at_work {
            self.shared.lease.lost();
            self.shared.beat_now();
        }
        !is_at_work
    }
}
