//! Claims whose results were lost: the claim may have succeeded, failed, or may still be running in the server.

use std::time::{Duration, Instant};

use crate::engine::lease::sql::backend::Backend;
use crate::engine::lease::sql::lease::LeaseId;

/// A claim whose result was lost, or a settle that the server has lost.
// Why: docs/decisions.md#doubt
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Doubt {
    pub(crate) lease: LeaseId,
    pub(crate) ran_by: RanBy,
    /// The number of this doubt among all of this relay: a later one may have the same lease and process.
    pub(crate) number: u64,
    /// When a result was lost first.
    pub(crate) since: Instant,
    /// When a result was lost last.
    pub(crate) last: Instant,
}

/// The server processes that may still be running a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RanBy {
    /// Only these: a server that restarts again and again gives each statement a process of its own. None: it was another
    /// server than this one.
    Only(Vec<Backend>),
    /// It may be any process.
    Any,
}

/// The most processes of one doubt. More threads do not have a connection that claims.
const MOST: usize = 8;

impl RanBy {
    fn and(self, others: Self) -> Self {
        let (Self::Only(mut all), Self::Only(mut others)) = (self, others) else {
            return Self::Any;
        };
        others.retain(|one| !all.contains(one));
        all.append(&mut others);
        match all.len() > MOST {
            true => Self::Any,
            false => Self::Only(all),
        }
    }
}

impl From<Option<Backend>> for RanBy {
    /// The process is not known behind a pooler.
    fn from(backend: Option<Backend>) -> Self {
        backend.map_or(Self::Any, |one| Self::Only(vec![one]))
    }
}

/// What is known about the server processes of a lost claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtWork {
    /// None exists any more: the claim has committed, or never will.
    No,
    /// Some still exist, and may commit the claim.
    Yes,
    /// The process is not known, and the claim may still be running.
    Unknown,
}

/// A claim by an unknown process has ended after this time: no statement of a claim may take longer. Behind a pooler, a claim is a
/// transaction: it can only be committing when its client has lost it.
const LONGEST_CLAIM: Duration = Duration::from_secs(40);

impl Doubt {
    pub(crate) fn new(lease: LeaseId, ran_by: RanBy, number: u64, now: Instant) -> Self {
        Self {
            lease,
            ran_by,
            number,
            since: now,
            last: now,
        }
    }

    /// Whether a claim by an unknown process may still be running.
    pub(super) fn may_run(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last) < LONGEST_CLAIM
    }

    /// Combines two doubts: the claimer and a settler can both lose a result, and two processes may still be running.
    pub(super) fn beside(self, before: Option<Self>) -> Self {
        match before {
            // The lease of the older doubt has ended, and its messages are taken over.
            Some(before) if before.lease > self.lease => Self {
                number: self.number,
                ..before
            },
            Some(before) if before.lease == self.lease => Self {
                ran_by: before.ran_by.and(self.ran_by),
                since: before.since,
                ..self
            },
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_doubts_about_one_lease_no_process_is_forgotten() {
        let now = Instant::now();
        let doubt = |lease, ran_by| Doubt::new(LeaseId(lease), ran_by, 1, now);
        let process = |pid| RanBy::from(Some(Backend { pid, started: 1 }));
        let settler = doubt(1, process(10));
        let beside = |one: &Doubt, before: &Doubt| one.clone().beside(Some(before.clone()));
        assert_eq!(settler.clone().beside(None), settler);
        assert_eq!(beside(&settler, &settler), settler);
        let both = beside(&doubt(1, process(11)), &settler);
        let expected = [10, 11].map(|pid| Backend { pid, started: 1 });
        assert_eq!(both.ran_by, RanBy::Only(expected.into()));
        let any = doubt(1, RanBy::Any);
        assert_eq!(beside(&settler, &any), any);
        assert_eq!(beside(&any, &settler), any);
        let many = (0..).take(MOST + 1).map(process);
        assert_eq!(many.reduce(RanBy::and), Some(RanBy::Any));
        // The older lease has ended, and its messages are taken over.
        let newer = doubt(2, process(11));
        assert_eq!(beside(&newer, &settler), newer);
        let nobody = doubt(1, RanBy::Only(Vec::new()));
        assert_eq!(beside(&nobody, &settler), settler);
        assert_eq!(beside(&nobody, &nobody), nobody);
        assert_eq!(beside(&settler, &nobody), settler);
        // The same if the older lease is reported later.
        assert_eq!(beside(&settler, &newer), newer);
    }
}
