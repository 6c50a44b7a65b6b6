//! What all searches have in common.
//!
//! A search finds messages that are due and that the next claims of the lanes may not find. Each search answers the same
//! questions ([`Search`]), and [`Searches`](super::searches::Searches) asks them in the order of their priority. Another
//! search is another file and two lines: its module, and its place in the list.

use std::collections::HashSet;
use std::time::Instant;

use super::pace::Last;
use super::picks::{Claims, Picked};
use crate::engine::claim::sql::claim::Position;
use crate::engine::claim::sql::page::Page;
use crate::engine::claim::sql::search::Ask;
use crate::engine::keys::sql::ordered::Key;

/// What the searches see when the planner asks them.
#[derive(Debug, Clone, Copy)]
pub(super) struct SearchPass {
    pub(super) now: Instant,
    /// When the look began.
    pub(super) since: Instant,
    /// No lane has work.
    pub(super) is_idle: bool,
    /// A caller asks whether nothing is left.
    pub(super) is_asked: bool,
    /// Keyed messages may be claimed.
    pub(super) has_keyed: bool,
    /// The number of claims is limited.
    pub(super) is_limited: bool,
    /// The highest floor of the lanes; `None`: claims have passed no message.
    pub(super) passed: Option<Position>,
}

/// A search that has ended: its query, and the claim of what the query has found.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) ask: Ask,
    pub(crate) outcome: SearchOutcome,
    pub(crate) last: Last,
}

#[derive(Debug)]
pub(crate) enum SearchOutcome {
    Done(Box<FoundMessages>),
    /// A statement took too long and was cancelled.
    TooSlow,
    Failed,
}

/// The messages that a query has found, and those of them that were claimed.
#[derive(Debug)]
pub(crate) struct FoundMessages {
    pub(crate) page: Page,
    pub(crate) picked: Picked,
    pub(crate) claims: Claims,
}

impl FoundMessages {
    /// The keys of picked messages that their claim has left out because of its size.
    pub(super) fn left_out(&self) -> Vec<Key> {
        if !self.claims.is_cut {
            return Vec::new();
        }
        let claimed: HashSet<i64> = self.claims.claimed.iter().copied().collect();
        let picked = self.picked.keyed.iter().map(|one| one.sequence);
        let left: HashSet<i64> = picked.filter(|one| !claimed.contains(one)).collect();
        let found = self.page.found.iter();
        let found = found.filter(|free| left.contains(&free.sequence));
        found.filter_map(|free| free.key()).collect()
    }
}

/// When another walk begins.
#[derive(Debug)]
pub(super) enum WalkAgain {
    /// At once: any key may be free.
    Now,
    /// As soon as one may begin.
    Soon,
}

/// The questions that every search answers.
pub(super) trait Search {
    /// What to ask the database now, if the search is due.
    fn ask(&mut self, pass: &SearchPass) -> Option<Ask>;

    /// Learns the outcome. Returns whether another walk is needed.
    fn learn(&mut self, finished: Finished) -> Option<WalkAgain>;

    /// When the search is due again, although no notification announces what it finds. `None`: with the next look.
    fn again_at(&self, _: &SearchPass) -> Option<Instant> {
        None
    }

    /// Whether the search has left nothing since the look began. Searches whose messages are not waited for never have.
    fn is_done(&self, _: &SearchPass) -> bool {
        true
    }
}

/// Every other turn, while others have work, too.
#[derive(Debug, Default)]
pub(super) struct EveryOther {
    had_last: bool,
}

impl EveryOther {
    pub(super) fn is_next(&mut self, is_alone: bool) -> bool {
        self.had_last = is_alone || !self.had_last;
        self.had_last
    }
}
