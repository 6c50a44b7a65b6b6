//! Removes old rows of the inbox, if a retention is set.

use std::time::{Duration, Instant};

use super::sql::{self as inbox, Cleaning, ForgettingHandled};
use crate::engine::clean::chore::Chore;
use crate::engine::clean::{CLEAN_BATCH, CLEAN_INTERVAL, SHORTEST_INTERVAL};
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::error::DatabaseError;
use crate::log;

struct InboxCleaning {
    retention: Option<Duration>,
    next: Instant,
    /// The last state of the inbox.
    state: Option<Cleaning>,
    begun: Option<BegunCleaning>,
}

/// A cleaning that has begun.
struct BegunCleaning {
    table: String,
    old: ForgettingHandled,
    removed: usize,
}

pub(crate) fn chore(shared: &Shared) -> Box<dyn Chore + '_> {
    Box::new(InboxCleaning {
        retention: shared.settings.inbox_retention,
        next: Instant::now(),
        state: None,
        begun: None,
    })
}

impl InboxCleaning {
    /// Begins a cleaning. If the inbox cannot be cleaned, logs the reason once and tries again later: the table or the right
    /// may be added.
    fn start(
        &mut self,
        session: &mut Session,
        retention: Duration,
    ) -> Result<Option<BegunCleaning>, DatabaseError> {
        let state = session.run(|conn, _| inbox::cleaning(conn))?;
        let before = self.state.replace(state.clone());
        let why = match &state {
            Cleaning::Possible(table) => {
                return Ok(Some(BegunCleaning {
                    table: table.clone(),
                    old: ForgettingHandled::new(table.clone(), retention),
                    removed: 0,
                }));
            }
            Cleaning::NoTable => {
                "there is no table outbox_inbox; `diesel-outbox migrate` creates it"
            }
            Cleaning::NoRight => "the relay's role needs SELECT and DELETE on outbox_inbox",
        };
        if before != Some(state) {
            log::warn!(event = "inbox_not_cleaned"; "cannot clean the inbox (OUTBOX_INBOX_RETENTION): {why}; retrying");
        }
        Ok(None)
    }
}

impl BegunCleaning {
    /// Removes a batch of rows. `true`: there may be more.
    fn step(&mut self, session: &mut Session) -> Result<bool, DatabaseError> {
        let rows = session.run(|conn, _| self.old.step(conn, CLEAN_BATCH.into()))?;
        self.removed += rows;
        Ok(rows > 0)
    }

    fn log(&self) {
        let Self { removed, table, .. } = self;
        if *removed > 0 {
            log::info!(event = "inbox_cleaned", rows = *removed; "removed {removed} old rows of the inbox {table}");
        }
    }
}

impl Chore for InboxCleaning {
    fn next(&self) -> Option<Instant> {
        self.retention.map(|_| self.next)
    }

    /// Removes one batch at a time, so that the other chores are done meanwhile.
    fn work(&mut self, session: &mut Session) -> Result<(), DatabaseError> {
        let now = Instant::now();
        let Some(retention) = self.retention.filter(|_| now >= self.next) else {
            return Ok(());
        };
        let begun = match self.begun.take() {
            Some(begun) => Some(begun),
            None => self.start(session, retention)?,
        };
        if let Some(mut begun) = begun {
            if begun.step(session)? {
                self.begun = Some(begun);
                return Ok(());
            }
            begun.log();
        }
        // A short retention needs more frequent cleaning.
        self.next = now + CLEAN_INTERVAL.min(retention / 2).max(SHORTEST_INTERVAL);
        Ok(())
    }

    fn last(&mut self, _: &mut Session) -> Result<(), DatabaseError> {
        if let Some(begun) = self.begun.take() {
            begun.log();
        }
        Ok(())
    }
}
