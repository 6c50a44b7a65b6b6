//! Removes the records of changed endpoints that every relay has read, and marks of removed endpoints that nobody needs.

use std::time::{Duration, Instant};

use super::sql::registrations::{self, ReadTo};
use super::sql::removed;
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::error::DatabaseError;

/// How long a record stays at least. Relays read the rows of endpoints every second.
const INTERVAL: Duration = Duration::from_secs(60);

/// How old a mark of a removed endpoint is before it is looked at, and how often that is; while there are more, sooner.
const REMOVED_AGE: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(5);

struct OldRecords {
    /// Which records were there at the last look. All relays have read these rows by the next one.
    seen: Option<ReadTo>,
    next: Instant,
    next_removed: Instant,
}

pub(super) fn chore() -> Box<dyn Chore> {
    Box::new(OldRecords {
        seen: None,
        next: Instant::now(),
        next_removed: Instant::now(),
    })
}

impl Chore for OldRecords {
    fn next(&self) -> Option<Instant> {
        Some(self.next.min(self.next_removed))
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now >= self.next_removed {
            let has_more =
                session.run(|conn, name| removed::forget_removed(conn, name, REMOVED_AGE))?;
            self.next_removed = now + if has_more { SOON } else { REMOVED_AGE };
        }
        if now >= self.next {
            let then = self.seen.as_ref();
            let seen = session.run(|conn, name| registrations::forget(conn, name, then))?;
            self.seen = Some(seen);
            self.next = now + INTERVAL;
        }
        Ok(())
    }
}
