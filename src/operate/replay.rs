//! Replays: delivered messages are delivered again.

use diesel::PgConnection;

use super::bulk::Bulk;
use super::sql::audit::Act;
use super::sql::replay::{self, ReplayIds};
use super::sql::selection::Selection;
use crate::endpoints::sql::missed::Bulked;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::sql::pinned::pinned;
use crate::words::UnknownWord;

/// The name of a run of [`replay`]. The name is part of the idempotency key of each message that the run
/// enqueues: `<key>#replay-<run>`. An interrupted run continues under its name, and replays no message twice.
///
/// ```
/// use diesel_outbox::admin::ReplayRun;
///
/// let run: ReplayRun = "billing-lost-a-day".parse()?;
/// assert_eq!(run.to_string(), "billing-lost-a-day");
/// assert_ne!(ReplayRun::now(), ReplayRun::now());
/// assert!("no spaces allowed".parse::<ReplayRun>().is_err());
/// # Ok::<(), diesel_outbox::UnknownWord>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayRun(String);

impl ReplayRun {
    /// A new run, named after the present time.
    pub fn now() -> Self {
        Self(replay::new_run())
    }
}

impl std::str::FromStr for ReplayRun {
    type Err = UnknownWord;

    /// 1 to 22 ASCII letters, digits and `-`.
    fn from_str(run: &str) -> Result<Self, UnknownWord> {
        let is_good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if run.is_empty() || run.len() > replay::LONGEST_RUN || !run.bytes().all(is_good) {
            return Err(UnknownWord::new(
                "run name (1 to 22 letters, digits and -)",
                run,
            ));
        }
        Ok(Self(run.to_owned()))
    }
}

impl std::fmt::Display for ReplayRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// Enqueues delivered messages again, in the order in which they were delivered. A message that this run has enqueued
/// before, or that shares one replay with another message, is skipped.
///
/// - A replayed message goes only to the destination that it named. A message that named none goes to the
///   requested [`destination`](Selection::destination), otherwise where the current routes lead.
/// - Topic, payload, headers, ordering key, tenant and the time of the event stay the same: receivers get what they got
///   first. A message whose payload is not in the ledger (`OUTBOX_LEDGER_PAYLOAD`) is not replayed.
/// - The message id stays the same, so a receiver that remembers handled ids ignores the message; or the id is new
///   ([`ReplayIds`]). The idempotency key is `<key>#replay-<run>`; receivers and handlers see `<key>`, unless the id is
///   new.
/// - The history records who replayed the message and why.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, Bulk, Note, ReplayIds, ReplayRun, Selection};
/// use std::time::{Duration, SystemTime};
///
/// /// Billing has lost an hour of work.
/// fn again(conn: &mut PgConnection, outbox: &OutboxName) -> Result<u64, DatabaseError> {
///     let selection = Selection::default()
///         .since(SystemTime::now().checked_sub(Duration::from_secs(3600)))
///         .destination("billing".to_owned());
///     let note = Note::new("alice", "billing was restored from a backup");
///     let (ids, run) = (ReplayIds::New, ReplayRun::now());
///     println!("this is the run {run}");
///     Ok(admin::replay(conn, outbox, &selection, ids, &run, Bulk::new(&note))?.changed)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]; messages replayed before the error stay, and are skipped when the run continues.
pub fn replay(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    ids: ReplayIds,
    run: &ReplayRun,
    mut bulk: Bulk<'_>,
) -> Result<Bulked, DatabaseError> {
    let mut walk = pinned(conn, name, |conn, name| {
        replay::begin(conn, name, selection, &run.0)
    })?;
    if bulk.is_dry() {
        return Ok(pinned(conn, name, |conn, name| {
            replay::count(conn, name, selection, &walk)
        })?);
    }
    let note = bulk.note();
    // The end is what the totals say, whoever ended the steps.
    let _ = bulk.steps(conn, |conn, most| {
        pinned(conn, name, |conn, name| {
            let step = replay::step(conn, name, selection, ids, &mut walk, most, note.as_str())?;
            if let Some(Bulked { changed: 1.., .. }) = step {
                note.audit(conn, name, Act::Replay, &run.0)?;
            }
            Ok::<_, DatabaseError>(step)
        })
    })?;
    Ok(bulk.done())
}
