//! What all searches have in common.
//!
//! A search finds messages that are due and that the next claims of the lanes may not find. Each search answers the same
//! questions ([`Search`]), and [`Searches`](super::searches::Searches) asks them in the order of their priority. Another
//! search is another file and two lines: its module, and its place in the list.

use std::time::{Duration, Instant};

use super::picks::{Claims, Picked};
use crate::store::relay::claim::Position;
use crate::store::relay::ordered::Key;
use crate::store::relay::page::{Free, Page};
use crate::store::relay::search::Ask;

/// What the searches see when the planner asks them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
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

#[cfg(test)]
impl Pass {
    /// An idle pass of a look that begins now.
    pub(super) fn at(now: Instant) -> Self {
        Self {
            now,
            since: now,
            is_idle: true,
            is_asked: false,
            has_keyed: true,
            is_limited: false,
            passed: None,
        }
    }
}

/// The result of a query and of the claim of what it has found.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all outcomes are done")]
pub(in crate::relay) enum Outcome {
    Done {
        page: Page,
        picked: Picked,
        claims: Claims,
    },
    /// A statement took too long and was cancelled.
    TooSlow,
    Failed,
}

/// What a search has found out for the others.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// Other searches may take too long, too: the patrol begins.
    pub(super) wants_patrol: bool,
    /// Any key may be free: a new walk begins.
    pub(super) restarts_walk: bool,
    /// Another walk is to follow, as soon as one may begin.
    pub(super) wants_walk: bool,
    /// Keys to query by name.
    pub(super) freed: Vec<Key>,
    /// Messages that claims of their lanes may have passed.
    pub(super) free: Vec<Free>,
}

/// The questions that every search answers.
pub(super) trait Search {
    /// What to ask the database now, if the search is due.
    fn ask(&mut self, pass: &Pass) -> Option<Ask>;

    /// Learns the outcome of the query.
    fn learn(&mut self, now: Instant, ask: Ask, outcome: Outcome, took: Duration) -> Hints;

    /// When the search is due again, although no notification announces what it finds. `None`: with the next look.
    fn again_at(&self, pass: &Pass) -> Option<Instant>;

    /// Whether the search has left nothing since the look began.
    fn is_done(&self, pass: &Pass) -> bool;
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
