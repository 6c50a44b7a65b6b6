//! The janitor thread: retention of the ledger and of the inbox, leases and pauses that nobody needs any
//! more, and how much waits.

mod leases;

use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use diesel::PgConnection;
use diesel::result::QueryResult;

use self::leases::Leases;
use super::depths::Counting;
use super::session::Session;
use super::shared::Shared;
use crate::error::DatabaseError;
use crate::store::clean;
use crate::store::connection::Plans;
use crate::store::inbox::{self, Cleaning};

/// How often the ledger and the inbox are cleaned, at most.
const CLEAN_INTERVAL: Duration = Duration::from_secs(60);
/// Rows removed by one statement.
const CLEAN_BATCH: i64 = 1000;
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Keeps house until the relay stops.
pub(crate) fn run(shared: &Shared) {
    let mut janitor = Janitor::new(shared);
    loop {
        let wait = match janitor.work() {
            Ok(()) => janitor.until_next(),
            Err(_) => janitor.session.wait(),
        };
        match shared.stop_signal().recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

struct Janitor<'a> {
    shared: &'a Shared,
    session: Session,
    depths: Counting<'a>,
    /// How often is cleaned.
    interval: Duration,
    next_cleaning: Instant,
    leases: Leases,
    cleaning: Cleaning,
}

impl<'a> Janitor<'a> {
    fn new(shared: &'a Shared) -> Self {
        // A short retention is kept more exactly.
        let inbox_retention = shared.config.inbox_retention;
        let interval = CLEAN_INTERVAL
            .min(shared.config.retention / 2)
            .min(inbox_retention.map_or(CLEAN_INTERVAL, |age| age / 2))
            .max(Duration::from_millis(200));
        Self {
            shared,
            session: shared.session(&shared.progress.janitor, STATEMENT_TIMEOUT, Plans::Any),
            depths: Counting::new(shared),
            interval,
            next_cleaning: Instant::now(),
            leases: Leases::new(),
            cleaning: Cleaning::Possible,
        }
    }

    /// Whatever it is time for.
    fn work(&mut self) -> Result<(), DatabaseError> {
        if Instant::now() >= self.next_cleaning {
            self.clean_ledger()?;
            self.clean_inbox()?;
            self.next_cleaning = Instant::now() + self.interval;
        }
        self.leases.look(self.shared, &mut self.session)?;
        self.depths.count(&mut self.session)
    }

    fn until_next(&self) -> Duration {
        let next = self.next_cleaning.min(self.depths.next());
        let next = next.min(self.leases.next());
        next.saturating_duration_since(Instant::now())
    }

    fn clean_ledger(&mut self) -> Result<(), DatabaseError> {
        if !self.shared.config.cleaner {
            return Ok(());
        }
        let (name, retention) = (&self.shared.config.table, self.shared.config.retention);
        let removed = self
            .remove_all(|conn| clean::remove_old_ledger_rows(conn, name, retention, CLEAN_BATCH))?;
        if removed > 0 {
            log::info!(event = "cleaned", rows = removed; "old ledger rows were removed");
        }
        Ok(())
    }

    /// Cleans the inbox, where the relay was told to. That it cannot is said once, and looked at again: the
    /// table may come, and the right.
    fn clean_inbox(&mut self) -> Result<(), DatabaseError> {
        let Some(retention) = self.shared.config.inbox_retention else {
            return Ok(());
        };
        let cleaning = self.session.run(inbox::cleaning)?;
        let before = std::mem::replace(&mut self.cleaning, cleaning);
        let why = match cleaning {
            Cleaning::Possible => None,
            Cleaning::NoTable => {
                Some("there is no table outbox_inbox: `diesel-outbox migrate` makes it")
            }
            Cleaning::NoRight => Some("the relay's role needs SELECT and DELETE on outbox_inbox"),
        };
        if let Some(why) = why {
            if cleaning != before {
                log::warn!(event = "inbox_not_cleaned"; "OUTBOX_INBOX_RETENTION is set, and the inbox is not cleaned: {why}");
            }
            return Ok(());
        }
        let removed =
            self.remove_all(|conn| inbox::remove_old_rows(conn, retention, CLEAN_BATCH))?;
        if removed > 0 {
            log::info!(event = "inbox_cleaned", rows = removed; "old rows of the inbox were removed");
        }
        Ok(())
    }

    /// Removes rows until none is left, or the relay stops. Returns how many.
    fn remove_all(
        &mut self,
        remove: impl Fn(&mut PgConnection) -> QueryResult<usize>,
    ) -> Result<usize, DatabaseError> {
        let mut removed = 0;
        while !self.shared.is_stopping() {
            let rows = self.session.run(&remove)?;
            removed += rows;
            if rows == 0 {
                break;
            }
            // There may be a day's work.
            self.depths.count(&mut self.session)?;
        }
        Ok(removed)
    }
}
