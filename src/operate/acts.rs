//! Acts on many messages. Each is one file below, listed once in [`ACTS`]: commands, pages and JSON present what is listed.
//! Acts on one message are in [`message`]. Acts on one endpoint are listed in [`ENDPOINT_ACTS`](endpoint::ENDPOINT_ACTS).
//!
//! To add one: its file, and its line in [`ACTS`].

mod cancel;
mod discard;
pub(crate) mod endpoint;
pub(crate) mod letters;
pub(crate) mod message;
pub(crate) mod pause;
mod requeue;
mod retry;
#[cfg(feature = "feeds")]
pub(crate) mod token;
mod waiting;

use std::fmt;
use std::time::SystemTime;

use diesel::PgConnection;

use super::bulk::Bulk;
use super::chosen::{Chosen, WrongChoice};
use super::sql::messages::MessageRecord;
use super::sql::selection::Selection;
use crate::endpoints::sql::missed::Bulked;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::outbox::sql::waiting::Changed;

/// All acts on many messages.
pub static ACTS: &[&dyn ManyAct] = &[
    &requeue::REQUEUE,
    &discard::DISCARD,
    &retry::RETRY,
    &cancel::CANCEL,
];

/// The most messages that are named by ids at once.
const MOST_IDS: usize = 1_000;

/// An act on the messages that are chosen.
pub trait ManyAct: Sync {
    /// Its words.
    fn words(&self) -> &'static Words;

    /// The conditions, of what the act may change.
    ///
    /// # Errors
    /// A [`WrongChoice`].
    fn selection(&self, chosen: &Chosen) -> Result<Selection, WrongChoice> {
        chosen.selection()
    }

    /// Whether a text may be an id.
    ///
    /// # Errors
    /// Why it is none.
    fn check_id(&self, _id: &str) -> Result<(), String> {
        Ok(())
    }

    /// How many messages the act would change, which is the first of them, and what the act leaves.
    ///
    /// # Errors
    /// An [`ActError`].
    fn preview(&self, conn: &mut PgConnection, name: &OutboxName, which: &Choice)
    -> Found<Preview>;

    /// Changes the messages in steps. After an error, or if the watcher of `bulk` stops the act, completed steps stay, and
    /// the same call continues.
    ///
    /// # Errors
    /// An [`ActError`].
    fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
        bulk: Bulk<'_>,
    ) -> Found<Performed>;

    /// What still holds the messages after the act, and how many; empty if the act does not send them.
    ///
    /// # Errors
    /// An [`ActError`].
    fn still_held(
        &self,
        _conn: &mut PgConnection,
        _name: &OutboxName,
        _which: &Choice,
    ) -> Found<StillHeld> {
        Ok(StillHeld::default())
    }
}

/// The result of a question to an act.
pub(crate) type Found<T> = Result<T, ActError>;

/// The words of an act, for all who present it.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    /// What the act is about, as the group of its command: `dead`.
    pub group: &'static str,
    /// The act, as an imperative: `requeue`.
    pub name: &'static str,
    /// What was done: `requeued`.
    pub done: &'static str,
    /// One and several of what it changes: `dead letter`, `dead letters`.
    pub things: (&'static str, &'static str),
    /// Its path in pages and JSON.
    pub path: &'static str,
    /// What the act does, in a sentence.
    pub about: &'static str,
    /// What becomes of the messages, and what does not change.
    pub becomes: &'static str,
    /// How to undo it.
    pub undo: &'static str,
    /// Whether the messages are lost to their destinations: it wants to be confirmed even for a few.
    pub ends: bool,
    /// What an id is.
    pub ids: &'static str,
}

impl Words {
    /// A number with the things: `7 dead letters`.
    pub fn counted(&self, count: u64) -> String {
        let thing = match count {
            1 => self.things.0,
            _ => self.things.1,
        };
        format!("{count} {thing}")
    }
}

/// The messages that an act is about: by their ids, by conditions, or all.
#[derive(Debug, Clone)]
pub struct Choice {
    pub(crate) ids: Vec<String>,
    pub(crate) selection: Selection,
}

impl Choice {
    /// What was chosen. An act without any choice is refused: a script whose variable is empty means no message, not all
    /// of them.
    ///
    /// # Errors
    /// A [`WrongChoice`]: nothing is chosen, `all` beside a choice, or a condition that cannot be used.
    pub fn new(
        act: &dyn ManyAct,
        ids: Vec<String>,
        chosen: &Chosen,
        all: bool,
    ) -> Result<Self, WrongChoice> {
        let wrong = |field: &'static str, why: String| Err(WrongChoice { field, why });
        let conditions = Chosen::NAMES.join(", ");
        if let Some(Err(why)) = ids.iter().map(|id| act.check_id(id)).find(Result::is_err) {
            return wrong("ids", why);
        }
        if !ids.is_empty() && (all || chosen.has_more_than_destination()) {
            return wrong(
                "ids",
                "ids cannot be combined with all, and of the conditions only with destination"
                    .to_owned(),
            );
        }
        if ids.len() > MOST_IDS {
            return wrong("ids", format!("at most {MOST_IDS} ids at once"));
        }
        // A variable of a script that is empty.
        if chosen.destination() == Some("") {
            return wrong("destination", "is empty".to_owned());
        }
        match (all, ids.is_empty() && chosen.is_empty()) {
            (false, true) => wrong(
                "all",
                format!("choose messages by ids, by {conditions}; or choose all"),
            ),
            (true, false) => wrong("all", format!("all cannot be combined with {conditions}")),
            _ => Ok(Self {
                ids,
                selection: act.selection(chosen)?,
            }),
        }
    }

    /// Only what was there at this time, as a [`Preview`] has it.
    #[must_use]
    pub fn counted_at(mut self, time: SystemTime) -> Self {
        let earliest = self
            .selection
            .counted_at
            .map_or(time, |before| before.min(time));
        self.selection = self.selection.counted_at(earliest);
        self
    }

    /// Whether single messages are meant.
    pub fn is_by_id(&self) -> bool {
        !self.ids.is_empty()
    }

    /// The conditions.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }
}

/// The choice in words: `topic order.*`, or `all`.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = self.ids.clone();
        let conditions = self.selection.to_string();
        parts.extend((!conditions.is_empty()).then_some(conditions));
        match parts.is_empty() {
            true => f.write_str("all"),
            false => f.write_str(&parts.join(", ")),
        }
    }
}

/// What an act would do.
#[derive(Debug, Clone)]
pub struct Preview {
    /// The messages that it would change.
    pub count: u64,
    /// The first of them, without payload.
    pub first: Option<MessageRecord>,
    /// What it would leave although it was chosen, and why.
    pub leaves: Vec<String>,
    /// When the messages were counted. What comes later was not counted.
    pub counted_at: SystemTime,
}

/// What still holds messages.
#[derive(Debug, Clone, Default)]
pub struct StillHeld {
    /// Each reason, and how many messages it holds.
    pub reasons: Vec<(String, u64)>,
    /// `false`: there may be more.
    pub is_complete: bool,
}

/// What an act has done.
#[derive(Debug, Clone, Default)]
pub struct Performed {
    /// The numbers of all steps.
    pub bulked: Bulked,
    /// For messages that were chosen by id: what became of the parts of each.
    pub parts: Vec<(String, Changed)>,
}

/// Why an act was not carried out, or not to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ActError {
    /// An id that names no message, or several. Nothing was changed.
    #[error("{0}; nothing was changed")]
    Unknown(String),
    /// The database failed. Completed steps stay.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

impl From<diesel::result::Error> for ActError {
    fn from(error: diesel::result::Error) -> Self {
        Self::Database(error.into())
    }
}
