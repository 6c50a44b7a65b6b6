//! Undoing a claim without an answer: releasing the messages that it took.

use std::collections::BTreeSet;
use std::time::Duration;

use super::ranges::Ranges;
use crate::relay::doubt::Doubt;
use crate::store::range::Range;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::settle::Claim;

/// A pass over the messages of a lease, to release those that this process does not know.
#[derive(Debug)]
pub(super) struct Undoing {
    doubt: Doubt,
    ranges: Ranges,
    /// Known claims in the ranges still to come: put aside before, or claimed under the lease since.
    known: BTreeSet<Claim>,
    /// The number of released messages.
    count: usize,
}

/// A part of the messages of a lease.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::relay) struct Part {
    pub(in crate::relay) lease: LeaseId,
    pub(in crate::relay) range: Range,
    /// The known claims in the range, which are kept.
    pub(in crate::relay) known: Vec<Claim>,
}

impl Undoing {
    pub(super) fn new(doubt: Doubt, aside: Vec<Claim>) -> Self {
        Self {
            doubt,
            ranges: Ranges::new(),
            known: aside.into_iter().collect(),
            count: 0,
        }
    }

    pub(super) fn is_of(&self, lease: LeaseId) -> bool {
        self.doubt.lease == lease
    }

    /// The next part to release; or the number of released messages, at the end of the pass.
    pub(super) fn next(&self) -> Result<Part, usize> {
        let range = self.ranges.next().ok_or(self.count)?;
        let known = self.known.range(behind(range.after)..behind(range.upto));
        Ok(Part {
            lease: self.doubt.lease,
            range,
            known: known.copied().collect(),
        })
    }

    pub(super) fn doubt(&self) -> Doubt {
        self.doubt
    }

    /// `count` messages of the range were released; `None`: the statement took too long.
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

    /// A message was claimed, and the claim had an answer.
    pub(super) fn knows(&mut self, lease: LeaseId, claim: Claim) {
        let range = self.ranges.next();
        if self.is_of(lease) && range.is_some_and(|range| claim.sequence > range.after) {
            self.known.insert(claim);
        }
    }
}

/// A bound after all claims of this sequence.
fn behind(sequence: i64) -> Claim {
    Claim {
        sequence,
        at: i64::MAX,
    }
}
