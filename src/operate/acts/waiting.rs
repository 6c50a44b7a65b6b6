//! What acts on waiting messages share.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use diesel::PgConnection;

use super::{ActError, Choice, Found, ManyAct, Performed, Preview, StillHeld, Words};
use crate::endpoints::sql::missed::Bulked;
use crate::name::OutboxName;
use crate::operate::bulk::{Bulk, change_all};
use crate::operate::chosen::{Chosen, WrongChoice};
use crate::operate::messages::message;
use crate::operate::sql::messages::{KeptIn, MessageRecord};
use crate::operate::sql::selection::Selection;
use crate::operate::sql::selection::now;
use crate::operate::sql::waiting::{WaitingChange, count, first_of};
use crate::operate::sql::why::WaitReason;
use crate::operate::waiting::{cancel, retry, wait_reasons_of, waiting};
use crate::outbox::sql::seek::MessageKey;
use crate::outbox::sql::waiting::{MessageRef, PartState};
use crate::sql::pinned::pinned;

pub(super) const THINGS: (&str, &str) = ("waiting message", "waiting messages");
pub(super) const IDS: &str = "Only these messages: idempotency keys, message ids or sequences. With --destination, only \
    the part for this destination";

/// The messages of which is said what still holds them.
const SOME: i64 = 1_000;

/// How long the messages of a preview are looked up by their ids.
const LONGEST_LOOK: Duration = Duration::from_secs(5);

/// The messages with this id, as far as they wait, without content.
fn of_id(
    conn: &mut PgConnection,
    name: &OutboxName,
    id: &str,
    which: &Choice,
) -> Found<Vec<MessageRecord>> {
    let mut rows = message(conn, name, &MessageKey::Text(id.to_owned()))?.rows;
    let to = which.selection.destination.as_deref();
    rows.retain(|row| {
        // A replay is another message.
        let is_it = row.idempotency_key == id || row.replay_of().is_none();
        is_it && row.kept_in == KeptIn::Live && to.is_none_or(|to| row.destination == to)
    });
    for row in &mut rows {
        (row.payload, row.headers, row.response) = (None, None, None);
    }
    Ok(rows)
}

/// An act on waiting messages.
pub(super) struct WaitingAct {
    pub(super) words: &'static Words,
    pub(super) change: WaitingChange,
}

impl ManyAct for WaitingAct {
    fn words(&self) -> &'static Words {
        self.words
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
        let (counted_at, change) = (now(conn)?, self.change);
        let mut preview = Preview {
            count: 0,
            first: None,
            leaves: Vec::new(),
            counted_at,
        };
        if which.is_by_id() {
            let began = Instant::now();
            for (at, id) in which.ids.iter().enumerate() {
                if began.elapsed() > LONGEST_LOOK {
                    let rest = which.ids.len() - at;
                    preview.count += rest as u64;
                    preview
                        .leaves
                        .push(format!("{rest} ids were not looked up"));
                    break;
                }
                let rows = of_id(conn, name, id, which)?.into_iter();
                for row in rows.filter(|row| row.locked_by.is_none()) {
                    preview.count += 1;
                    preview.first.get_or_insert(row);
                }
            }
            return Ok(preview);
        }
        let which = which.clone().counted_at(counted_at);
        pinned(conn, name, |conn, name| {
            let several = change.several();
            let selection = which.selection.with_routed(conn, name, several)?;
            let count = count(conn, name, &selection, change, None)?;
            preview.count = count.map_or(0, |count| u64::try_from(count).unwrap_or(0));
            preview.first = first_of(conn, name, &selection, change)?;
            if !selection.shared.is_empty() {
                preview.leaves.push(format!(
                    "messages of {} stay, because others get them, too, or a relay cannot be read",
                    selection.shared.join(", ")
                ));
            }
            Ok::<_, ActError>(())
        })?;
        Ok(preview)
    }

    fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
        mut bulk: Bulk<'_>,
    ) -> Found<Performed> {
        if which.ids.is_empty() {
            let bulked = change_all::<ActError>(conn, name, &which.selection, self.change, bulk)?;
            return Ok(Performed {
                bulked,
                parts: Vec::new(),
            });
        }
        let change_one = match self.change {
            WaitingChange::Retry => retry,
            WaitingChange::Cancel => cancel,
        };
        let (note, mut parts) = (bulk.note(), Vec::new());
        let mut ids = which.ids.iter();
        // The end is what the totals say, whoever ended the steps.
        let _ = bulk.steps(conn, |conn, _| {
            let Some(id) = ids.next() else {
                return Ok(None);
            };
            let mut named = MessageRef::from(MessageKey::Text(id.clone()));
            if let Some(to) = &which.selection.destination {
                named = named.at(to);
            }
            let changed = change_one(conn, name, &named, note)?;
            let done = changed.parts.iter();
            let done = done.filter(|part| part.state == PartState::Done).count();
            let step = Bulked::of(changed.parts.len().max(1), done);
            parts.push((id.clone(), changed));
            Ok::<_, ActError>(Some(step))
        })?;
        Ok(Performed {
            bulked: bulk.done(),
            parts,
        })
    }

    fn still_held(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
    ) -> Found<StillHeld> {
        match self.change {
            WaitingChange::Retry => still_held(conn, name, which),
            WaitingChange::Cancel => Ok(StillHeld::default()),
        }
    }
}

/// What else holds the messages that are due now.
fn still_held(conn: &mut PgConnection, name: &OutboxName, which: &Choice) -> Found<StillHeld> {
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
    let is_full = i64::try_from(rows.len()).is_ok_and(|rows| rows >= SOME);
    Ok(StillHeld {
        reasons: held.into_iter().collect(),
        is_complete: !is_full,
    })
}
