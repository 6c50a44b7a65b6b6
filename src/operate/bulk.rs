//! Changes of many messages: in steps, at a limited rate, and interrupted at any time. No step is recorded: the rows show
//! what is left, so the same call continues.

use std::ops::ControlFlow;
use std::thread::sleep;
use std::time::{Duration, Instant};

use diesel::PgConnection;

use super::sql::selection::Selection;
use super::sql::waiting::{self, WaitingChange};
use super::waiting::Note;
use crate::endpoints::sql::missed::Bulked;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::shows::shows;
use crate::sql::brief::limited;
use crate::sql::pinned::pinned;

/// Messages that one transaction changes.
const STEP: usize = 1_000;
/// With a time limit: so many payloads are filtered between two looks at the clock.
const SHORT_STEP: usize = 100;

/// How a bulk change runs: who changes the messages and why, how fast, and what watches it.
///
/// Each transaction changes at most 1,000 messages. After an error, or if the watcher stops the change, completed
/// transactions stay, and the same call continues with the rest.
///
/// ```
/// use diesel_outbox::admin::{Bulk, Note};
///
/// let note = Note::new("alice", "the receiver is fixed");
/// let bulk = Bulk::new(&note).rate(500).progress(|so_far| {
///     println!("{} messages", so_far.changed);
///     true
/// });
/// # let _ = bulk;
/// ```
pub struct Bulk<'a> {
    note: &'a Note,
    rate: Option<u32>,
    is_dry: bool,
    /// When a search is given up; `None`: the statement's own limit applies.
    until: Option<Instant>,
    statement_timeout: Option<Duration>,
    progress: Box<dyn FnMut(&Bulked) -> bool + 'a>,
    done: Bulked,
}

shows!(Bulk<'_>: note, rate, is_dry);

impl<'a> Bulk<'a> {
    /// As fast as possible, unwatched.
    pub fn new(note: &'a Note) -> Self {
        Self {
            note,
            rate: None,
            is_dry: false,
            until: None,
            statement_timeout: None,
            progress: Box::new(|_| true),
            done: Bulked::default(),
        }
    }

    /// Sets the most messages in a second; 0 is taken as 1. Defaults to no limit.
    #[must_use]
    pub fn rate(mut self, messages: impl Into<Option<u32>>) -> Self {
        self.rate = messages.into().map(|rate| rate.max(1));
        self
    }

    /// Only counts the messages, and changes nothing.
    ///
    /// ```
    /// use diesel_outbox::admin::{Bulk, Note};
    ///
    /// let note = Note::new("ada", "how many?");
    /// let count = Bulk::new(&note).dry_run();
    /// # let _ = count;
    /// ```
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.is_dry = true;
        self
    }

    /// Sets how long each statement may take, whatever the connection's own limit is: for a connection of a pool. Defaults
    /// to the limit of the connection.
    ///
    /// ```
    /// use diesel_outbox::admin::{Bulk, Note};
    /// use std::time::Duration;
    ///
    /// let note = Note::new("ada", "the receiver is fixed");
    /// let bulk = Bulk::new(&note).statement_timeout(Duration::from_secs(10));
    /// # let _ = bulk;
    /// ```
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = Some(timeout);
        self
    }

    /// Calls `watch` after each transaction, with the totals so far. The change stops when `watch` returns `false`.
    #[must_use]
    pub fn progress(mut self, watch: impl FnMut(&Bulked) -> bool + 'a) -> Self {
        self.progress = Box::new(watch);
        self
    }

    pub(crate) fn searching_until(mut self, until: Instant) -> Self {
        self.until = Some(until);
        self
    }

    /// How long a search may still take. PostgreSQL counts whole milliseconds.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(Instant::now());
        Some(left + Duration::from_millis(1))
    }

    pub(crate) fn note(&self) -> &'a Note {
        self.note
    }

    pub(crate) fn is_dry(&self) -> bool {
        self.is_dry
    }

    pub(crate) fn done(&self) -> Bulked {
        self.done
    }

    /// Runs statements within the limit of the change.
    pub(crate) fn limited<T, E: From<diesel::result::Error>>(
        &self,
        conn: &mut PgConnection,
        run: impl FnOnce(&mut PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        match self.statement_timeout {
            Some(timeout) => limited(conn, timeout, run),
            None => run(conn),
        }
    }

    /// Repeats `step` until it finds nothing (`None`), or until the watcher stops the change. `step` gets the most
    /// messages that it may change.
    pub(crate) fn steps<E: From<diesel::result::Error>>(
        &mut self,
        conn: &mut PgConnection,
        mut step: impl FnMut(&mut PgConnection, usize) -> Result<Option<Bulked>, E>,
    ) -> Result<ControlFlow<()>, E> {
        let most = self.rate.map_or(STEP, |rate| STEP.min(rate as usize));
        let most = self.until.map_or(most, |_| most.min(SHORT_STEP));
        loop {
            let began = Instant::now();
            let Some(done) = self.limited(conn, |conn| step(conn, most))? else {
                return Ok(ControlFlow::Continue(()));
            };
            self.done.changed += done.changed;
            self.done.skipped += done.skipped;
            self.done.without_payload += done.without_payload;
            if !(self.progress)(&self.done) {
                return Ok(ControlFlow::Break(()));
            }
            if let (Some(rate), false) = (self.rate, self.is_dry) {
                let least = Duration::from_secs_f64(done.changed as f64 / f64::from(rate));
                sleep(least.saturating_sub(began.elapsed()));
            }
        }
    }
}

/// Makes all matching messages due at once that wait after a failed attempt, in the order of their sequences. Attempts
/// and expiry stay unchanged; the history records who retried the messages and why. Messages that are delayed and were
/// never attempted keep their time, and so do messages in flight.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, Bulk, Note, Selection};
///
/// /// The receiver works again: do not wait for the backoff.
/// fn retry(conn: &mut PgConnection, outbox: &OutboxName) -> Result<u64, DatabaseError> {
///     let selection = Selection::default().destination("billing".to_owned());
///     let note = Note::new("alice", "billing is up again");
///     Ok(admin::retry_all(conn, outbox, &selection, Bulk::new(&note))?.changed)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn retry_all(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    bulk: Bulk<'_>,
) -> Result<Bulked, DatabaseError> {
    change_all(conn, name, selection, WaitingChange::Retry, bulk)
}

/// Cancels all matching messages, as [`cancel`](crate::admin::cancel) does. Messages in flight stay.
///
/// ```
/// # use diesel::PgConnection;
/// # use diesel_outbox::{DatabaseError, OutboxName};
/// use diesel_outbox::admin::{self, Bulk, Note, Selection};
///
/// /// Counts the reminders that would be cancelled.
/// fn reminders(conn: &mut PgConnection, outbox: &OutboxName) -> Result<u64, DatabaseError> {
///     let selection = Selection::default().topic("reminder".to_owned());
///     let note = Note::new("alice", "no reminders on Sundays");
///     Ok(admin::cancel_all(conn, outbox, &selection, Bulk::new(&note).dry_run())?.changed)
/// }
/// ```
///
/// # Errors
/// A [`DatabaseError`].
pub fn cancel_all(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    bulk: Bulk<'_>,
) -> Result<Bulked, DatabaseError> {
    change_all(conn, name, selection, WaitingChange::Cancel, bulk)
}

/// Changes all matching messages, and records the act.
pub(crate) fn change_all<E: From<diesel::result::Error>>(
    conn: &mut PgConnection,
    name: &OutboxName,
    selection: &Selection,
    act: WaitingChange,
    mut bulk: Bulk<'_>,
) -> Result<Bulked, E> {
    let several = act.several();
    if bulk.is_dry() {
        let count = pinned(conn, name, |conn, name| {
            let selection = selection.with_routed(conn, name, several)?;
            waiting::count(conn, name, &selection, act, None)
        })?;
        let count = count.map_or(0, |count| usize::try_from(count).unwrap_or(0));
        return Ok(Bulked::of(count, count));
    }
    let selection = &bulk.limited(conn, |conn| {
        pinned(conn, name, |conn, name| {
            selection.with_routed(conn, name, several)
        })
    })?;
    let target = match selection.is_everything() {
        true => "all".to_owned(),
        false => selection.to_string(),
    };
    let (note, mut after) = (bulk.note(), i64::MIN);
    // The end is what the totals say, whoever ended the steps.
    let _ = bulk.steps(conn, |conn, most| {
        let step = pinned(conn, name, |conn, name| {
            let step = waiting::change(conn, name, selection, act, (after, most), note.as_str())?;
            if let Some((_, 1..)) = step {
                note.audit(conn, name, act.into(), &target)?;
            }
            Ok::<_, E>(step)
        })?;
        Ok::<_, E>(step.map(|(last, count)| {
            after = last;
            Bulked::of(count, count)
        }))
    })?;
    Ok(bulk.done())
}
