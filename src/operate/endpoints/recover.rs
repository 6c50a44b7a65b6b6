//! Sending many messages of an endpoint again, or for the first time.

use std::ops::ControlFlow;
use std::time::SystemTime;

use diesel::PgConnection;

use crate::endpoints::sql::missed::looking_for;
use crate::endpoints::sql::missed::{self, Bulked};
use crate::endpoints::sql::rows::{self as store, EndpointRow};
use crate::endpoints::{EndpointError, Endpoints};
use crate::engine::send::sql::pause;
use crate::operate::bulk::{Bulk, change_all};
use crate::operate::sql::audit::Act;
use crate::operate::sql::dead;
use crate::operate::sql::messages::LetterId;
use crate::operate::sql::selection::Selection;
use crate::operate::sql::waiting;
use crate::operate::waiting::Note;

/// Which messages [`Endpoints::recover`] sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Recover {
    /// The endpoint's dead letters.
    #[default]
    DeadLetters,
    /// The dead letters, then the messages that the endpoint has missed: it wants them, but was disabled or not there.
    /// They are read from the ledger (`OUTBOX_LEDGER_PAYLOAD`).
    AndMissed,
}

impl Endpoints<'_> {
    /// Sends an endpoint what it did not get since this time, for example after an outage of its receiver. Messages are
    /// enqueued oldest first, 1,000 in each transaction, and each has the place in its ordering key that it had before.
    /// Each is the same message: id, key, content, headers and times. `None`: the endpoint does not exist.
    ///
    /// - Dead letters that were dead-lettered since this time are requeued, as by [`admin::requeue`](crate::admin::requeue).
    /// - With [`Recover::AndMissed`], messages that were enqueued since this time and that match topics, tenant and filter
    ///   of the endpoint as it is now. Messages that named another endpoint, and those that were cancelled or have
    ///   expired, are not sent. Messages without a payload in the ledger are
    ///   [counted](Bulked::without_payload), whether or not the filter would match.
    ///
    /// Interrupted, the same call continues: the rows show what the endpoint has. The messages of a disabled endpoint
    /// wait. The history records who recovered the messages and why.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::admin::{Bulk, Note};
    /// use diesel_outbox::endpoints::Recover;
    /// use std::time::{Duration, SystemTime};
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let yesterday = SystemTime::now() - Duration::from_secs(24 * 3600);
    /// let note = Note::new("alice", "the customer's server was down for a day");
    /// let bulk = Bulk::new(&note).rate(100);
    /// let sent = outbox.endpoints().recover(&mut conn, "acme", yesterday, Recover::AndMissed, bulk)?;
    /// if let Some(sent) = sent {
    ///     println!("{} messages, and {} are no longer kept", sent.changed, sent.without_payload);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails. Messages enqueued before the error stay.
    pub fn recover(
        &self,
        conn: &mut PgConnection,
        name: &str,
        since: SystemTime,
        what: Recover,
        mut bulk: Bulk<'_>,
    ) -> Result<Option<Bulked>, EndpointError> {
        let Some(found) = self.registered(conn, name)? else {
            return Ok(None);
        };
        let goes = self.dead_letters(conn, &found, since, &mut bulk)?;
        if goes.is_continue() && what == Recover::AndMissed {
            self.missed(conn, &found, since, Act::RecoverEndpoint, &mut bulk)?;
        }
        Ok(Some(bulk.done()))
    }

    /// Sends a new endpoint the messages since this time: those that [`recover`](Self::recover) calls missed.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::admin::{Bulk, Note};
    /// use std::time::{Duration, SystemTime};
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let week = SystemTime::now() - Duration::from_secs(7 * 24 * 3600);
    /// let note = Note::new("alice", "the customer starts with the last week");
    /// outbox.endpoints().backfill(&mut conn, "acme", week, Bulk::new(&note))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`recover`](Self::recover).
    pub fn backfill(
        &self,
        conn: &mut PgConnection,
        name: &str,
        since: SystemTime,
        mut bulk: Bulk<'_>,
    ) -> Result<Option<Bulked>, EndpointError> {
        let Some(found) = self.registered(conn, name)? else {
            return Ok(None);
        };
        self.missed(conn, &found, since, Act::BackfillEndpoint, &mut bulk)?;
        Ok(Some(bulk.done()))
    }

    /// Sends messages now that wait for a retry at this endpoint, and closes its circuit breaker. Other pauses stay, and hold
    /// them; so does a disabled endpoint. `None`: the endpoint does not exist.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::admin::{Bulk, Note};
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let note = Note::new("alice", "the customer's server works again");
    /// let sent = outbox.endpoints().retry(&mut conn, "acme", Bulk::new(&note))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails. Messages that were changed before the error stay due.
    pub fn retry(
        &self,
        conn: &mut PgConnection,
        name: &str,
        bulk: Bulk<'_>,
    ) -> Result<Option<Bulked>, EndpointError> {
        if self.registered(conn, name)?.is_none() {
            return Ok(None);
        }
        let selection = Selection::default()
            .destination(name.to_owned())
            .tenant_id(self.tenant);
        let (note, is_dry) = (bulk.note(), bulk.is_dry());
        let done = change_all::<EndpointError>(
            conn,
            self.name,
            &selection,
            waiting::WaitingChange::Retry,
            bulk,
        )?;
        if !is_dry {
            self.pinned(conn, |conn, outbox| {
                if pause::close_breaker(conn, outbox, name)? {
                    note.audit(conn, outbox, Act::Resume, name)?;
                }
                Ok::<_, EndpointError>(())
            })?;
        }
        Ok(Some(done))
    }

    fn registered(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Option<EndpointRow>, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            store::endpoint_row(conn, outbox, self.which(name))
        })
    }

    fn dead_letters(
        &self,
        conn: &mut PgConnection,
        found: &EndpointRow,
        since: SystemTime,
        bulk: &mut Bulk<'_>,
    ) -> Result<ControlFlow<()>, EndpointError> {
        let name = &found.row.name;
        let selection = Selection::default()
            .destination(name.clone())
            .registration(found.id)
            .tenant_id(self.tenant)
            .since(since);
        let left = bulk.left();
        let letters: Option<Vec<LetterId>> = self.pinned(conn, |conn, outbox| {
            looking_for(conn, left, |conn| dead::matching(conn, outbox, &selection))
        })?;
        let Some(letters) = letters else {
            return Ok(ControlFlow::Break(()));
        };
        let (note, is_dry, mut left) = (bulk.note(), bulk.is_dry(), letters.as_slice());
        bulk.steps(conn, |conn, most| {
            let (step, rest) = left.split_at(most.min(left.len()));
            if step.is_empty() {
                return Ok(None);
            }
            left = rest;
            let requeued = match is_dry {
                true => step.len(),
                false => self.pinned(conn, |conn, outbox| {
                    let count = dead::requeue_to(conn, outbox, step, name, note.as_str())?;
                    if count > 0 {
                        let act = Act::RecoverEndpoint;
                        note.audit_made(conn, outbox, act, name, count)?;
                    }
                    Ok::<_, EndpointError>(count)
                })?,
            };
            Ok(Some(Bulked::of(step.len(), requeued)))
        })
    }

    fn missed(
        &self,
        conn: &mut PgConnection,
        found: &EndpointRow,
        since: SystemTime,
        act: Act,
        bulk: &mut Bulk<'_>,
    ) -> Result<(), EndpointError> {
        // A row of plain SQL may have a filter that no relay can use.
        found.row.check()?;
        let left = bulk.left();
        let wanted = self.pinned(conn, |conn, outbox| {
            missed::wanted(conn, outbox, found, since, left)
        })?;
        let Some(wanted) = wanted else {
            return Ok(());
        };
        let note = (!bulk.is_dry()).then(|| bulk.note());
        let (operator, mut after) = (note.map(Note::as_str), None);
        loop {
            let left = bulk.left();
            let page = self.pinned(conn, |conn, outbox| {
                missed::look(conn, outbox, &wanted, after, left)
            })?;
            let Some(page) = page else {
                return Ok(());
            };
            let mut left = page.as_slice();
            let goes = bulk.steps(conn, |conn, most| {
                let (step, rest) = left.split_at(most.min(left.len()));
                if step.is_empty() {
                    return Ok::<_, EndpointError>(None);
                }
                left = rest;
                self.pinned(conn, |conn, outbox| {
                    let done = missed::step(conn, outbox, &wanted, step, operator)?;
                    if let (
                        Some(note),
                        Some(Bulked {
                            changed: made @ 1..,
                            ..
                        }),
                    ) = (note, &done)
                    {
                        note.audit_made(
                            conn,
                            outbox,
                            act,
                            &found.row.name,
                            usize::try_from(*made).unwrap_or(usize::MAX),
                        )?;
                    }
                    Ok::<_, EndpointError>(done)
                })
            })?;
            match page.last() {
                Some(last)
                    if goes.is_continue() && left.is_empty() && page.len() >= missed::LOOK =>
                {
                    after = Some(last.place());
                }
                _ => return Ok(()),
            }
        }
    }
}
