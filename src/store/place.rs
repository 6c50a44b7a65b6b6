//! A place in a list that is read in pages.

use std::fmt;
use std::str::FromStr;

use diesel::pg::data_types::PgTimestamp;

use crate::status::UnknownWord;

/// PostgreSQL counts from 2000 on.
const BEGIN_MICROS: i64 = 946_684_800_000_000;

/// Where a page of a list ended: the next one goes on behind it, whatever has come or gone meanwhile.
/// Written as text it fits into a link or a flag.
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

/// The SQL of a time as microseconds since 1970; times without an end are the first and the last.
pub(super) fn micros(time: &str) -> String {
    format!(
        "CASE WHEN isfinite({time}) THEN (extract(epoch FROM {time}) * 1000000)::bigint
              WHEN {time} > now() THEN 9223372036854775807 ELSE -9223372036854775808 END"
    )
}

/// The SQL of a time as RFC 3339; `infinity` as it is.
pub(super) fn rfc3339(time: &str) -> String {
    format!(
        "coalesce(to_char({time} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), {time}::text)"
    )
}

/// Microseconds since 1970 as PostgreSQL has them; the first and the last stand for no end.
pub(super) fn from_micros(micros: i64) -> PgTimestamp {
    match micros {
        i64::MIN | i64::MAX => PgTimestamp(micros),
        micros => PgTimestamp(micros.saturating_sub(BEGIN_MICROS).max(EARLIEST)),
    }
}

/// The first time that PostgreSQL knows: 4714 before Christ.
const EARLIEST: i64 = -211_813_488_000_000_000;
