//! All searches, in the order of their priority.

use std::time::Instant;

use super::search::{Finished, Pass, Search, WalkAgain};
use crate::engine::claim::sql::search::Ask;
use crate::engine::keys::sql::ordered::Key;

macro_rules! searches {
    ($($name:ident::$Search:ident,)+) => {
        /// All searches, in the order of their priority.
        #[derive(Debug, Default)]
        pub(super) struct Searches {
            $(pub(super) $name: super::$name::$Search,)+
        }

        /// The search that asks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum SearchKind {
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

            pub(super) fn learn(&mut self, by: SearchKind, finished: Finished) -> Option<WalkAgain> {
                match by {
                    $(SearchKind::$Search => self.$name.learn(finished),)+
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
    unserved::Unserved,
    late::Late,
    freed::Freed,
    patrol::Patrol,
    walk::Walk,
}

impl Searches {
    /// These keys were freed.
    pub(super) fn free(&mut self, keys: impl IntoIterator<Item = Key>) {
        if self.freed.add(keys) {
            self.walk.want_round();
        }
    }
}
