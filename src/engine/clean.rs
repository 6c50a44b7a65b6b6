//! The janitor thread: cleans the ledger and its payloads, removes old leases and pauses, and does the chores that the
//! relay is given ([`Chore`]).

pub(crate) mod chore;
mod sql;

use std::time::{Duration, Instant};

use crossbeam_channel::select;

use self::chore::{Chore, NewChore};
use self::sql::{self as clean, Blanking};
use super::host::session::Session;
use super::host::shared::Shared;
use super::host::sql::connection::Plans;
use super::host::threads::Post;
use super::lease::holders::LeasesScan;
use super::workers::Workers;
use crate::config::LedgerPayload;
use crate::error::DatabaseError;
use crate::log;

/// The longest interval between two cleanings of the ledger, and of the inbox.
pub(crate) const CLEAN_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest interval.
pub(crate) const SHORTEST_INTERVAL: Duration = Duration::from_millis(200);
/// The most rows that one statement removes or changes.
pub(crate) const CLEAN_BATCH: i32 = 1000;
/// A shutdown waits for a statement of the janitor, and `drain` with it.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Cleans, and does the chores, until the relay stops.
pub(super) fn run<'a>(shared: &'a Shared, workers: Option<&'a dyn Workers>, chores: &[NewChore]) {
    let mut janitor = Janitor::new(shared, workers, chores);
    loop {
        let wait = match janitor.work() {
            Ok(()) => janitor.until_next(),
            Err(_) => janitor.session.wait(),
        };
        select! {
            recv(shared.signals.stop) -> _ => break,
            recv(shared.signals.count.ear) -> _ => janitor.chores.iter_mut().for_each(|one| one.hurry()),
            recv(shared.signals.chores.ear) -> _ => {}
            default(wait) => {}
        }
    }
    for chore in &mut janitor.chores {
        // If the database fails, a relay tries again.
        let _ = chore.last(&mut janitor.session);
    }
}

struct Janitor<'a> {
    shared: &'a Shared,
    session: Session,
    /// The interval between two cleanings.
    interval: Duration,
    next_cleaning: Instant,
    leases: LeasesScan,
    chores: Vec<Box<dyn Chore + 'a>>,
    /// Whether the last cleaning could not empty an old part of the ledger, because a transaction was reading it.
    is_ledger_in_use: bool,
    /// How far the payloads of the ledger are blanked, once that has begun.
    blanking: Option<Blanking>,
}

impl<'a> Janitor<'a> {
    fn new(shared: &'a Shared, workers: Option<&'a dyn Workers>, chores: &[NewChore]) -> Self {
        // A short retention needs more frequent cleaning.
        let interval = CLEAN_INTERVAL
            .min(shared.settings.retention / 12)
            .min(match shared.settings.ledger_payload {
                LedgerPayload::For(age) => age / 12,
                _ => CLEAN_INTERVAL,
            })
            .max(SHORTEST_INTERVAL);
        Self {
            shared,
            session: shared.session(Post::Janitor, STATEMENT_TIMEOUT, Plans::Any),
            interval,
            next_cleaning: Instant::now(),
            leases: LeasesScan::new(),
            chores: (workers.into_iter())
                .flat_map(|workers| workers.chores(shared))
                .chain(chores.iter().map(|new| new(shared)))
                .collect(),
            is_ledger_in_use: false,
            blanking: None,
        }
    }

    /// Does all work that is due.
    fn work(&mut self) -> Result<(), DatabaseError> {
        self.leases.look(self.shared, &mut self.session)?;
        // Before the chores: one that always fails must not end the cleaning.
        if Instant::now() >= self.next_cleaning {
            self.clean_ledger()?;
            self.clean_payloads()?;
            self.next_cleaning = Instant::now() + self.interval;
        }
        self.look()
    }

    /// Does the work that must not wait for a long cleaning.
    fn look(&mut self) -> Result<(), DatabaseError> {
        self.leases.look(self.shared, &mut self.session)?;
        for chore in &mut self.chores {
            chore.work(&mut self.session)?;
        }
        Ok(())
    }

    fn until_next(&self) -> Duration {
        let next = self.next_cleaning.min(self.leases.next());
        let chores = self.chores.iter().filter_map(|chore| chore.next());
        let next = chores.fold(next, Instant::min);
        next.saturating_duration_since(Instant::now())
    }

    fn clean_ledger(&mut self) -> Result<(), DatabaseError> {
        if !self.shared.settings.cleaner {
            return Ok(());
        }
        let retention = self.shared.settings.retention;
        let turned = (self.session).run(|conn, name| clean::rotate(conn, name, retention))?;
        let parts = turned.emptied;
        if parts > 0 {
            log::info!(event = "cleaned", parts = parts; "emptied {parts} old parts of the ledger");
        }
        let was_in_use = std::mem::replace(&mut self.is_ledger_in_use, turned.is_in_use);
        if turned.is_in_use && !was_in_use {
            log::warn!(event = "ledger_in_use", retry_in:? = self.interval; "cannot empty old parts of the ledger while a transaction reads them: retrying in {:?}", self.interval);
        }
        Ok(())
    }

    /// Blanks the payloads of the ledger that are kept for a shorter time than their entries.
    fn clean_payloads(&mut self) -> Result<(), DatabaseError> {
        let settings = &self.shared.settings;
        let (LedgerPayload::For(age), true) = (settings.ledger_payload, settings.cleaner) else {
            return Ok(());
        };
        let mut blanking = match self.blanking.take() {
            Some(blanking) => blanking,
            None => self.session.run(Blanking::new)?,
        };
        let blanked = self.blank(&mut blanking, age);
        // After a failure, too: the next cleaning continues.
        self.blanking = Some(blanking);
        let sum = blanked?;
        if sum > 0 {
            log::info!(event = "payloads_cleaned", payloads = sum; "blanked {sum} old payloads of the ledger");
        }
        Ok(())
    }

    fn blank(&mut self, blanking: &mut Blanking, age: Duration) -> Result<i32, DatabaseError> {
        let mut sum = 0;
        while !self.shared.is_stopping() {
            let (blanked, are_all) =
                (self.session).run(|conn, name| blanking.step(conn, name, age, CLEAN_BATCH))?;
            sum += blanked;
            if are_all {
                break;
            }
            self.look()?;
        }
        Ok(sum)
    }
}
