//! What all searches have in common.
//!
//! A search finds messages that are due and that the next claims of the lanes may not find. Each search answers the same
//! questions ([`Search`]), and [`Searches`] asks them in the order of their priority. Another search is another file and
//! two lines: its module, and its place in the list.

use std::time::{Duration, Instant};

use super::freed::Freed;
use super::late::Late;
use super::patrol::Patrol;
use super::picks::Picked;
use super::unserved::Unserved;
use super::walk::Walk;
use crate::relay::pace::Pace;
use crate::store::relay::claim::Position;
use crate::store::relay::ordered::Key;
use crate::store::relay::patrol::Free;
use crate::store::relay::search::{Ask, Page};

/// Searches take at most a twentieth of the time. If an old snapshot keeps a million dead entries in an index, a search
/// may read them all.
pub(super) const REST: u32 = 20;

/// The pace of a search that begins no sooner than this after its last end.
pub(super) const fn pace(interval: Duration) -> Pace {
    Pace {
        interval,
        rest: REST,
    }
}

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

/// The claim of chosen messages.
#[derive(Debug, Default)]
pub(in crate::relay) struct Claims {
    /// The claimed sequences.
    pub(in crate::relay) claimed: Vec<i64>,
    /// Some messages were left out because of their size.
    pub(in crate::relay) is_cut: bool,
    /// Another relay was claiming keyed messages.
    pub(in crate::relay) is_beaten: bool,
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

macro_rules! searches {
    ($($name:ident: $Search:ident,)+) => {
        /// All searches, in the order of their priority.
        #[derive(Debug, Default)]
        pub(super) struct Searches {
            $(pub(super) $name: $Search,)+
        }

        /// The search that asks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(in crate::relay) enum SearchKind {
            $($Search,)+
        }

        impl Searches {
            /// The query of the first search that is due.
            pub(super) fn ask(&mut self, pass: &Pass) -> Option<(SearchKind, Ask)> {
                $(if let Some(ask) = self.$name.ask(pass) {
                    return Some((SearchKind::$Search, ask));
                })+
                None
            }

            pub(super) fn learn(
                &mut self,
                now: Instant,
                (by, ask): (SearchKind, Ask),
                outcome: Outcome,
                took: Duration,
            ) -> Hints {
                match by {
                    $(SearchKind::$Search => self.$name.learn(now, ask, outcome, took),)+
                }
            }

            /// When the first search is due again.
            pub(super) fn again_at(&self, pass: &Pass) -> Option<Instant> {
                [$(self.$name.again_at(pass)),+].into_iter().flatten().min()
            }

            /// Whether no search has left anything since the look began.
            pub(super) fn is_done(&self, pass: &Pass) -> bool {
                $(self.$name.is_done(pass))&&+
            }
        }
    };
}

searches! {
    unserved: Unserved,
    late: Late,
    freed: Freed,
    patrol: Patrol,
    walk: Walk,
}

impl Searches {
    /// These keys were freed.
    pub(super) fn free(&mut self, keys: impl IntoIterator<Item = Key>) {
        if self.freed.add(keys) {
            self.walk.want_round();
        }
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
