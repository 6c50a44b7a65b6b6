//! The janitor thread: retention of the ledger and of the inbox, and leases and pauses that nobody needs
//! any more.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use diesel::PgConnection;
use diesel::result::QueryResult;

use super::session::Session;
use super::shared::Shared;
use crate::error::DatabaseError;
use crate::store::connection::Plans;
use crate::store::inbox::{self, Cleaning};
use crate::store::{clean, lease, pause};

/// How often the ledger and the inbox are cleaned, at most.
const CLEAN_INTERVAL: Duration = Duration::from_secs(60);
/// Rows removed by one statement.
const CLEAN_BATCH: i64 = 1000;
/// How often the leases are gone through, which reads the outbox.
const LEASE_INTERVAL: Duration = Duration::from_secs(3600);
/// How long a lease, or a pause, is remembered after it was over.
const LEASE_AGE: Duration = Duration::from_secs(3600);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Keeps house until the relay stops.
pub(crate) fn run(shared: &Shared) {
    let mut session = shared.session(&shared.progress.janitor, STATEMENT_TIMEOUT, Plans::Any);
    // A short retention is kept more exactly.
    let inbox_retention = shared.config.inbox_retention;
    let interval = CLEAN_INTERVAL
        .min(shared.config.retention / 2)
        .min(inbox_retention.map_or(CLEAN_INTERVAL, |age| age / 2))
        .max(Duration::from_millis(200));
    let mut leases_seen: Option<Instant> = None;
    let mut cleaning = Cleaning::Possible;
    loop {
        let result = keep_house(shared, &mut session, &mut leases_seen)
            .and_then(|()| clean_inbox(shared, &mut session, &mut cleaning));
        let wait = if result.is_ok() {
            interval
        } else {
            session.wait()
        };
        match shared.stop_signal().recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn keep_house(
    shared: &Shared,
    session: &mut Session,
    leases_seen: &mut Option<Instant>,
) -> Result<(), DatabaseError> {
    let name = &shared.config.table;
    if leases_seen.is_none_or(|at| at.elapsed() >= LEASE_INTERVAL) {
        let vanished = session.run(|conn| {
            lease::forget(conn, name, LEASE_AGE)?;
            pause::forget(conn, name, LEASE_AGE)?;
            lease::vanished(conn, name)
        })?;
        if !vanished.is_empty() {
            log::warn!(event = "lease_vanished", leases:? = vanished; "messages name leases that were removed: they are taken over");
        }
        *shared
            .vanished
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = vanished;
        *leases_seen = Some(Instant::now());
    }
    if !shared.config.cleaner {
        return Ok(());
    }
    let retention = shared.config.retention;
    let removed = remove_all(shared, session, |conn| {
        clean::remove_old_ledger_rows(conn, name, retention, CLEAN_BATCH)
    })?;
    if removed > 0 {
        log::info!(event = "cleaned", rows = removed; "old ledger rows were removed");
    }
    Ok(())
}

/// Cleans the inbox, where the relay was told to. That it cannot is said once, and looked at again: the
/// table may come, and the right.
fn clean_inbox(
    shared: &Shared,
    session: &mut Session,
    known: &mut Cleaning,
) -> Result<(), DatabaseError> {
    let Some(retention) = shared.config.inbox_retention else {
        return Ok(());
    };
    let cleaning = session.run(inbox::cleaning)?;
    let before = std::mem::replace(known, cleaning);
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
    let removed = remove_all(shared, session, |conn| {
        inbox::remove_old_rows(conn, retention, CLEAN_BATCH)
    })?;
    if removed > 0 {
        log::info!(event = "inbox_cleaned", rows = removed; "old rows of the inbox were removed");
    }
    Ok(())
}

/// Removes rows until none is left, or the relay stops. Returns how many.
fn remove_all(
    shared: &Shared,
    session: &mut Session,
    remove: impl Fn(&mut PgConnection) -> QueryResult<usize>,
) -> Result<usize, DatabaseError> {
    let mut removed = 0;
    while !shared.is_stopping() {
        let rows = session.run(&remove)?;
        removed += rows;
        if rows == 0 {
            break;
        }
    }
    Ok(removed)
}
