//! Reports feeds that have events and that nobody reads, and those that are read again.

use std::time::{Duration, Instant};

use super::serving::ServedEndpoints;
use super::sql::{own, unread};
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::error::DatabaseError;

/// The longest interval between two looks at the same feed, and the shortest.
const INTERVAL: Duration = Duration::from_secs(60);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(500);

struct UnreadFeeds<'a> {
    served: &'a ServedEndpoints,
    /// How long nobody must have read.
    after: Duration,
    next: Instant,
    /// The last feed of the look before. Empty: the next look begins with the first feed.
    seen: String,
}

pub(super) fn chore<'a>(served: &'a ServedEndpoints, shared: &'a Shared) -> Box<dyn Chore + 'a> {
    Box::new(UnreadFeeds {
        served,
        after: shared.settings.feed_unread_after,
        next: Instant::now(),
        seen: String::new(),
    })
}

impl Chore for UnreadFeeds<'_> {
    fn next(&self) -> Option<Instant> {
        self.served.registry().has_feeds.then_some(self.next)
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now < self.next || !self.served.registry().has_feeds {
            return Ok(());
        }
        self.next = now + (self.after / 12).clamp(SHORTEST_INTERVAL, INTERVAL);
        let after = self.after;
        let seen = std::mem::take(&mut self.seen);
        let (turned, last) = session.run(|conn, name| unread::turned(conn, name, &seen, after))?;
        if let Some(last) = last {
            // There are more: the next look is due at once.
            (self.seen, self.next) = (last, now);
        }
        let own_events = session.witness.is_some();
        for feed in turned {
            // Who locks the row holds up neither leases nor the ledger: the janitor comes again.
            session.run_without_waiting(|conn, name| {
                if unread::record(conn, name, &feed)?
                    && own_events
                    && let Some(turn) = feed.turn()
                {
                    own::tell_unread(conn, name, &feed.name, turn)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}
