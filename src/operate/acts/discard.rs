//! Dead letters are deleted.

use super::Words;
use super::letters::{self, LetterAct};
use crate::operate::dead_letters::Change;

pub(super) static DISCARD: LetterAct = LetterAct {
    words: &Words {
        group: "dead",
        name: "discard",
        done: "discarded",
        things: letters::THINGS,
        path: "/dead/discard",
        about: "Delete dead letters permanently",
        becomes: "They are deleted permanently, with their payloads, and the ordering keys that they block are free. The ledger still records them as dead.",
        undo: "It cannot be undone.",
        ends: true,
        ids: letters::IDS,
    },
    change: Change::Discard,
};
