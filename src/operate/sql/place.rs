//! A place in a list that is read page by page.

use std::fmt;
use std::str::FromStr;

use diesel::pg::data_types::PgTimestamp;

use crate::schema::values::from_micros;
use crate::words::UnknownWord;

/// The end of a page of a list. The next page continues after it, even if rows were added or removed meanwhile.
/// Its text form fits into a link or a flag.
///
/// ```
/// use diesel_outbox::admin::Place;
///
/// let place: Place = "1763755200123456.42".parse()?;
/// assert_eq!(place.to_string(), "1763755200123456.42");
/// # Ok::<(), diesel_outbox::UnknownWord>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Microseconds since 1970.
    pub(crate) micros: i64,
    pub(crate) sequence: i64,
}

impl Place {
    /// The place before all rows of this time.
    pub(crate) fn before(micros: i64) -> Self {
        let sequence = i64::MIN;
        Self { micros, sequence }
    }

    /// The place in the types of a row's columns.
    pub(crate) fn of_row(self) -> (PgTimestamp, i64) {
        (from_micros(self.micros), self.sequence)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.micros, self.sequence)
    }
}

impl FromStr for Place {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let parts = text.split_once('.');
        let parsed = parts.and_then(|(micros, sequence)| {
            Some(Self {
                micros: micros.parse().ok()?,
                sequence: sequence.parse().ok()?,
            })
        });
        parsed.ok_or_else(|| UnknownWord::new("place", text))
    }
}
