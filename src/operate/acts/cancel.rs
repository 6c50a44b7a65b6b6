//! Waiting messages end unsent.

use diesel::PgConnection;

use super::waiting;
use super::{Choice, Found, ManyAct, Performed, Preview, Words};
use crate::name::OutboxName;
use crate::operate::bulk::{Bulk, cancel_all};
use crate::operate::chosen::{Chosen, WrongChoice};
use crate::operate::sql::selection::Selection;
use crate::operate::sql::waiting::WaitingChange;
use crate::operate::waiting::cancel;

pub(super) struct Cancel;

impl ManyAct for Cancel {
    fn words(&self) -> &'static Words {
        &Words {
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
        }
    }

    fn selection(&self, chosen: &Chosen) -> Result<Selection, WrongChoice> {
        chosen.of_waiting()
    }

    fn preview(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
    ) -> Found<Preview> {
        waiting::preview(conn, name, which, WaitingChange::Cancel)
    }

    fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
        bulk: Bulk<'_>,
    ) -> Found<Performed> {
        waiting::perform(conn, name, which, bulk, cancel_all, cancel)
    }
}
