//! What acts on waiting messages share.

use std::collections::BTreeMap;

use diesel::PgConnection;

use super::{Choice, Found, Performed, Preview};
use crate::endpoints::sql::missed::Bulked;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::operate::bulk::Bulk;
use crate::operate::messages::message;
use crate::operate::sql::messages::{KeptIn, MessageRecord};
use crate::operate::sql::selection::Selection;
use crate::operate::sql::selection::now;
use crate::operate::sql::why::WaitReason;
use crate::operate::waiting::{Note, wait_reasons_of, waiting};
use crate::outbox::sql::seek::MessageKey;
use crate::outbox::sql::waiting::{Changed, MessageRef, PartState};

pub(super) const THINGS: (&str, &str) = ("waiting message", "waiting messages");
pub(super) const IDS: &str = "Only these messages: idempotency keys, message ids or sequences. With --destination, only \
    the part for this destination";

/// The messages of which is said what still holds them.
const SOME: i64 = 1_000;

type ChangeAll =
    fn(&mut PgConnection, &OutboxName, &Selection, Bulk<'_>) -> Result<Bulked, DatabaseError>;
type ChangeOne =
    fn(&mut PgConnection, &OutboxName, &MessageRef, &Note) -> Result<Changed, DatabaseError>;

/// The messages with this id, as far as they wait.
fn of_id(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: &str,
    which: &Choice,
) -> Found<Vec<MessageRecord>> {
    let mut rows = message(conn, name, &MessageKey::Text(id.to_owned()))?.rows;
    let to = which.selection.destination.as_deref();
    rows.retain(|row| row.kept_in == KeptIn::Live && to.is_none_or(|to| row.destination == to));
    Ok(rows)
}

pub(super) fn preview(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &Choice,
    all: ChangeAll,
) -> Found<Preview> {
    let as_of = now(conn)?;
    let mut first = None;
    let mut count = 0;
    for id in &which.ids {
        let rows = of_id(conn, name, id, which)?.into_iter();
        for row in rows.filter(|row| row.locked_by.is_none()) {
            count += 1;
            first.get_or_insert(row);
        }
    }
    if which.ids.is_empty() {
        let which = which.clone().as_of(as_of);
        let note = Note::new("", "");
        count = all(conn, name, &which.selection, Bulk::new(&note).dry_run())?.changed;
        if count > 0 {
            first = waiting(conn, name, &which.selection, 1)?.rows.pop();
        }
    }
    Ok(Preview {
        count,
        first,
        leaves: Vec::new(),
        as_of,
    })
}

pub(super) fn perform(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &Choice,
    bulk: Bulk<'_>,
    all: ChangeAll,
    one: ChangeOne,
) -> Found<Performed> {
    if which.ids.is_empty() {
        let bulked = all(conn, name, &which.selection, bulk)?;
        return Ok(Performed {
            bulked,
            parts: Vec::new(),
        });
    }
    let mut done = Performed::default();
    for id in &which.ids {
        let mut one_of_them = MessageRef::from(MessageKey::Text(id.clone()));
        if let Some(to) = &which.selection.destination {
            one_of_them = one_of_them.at(to);
        }
        let changed = one(conn, name, &one_of_them, bulk.note())?;
        let parts = changed.parts.len();
        let ended = changed.parts.iter();
        let ended = ended.filter(|part| part.state == PartState::Done).count();
        let step = Bulked::of(parts, ended);
        done.bulked.changed += step.changed;
        done.bulked.skipped += step.skipped;
        done.parts.push((id.clone(), changed));
    }
    Ok(done)
}

/// What else holds the messages that are due now.
pub(super) fn still_held(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &Choice,
) -> Found<Vec<(String, u64)>> {
    let rows = match which.ids.is_empty() {
        true => waiting(conn, name, &which.selection, SOME)?.rows,
        false => {
            let mut rows = Vec::new();
            for id in &which.ids {
                rows.extend(of_id(conn, name, id, which)?);
            }
            rows
        }
    };
    let mut held: BTreeMap<String, u64> = BTreeMap::new();
    for reason in wait_reasons_of(conn, name, &rows)?.into_iter().flatten() {
        let text = match reason {
            WaitReason::NotDue { .. } | WaitReason::NoRoom { .. } | WaitReason::Sending { .. } => {
                continue;
            }
            WaitReason::BehindKey { .. } if which.ids.is_empty() => {
                "behind an earlier message of its key".to_owned()
            }
            other => other.to_string(),
        };
        *held.entry(text).or_default() += 1;
    }
    Ok(held.into_iter().collect())
}
