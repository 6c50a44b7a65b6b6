//! The janitor thread: cleans the ledger, its payloads and the inbox, removes old leases and pauses, counts the waiting
//! messages, and has endpoints verified.

mod leases;
mod verifications;

use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use crossbeam_channel::select;

use self::leases::Leases;
use self::verifications::Verifications;
use super::depths::Counting;
use super::session::Session;
use super::shared::Shared;
use super::threads::Post;
use crate::config::LedgerPayload;
use crate::error::DatabaseError;
use crate::log;
use crate::store::brief::Tried;
use crate::store::relay::clean::{self, Blanking};
use crate::store::relay::connection::Plans;
use crate::store::relay::{failing, own, topics};
use crate::store::write::inbox::{self, Cleaning, Forgetting};

/// The longest interval between two cleanings of the ledger and the inbox.
const CLEAN_INTERVAL: Duration = Duration::from_secs(60);
/// The most rows that one statement removes or changes.
const CLEAN_BATCH: i32 = 1000;
/// A shutdown waits for a statement of the janitor, and `drain` with it.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// The most topics without a subscriber that are recorded at once.
const MOST_UNWANTED: usize = 10;
/// While endpoints fail, the interval between two looks whether that is to be told.
const TELL_INTERVAL: Duration = Duration::from_secs(10);

/// Cleans and counts until the relay stops.
pub(crate) fn run(shared: &Shared) {
    let (mut session, mut verifications) = thread::scope(|scope| {
        let mut janitor = Janitor::new(shared, scope);
        let ended = janitor.verifications.inbox.clone();
        loop {
            let wait = match janitor.work() {
                Ok(()) => janitor.until_next(),
                Err(_) => janitor.session.wait(),
            };
            select! {
                recv(shared.signals.stop) -> _ => return (janitor.session, janitor.verifications),
                recv(shared.signals.count.ear) -> _ => janitor.depths.hurry(),
                recv(ended) -> one => janitor.verifications.keep(one),
                default(wait) => {}
            }
        }
    });
    // If the database fails, a relay tries again.
    let _ = verifications.record(&mut session);
    // A job's last messages.
    let _ = record_unwanted(shared, &mut session);
}

/// Records topics whose messages have ended without a subscriber, and says so. `true`: there are any.
fn record_unwanted(shared: &Shared, session: &mut Session) -> Result<bool, DatabaseError> {
    let mut is_any = false;
    for topic in shared.unwanted.take(MOST_UNWANTED) {
        // Who locks the table holds up nobody: the topic is recorded at its next message.
        let recorded = session.run_without_waiting(|conn, name| {
            topics::record_without_subscriber(conn, name, &topic)
        })?;
        if matches!(recorded, Tried::Done(true)) {
            is_any = true;
            log::warn!(event = "topic_without_subscriber", topic = topic; "messages of {topic} have ended without a subscriber, and the ledger has no delivery of the topic: if the topic is right, declare it (OUTBOX_TOPICS)");
        }
    }
    Ok(is_any)
}

struct Janitor<'a, 'scope> {
    shared: &'a Shared,
    scope: &'scope Scope<'scope, 'a>,
    verifications: Verifications,
    session: Session,
    depths: Counting<'a>,
    /// The interval between two cleanings.
    interval: Duration,
    next_cleaning: Instant,
    next_telling: Instant,
    leases: Leases,
    /// Whether the last cleaning could not empty an old part of the ledger, because a transaction was reading it.
    is_ledger_in_use: bool,
    /// How far the payloads of the ledger are blanked, once that has begun.
    blanking: Option<Blanking>,
    /// The last state of the inbox.
    cleaning: Option<Cleaning>,
}

impl<'a, 'scope> Janitor<'a, 'scope> {
    fn new(shared: &'a Shared, scope: &'scope Scope<'scope, 'a>) -> Self {
        // A short retention needs more frequent cleaning.
        let inbox_retention = shared.settings.inbox_retention;
        let interval = CLEAN_INTERVAL
            .min(shared.settings.retention / 12)
            .min(inbox_retention.map_or(CLEAN_INTERVAL, |age| age / 2))
            .min(match shared.settings.ledger_payload {
                LedgerPayload::For(age) => age / 12,
                _ => CLEAN_INTERVAL,
            })
            .max(Duration::from_millis(200));
        Self {
            shared,
            scope,
            verifications: Verifications::new(),
            session: shared.session(Post::Janitor, STATEMENT_TIMEOUT, Plans::Any),
            depths: Counting::new(shared),
            interval,
            next_cleaning: Instant::now(),
            next_telling: Instant::now(),
            leases: Leases::new(),
            is_ledger_in_use: false,
            blanking: None,
            cleaning: None,
        }
    }

    /// Does all work that is due.
    fn work(&mut self) -> Result<(), DatabaseError> {
        self.look()?;
        if Instant::now() >= self.next_cleaning {
            self.clean_ledger()?;
            self.clean_payloads()?;
            self.clean_inbox()?;
            self.next_cleaning = Instant::now() + self.interval;
        }
        Ok(())
    }

    /// Does the work that must not wait for a long cleaning.
    fn look(&mut self) -> Result<(), DatabaseError> {
        self.verifications
            .look(self.shared, self.scope, &mut self.session)?;
        self.leases.look(self.shared, &mut self.session)?;
        self.tell_failing()?;
        if record_unwanted(self.shared, &mut self.session)? {
            self.depths.has_recorded();
        }
        self.depths.count(&mut self.session)
    }

    fn until_next(&self) -> Duration {
        let next = self.next_cleaning.min(self.depths.next());
        let next = next.min(self.leases.next());
        let next = next.min(self.verifications.next());
        let next = match self.shared.registered.is_any_failing() {
            true => next.min(self.next_telling),
            false => next,
        };
        next.saturating_duration_since(Instant::now())
    }

    /// Tells of destinations that have failed for long enough, and to which nothing is sent until a retry.
    fn tell_failing(&mut self) -> Result<(), DatabaseError> {
        let now = Instant::now();
        if now < self.next_telling || !self.shared.registered.is_any_failing() {
            return Ok(());
        }
        self.next_telling = now + TELL_INTERVAL;
        let own_events = self.session.own_events;
        // Who locks the table holds up neither leases nor the ledger: the janitor comes again.
        let told = self.session.run_without_waiting(|conn, name| {
            for (destination, turned) in failing::record_overdue(conn, name)? {
                if own_events {
                    own::tell_failing(conn, name, &destination, turned)?;
                }
            }
            Ok(())
        });
        told.map(drop)
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
        self.blanking = Some(blanking);
        if sum > 0 {
            log::info!(event = "payloads_cleaned", payloads = sum; "blanked {sum} old payloads of the ledger");
        }
        Ok(())
    }

    /// Cleans the inbox, if a retention is set. If the inbox cannot be cleaned, logs the reason once and tries again
    /// later: the table or the right may be added.
    fn clean_inbox(&mut self) -> Result<(), DatabaseError> {
        let Some(retention) = self.shared.settings.inbox_retention else {
            return Ok(());
        };
        let cleaning = self.session.run(|conn, _| inbox::cleaning(conn))?;
        let before = self.cleaning.replace(cleaning.clone());
        let why = match &cleaning {
            Cleaning::Possible(table) => return self.clean_inbox_in(table, retention),
            Cleaning::NoTable => {
                "there is no table outbox_inbox; `diesel-outbox migrate` creates it"
            }
            Cleaning::NoRight => "the relay's role needs SELECT and DELETE on outbox_inbox",
        };
        if before != Some(cleaning) {
            log::warn!(event = "inbox_not_cleaned"; "cannot clean the inbox (OUTBOX_INBOX_RETENTION): {why}; retrying");
        }
        Ok(())
    }

    fn clean_inbox_in(&mut self, table: &str, retention: Duration) -> Result<(), DatabaseError> {
        let mut old = Forgetting::new(table, retention);
        let mut removed = 0;
        while !self.shared.is_stopping() {
            let rows = self
                .session
                .run(|conn, _| old.step(conn, CLEAN_BATCH.into()))?;
            if rows == 0 {
                break;
            }
            removed += rows;
            self.look()?;
        }
        if removed > 0 {
            log::info!(event = "inbox_cleaned", rows = removed; "removed {removed} old rows of the inbox {table}");
        }
        Ok(())
    }
}
