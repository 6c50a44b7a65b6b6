//! Reads the rows of endpoints on the claimer's thread, and records there what their gates have found.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::database::Rows;
use super::failing::RowNews;
use super::roster::Registry;
use super::serving::{Bad, ServedEndpoint, ServedEndpoints};
use super::sql::rows::AsSeen;
use crate::clock;
use crate::engine::claim::sql::glance::Marks;
use crate::engine::directory::Directory;
use crate::engine::host::database::{Database, DatabaseResult};
use crate::engine::host::shared::Shared;
use crate::engine::lease::sql::lease::LeaseId;
use crate::engine::plan::pace::{Last, Pace};
use crate::engine::send::gate::ExchangeTime;
use crate::engine::send::pauses;
use crate::engine::serves::routes::Refuses;
use crate::engine::workers::{IsNew, Keeper, SurveyedMembers};
use crate::hand::Hand;
use crate::log;
use crate::sql::brief::{Locks, Tried};

/// Checks of the rows for changes, some of which read all rows.
const ROWS: Pace = Pace::of_search(Duration::ZERO);
/// The longest time until the next check: changes must take effect within a second.
const LONGEST_ROWS_INTERVAL: Duration = Duration::from_millis(500);
/// The shortest time between two tries to disable rows, if another session has locked one.
const LOCKED_ROW: Duration = Duration::from_secs(1);
/// Why an endpoint is disabled after a 410.
const GONE: &str = "GONE: the receiver responded with 410";

/// Keeps what a relay knows of endpoints up to date.
pub(crate) struct EndpointKeeper {
    served: Arc<ServedEndpoints>,
    /// The last check of the rows for changes.
    rows_looked: Option<Last>,
    /// The marks of the rows that were read before they were.
    marks: Option<Marks>,
    /// Whether another session has locked the rows.
    is_locked_out: bool,
    /// Rows that no relay can use, and that are to be disabled once they are not locked.
    unusable: VecDeque<Bad>,
    /// Until when none of them is tried.
    locked_until: Option<Instant>,
    /// The refused endpoints in the relay's lease.
    refusals_published: Option<(LeaseId, Arc<Refuses>)>,
}

impl EndpointKeeper {
    pub(crate) fn new(served: Arc<ServedEndpoints>) -> Self {
        Self {
            served,
            rows_looked: None,
            marks: None,
            is_locked_out: false,
            unusable: VecDeque::new(),
            locked_until: None,
            refusals_published: None,
        }
    }

    /// Learns the changes of endpoints, and which of the names `waiting` were removed. If another session has locked the
    /// table, the relay continues with the endpoints that it knows.
    // Why: docs/decisions.md#registry
    fn look_at_rows<D: Rows>(
        &mut self,
        shared: &Shared,
        db: &mut D,
        waiting: &[String],
    ) -> DatabaseResult<Tried<IsNew>> {
        let served = &self.served;
        let began = clock::now();
        let before = served.registry();
        // A relay that has not read the table yet waits for its lock: it would send only to a part of the endpoints.
        let locks = match self.rows_looked.is_some() {
            true => Locks::NotWaitedFor,
            false => Locks::WaitedFor,
        };
        let read_to = served.rows_read_to().filter(|_| !served.is_whole_due());
        let since = (served.failing_stamp(), read_to.as_deref());
        let (changes, next) = match db.registered(&before, since, waiting, locks)? {
            Tried::Done((changes, next)) => {
                self.is_locked_out = false;
                (changes.zip(shared.bulkheads.last()), next)
            }
            Tried::Locked => {
                if !std::mem::replace(&mut self.is_locked_out, true) {
                    log::warn!(event = "endpoints_locked"; "another session has locked the table of endpoints, of pauses or of topics: going on with what this relay has read before");
                }
                self.rows_looked = Some(Last::since(began));
                return Ok(Tried::Locked);
            }
        };
        let paused = changes.as_ref().and_then(|(one, _)| one.paused.clone());
        let applied = changes.map(|(changes, all)| served.change(changes, all));
        served.has_read_to(next, read_to.is_none().then_some(began));
        if let Some(paused) = paused {
            pauses::learn(shared, &paused);
        }
        let table = &shared.settings.table;
        let is_first = self.rows_looked.is_none();
        if is_first && !table.has_endpoints() && served.can_send() {
            log::info!(event = "without_endpoints", outbox:% = table; "the outbox {table} has no tables of endpoints: delivering to other destinations only");
        }
        // Applying many changes can take longer than reading them.
        self.rows_looked = Some(Last::since(began));
        let mut is_new = false;
        if let Some((bad, is_changed)) = applied {
            is_new = is_changed;
            tell_refusals(&before, &served.registry());
            self.unusable.extend(bad);
        }
        Ok(Tried::Done(is_new))
    }

    /// Disables the rows that no relay can use. One that another session has locked is waited for at most once a second, and
    /// comes last then: each try may take 20 ms of the claimer.
    fn disable_unusable(&mut self, db: &mut impl Rows) -> DatabaseResult<()> {
        while self.locked_until.is_none_or(|until| clock::now() >= until)
            && let Some(one) = self.unusable.front()
        {
            let why = (Hand::Relay, one.why.as_str());
            match disable(db, one.as_seen(), why, None)? {
                Tried::Done(()) => drop(self.unusable.pop_front()),
                Tried::Locked => {
                    self.unusable.rotate_left(1);
                    self.locked_until = Some(clock::now() + LOCKED_ROW);
                }
            }
        }
        Ok(())
    }
}

impl<D: Database + Rows> Keeper<D> for EndpointKeeper {
    fn due(&self) -> Option<Option<Instant>> {
        let next = |last| ROWS.next(last).min(last.ended + LONGEST_ROWS_INTERVAL);
        let next = self.rows_looked.map(next);
        Some(next.filter(|at| clock::now() < *at))
    }

    fn asks_marks(&self) -> bool {
        !self.served.is_whole_due()
    }

    fn read(
        &mut self,
        shared: &Shared,
        db: &mut D,
        waiting: &[String],
        surveyed: Option<SurveyedMembers>,
    ) -> DatabaseResult<Tried<IsNew>> {
        if let Some(SurveyedMembers {
            marks: Some((marks, took)),
            server,
        }) = surveyed
        {
            let read_to = self.served.rows_read_to();
            let is_same_server = read_to.is_none_or(|one| one.is_of(server));
            let is_same = self.marks == Some(marks) && is_same_server;
            if is_same && waiting.is_empty() {
                let ended = clock::now();
                self.rows_looked = Some(Last { ended, took });
                return Ok(Tried::Done(false));
            }
        }
        let read = self.look_at_rows(shared, db, waiting);
        if !matches!(read, Ok(Tried::Done(_))) {
            // The next survey reads the rows, whatever the marks are.
            self.marks = None;
        }
        let Tried::Done(is_new) = read? else {
            return Ok(Tried::Locked);
        };
        if let Some(SurveyedMembers { marks, .. }) = surveyed {
            self.marks = marks.map(|(marks, _)| marks);
        }
        Ok(Tried::Done(is_new))
    }

    /// Also disables the rows that no relay can use. Beside that, the relay decides nothing for others: the rows of endpoints
    /// that it refuses stay as they are.
    fn publish(&mut self, db: &mut D, lease: LeaseId) -> DatabaseResult<()> {
        self.disable_unusable(db)?;
        let refuses = self.served.refuses();
        let is_same = match &self.refusals_published {
            Some((of, before)) if *of == lease => *before == refuses,
            _ => refuses.is_empty(),
        };
        if !is_same {
            db.publish_refusals(lease, refuses.to_json())?;
            self.refusals_published = Some((lease, refuses));
        }
        Ok(())
    }

    fn exchange(&mut self, shared: &Shared, db: &mut D, when: ExchangeTime) -> DatabaseResult<()> {
        let watched = self.served.watched();
        for ServedEndpoint {
            endpoint, bulkhead, ..
        } in watched.iter().map(AsRef::as_ref)
        {
            let record = |db: &mut D, news| db.tell_pause_of(endpoint.as_seen(), news);
            pauses::exchange_gate(shared, db, bulkhead, when, record)?;
        }
        for member in &watched {
            follow_row(db, member)?;
        }
        Ok(())
    }
}

/// Records in the row of an endpoint that it fails or works, and disables one that has failed for longer
/// than the settings allow.
fn follow_row(db: &mut impl Rows, member: &ServedEndpoint) -> DatabaseResult<()> {
    let gate = &member.bulkhead.gate;
    if gate.waits_for_row(clock::now()) {
        return Ok(());
    }
    let Some(news) = member.follower.take_row_news() else {
        return Ok(());
    };
    let seen = member.endpoint.as_seen();
    let failed = match news {
        RowNews::Fails(since, code) => Some((clock::now().saturating_duration_since(since), code)),
        RowNews::Works | RowNews::HasFailedLong(_) | RowNews::Gone => None,
    };
    let told = match news {
        RowNews::Fails(..) | RowNews::Works => db.tell_failing(seen, failed).map(|told| {
            if let Tried::Done(row) = told {
                member.follower.learn_row(row, clock::now());
            }
            matches!(told, Tried::Done(_))
        }),
        RowNews::HasFailedLong(after) => {
            let why = format!("has failed for {}", humantime::format_duration(after));
            let why = (Hand::Relay, why.as_str());
            disable(db, seen, why, Some(after)).map(|told| matches!(told, Tried::Done(_)))
        }
        RowNews::Gone => {
            let why = (Hand::Receiver, GONE);
            disable(db, seen, why, None).map(|told| matches!(told, Tried::Done(_)))
        }
    };
    if !matches!(told, Ok(true)) {
        member.follower.keep_row_news(news);
    }
    if !told? {
        gate.wait_for_row(clock::now());
    }
    Ok(())
}

/// Disables an endpoint, unless it has changed since it was seen or, with `failed_for`, has not failed for
/// this time. Logs the change.
fn disable(
    db: &mut impl Rows,
    seen: AsSeen<'_>,
    (by, why): (Hand, &str),
    failed_for: Option<Duration>,
) -> DatabaseResult<Tried<()>> {
    let Tried::Done(is_disabled) = db.disable(seen, (by, why), failed_for)? else {
        return Ok(Tried::Locked);
    };
    if is_disabled {
        let name = seen.name;
        log::warn!(event = "endpoint_disabled", destination = name, reason = why; "disabled the endpoint {name}: {why}; messages already addressed to it wait until it is enabled, and it gets no new ones");
    }
    Ok(Tried::Done(()))
}

/// Logs which destinations this relay refuses since the last look.
fn tell_refusals(before: &Registry, now: &Registry) {
    let mut new = now.refuses.each();
    let is_new = |(name, why): &(&str, &str)| before.refuses.why(name) != Some(*why);
    if let Some((name, why)) = new.find(is_new) {
        let count = now.refuses.count();
        log::error!(event = "endpoint_refused", destination = name, destinations = count, reason = why; "this relay does not send to {count} endpoints, for example {name} ({why}): their messages wait for a relay that does");
    }
}
