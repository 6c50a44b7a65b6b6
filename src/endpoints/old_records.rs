//! Removes the records of changed endpoints that every relay has read.

use std::time::{Duration, Instant};

use super::sql::registrations::{self, ReadTo};
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::error::DatabaseError;

/// How long a record stays at least. Relays read the rows of endpoints every second.
const INTERVAL: Duration = Duration::from_secs(60);

struct OldRecords {
    /// Which records were there at the last look. All relays have read these rows by the next one.
    seen: Option<ReadTo>,
    next: Instant,
}

pub(super) fn chore() -> Box<dyn Chore> {
    Box::new(OldRecords {
        seen: None,
        next: Instant::now(),
    })
}

impl Chore for OldRecords {
    fn next(&self) -> Option<Instant> {
        Some(self.next)
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        let then = self.seen.as_ref();
        let seen = session.run(|conn, name| registrations::forget(conn, name, then))?;
        self.seen = Some(seen);
        self.next = now + INTERVAL;
        Ok(())
    }
}
