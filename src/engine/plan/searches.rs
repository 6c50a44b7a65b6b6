//! All searches, in the order of their priority.

use std::time::Instant;

use super::search::{Finished, Search, SearchPass, WalkAgain};
use crate::engine::claim::sql::search::Ask;
use crate::engine::keys::sql::ordered::Key;

macro_rules! searches {
    ($($name:ident::$Search:ident: $Ask:ident,)+) => {
        /// All searches, in the order of their priority.
        #[derive(Debug, Default)]
        pub(super) struct Searches {
            $(pub(super) $name: super::$name::$Search,)+
        }

        impl Searches {
            /// The query of the first search that is due.
            pub(super) fn ask(&mut self, pass: &SearchPass) -> Option<Ask> {
                None$(.or_else(|| self.$name.ask(pass)))+
            }

            /// Each search has a query of its own.
            pub(super) fn learn(&mut self, finished: Finished) -> Option<WalkAgain> {
                match finished.ask {
                    $(Ask::$Ask(..) => self.$name.learn(finished),)+
                }
            }

            /// When the first search is due again.
            pub(super) fn again_at(&self, pass: &SearchPass) -> Option<Instant> {
                [$(self.$name.again_at(pass)),+].into_iter().flatten().min()
            }

            /// Whether no search has left anything since the look began.
            pub(super) fn is_done(&self, pass: &SearchPass) -> bool {
                $(self.$name.is_done(pass))&&+
            }
        }
    };
}

searches! {
    unserved::UnservedSearch: Expired,
    late::Late: Late,
    freed::FreedKeys: Keys,
    patrol::Patrol: Range,
    walk::Walk: Walk,
}

impl Searches {
    /// These keys were freed.
    pub(super) fn free(&mut self, keys: impl IntoIterator<Item = Key>) {
        if self.freed.add(keys) {
            self.walk.want_round();
        }
    }
}
