//! Keys that may be free.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::search::{EveryOther, Finished, Search, SearchOutcome, SearchPass, WalkAgain};
use super::to::To;
use crate::engine::claim::sql::page::PAGE;
use crate::engine::claim::sql::search::Ask;
use crate::engine::keys::sql::ordered::Key;

/// The most keys that are remembered. If there are more, a walk finds them.
const MOST: usize = 20 * PAGE;

/// Keys whose first message may have become free. They are queried by name: with many keys a walk takes long, and would
/// never end if each freed key began a new one.
#[derive(Debug, Default)]
pub(super) struct FreedKeys {
    /// Keys to query.
    keys: VecDeque<Key>,
    /// Keys whose destination has no room or is closed.
    waiting: BTreeMap<Key, To>,
    turn: EveryOther,
}

impl FreedKeys {
    /// Returns `true` if the keys are too many, and were forgotten.
    pub(super) fn add(&mut self, keys: impl IntoIterator<Item = Key>) -> bool {
        self.keys.extend(keys);
        let are_too_many = self.keys.len() + self.waiting.len() > MOST;
        if are_too_many {
            self.keys.clear();
            self.waiting.clear();
        }
        are_too_many
    }

    /// Queries waiting keys again if there is room now.
    pub(super) fn wait_has_ended(&mut self, is_room: impl Fn(To) -> bool) {
        let keys = &mut self.keys;
        self.waiting.retain(|key, to| {
            let has_room = is_room(*to);
            if has_room {
                keys.push_back(key.clone());
            }
            !has_room
        });
    }

    /// Whether some keys can be queried now.
    pub(super) fn has_some(&self, is_room: impl Fn(To) -> bool) -> bool {
        !self.keys.is_empty() || self.waiting.values().any(|to| is_room(*to))
    }
}

impl Search for FreedKeys {
    /// Each key appears once: its message must not be claimed twice.
    fn ask(&mut self, pass: &SearchPass) -> Option<Ask> {
        if self.keys.is_empty() {
            self.turn = EveryOther::default();
            return None;
        }
        if !pass.has_keyed || !self.turn.is_next(false) {
            return None;
        }
        let next: BTreeSet<Key> = self.keys.drain(..self.keys.len().min(PAGE)).collect();
        Some(Ask::Keys(next.into_iter().collect()))
    }

    fn learn(&mut self, finished: Finished) -> Option<WalkAgain> {
        match (finished.ask, finished.outcome) {
            (Ask::Keys(keys), SearchOutcome::Done(done)) if done.claims.of_keys.is_beaten() => {
                self.keys.extend(keys);
            }
            (_, SearchOutcome::Done(done)) => {
                for left in done.picked.left {
                    match left.key {
                        Some(key) if left.has_room => self.keys.push_back(key),
                        Some(key) => drop(self.waiting.insert(key, left.to)),
                        None => {}
                    }
                }
            }
            // One of the keys may be the reason, so a walk finds them instead.
            (_, SearchOutcome::TooSlow | SearchOutcome::Failed) => return Some(WalkAgain::Soon),
        }
        None
    }
}
