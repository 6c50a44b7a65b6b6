//! The claimer's statements around claims: surveys, endpoints, and the release of unknown messages.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Claimer;
use crate::clock;
use crate::hand::Hand;
use crate::log;
use crate::relay::database::{Answer, Asks, Database, Published};
use crate::relay::doubt::{AtWork, Doubt, RanBy};
use crate::relay::pace::{Last, Pace};
use crate::relay::pauses::{self, disable};
use crate::relay::planner::{Report, Survey, Surveyed, Undo};
use crate::relay::registry::Registry;
use crate::store::brief::{Locks, Tried};

/// Checks of the rows of endpoints for changes, some of which read all rows.
const ROWS: Pace = Pace::of_search(Duration::ZERO);
/// The longest time until the next check: changes must take effect within a second.
const LONGEST_ROWS_INTERVAL: Duration = Duration::from_millis(500);

impl<D: Database> Claimer<'_, D> {
    /// Queries the streams, the ended leases and the pauses.
    pub(super) fn survey(&mut self, survey: Survey) -> Answer<()> {
        let shared = self.shared;
        let rows_due = self.rows_due();
        let read_to = shared.registered.read_to();
        let asks = Asks {
            locks: heeded(self.knows_pauses),
            marks: rows_due == Some(None) && !shared.registered.is_whole_due(),
            read_to: read_to.as_deref(),
        };
        let moment = shared.moment();
        let mut found = (self.db).survey(self.planner.lease(), &survey.streams, moment, asks)?;
        for lease in &found.shortened {
            log::info!(event = "session_gone", lease = lease; "the relay with lease {lease} has lost its connection: other relays take over its messages soon, unless it reconnects");
        }
        found.is_active |= !shared.settings.single_active;
        if found.is_active && !shared.is_one_shot {
            self.record_topics()?;
        }
        // First: with new rows come pauses that were read later.
        if let Tried::Done(paused) = &found.paused {
            pauses::learn(shared, paused);
            self.knows_pauses = true;
        }
        self.look_at_endpoints(rows_due, &found)?;
        let lost = self.db.after().lost;
        let is_without_answer = std::mem::replace(&mut self.lost, lost) != lost;
        let is_other_server = self.planner.is_other_server(found.server);
        if is_other_server {
            log::info!(event = "server_changed"; "the database was restarted or failed over: checking the messages that it shows as claimed by this relay");
            shared.custody.meet_another_server();
        }
        if is_other_server || is_without_answer {
            (shared.custody).begin_doubt(self.planner.lease(), RanBy::NONE);
        }
        let was_active = self.planner.is_active();
        // Read after the query: this process may have claimed under a lease right before it ended.
        let held = shared.custody.leases();
        if self.planner.surveyed(clock::now(), survey, found, &held) {
            shared.signals.count.ring();
        }
        if was_active != self.planner.is_active() {
            self.tell_standing();
        }
        Ok(())
    }

    /// Records the topics that this relay serves, now that it does. From then on their messages wait for such a relay,
    /// so a relay that only stood by, or a job that found nothing to do, must not record them.
    pub(super) fn record_topics(&mut self) -> Answer<()> {
        if !self.is_recorded {
            let serves = &self.shared.settings.serves;
            (self.db).publish(self.planner.lease(), Published::Topics(serves))?;
            self.is_recorded = true;
        }
        Ok(())
    }

    /// When the rows of endpoints are checked for changes next: `Some(None)` now, `None` never.
    fn rows_due(&self) -> Option<Option<Instant>> {
        let next = |last| ROWS.next(last).min(last.ended + LONGEST_ROWS_INTERVAL);
        let next = self.rows_looked.map(next);
        (self.shared.registered.is_on()).then(|| next.filter(|at| clock::now() < *at))
    }

    /// Reads the rows of endpoints, unless their marks say that they are the same, or tells the planner when
    /// this is due.
    fn look_at_endpoints(&mut self, due: Option<Option<Instant>>, found: &Surveyed) -> Answer<()> {
        let Some(next) = due else {
            return Ok(());
        };
        self.planner.hear(Report::RowsOwed(next));
        if next.is_none() {
            let streams = found.streams.iter().flatten();
            let named = streams.map(|one| one.stream.topic.destination.as_str());
            let waiting = self.without_destination(named);
            let marks = found.marks.map(|(marks, _)| marks);
            let read_to = self.shared.registered.read_to();
            let is_same_server = read_to.is_none_or(|one| one.is_of(found.server));
            match found.marks {
                Some((marks, took))
                    if self.marks == Some(marks)
                        && is_same_server
                        && waiting.is_empty()
                        && self.unusable.is_empty() =>
                {
                    let ended = clock::now();
                    self.rows_looked = Some(Last { ended, took });
                }
                _ => {
                    if self.look_at_rows(&waiting)? == Tried::Done(()) {
                        self.marks = marks;
                    }
                }
            }
        }
        self.publish_refusals()
    }

    /// Those of these names, and of the destinations of known streams, that neither the settings nor the endpoints have. Some were removed.
    pub(super) fn without_destination<'n>(
        &'n self,
        named: impl Iterator<Item = &'n str>,
    ) -> Vec<String> {
        let (registry, routes) = (self.shared.registered.registry(), &self.shared.routes);
        let known = self.planner.destinations();
        let is_without =
            |name: &&str| !name.is_empty() && registry.named(name).is_none() && !routes.has(name);
        let names: BTreeSet<&str> = named.chain(known).filter(is_without).collect();
        names.into_iter().map(str::to_owned).collect()
    }

    /// Writes into the lease which endpoints this relay does not serve because of its settings, if this
    /// has changed. The relay decides nothing for others: the rows stay as they are.
    fn publish_refusals(&mut self) -> Answer<()> {
        let lease = self.planner.lease();
        let refuses = self.shared.registered.refuses();
        let is_same = match &self.refusals_published {
            Some((of, before)) if *of == lease => *before == refuses,
            _ => refuses.is_empty(),
        };
        if !is_same {
            self.db
                .publish(lease, Published::Refusals(refuses.to_json()))?;
            self.refusals_published = Some((lease, refuses));
        }
        Ok(())
    }

    /// Learns the changes of endpoints, and which of the names `waiting` were removed, and disables
    /// destinations that no relay can use. If another session has
    /// locked the table, the relay continues with the destinations that it knows.
    pub(super) fn look_at_rows(&mut self, waiting: &[String]) -> Answer<Tried<()>> {
        let (shared, registered) = (self.shared, &self.shared.registered);
        let began = clock::now();
        let before = registered.registry();
        let locks = heeded(self.rows_looked.is_some());
        let read_to = registered.read_to().filter(|_| !registered.is_whole_due());
        let since = (registered.failing_stamp(), read_to.as_deref());
        let changes = (self.db).registered(&before, since, waiting, locks)?;
        let (changes, next) = match changes {
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
        let applied = changes.map(|(changes, all)| registered.change(changes, all, &shared.routes));
        registered.has_read_to(next, read_to.is_none().then_some(began));
        if let Some(paused) = paused {
            pauses::learn(shared, &paused);
        }
        // Applying many changes can take longer than reading them.
        self.rows_looked = Some(Last::since(began));
        if let Some((bad, is_changed)) = applied {
            if is_changed {
                let registry = registered.registry();
                let is_there = |id| registry.get(id).is_some();
                shared.custody.keep_endpoints(is_there);
                self.planner.hear(Report::Registered(registry));
            }
            tell_refusals(&before, &registered.registry());
            self.unusable.extend(bad);
        }
        let mut locked = Vec::new();
        for one in std::mem::take(&mut self.unusable) {
            let why = (Hand::Relay, one.why.as_str());
            if disable(&mut self.db, one.as_seen(), why, None)? == Tried::Locked {
                locked.push(one);
            }
        }
        self.unusable = locked;
        Ok(Tried::Done(()))
    }

    /// Logs that this relay has become active, or stands by.
    fn tell_standing(&self) {
        let (shared, is_active) = (self.shared, self.planner.is_active());
        shared.threads.set_standing_by(!is_active);
        if is_active {
            log::info!(event = "active", outbox:% = shared.settings.table; "this relay is active now: claiming messages of {}", shared.settings.table);
        } else {
            shared.signals.sleep.rest();
            log::info!(event = "standby", outbox:% = shared.settings.table; "another relay of {} is active: standing by", shared.settings.table);
        }
    }

    /// Finds out whether a claim whose result was lost may still be running, releases a part of the messages that a lease
    /// holds and that this relay does not know, or ends the doubt.
    pub(super) fn undo(&mut self, undo: Undo) -> Answer<()> {
        let custody = &self.shared.custody;
        match undo {
            Undo::Look(doubt) => {
                let at_work = match doubt.ran_by.processes() {
                    Some(processes) if self.db.end_processes(&processes)? => AtWork::Yes,
                    None if doubt.may_run(clock::now()) => AtWork::Unknown,
                    Some(_) | None => AtWork::No,
                };
                let newest = self.db.newest(self.shared.moment())?;
                let newest = newest.unwrap_or(i64::MAX);
                self.planner.looked(clock::now(), at_work, newest);
            }
            Undo::Part(part) => {
                let Some(known) = custody.begin_release(part.lease, part.range) else {
                    self.planner.undo_is_put_off(clock::now());
                    return Ok(());
                };
                let began = clock::now();
                let released = self.db.release_unknown(part, &known, self.shared.moment());
                custody.end_release();
                let took = clock::since(began);
                self.planner.undone(clock::now(), part, released?, took);
            }
            Undo::End { doubt, released } => self.end_doubt(doubt, released),
        }
        Ok(())
    }

    fn end_doubt(&self, doubt: Doubt, released: Option<usize>) {
        let lease = doubt.lease;
        if let Some(count) = released {
            // To find nothing is normal: every restart of the server ends like this.
            let level = if count == 0 {
                log::Level::Info
            } else {
                log::Level::Warn
            };
            log::log!(level, event = "claim_undone", lease = lease.0, messages = count; "released {count} messages that the database showed as claimed by this relay (lease {}), but that the relay did not know", lease.0);
        }
        self.shared.custody.end_doubt(doubt);
    }
}

/// A relay that has not read a table yet waits for the table's lock: it would send what is paused, or only to a part of
/// the destinations.
fn heeded(has_been_read: bool) -> Locks {
    match has_been_read {
        true => Locks::NotWaitedFor,
        false => Locks::WaitedFor,
    }
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
