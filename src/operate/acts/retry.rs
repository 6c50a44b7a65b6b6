//! Waiting messages become due.

use super::Words;
use super::waiting::{self, WaitingAct};
use crate::operate::sql::waiting::WaitingChange;

pub(super) static RETRY: WaitingAct = WaitingAct {
    words: &Words {
        group: "message",
        name: "retry",
        done: "retried",
        things: waiting::THINGS,
        path: "/messages/retry",
        about: "Make messages due that wait after a failed attempt; a message that is named by its id, whatever it waits for",
        becomes: "They become due at once. Attempts and expiry stay. Delayed messages that were never attempted keep their time, unless they are named by their ids.",
        undo: "`message reschedule` gives a message that was not sent yet another time.",
        ends: false,
        ids: waiting::IDS,
    },
    change: WaitingChange::Retry,
};
