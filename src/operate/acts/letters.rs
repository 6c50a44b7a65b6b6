//! What acts on dead letters share.

use diesel::PgConnection;

use super::{ActError, Choice, Found, ManyAct, Performed, Preview, Words};
use crate::name::OutboxName;
use crate::operate::bulk::Bulk;
use crate::operate::dead_letters::{Change, change, dead_letters, matching_dead_letters};
use crate::operate::sql::messages::LetterId;
use crate::operate::sql::selection::now;

pub(super) const THINGS: (&str, &str) = ("dead letter", "dead letters");
pub(super) const IDS: &str = "Only these dead letters: ids of `dead list` (the sequence), or SEQUENCE.MESSAGE-ID where \
    several dead letters have a sequence";

/// What a person calls a dead letter. A sequence may be used again, so it may name several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LetterName {
    /// A sequence: `7`.
    Sequence(i64),
    /// A sequence and a message id, as lists have them: `7.0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c`.
    Letter(LetterId),
}

impl LetterName {
    /// The sequence.
    pub fn sequence(self) -> i64 {
        match self {
            Self::Sequence(sequence) => sequence,
            Self::Letter(letter) => letter.sequence.0,
        }
    }

    /// Whether it names this dead letter.
    pub fn is_of(self, letter: LetterId) -> bool {
        match self {
            Self::Sequence(sequence) => letter.sequence.0 == sequence,
            Self::Letter(one) => letter == one,
        }
    }
}

impl std::str::FromStr for LetterName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sequence = text.parse().map(Self::Sequence);
        sequence.or_else(|_| text.parse().map(Self::Letter)).map_err(|_| {
            format!("{text:?} is not an id: `diesel-outbox dead list` shows the ids, which are whole numbers")
        })
    }
}

/// An act on dead letters.
pub(super) struct LetterAct {
    pub(super) words: &'static Words,
    pub(super) change: Change,
}

/// The dead letters that are meant, oldest first, and how many of them are gone. A sequence must name exactly one; an id
/// that has the message id, too, comes from a list, and its letter may be gone since.
fn letters(
    conn: &mut PgConnection,
    name: &OutboxName,
    which: &Choice,
) -> Found<(Vec<LetterId>, u64)> {
    // Whoever chose the messages has checked the ids.
    let ids = which.ids.iter().filter_map(|text| text.parse().ok());
    let ids: Vec<LetterName> = ids.collect();
    let sequences: Vec<i64> = ids.iter().map(|id| id.sequence()).collect();
    let selection = which.selection.clone().sequences(sequences);
    let mut found = matching_dead_letters(conn, name, &selection)?;
    if !ids.is_empty() {
        found.retain(|letter| ids.iter().any(|id| id.is_of(*letter)));
    }
    let of = |id: LetterName| -> Vec<String> {
        let of_it = found.iter().filter(|letter| id.is_of(**letter));
        of_it.map(ToString::to_string).collect()
    };
    let named = || which.ids.iter().zip(&ids);
    if let Some((text, id)) = named().find(|(_, id)| of(**id).len() > 1) {
        return Err(ActError::Unknown(format!(
            "several dead letters have the id {text}: give one of {}",
            of(*id).join(", ")
        )));
    }
    let missing: Vec<_> = named().filter(|(_, id)| of(**id).is_empty()).collect();
    let gone = missing.len() as u64;
    let missing = missing
        .iter()
        .filter(|(_, id)| matches!(id, LetterName::Sequence(_)));
    let missing: Vec<&str> = missing.map(|(text, _)| text.as_str()).collect();
    match missing.is_empty() {
        true => Ok((found, gone)),
        false => Err(ActError::Unknown(format!(
            "there is no dead letter with the id {}",
            missing.join(", ")
        ))),
    }
}

impl ManyAct for LetterAct {
    fn words(&self) -> &'static Words {
        self.words
    }

    fn check_id(&self, id: &str) -> Result<(), String> {
        id.parse::<LetterName>().map(drop)
    }

    fn preview(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
    ) -> Found<Preview> {
        let counted_at = now(conn)?;
        let (found, _) = letters(conn, name, &which.clone().counted_at(counted_at))?;
        let first = match found.first() {
            Some(first) => {
                let one = which.selection.clone().sequences(vec![first.sequence.0]);
                let mut rows = dead_letters(conn, name, &one, 10)?;
                rows.retain(|row| row.id() == *first);
                rows.pop()
            }
            None => None,
        };
        Ok(Preview {
            count: found.len() as u64,
            first,
            leaves: Vec::new(),
            counted_at,
        })
    }

    fn perform(
        &self,
        conn: &mut PgConnection,
        name: &OutboxName,
        which: &Choice,
        bulk: Bulk<'_>,
    ) -> Found<Performed> {
        let (letters, gone) = bulk.limited(conn, |conn| letters(conn, name, which))?;
        let mut bulked = change(conn, name, &letters, self.change, bulk)?;
        bulked.skipped += gone;
        let parts = Vec::new();
        Ok(Performed { bulked, parts })
    }
}
