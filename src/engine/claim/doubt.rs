//! Claims whose results were lost: the claim may have succeeded, failed, or may still be running in the server.

use std::time::{Duration, Instant};

use crate::engine::lease::sql::backend::Backend;
use crate::engine::lease::sql::lease::LeaseId;

/// A claim whose result was lost, or a settle that the server has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RanBy {
    /// Only these: a server that restarts again and again gives each statement a process of its own.
    Only([Option<Backend>; MOST]),
    /// It may be any process.
    Any,
}

/// The most processes of one doubt. More threads do not have a connection that claims.
const MOST: usize = 8;

impl RanBy {
    /// No process of this server, which is another one than before.
    pub(crate) const NONE: Self = Self::Only([None; MOST]);

    /// The processes; `None`: any.
    pub(crate) fn processes(&self) -> Option<Vec<Backend>> {
        match self {
            Self::Only(processes) => Some(processes.iter().copied().flatten().collect()),
            Self::Any => None,
        }
    }

    fn and(self, others: Self) -> Self {
        let (Self::Only(mut all), Some(others)) = (self, others.processes()) else {
            return Self::Any;
        };
        for one in others {
            if all.contains(&Some(one)) {
                continue;
            }
            match all.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = Some(one),
                None => return Self::Any,
            }
        }
        Self::Only(all)
    }
}

impl From<Backend> for RanBy {
    fn from(backend: Backend) -> Self {
        let mut processes = [None; MOST];
        processes[0] = Some(backend);
        Self::Only(processes)
    }
}

impl From<Option<Backend>> for RanBy {
    /// The process is not known behind a pooler.
    fn from(backend: Option<Backend>) -> Self {
        backend.map_or(Self::Any, Self::from)
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
        let process = |pid| RanBy::from(Backend { pid, started: 1 });
        let settler = doubt(1, process(10));
        assert_eq!(settler.beside(None), settler);
        assert_eq!(settler.beside(Some(settler)), settler);
        let both = doubt(1, process(11)).beside(Some(settler));
        let both = both.ran_by.processes().expect("known processes");
        assert_eq!(both.iter().map(|one| one.pid).collect::<Vec<_>>(), [10, 11]);
        let any = doubt(1, RanBy::Any);
        assert_eq!(settler.beside(Some(any)), any);
        assert_eq!(any.beside(Some(settler)), any);
        let many = (0..).take(MOST + 1).map(process);
        assert_eq!(many.reduce(RanBy::and), Some(RanBy::Any));
        // The older lease has ended, and its messages are taken over.
        let newer = doubt(2, process(11));
        assert_eq!(newer.beside(Some(settler)), newer);
        let nobody = doubt(1, RanBy::NONE);
        assert_eq!(nobody.beside(Some(settler)), settler);
        assert_eq!(nobody.beside(Some(nobody)), nobody);
        assert_eq!(settler.beside(Some(nobody)), settler);
        // The same if the older lease is reported later.
        assert_eq!(settler.beside(Some(newer)), newer);
    }
}
