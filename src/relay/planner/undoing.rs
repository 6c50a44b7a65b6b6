//! Giving back what a claim without an answer took.

use std::collections::BTreeSet;
use std::time::Duration;

use super::ranges::Ranges;
use crate::store::range::Range;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Claim;

/// What a lease holds is gone through, for messages that nobody knows of.
#[derive(Debug)]
pub(super) struct Undoing {
    lease: LeaseId,
    ranges: Ranges,
    /// Claimed under the lease since, or put aside before: of those that are not gone through yet.
    known: BTreeSet<Claim>,
    /// Given back.
    count: usize,
}

/// A part of what a lease holds.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::relay) struct Part {
    pub(in crate::relay) lease: LeaseId,
    pub(in crate::relay) range: Range,
    /// What is known of it, and to be kept.
    pub(in crate::relay) known: Vec<Claim>,
}

impl Undoing {
    pub(super) fn new(lease: LeaseId, aside: Vec<Claim>) -> Self {
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

    /// What is to be given back next; or how many were, when all is gone through.
    pub(super) fn next(&self) -> Result<Part, usize> {
        let range = self.ranges.next().ok_or(self.count)?;
        let known = self.known.range(behind(range.after)..behind(range.upto));
        Ok(Part {
            lease: self.lease,
            range,
            known: known.copied().collect(),
        })
    }

    pub(super) fn lease(&self) -> LeaseId {
        self.lease
    }

    /// So many of the range were given back. `None`: it took too long.
    pub(super) fn learn(&mut self, range: Range, count: Option<usize>, took: Duration) {
        match count {
            Some(count) => {
                self.count += count;
                self.ranges.read(range.upto, took);
                self.known = self.known.split_off(&behind(range.upto));
            }
            None => self.ranges.was_too_wide(),
        }
    }

    /// This was claimed, and its claim had an answer.
    pub(super) fn knows(&mut self, lease: LeaseId, claim: Claim) {
        let range = self.ranges.next();
        if self.is_of(lease) && range.is_some_and(|range| claim.sequence > range.after) {
            self.known.insert(claim);
        }
    }
}

/// Behind all claims of this sequence.
fn behind(sequence: i64) -> Claim {
    Claim {
        sequence,
        at: i64::MAX,
    }
}
