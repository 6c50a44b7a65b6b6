//! A thread's connection to the simulated database. Statements take time, and may have no answer.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use diesel::result::{DatabaseErrorKind, Error};

use super::broken::Broken;
use super::process::Actor;
use super::promises::Promise;
use super::stage::{Stage, Trouble};
use super::tables::{Changes, Now, Tables};
use crate::endpoints::database::{Rows, SinceThen};
use crate::endpoints::roster::Registry;
use crate::endpoints::sql::failing::RowFailures;
use crate::endpoints::sql::registrations::ReadTo;
use crate::endpoints::sql::rows::AsSeen;
use crate::engine::claim::sql::claim::{Batch, Claimant, Claimed};
use crate::engine::claim::sql::page::Page;
use crate::engine::claim::sql::search::Ask;
use crate::engine::host::database::{AfterStatement, Asks, Database, DatabaseResult, Taken, Which};
use crate::engine::host::session::AfterRefusal;
use crate::engine::keys::sql::ordered::{Candidate, Key};
use crate::engine::lease::sql::backend::Backend;
use crate::engine::lease::sql::lease::{LeaseId, Registration, SeenLease};
use crate::engine::plan::{Streams, Surveyed};
use crate::engine::send::gate::GateNews;
use crate::engine::send::sql::pause::{BREAKER_OPEN, Paused};
use crate::engine::serves::routes::Serves;
use crate::engine::settle::LOCK_TIMEOUT;
use crate::engine::settle::settlement::{Kind, Settlement};
use crate::engine::settle::sql::settle::{Claim, Discarded, Released, Trace, Written};
use crate::engine::settle::sql::whereabouts::Whereabouts;
use crate::engine::settle::written::Settle;
use crate::error::DatabaseError;
use crate::hand::Hand;
use crate::sql::brief::{Locks, Tried};
use crate::sql::range::Range;
use crate::status::ReasonCode;

/// The same as in a session.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// How often a statement checks whether its rows are still locked.
const WHILE_LOCKED: Duration = Duration::from_millis(5);
const WHILE_HELD: Duration = Duration::from_micros(100);

pub(super) struct Link<'w> {
    stage: &'w Stage<'w>,
    process: usize,
    thread: Actor,
    /// The server and the server's process of the connection.
    connected: Option<(u64, i32)>,
    backend: Option<Backend>,
    failures: u32,
    has_timed_out: bool,
    lost: u64,
    /// How long the last statement has read dead index entries.
    took: Duration,
    /// The changes of a transaction that stays open.
    pub(super) open: Option<Changes>,
}

pub(super) fn no_answer() -> DatabaseError {
    failure(DatabaseErrorKind::ClosedConnection, "no answer")
}

fn failure(kind: DatabaseErrorKind, what: &str) -> DatabaseError {
    DatabaseError::Statement(Error::DatabaseError(kind, Box::new(what.to_owned())))
}

impl<'w> Link<'w> {
    pub(super) fn new(stage: &'w Stage<'w>, process: usize, thread: Actor) -> Self {
        Self {
            stage,
            process,
            thread,
            connected: None,
            backend: None,
            failures: 0,
            has_timed_out: false,
            lost: 0,
            took: Duration::ZERO,
            open: None,
        }
    }

    /// Commits the transaction that has stayed open.
    pub(super) fn commit(&mut self) {
        self.stage.commit(self.open.take().unwrap_or_default());
    }

    /// Runs a statement or a transaction. It reads and changes the tables at one moment; others see the changes at a
    /// later moment.
    fn ask<T>(
        &mut self,
        work: impl FnOnce(&mut Tables, Now, Option<Broken>, &mut Changes) -> T,
    ) -> DatabaseResult<T> {
        let stage = self.stage;
        let trouble = self.begin()?;
        let mut changes = Changes::default();
        let value = work(
            &mut stage.tables.borrow_mut(),
            stage.database_now(),
            stage.broken,
            &mut changes,
        );
        stage.tables.borrow_mut().lock(&changes);
        self.end(changes, trouble)?;
        Ok(value)
    }

    /// Sends a statement to the server.
    fn begin(&mut self) -> DatabaseResult<Trouble> {
        let stage = self.stage;
        stage.count_statement(self.process);
        self.has_timed_out = false;
        let result = self.reach();
        match &result {
            Ok(_) => {}
            Err(_) => self.failures = self.failures.saturating_add(1),
        }
        result
    }

    fn reach(&mut self) -> DatabaseResult<Trouble> {
        let stage = self.stage;
        if stage.is_cut_off(self.process, self.thread) {
            stage.pass(self.process, stage.dice(1, 20));
            self.disconnect();
            return Err(DatabaseError::Connect("cut off".to_owned()));
        }
        if self.connected.is_none() {
            stage.pass(self.process, stage.dice(1, 4));
            let Some(server) = stage.server(self.process, self.thread) else {
                return Err(DatabaseError::Connect("no server".to_owned()));
            };
            let backend = stage.next_backend(self.process);
            self.connected = Some((server, backend));
            self.backend = Some(Backend {
                pid: backend,
                started: 0,
            });
        }
        let trouble = stage.trouble(self.process);
        stage.pass(self.process, stage.way());
        if trouble == Trouble::LostBefore || !self.is_connected() {
            return Err(self.loses());
        }
        if let Trouble::TimesOut(limit) = trouble {
            stage.pass(self.process, limit);
            if !self.is_connected() {
                return Err(self.loses());
            }
            self.disconnect();
            self.has_timed_out = true;
            return Err(failure(DatabaseErrorKind::Unknown, "canceling statement"));
        }
        Ok(trouble)
    }

    /// Waits for rows that a person has locked, up to the time limit.
    fn wait_for_people(&mut self, rows: impl Iterator<Item = i64> + Clone) -> DatabaseResult<()> {
        let limit = match self.stage.broken {
            Some(Broken::WaitsForPeople) => Duration::MAX,
            _ => LOCK_TIMEOUT,
        };
        self.wait_while(WHILE_LOCKED, limit, |tables| {
            rows.clone().any(|row| tables.of_people.contains(&row))
        })
    }

    /// Waits until no other transaction holds these feeds, up to the time limit.
    fn wait_for_feeds(&mut self, feeds: &[&str]) -> DatabaseResult<()> {
        self.wait_while(WHILE_HELD, LOCK_TIMEOUT, |tables| {
            feeds.iter().any(|feed| tables.held_feeds.contains(feed))
        })
    }

    fn wait_while(
        &mut self,
        step: Duration,
        limit: Duration,
        is_locked: impl Fn(&Tables) -> bool,
    ) -> DatabaseResult<()> {
        let stage = self.stage;
        let until = stage.now().saturating_add(limit);
        // After a broken promise, no one unlocks rows.
        while is_locked(&stage.tables.borrow()) && stage.fall.borrow().is_none() {
            if stage.now() >= until {
                self.has_timed_out = true;
                return Err(failure(DatabaseErrorKind::Unknown, "canceling statement"));
            }
            stage.pass(self.process, step);
        }
        match self.is_connected() {
            true => Ok(()),
            false => Err(self.loses()),
        }
    }

    /// Changes the row of a pause, unless a person has locked it.
    fn of_pause<T>(
        &mut self,
        which: &str,
        work: impl FnOnce(&mut Tables, Now) -> T,
    ) -> DatabaseResult<Tried<T>> {
        self.ask(|tables, now, _, _| {
            let is_it =
                |(kind, name, _): &(String, String, Hand)| kind == "destination" && name == which;
            let is_locked = tables.has_locked_pauses && tables.pauses.keys().any(is_it);
            match is_locked {
                true => Tried::Locked,
                false => Tried::Done(work(tables, now)),
            }
        })
    }

    /// The connection ends without an answer.
    fn loses(&mut self) -> DatabaseError {
        self.disconnect();
        self.lost += 1;
        no_answer()
    }

    /// Disconnects. The server notices now or later.
    fn disconnect(&mut self) {
        if let Some((_, backend)) = self.connected.take() {
            self.stage.session_ends(backend);
        }
    }

    /// Whether a statement with the time limit `moment` is cancelled because it reads too many dead index entries.
    fn is_too_long(&mut self, moment: Duration, takes: Duration) -> bool {
        self.took = match self.stage.has_dead_entries() {
            true => takes.min(moment),
            false => Duration::ZERO,
        };
        self.stage.pass(self.process, self.took);
        self.took == moment
    }

    fn claim_keyed(
        &mut self,
        by: Claimant<'_>,
        candidates: &[Candidate],
    ) -> DatabaseResult<Option<Batch>> {
        let batch = self.ask(|tables, now, broken, changes| {
            tables.claim_keyed(by, candidates, now, broken, changes)
        })?;
        let (stage, process) = (self.stage, self.process);
        let taken = |batch: &Batch| -> Vec<i64> {
            sequences(&batch.claimed)
                .chain(sequences(&batch.behind))
                .collect()
        };
        stage.tell(|| {
            format!(
                "process {process}: keyed claim of {candidates:?}: {:?}",
                batch.as_ref().map(taken)
            )
        });
        Ok(batch)
    }

    fn is_connected(&self) -> bool {
        let server = self.stage.server(self.process, self.thread);
        self.connected
            .is_some_and(|(connected, _)| Some(connected) == server)
    }

    /// Ends the transaction, and returns its answer to this process.
    fn end(&mut self, changes: Changes, trouble: Trouble) -> DatabaseResult<()> {
        let result = self.try_end(changes, trouble);
        match &result {
            Ok(()) => self.failures = 0,
            Err(_) => {
                self.disconnect();
                self.failures = self.failures.saturating_add(1);
            }
        }
        result
    }

    fn try_end(&mut self, changes: Changes, trouble: Trouble) -> DatabaseResult<()> {
        let stage = self.stage;
        if let Trouble::Hangs(time) = trouble {
            // The client has given up, and the server does not know.
            let (_, backend) = self.connected.ok_or_else(no_answer)?;
            stage.commit_later(changes, backend, time);
            return Err(self.loses());
        }
        let server = self.connected.map(|(server, _)| server);
        let has_time = self.open.is_none() && stage.fall.borrow().is_none();
        if !changes.feeds.is_empty() && has_time && trouble != Trouble::Refused {
            // Others wait for the feeds: the server commits at its time, whatever the client does.
            let (_, backend) = self.connected.ok_or_else(no_answer)?;
            let way = stage.way();
            stage.commit_later(changes, backend, way);
            stage.pass(self.process, way + stage.way());
            let is_lost = !stage.is_server(server) || stage.was_ended(backend);
            return match is_lost || trouble == Trouble::LostAfter || !self.is_connected() {
                true => Err(self.loses()),
                false => Ok(()),
            };
        }
        stage.pass(self.process, stage.way());
        if changes.is_keyed_claim && stage.history.slow_claims {
            stage.pass(self.process, stage.dice(0, 150));
        }
        if !stage.is_server(server) {
            // The server's locks are gone with it.
            return Err(self.loses());
        }
        if trouble == Trouble::Refused {
            stage.tables.borrow_mut().unlock(&changes);
            return Err(failure(DatabaseErrorKind::NotNullViolation, "refused"));
        }
        if let Some(open) = &mut self.open {
            *open = changes;
            return Ok(());
        }
        stage.commit(changes);
        stage.pass(self.process, stage.way());
        if trouble == Trouble::LostAfter || !self.is_connected() {
            return Err(match stage.broken {
                Some(Broken::ForgetsDoubts) => DatabaseError::Connect("nothing".to_owned()),
                _ => self.loses(),
            });
        }
        Ok(())
    }
}

fn sequences(claimed: &[Claimed]) -> impl Iterator<Item = i64> {
    claimed.iter().map(|one| one.message.sequence.0)
}

/// The time to read a range in which nearly all entries are dead.
fn time_for(Range { after, upto }: Range) -> Duration {
    let width = upto.clamp(0, 5000) - after.clamp(0, 5000);
    Duration::from_micros(u64::try_from(width).unwrap_or(0) * 100)
}

impl Database for Link<'_> {
    fn after(&self) -> AfterStatement {
        let doubled = 2_u32.saturating_pow(self.failures.saturating_sub(1));
        AfterStatement {
            backend: self.backend,
            wait: FIRST_WAIT.saturating_mul(doubled).min(LONGEST_WAIT),
            is_missing: false,
            has_timed_out: self.has_timed_out,
            lost: match self.stage.broken {
                Some(
                    Broken::ForgetsDoubts
                    | Broken::OverlooksCrashes
                    | Broken::TakesEachServerForTheSame,
                ) => 0,
                _ => self.lost,
            },
        }
    }

    fn replace(&mut self) {
        self.disconnect();
        self.lost += 1;
    }

    fn survey(
        &mut self,
        lease: LeaseId,
        asked: &Streams,
        moment: Duration,
        asks: Asks<'_>,
    ) -> DatabaseResult<Surveyed> {
        let stage = self.stage;
        let is_too_long =
            !matches!(asked, Streams::Behind(_)) && self.is_too_long(moment, stage.dice(20, 300));
        let took = self.took;
        let server = stage.start_of_server();
        self.ask(|tables, now, broken, _| {
            let streams = match asked {
                Streams::All => Some(tables.streams(i64::MIN, &[])),
                Streams::Beside(known) => Some(tables.streams(i64::MIN, known)),
                Streams::Behind(sequence) => Some(tables.streams(*sequence, &[])),
            };
            let streams = streams.filter(|_| !is_too_long);
            let shortened = tables.shorten(lease.0, now.micros);
            let mut ended = tables.ended(now.micros);
            if broken == Some(Broken::TakesOverFromTheLiving) {
                ended = tables
                    .leases
                    .keys()
                    .copied()
                    .filter(|id| *id != lease.0)
                    .collect();
            }
            Surveyed {
                streams,
                took,
                shortened,
                ended,
                is_active: tables.is_at_work(lease.0, now.micros),
                time: now.micros,
                server: if broken == Some(Broken::TakesEachServerForTheSame) {
                    0
                } else {
                    server
                },
                paused: Tried::Done(tables.all_pauses(now.micros)),
                marks: (asks.marks).then(|| (tables.marks(now.micros), took)),
            }
        })
    }

    fn record_topics(&mut self, serves: &Serves) -> DatabaseResult<()> {
        self.ask(|tables, _, _, _| tables.record_topics(serves))
    }

    fn claim(&mut self, by: Claimant<'_>, which: Which<'_>) -> DatabaseResult<Taken> {
        let mut reached = HashMap::new();
        let batch = match which {
            Which::Plain(lanes, room) => {
                let batch = self
                    .ask(|tables, now, _, changes| tables.claim(by, lanes, room, now, changes))?;
                let (stage, process) = (self.stage, self.process);
                stage.tell(|| {
                    let claimed: Vec<i64> = sequences(&batch.claimed).collect();
                    format!("process {process}: claim of {lanes:?}: {claimed:?}")
                });
                Some(batch)
            }
            Which::Chosen(sequences) => {
                Some(self.ask(|tables, now, _, changes| {
                    tables.claim_chosen(by, sequences, now, changes)
                })?)
            }
            Which::First(candidates) => self.claim_keyed(by, candidates)?,
            Which::Due(lanes, goes_to, room) => {
                let goes_to: Vec<&str> = goes_to.iter().map(String::as_str).collect();
                let mut due;
                (due, reached) =
                    self.ask(|tables, now, _, _| tables.due(by, lanes, &goes_to, now.micros))?;
                due.truncate(room);
                match due.is_empty() {
                    true => Some(Batch::default()),
                    false => self.claim_keyed(by, &due)?,
                }
            }
        };
        Ok(Taken { batch, reached })
    }

    fn find(
        &mut self,
        expired: &[i64],
        ask: &Ask,
        moment: Duration,
    ) -> DatabaseResult<Option<Page>> {
        let (stage, process) = (self.stage, self.process);
        let takes = match ask {
            Ask::Range(range) => time_for(*range),
            _ if ask.may_be_long() => stage.dice(1, 300),
            _ => Duration::ZERO,
        };
        if ask.may_be_long() && self.is_too_long(moment, takes) {
            return Ok(None);
        }
        if matches!(ask, Ask::Walk(_)) && stage.history.is_crowded {
            stage.pass(process, stage.dice(50, 90));
        }
        let page = self.ask(|tables, now, broken, _| {
            let mut page = tables.find(expired, ask, now.micros);
            let is_late = matches!(ask, Ask::Late(_));
            if is_late && broken == Some(Broken::OverlooksWhatIsLate) {
                page.found.clear();
            }
            page
        })?;
        stage.tell(|| format!("process {process}: {ask:?}: {page:?}"));
        Ok(Some(page))
    }

    fn end_processes(&mut self, processes: &[Backend]) -> DatabaseResult<bool> {
        let stage = self.stage;
        self.ask(|_, _, _, _| ())?;
        if stage.broken == Some(Broken::DoubtsNoOneAtWork) {
            return Ok(false);
        }
        let mut is_at_work = false;
        for process in processes {
            is_at_work |= stage.is_at_work(process.pid);
            stage.ask_to_end(process.pid);
        }
        Ok(is_at_work)
    }

    fn newest(&mut self, _: Duration) -> DatabaseResult<Option<i64>> {
        self.ask(|tables, _, _, _| Some(tables.rows.keys().next_back().copied().unwrap_or(0)))
    }

    fn release_unknown(
        &mut self,
        lease: LeaseId,
        range: Range,
        known: &[Claim],
        moment: Duration,
    ) -> DatabaseResult<Option<Released>> {
        if self.is_too_long(moment, time_for(range)) {
            return Ok(None);
        }
        let released = self.ask(|tables, _, broken, changes| match broken {
            Some(Broken::UndoesNothing) => Released {
                messages: 0,
                are_some_locked: false,
            },
            _ => tables.release_unknown(lease, range, known, changes),
        })?;
        let (stage, process) = (self.stage, self.process);
        stage.tell(|| {
            let known: BTreeSet<i64> = known.iter().map(|claim| claim.sequence).collect();
            format!("process {process} undoes {range:?} but {known:?}: {released:?}")
        });
        Ok(Some(released))
    }

    fn settle(&mut self, _: AfterRefusal, settle: &Settle<'_>) -> DatabaseResult<(Written, Batch)> {
        let stage = self.stage;
        let mut trouble = self.begin()?;
        let each = settle.group.iter().flat_map(Settlement::each);
        let rows: Vec<i64> = each.map(Settlement::sequence).collect();
        let (began, process) = (stage.now(), self.process);
        let waited = self.wait_for_people(rows.iter().copied());
        stage.tell(|| {
            let time = stage.now() - began;
            format!(
                "process {process} settles {rows:?}, after {time:?}: {}",
                waited.is_ok()
            )
        });
        waited?;
        if stage.refuses(settle) {
            trouble = Trouble::Refused;
        }
        let mut changes = Changes::default();
        if settle.kind == Kind::Stored {
            let feeds = stage.feeds_of(settle);
            if stage.broken == Some(Broken::NumbersBeforeTheLock) {
                changes.ends = stage.tables.borrow().feed_ends();
            }
            if stage.broken != Some(Broken::NumbersWithoutLock) {
                self.wait_for_feeds(&feeds)?;
                // Meanwhile, a person may have locked a message.
                self.wait_for_people(rows.iter().copied())?;
                changes.feeds = feeds;
            }
        }
        let now = stage.database_now();
        let written =
            (stage.tables.borrow_mut()).settle(settle, now.micros, stage.broken, &mut changes);
        stage.tables.borrow_mut().lock(&changes);
        let is_refused = changes.is_refused;
        let of_changed = (written.changed.iter()).filter_map(|one| settle.keys.get(one));
        let keys: Vec<Key> = of_changed.cloned().collect();
        let mut next = Batch::default();
        if !keys.is_empty() {
            if stage.broken == Some(Broken::ContinuesLater) {
                stage.commit(std::mem::take(&mut changes));
            }
            let server = self.connected.map(|(server, _)| server);
            stage.pass(self.process, stage.way());
            if !stage.is_server(server) {
                self.failures = self.failures.saturating_add(1);
                return Err(self.loses());
            }
            let by = Claimant {
                read_to: None,
                ..settle.claimant
            };
            let now = stage.database_now();
            let mut more = changes.clone();
            next = (stage.tables.borrow()).claim_next(by, &keys, settle.closed, now, &mut more);
            stage.tables.borrow_mut().lock(&more);
            changes = more;
            if stage.broken == Some(Broken::ContinuesLater) {
                stage.pass(self.process, stage.dice(0, 150));
            }
        }
        self.end(changes, trouble)?;
        match is_refused {
            true => Err(failure(DatabaseErrorKind::CheckViolation, "moved")),
            false => Ok((written, next)),
        }
    }

    fn settled(&mut self, _: AfterRefusal, traces: &[Trace]) -> DatabaseResult<Vec<i64>> {
        self.ask(|tables, _, _, _| {
            let is_left = |trace: &&Trace| {
                let id = trace.message_id.as_u128();
                tables.ledger.iter().any(|entry| {
                    entry.row.id as u128 == id
                        && entry.row.sequence == trace.claim.sequence
                        && entry.at >= trace.claim.at
                })
            };
            let left = traces.iter().filter(is_left);
            left.map(|trace| trace.claim.sequence).collect()
        })
    }

    fn locked(&mut self, sequences: &[i64]) -> DatabaseResult<Vec<i64>> {
        self.ask(|tables, _, _, _| {
            let locked = sequences.iter().filter(|one| tables.locked.contains(one));
            locked.copied().collect()
        })
    }

    fn note_conflicts(&mut self, _: &[Discarded<'_>]) -> DatabaseResult<()> {
        Ok(())
    }

    fn whereabouts(&mut self, _: &[Trace]) -> DatabaseResult<Vec<Whereabouts>> {
        self.ask(|_, _, _, _| Vec::new())
    }

    fn tell_pause(&mut self, which: &str, news: GateNews) -> DatabaseResult<Tried<()>> {
        let left = |until: Instant| until.saturating_duration_since(crate::clock::now());
        let (by, left, openings) = match news {
            GateNews::Paused(code, until) => ((Hand::Receiver, code.as_str()), until.map(left), 0),
            GateNews::Opened(until, openings) => {
                ((Hand::Relay, BREAKER_OPEN), Some(left(until)), openings)
            }
            GateNews::Recovered => {
                return self.of_pause(which, |tables, _| tables.close_breaker(which));
            }
        };
        self.of_pause(which, |tables, now| {
            tables.pause("destination", which, by, left, openings, now.micros);
        })
    }

    fn take_probe(
        &mut self,
        which: &str,
        hold: Duration,
    ) -> DatabaseResult<Tried<(bool, Vec<Paused>)>> {
        self.of_pause(which, |tables, now| {
            let is_ours = tables.take_probe(which, hold, now.micros);
            (is_ours, tables.all_pauses(now.micros))
        })
    }

    fn release_probe(&mut self, which: &str) -> DatabaseResult<Tried<()>> {
        self.of_pause(which, |tables, now| tables.release_probe(which, now.micros))
    }

    fn register(&mut self, registration: &Registration) -> DatabaseResult<LeaseId> {
        self.ask(|tables, now, _, _| tables.register(registration, now.micros))
    }

    fn look(&mut self, lease: LeaseId) -> DatabaseResult<Option<SeenLease>> {
        let trouble = self.begin()?;
        let (stage, backend) = (self.stage, self.backend.map(|one| one.pid));
        let now = stage.database_now().micros;
        let seen = stage.tables.borrow_mut().look(lease.0, backend, now);
        self.end(Changes::default(), trouble)?;
        Ok(seen)
    }

    fn renew(
        &mut self,
        lease: LeaseId,
        by: Duration,
        takeover_after: Option<Duration>,
        _: Option<Backend>,
    ) -> DatabaseResult<bool> {
        self.ask(|tables, now, _, _| tables.renew(lease.0, by, takeover_after, now.micros))
    }

    fn end(&mut self, lease: LeaseId) -> DatabaseResult<()> {
        self.ask(|tables, _, _, _| {
            tables.leases.remove(&lease.0);
        })?;
        self.stage.notify();
        Ok(())
    }
}

impl Rows for Link<'_> {
    fn registered(
        &mut self,
        known: &Registry,
        _: (i64, Option<&ReadTo>),
        waiting: &[String],
        _: Locks,
    ) -> DatabaseResult<Tried<SinceThen>> {
        let is_strict = self.stage.is_strict_relay(self.process);
        self.ask(|tables, now, _, _| tables.registered_since(known, waiting, is_strict, now.micros))
            .map(|changes| Tried::Done((changes, None)))
    }

    fn disable(
        &mut self,
        seen: AsSeen<'_>,
        (_, why): (Hand, &str),
        _: Option<Duration>,
    ) -> DatabaseResult<Tried<bool>> {
        // Each row of this world is good for some relay.
        self.stage.fall(Promise::Others, || {
            format!("{} is disabled: {why}", seen.name)
        });
        Ok(Tried::Done(true))
    }

    fn tell_failing(
        &mut self,
        _: AsSeen<'_>,
        failed: Option<(Duration, ReasonCode)>,
    ) -> DatabaseResult<Tried<RowFailures>> {
        let failed_for = failed.map(|(time, _)| time);
        Ok(Tried::Done(RowFailures::default().after(failed_for)))
    }

    fn publish_refusals(&mut self, _: LeaseId, _: Option<String>) -> DatabaseResult<()> {
        Ok(())
    }

    fn tell_pause_of(&mut self, row: AsSeen<'_>, news: GateNews) -> DatabaseResult<Tried<()>> {
        self.tell_pause(row.name, news)
    }
}
