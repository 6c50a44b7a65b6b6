//! Empties old events of feeds.

use std::time::{Duration, Instant};

use super::sql::{keeping, store};
use crate::engine::clean::chore::Chore;
use crate::engine::clean::{CLEAN_INTERVAL, SHORTEST_INTERVAL};
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::engine::send::bulkhead::SendsTo;
use crate::error::DatabaseError;
use crate::log;

struct FeedCleaning {
    /// The feeds of the settings that have no row yet, as far as is known.
    unmade: Vec<String>,
    cleans: bool,
    retention: Duration,
    most_bytes: Option<u64>,
    next: Option<Instant>,
    is_in_use: bool,
}

pub(crate) fn chore(shared: &Shared) -> Box<dyn Chore + '_> {
    let settings = &shared.settings;
    let feeds = shared.bulkheads.iter();
    let feeds = feeds.filter(|one| matches!(one.serves, SendsTo::Feed));
    let unmade: Vec<String> = feeds.map(|one| one.name.to_string()).collect();
    let has_work = settings.cleaner || !unmade.is_empty();
    Box::new(FeedCleaning {
        unmade,
        cleans: settings.cleaner,
        retention: settings.feed_retention,
        most_bytes: settings.feed_max_bytes,
        next: has_work.then(Instant::now),
        is_in_use: false,
    })
}

impl Chore for FeedCleaning {
    fn next(&self) -> Option<Instant> {
        self.next
    }

    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if self.next.is_none_or(|at| now < at) {
            return Ok(());
        }
        // Readers may come before the first message.
        if !self.unmade.is_empty()
            && session.run(|conn, name| store::make_configured(conn, name, &self.unmade))?
        {
            self.unmade.clear();
        }
        if !self.cleans {
            self.next = (!self.unmade.is_empty()).then(|| now + CLEAN_INTERVAL);
            return Ok(());
        }
        let turned = session
            .run(|conn, name| keeping::rotate(conn, name, self.retention, self.most_bytes))?;
        // A short retention needs more frequent cleaning, and a limit of bytes is reached at any time.
        let interval = match self.most_bytes {
            Some(_) => SHORTEST_INTERVAL,
            None => CLEAN_INTERVAL
                .min(self.retention / 12)
                .max(SHORTEST_INTERVAL),
        };
        self.next = Some(now + interval);
        let Some((parts, is_in_use)) = turned else {
            return Ok(());
        };
        if parts > 0 {
            log::info!(event = "feeds_cleaned", parts = parts; "emptied {parts} old parts of the events of feeds");
        }
        let was_in_use = std::mem::replace(&mut self.is_in_use, is_in_use);
        if is_in_use && !was_in_use {
            log::warn!(event = "feeds_in_use", retry_in:? = interval; "cannot empty old events of feeds while a transaction reads them: retrying in {interval:?}");
        }
        Ok(())
    }
}
