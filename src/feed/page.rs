//! A page of a feed: whether what was read continues a cursor. Decided from values, so that the simulation decides the
//! same.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::cursor::Cursor;
pub use super::event::FeedEvent;
use super::sql::read::{self, FeedRow};
use crate::name::OutboxName;
use crate::schema::instant::parse_time;

/// Where a page begins. Written as `begin`, `end`, a cursor, or a time (RFC 3339).
///
/// ```
/// use diesel_outbox::feed::After;
///
/// assert_eq!("begin".parse(), Ok(After::Begin));
/// let after: After = "2026-11-21T10:00:00Z".parse()?;
/// assert!(matches!(after, After::Time(_)));
/// assert!("yesterday".parse::<After>().is_err());
/// # Ok::<(), diesel_outbox::feed::BadAfter>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Before the first event that is kept.
    Begin,
    /// Behind the last event.
    End,
    /// Behind the event of this cursor.
    Cursor(Cursor),
    /// Before the first event that was stored at this time or later.
    Time(SystemTime),
}

/// A text that is no place in a feed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not begin, end, a cursor or a time (2026-11-21T10:00:00Z)")]
pub struct BadAfter(String);

impl fmt::Display for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin => f.pad("begin"),
            Self::End => f.pad("end"),
            Self::Cursor(cursor) => cursor.fmt(f),
            Self::Time(time) => humantime::format_rfc3339_nanos(*time).fmt(f),
        }
    }
}

impl FromStr for After {
    type Err = BadAfter;

    fn from_str(text: &str) -> Result<Self, BadAfter> {
        match text {
            "begin" => Ok(Self::Begin),
            "end" => Ok(Self::End),
            _ => match (text.parse(), parse_time(text)) {
                (Ok(cursor), _) => Ok(Self::Cursor(cursor)),
                (_, Some(time)) if time >= SystemTime::UNIX_EPOCH => Ok(Self::Time(time)),
                _ => Err(BadAfter(text.chars().take(100).collect())),
            },
        }
    }
}

/// Events that follow each other, and the cursor behind them.
#[derive(Debug, Clone)]
pub struct FeedPage {
    /// The events, in order.
    pub events: Vec<FeedEvent>,
    /// Of the last event here; without events, of the last one that there is.
    pub next: Cursor,
}

/// Why a cursor cannot be continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discontinued {
    /// Events behind the cursor, or since the time, were removed.
    Expired {
        /// The position of the first event that is kept.
        first_position: i64,
    },
    /// The feed has another event at its position, or none: the database was restored, or the feed begun again.
    Changed {
        /// The position of the last event.
        last_position: i64,
    },
}

/// What continues a cursor, among what was read.
pub(crate) enum Continued {
    /// The events from this index on.
    From(usize),
    /// The events were emptied while they were read: to be read again.
    Torn,
    Not(Discontinued),
}

/// `base`: the cursor of the last emptied event.
fn expired(base: Cursor) -> Discontinued {
    Discontinued::Expired {
        first_position: base.position() + 1,
    }
}

/// Whether `events`, read from the position of the cursor on, continue it. `base`: the cursor of the last emptied event,
/// which was read before; `last`: the position of the last event, read after.
pub(crate) fn continues(cursor: Cursor, base: Cursor, events: &[Cursor], last: i64) -> Continued {
    let follow = |from: i64, events: &[Cursor]| {
        let expected = from + 1..;
        events
            .iter()
            .zip(expected)
            .all(|(event, position)| event.position() == position)
    };
    let changed = Continued::Not(Discontinued::Changed {
        last_position: last,
    });
    if cursor.position() < base.position() {
        return Continued::Not(expired(base));
    }
    if cursor.position() == base.position() {
        let behind = events.partition_point(|event| event.position() <= base.position());
        return match follow(base.position(), &events[behind..]) {
            _ if !cursor.is_of(&base) => changed,
            true => Continued::From(behind),
            false => Continued::Torn,
        };
    }
    match events.first() {
        Some(first) if first.position() == cursor.position() => {
            match follow(first.position(), &events[1..]) {
                _ if !cursor.is_of(first) => changed,
                true => Continued::From(1),
                false => Continued::Torn,
            }
        }
        Some(_) => Continued::Torn,
        None if last >= cursor.position() => Continued::Torn,
        None => changed,
    }
}

/// What a page is made of. Each is read at a moment of its own.
pub(crate) trait PageSource {
    /// The feed of this name, if it can be read.
    fn feed(&mut self, name: &str) -> QueryResult<Option<FeedRow>>;
    /// The events of the feed from this position on, at most so many.
    fn events(&mut self, feed: &FeedRow, from: i64, most: i64) -> QueryResult<Vec<FeedEvent>>;
    /// The cursor of the last event, or of the last emptied one.
    fn last(&mut self, feed: &FeedRow) -> QueryResult<Cursor>;
    /// The cursor before the first event that was stored at this time or later.
    fn before(&mut self, feed: &FeedRow, time: SystemTime) -> QueryResult<Cursor>;
}

impl PageSource for (&mut PgConnection, &OutboxName) {
    fn feed(&mut self, name: &str) -> QueryResult<Option<FeedRow>> {
        read::feed(self.0, self.1, name)
    }

    fn events(&mut self, feed: &FeedRow, from: i64, most: i64) -> QueryResult<Vec<FeedEvent>> {
        read::events(self.0, self.1, feed, from, most)
    }

    fn last(&mut self, feed: &FeedRow) -> QueryResult<Cursor> {
        read::last(self.0, self.1, feed)
    }

    fn before(&mut self, feed: &FeedRow, time: SystemTime) -> QueryResult<Cursor> {
        read::before(self.0, self.1, feed, time)
    }
}

/// A page that is emptied each time while it is read is an error after this many tries.
const TRIES: usize = 5;

/// Reads at most `limit` events of a feed.
///
/// # Errors
/// If the database fails.
pub(crate) fn page(
    mut reads: impl PageSource,
    feed: &FeedRow,
    after: After,
    limit: i64,
) -> QueryResult<Result<FeedPage, Discontinued>> {
    let mut feed = feed.clone();
    for _ in 0..TRIES {
        let base = feed.base;
        let cursor = match after {
            After::Begin => base,
            After::Cursor(cursor) => cursor,
            After::End => {
                let next = reads.last(&feed)?;
                return Ok(Ok(FeedPage {
                    events: Vec::new(),
                    next,
                }));
            }
            // Events that were stored since were removed.
            After::Time(time) if base.is_since(time) => return Ok(Err(expired(base))),
            After::Time(time) => reads.before(&feed, time)?,
        };
        let mut events = reads.events(&feed, cursor.position(), limit + 1)?;
        let read: Vec<Cursor> = events.iter().map(FeedEvent::cursor).collect();
        let last = match read.last() {
            Some(last) => *last,
            None => reads.last(&feed)?,
        };
        match continues(cursor, base, &read, last.position()) {
            Continued::From(at) => {
                let mut events = events.split_off(at);
                events.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
                let next = events.last().map_or(cursor, FeedEvent::cursor);
                return Ok(Ok(FeedPage { events, next }));
            }
            Continued::Not(why @ Discontinued::Expired { .. }) => return Ok(Err(why)),
            found => {
                // What was emptied meanwhile is below the new base.
                let now = reads.feed(&feed.name)?;
                let Some(now) = now.filter(|now| now.registration == feed.registration) else {
                    // Whoever asks next is told.
                    return Ok(Ok(FeedPage {
                        events: Vec::new(),
                        next: cursor,
                    }));
                };
                if matches!(found, Continued::Not(_)) {
                    let last_position = reads.last(&now)?.position();
                    return Ok(Err(Discontinued::Changed { last_position }));
                }
                feed = now;
            }
        }
    }
    let why = "the events of the feed are emptied faster than they are read, or its positions have a hole";
    Err(diesel::result::Error::QueryBuilderError(why.into()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::feed::cursor::Mark;

    fn mark(number: i64) -> Mark {
        Mark {
            id: Uuid::from_u128(u128::try_from(number).expect("a number")),
            stored_at: Some(number),
        }
    }

    fn cursor(position: i64) -> Cursor {
        Cursor::new(position, (position > 0).then(|| mark(position)))
    }

    fn events(positions: std::ops::RangeInclusive<i64>) -> Vec<Cursor> {
        positions.map(cursor).collect()
    }

    fn is_from(at: usize, found: &Continued) -> bool {
        matches!(found, Continued::From(from) if *from == at)
    }

    #[test]
    fn a_place_is_written_and_read() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_795_000_000_123_456_789);
        for after in [
            After::Begin,
            After::End,
            After::Cursor(cursor(7)),
            After::Time(time),
        ] {
            assert_eq!(after.to_string().parse(), Ok(after));
        }
        assert_eq!(
            "2026-11-21T10:00:00.5+01:00".parse::<After>(),
            "2026-11-21T09:00:00.5Z".parse()
        );
        for text in ["", "soon", "7", "1969-12-31T23:59:59Z"] {
            assert!(text.parse::<After>().is_err(), "{text}");
        }
    }

    /// R73
    #[test]
    fn a_page_continues_its_cursor_or_says_why_not() {
        assert!(is_from(0, &continues(cursor(0), cursor(0), &[], 0)));
        assert!(is_from(
            0,
            &continues(cursor(0), cursor(0), &events(1..=3), 3)
        ));
        assert!(is_from(
            1,
            &continues(cursor(2), cursor(0), &events(2..=5), 5)
        ));
        // A reader that is caught up with a feed whose events were all emptied.
        assert!(is_from(0, &continues(cursor(7), cursor(7), &[], 7)));
        assert!(is_from(
            0,
            &continues(cursor(7), cursor(7), &events(8..=9), 9)
        ));

        let expired = continues(cursor(3), cursor(7), &events(8..=9), 9);
        let first_position = 8;
        assert!(
            matches!(expired, Continued::Not(Discontinued::Expired { first_position: found }) if found == first_position)
        );

        // A cursor of one event, without the time.
        let weak = Mark {
            stored_at: None,
            ..mark(2)
        };
        let weak = Cursor::new(2, Some(weak));
        for (base, at) in [(0, 1), (2, 0)] {
            let found = continues(weak, cursor(base), &events(3 - at..=5), 5);
            let at = usize::try_from(at).expect("an index");
            assert!(is_from(at, &found));
        }

        // Restored: another event at the position or at the base, the same event stored at another time, or the position is
        // ahead.
        let again = Mark {
            stored_at: Some(7),
            ..mark(2)
        };
        let is_changed = |found| {
            matches!(
                found,
                Continued::Not(Discontinued::Changed { last_position: 5 })
            )
        };
        for other in [mark(99), again] {
            let other = Cursor::new(2, Some(other));
            assert!(is_changed(continues(other, cursor(0), &events(2..=5), 5)));
            assert!(is_changed(continues(other, cursor(2), &events(3..=5), 5)));
        }
        assert!(is_changed(continues(cursor(9), cursor(0), &[], 5)));

        // Emptied while it was read.
        let is_torn = |found| matches!(found, Continued::Torn);
        assert!(is_torn(continues(cursor(2), cursor(0), &events(4..=5), 5)));
        assert!(is_torn(continues(cursor(0), cursor(0), &events(4..=5), 5)));
        let hole = [events(2..=3), events(5..=5)].concat();
        assert!(is_torn(continues(cursor(2), cursor(0), &hole, 5)));
    }
}
