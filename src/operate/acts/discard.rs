//! Dead letters are deleted.

use diesel::PgConnection;

use super::letters;
use super::{Choice, Found, ManyAct, Performed, Preview, Words};
use crate::name::OutboxName;
use crate::operate::bulk::Bulk;
use crate::operate::dead_letters::Change;

pub(super) struct Discard;

impl ManyAct for Discard {
    fn words(&self) -> &'static Words {
        &Words {
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
        letters::perform(conn, name, which, Change::Discard, bulk)
    }
}
