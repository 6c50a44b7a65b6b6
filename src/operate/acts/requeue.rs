//! Dead letters become due again.

use diesel::PgConnection;

use super::letters;
use super::{Choice, Found, ManyAct, Performed, Preview, Words};
use crate::name::OutboxName;
use crate::operate::bulk::Bulk;
use crate::operate::dead_letters::Change;

pub(super) struct Requeue;

impl ManyAct for Requeue {
    fn words(&self) -> &'static Words {
        &Words {
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
        }
    }

    fn check_id(&self, id: &str) -> Result<(), String> {
        letters::check_id(id)
    }

    fn preview(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
    ) -> Found<Preview> {
        letters::preview(conn, name, which)
    }

    fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
        bulk: Bulk<'_>,
    ) -> Found<Performed> {
        letters::perform(conn, name, which, Change::Requeue, bulk)
    }
}
