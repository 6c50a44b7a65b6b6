//! Delivering again what was delivered.

use diesel::PgConnection;

use super::Note;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::status::UnknownWord;
use crate::store::operate::replay::{self, ReplayFilter, ReplayIds, Replayed};
use crate::store::pinned::pinned;

/// The name of a run of [`replay`]: it stands in the idempotency keys of the messages that the run makes,
/// as `<key>#replay-<run>`. A run that was broken off is continued under its name, and replays nothing
/// twice.
///
/// ```
/// use diesel_outbox::admin::ReplayRun;
///
/// let run: ReplayRun = "billing-lost-a-day".parse()?;
/// assert_eq!(run.to_string(), "billing-lost-a-day");
/// assert!("spaces are none".parse::<ReplayRun>().is_err());
/// # Ok::<(), diesel_outbox::UnknownWord>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayRun(String);

impl std::str::FromStr for ReplayRun {
    type Err = UnknownWord;

    /// 1 to 22 ASCII letters, digits and `-`.
    fn from_str(run: &str) -> Result<Self, UnknownWord> {
        let is_good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if run.is_empty() || run.len() > replay::LONGEST_RUN || !run.bytes().all(is_good) {
            return Err(UnknownWord::new(
                "name of a run (1 to 22 letters, digits and -)",
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

/// What [`replay`] would do with this filter, now.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, ReplayFilter};
///
/// fn show(conn: &mut PgConnection, outbox: &OutboxName) -> Result<(), DatabaseError> {
///     let found = admin::count_replayable(conn, outbox, &ReplayFilter::default())?;
///     println!("{} messages, and {} without payload", found.replayed, found.without_payload);
///     Ok(())
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn count_replayable(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
) -> Result<Replayed, DatabaseError> {
    Ok(pinned(conn, name, |conn, name| {
        let walk = replay::begin(conn, name, filter, None)?;
        replay::count(conn, name, filter, &walk)
    })?)
}

/// Enqueues delivered messages again, in the order in which they were delivered, a thousand in each
/// transaction. `progress` is called after each with the run's name and what it has done so far. Where the
/// last one is not wanted any more, it returns `false`, and the replay ends there.
///
/// - A replayed message goes to the destination that it named, and to no other. One that named none goes to the
///   [`destination`](ReplayFilter::destination) that is asked for, else where the routes of today lead.
/// - It has the same topic, payload, ordering key and tenant; no headers, which the ledger does not keep;
///   and no payload in the ledger (`OUTBOX_LEDGER_PAYLOAD`) means no replay.
/// - It has the same message id, so a receiver that knows what it has handled leaves it alone, or a new
///   one ([`ReplayIds`]). Its idempotency key is `<key>#replay-<run>`.
/// - The history keeps who replayed it and why.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, Note, ReplayFilter, ReplayIds};
/// use std::time::{Duration, SystemTime};
///
/// /// Billing has lost the work of an hour.
/// fn again(conn: &mut PgConnection, outbox: &OutboxName) -> Result<u64, DatabaseError> {
///     let filter = ReplayFilter {
///         since: SystemTime::now().checked_sub(Duration::from_secs(3600)),
///         destination: Some("billing".to_owned()),
///         ..ReplayFilter::default()
///     };
///     let note = Note::new("alice", "billing was restored from a backup");
///     let ids = ReplayIds::New;
///     let replayed = admin::replay(conn, outbox, &filter, ids, None, &note, |run, so_far| {
///         println!("{run}: {} messages", so_far.replayed);
///         true
///     })?;
///     Ok(replayed.replayed)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`]; what was replayed before it stays so, and is skipped when the run goes on.
pub fn replay(
    conn: &mut PgConnection,
    name: &OutboxName,
    filter: &ReplayFilter,
    ids: ReplayIds,
    run: Option<&ReplayRun>,
    note: &Note,
    mut progress: impl FnMut(&str, &Replayed) -> bool,
) -> Result<Replayed, DatabaseError> {
    let run = run.map(|run| run.0.as_str());
    let mut walk = pinned(conn, name, |conn, name| {
        replay::begin(conn, name, filter, run)
    })?;
    let mut sum = Replayed::default();
    while let Some(step) = pinned(conn, name, |conn, name| {
        replay::step(conn, name, filter, ids, &mut walk, note.as_str())
    })? {
        sum.replayed += step.replayed;
        sum.without_payload += step.without_payload;
        sum.skipped += step.skipped;
        if !progress(&walk.run, &sum) {
            break;
        }
    }
    Ok(sum)
}
