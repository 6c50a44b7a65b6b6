//! Waiting messages become due.

use diesel::PgConnection;

use super::waiting;
use super::{Choice, Found, ManyAct, Performed, Preview, StillHeld, Words};
use crate::name::OutboxName;
use crate::operate::bulk::{Bulk, retry_all};
use crate::operate::chosen::{Chosen, WrongChoice};
use crate::operate::sql::selection::Selection;
use crate::operate::sql::waiting::WaitingChange;
use crate::operate::waiting::retry;

pub(super) struct Retry;

impl ManyAct for Retry {
    fn words(&self) -> &'static Words {
        &Words {
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
        waiting::preview(conn, name, which, WaitingChange::Retry)
    }

    fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
        bulk: Bulk<'_>,
    ) -> Found<Performed> {
        waiting::perform(conn, name, which, bulk, retry_all, retry)
    }

    fn still_held(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
    ) -> Found<StillHeld> {
        waiting::still_held(conn, name, which)
    }
}
