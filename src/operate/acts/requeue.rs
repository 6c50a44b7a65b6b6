//! Dead letters become due again.

use super::Words;
use super::letters::{self, LetterAct};
use crate::operate::dead_letters::Change;

pub(super) static REQUEUE: LetterAct = LetterAct {
    words: &Words {
        group: "dead",
        name: "requeue",
        done: "requeued",
        things: letters::THINGS,
        path: "/dead/requeue",
        about: "Requeue dead letters: due at once, attempts reset",
        becomes: "They become due at once, with attempts reset, without an expiry that has passed. A dead letter stays if its idempotency key is in the outbox again, and ends for good if its endpoint was removed.",
        undo: "It cannot be undone. `message cancel` ends one that was not sent yet for good.",
        ends: false,
        ids: letters::IDS,
    },
    change: Change::Requeue,
};
