//! Where a consumer is in a feed.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

/// The position of the last event that a consumer has, and the id of that event, which tells a restored database from
/// the one that the consumer has read. A text without meaning for consumers.
///
/// ```
/// use diesel_outbox::feed::Cursor;
///
/// let cursor: Cursor = "42.0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c".parse()?;
/// assert_eq!(cursor.position(), 42);
/// assert_eq!(cursor.to_string(), "42.0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c");
/// assert!("42".parse::<Cursor>().is_err());
/// # Ok::<(), diesel_outbox::feed::BadCursor>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    position: i64,
    /// `None`: no event was ever before it.
    id: Option<Uuid>,
}

/// A text that is no cursor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cursor of a feed")]
pub struct BadCursor(String);

impl Cursor {
    /// Before the first event that there ever was.
    pub(crate) const START: Self = Self {
        position: 0,
        id: None,
    };

    pub(crate) fn new(position: i64, id: Option<Uuid>) -> Self {
        Self { position, id }
    }

    /// The position of the event; 0: before the first one.
    pub fn position(&self) -> i64 {
        self.position
    }

    pub(crate) fn id(&self) -> Option<Uuid> {
        self.id
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id {
            Some(id) => write!(f, "{}.{id}", self.position),
            None => write!(f, "{}", self.position),
        }
    }
}

impl FromStr for Cursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        if text == "0" {
            return Ok(Self::START);
        }
        let parts = text.split_once('.');
        let read = parts.and_then(|(position, id)| {
            let position = position.parse().ok().filter(|position| *position > 0)?;
            Some(Self::new(position, Some(Uuid::try_parse(id).ok()?)))
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
        for cursor in [Cursor::START, Cursor::new(i64::MAX, Some(id))] {
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }
        for text in ["", "-1", "1", "begin", "0.", "1.x", "9223372036854775808.x"] {
            assert!(text.parse::<Cursor>().is_err(), "{text}");
        }
        for position in ["0", "-1"] {
            assert!(format!("{position}.{id}").parse::<Cursor>().is_err());
        }
    }
}
