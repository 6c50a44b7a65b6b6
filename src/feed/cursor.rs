//! Where a consumer is in a feed.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use uuid::Uuid;

use crate::schema::values::{as_micros, from_micros};

/// The position of the last event that a consumer has, the id of that event, and when it was stored: they tell a database
/// that was restored, or a standby that lacks the last commits, from the one that the consumer has read. A text without
/// meaning for consumers.
///
/// ```
/// use diesel_outbox::feed::Cursor;
///
/// let text = "42.0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c.849261600123456";
/// let cursor: Cursor = text.parse()?;
/// assert_eq!(cursor.position(), 42);
/// assert_eq!(cursor.to_string(), text);
/// assert!("42".parse::<Cursor>().is_err());
/// # Ok::<(), diesel_outbox::feed::BadCursor>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    position: i64,
    /// `None`: no event was ever before it.
    event: Option<Mark>,
}

/// What tells the event at a position from another one there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) id: Uuid,
    /// In PostgreSQL's microseconds (since 2000). A standby that lacks the last commits may store the same event once
    /// more at the same position, behind other ones. `None`: unknown, in a cursor that somebody has made of what else an event
    /// shows.
    pub(crate) stored_at: Option<i64>,
}

impl Mark {
    fn is_of(self, other: Self) -> bool {
        let times = self.stored_at.zip(other.stored_at);
        self.id == other.id && times.is_none_or(|(time, other)| time == other)
    }
}

/// A text that is no cursor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cursor of a feed")]
pub struct BadCursor(String);

impl Cursor {
    /// Before the first event that there ever was.
    pub(crate) const START: Self = Self {
        position: 0,
        event: None,
    };

    pub(crate) fn new(position: i64, event: Option<Mark>) -> Self {
        Self { position, event }
    }

    /// The position of the event; 0: before the first one.
    pub fn position(&self) -> i64 {
        self.position
    }

    #[cfg(test)]
    pub(crate) fn event(&self) -> Option<Mark> {
        self.event
    }

    /// Whether its event was stored at this time or later.
    pub(crate) fn is_since(&self, time: SystemTime) -> bool {
        let stored_at = self.event.and_then(|event| event.stored_at);
        stored_at.is_some_and(|stored_at| stored_at >= from_micros(as_micros(time)).0)
    }

    /// Whether both are of the same event, as far as is known.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        let is_same = match (self.event, other.event) {
            (Some(event), Some(other)) => event.is_of(other),
            (event, other) => event == other,
        };
        self.position == other.position && is_same
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.position)?;
        if let Some(event) = self.event {
            write!(f, ".{}", event.id)?;
            if let Some(stored_at) = event.stored_at {
                write!(f, ".{stored_at}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Cursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        if text == "0" {
            return Ok(Self::START);
        }
        let parts = text.split_once('.');
        let read = parts.and_then(|(position, event)| {
            let position = position.parse().ok().filter(|position| *position > 0)?;
            let (id, stored_at) = match event.split_once('.') {
                Some((id, stored_at)) => (id, Some(stored_at.parse().ok()?)),
                None => (event, None),
            };
            let id = Uuid::try_parse(id).ok()?;
            Some(Self::new(position, Some(Mark { id, stored_at })))
        });
        read.ok_or_else(|| BadCursor(text.chars().take(100).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_are_no_cursors_are_refused() {
        let id = Uuid::now_v7();
        for stored_at in [None, Some(1), Some(i64::MIN)] {
            let cursor = Cursor::new(i64::MAX, Some(Mark { id, stored_at }));
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
            // It fits in the tables of consumers.
            assert!(cursor.to_string().len() < 100);
        }
        assert_eq!("0".parse(), Ok(Cursor::START));
        for text in ["", "-1", "1", "begin", "0.", "1.x", "9223372036854775808.x"] {
            assert!(text.parse::<Cursor>().is_err(), "{text}");
        }
        for position in ["0", "-1"] {
            assert!(format!("{position}.{id}").parse::<Cursor>().is_err());
        }
        for stored_at in ["", "x", "1.1"] {
            assert!(format!("1.{id}.{stored_at}").parse::<Cursor>().is_err());
        }
    }
}
