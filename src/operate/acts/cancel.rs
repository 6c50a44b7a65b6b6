//! Waiting messages end unsent.

use super::Words;
use super::waiting::{self, WaitingAct};
use crate::operate::sql::waiting::WaitingChange;

pub(super) static CANCEL: WaitingAct = WaitingAct {
    words: &Words {
        group: "message",
        name: "cancel",
        done: "cancelled",
        things: waiting::THINGS,
        path: "/messages/cancel",
        about: "Cancel waiting messages: they are neither sent nor dead-lettered",
        becomes: "They are not sent any more, their payloads are deleted, and their ordering keys continue without them. The ledger records them as dead, with the reason CANCELLED. With a destination, messages that others get, too, stay.",
        undo: "It cannot be undone: the application must enqueue the messages again.",
        ends: true,
        ids: waiting::IDS,
    },
    change: WaitingChange::Cancel,
};
