//! The claimer's statements around claims: surveys, members, and the release of unknown messages.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Claimer;
use super::doubt::{AtWork, Doubt, RanBy};
use crate::clock;
use crate::engine::host::database::{Asks, Database, DatabaseResult};
use crate::engine::plan::{Report, Survey, Surveyed, Undo};
use crate::engine::send::pauses;
use crate::engine::workers;
use crate::log;
use crate::sql::brief::{Locks, Tried};

impl<D: Database> Claimer<'_, D> {
    /// Queries the streams, the ended leases and the pauses.
    pub(super) fn survey(&mut self, survey: Survey) -> DatabaseResult<()> {
        let shared = self.shared;
        let due = self.keeper.as_ref().and_then(|keeper| keeper.due());
        let read_to = shared.directory.read_to();
        let asks = Asks {
            // A relay that has not read the pauses yet waits for the lock of their table: it would send what is paused.
            locks: match self.knows_pauses {
                true => Locks::NotWaitedFor,
                false => Locks::WaitedFor,
            },
            marks: due == Some(None) && self.keeper.as_ref().is_some_and(|one| one.asks_marks()),
            read_to: read_to.as_deref(),
        };
        let moment = shared.moment();
        let mut found = (self.db).survey(self.planner.lease, &survey.streams, moment, asks)?;
        for lease in &found.shortened {
            log::info!(event = "session_gone", lease = lease; "the relay with lease {lease} has lost its connection: other relays take over its messages soon, unless it reconnects");
        }
        found.is_active |= !shared.settings.single_active;
        if found.is_active && !shared.is_one_shot {
            self.record_topics()?;
        }
        // First: with new members come pauses that were read later.
        if let Tried::Done(paused) = &found.paused {
            pauses::learn(shared, paused);
            self.knows_pauses = true;
        }
        self.look_at_members(due, &found)?;
        let lost = self.db.after().lost;
        let is_without_answer = std::mem::replace(&mut self.lost, lost) != lost;
        let is_other_server = self.planner.is_other_server(found.server);
        if is_other_server {
            log::info!(event = "server_changed"; "the database was restarted or failed over: checking the messages that it shows as claimed by this relay");
            shared.custody.meet_another_server();
        }
        if is_other_server || is_without_answer {
            (shared.custody).begin_doubt(self.planner.lease, RanBy::Only(Vec::new()));
        }
        let was_active = self.planner.is_active;
        // Read after the query: this process may have claimed under a lease right before it ended.
        let held = shared.custody.leases();
        if self.planner.surveyed(clock::now(), survey, found, &held) {
            shared.signals.count.ring();
        }
        if was_active != self.planner.is_active {
            self.tell_standing();
        }
        Ok(())
    }

    /// Records the topics that this relay serves, now that it does. From then on their messages wait for such a relay,
    /// so a relay that only stood by, or a job that found nothing to do, must not record them.
    pub(super) fn record_topics(&mut self) -> DatabaseResult<()> {
        if !self.is_recorded {
            let serves = &self.shared.settings.serves;
            self.db.record_topics(serves)?;
            self.is_recorded = true;
        }
        Ok(())
    }

    /// Reads the members, unless their marks say that they are the same, or tells the planner when this is due.
    fn look_at_members(
        &mut self,
        due: Option<Option<Instant>>,
        found: &Surveyed,
    ) -> DatabaseResult<()> {
        let Some(next) = due else {
            return Ok(());
        };
        self.planner.hear(Report::RowsOwed(next));
        if next.is_none() {
            let streams = found.streams.iter().flatten();
            let named = streams.map(|one| one.stream.topic.destination.as_str());
            let waiting = self.without_destination(named);
            let surveyed = workers::SurveyedMembers {
                marks: found.marks,
                server: found.server,
            };
            self.read_members(&waiting, Some(surveyed))?;
        }
        match &mut self.keeper {
            Some(keeper) => keeper.publish(&mut self.db, self.planner.lease),
            None => Ok(()),
        }
    }

    /// Reads the members, and which of the names `waiting` were members.
    pub(super) fn read_members(
        &mut self,
        waiting: &[String],
        surveyed: Option<workers::SurveyedMembers>,
    ) -> DatabaseResult<Tried<()>> {
        let shared = self.shared;
        let Some(keeper) = &mut self.keeper else {
            return Ok(Tried::Done(()));
        };
        let Tried::Done(is_new) = keeper.read(shared, &mut self.db, waiting, surveyed)? else {
            return Ok(Tried::Locked);
        };
        if is_new {
            let roster = shared.directory.roster();
            shared.custody.keep_members(|member| roster.has(member));
            self.planner.hear(Report::Roster(roster));
        }
        Ok(Tried::Done(()))
    }

    /// Those of these names, and of the destinations of known streams, that neither the settings nor the members have. Some were removed.
    pub(super) fn without_destination<'n>(
        &'n self,
        named: impl Iterator<Item = &'n str>,
    ) -> Vec<String> {
        let (roster, routes) = (self.shared.directory.roster(), &self.shared.routes);
        let known = self.planner.destinations();
        let is_without =
            |name: &&str| !name.is_empty() && roster.member(name).is_none() && !routes.has(name);
        let names: BTreeSet<&str> = named.chain(known).filter(is_without).collect();
        names.into_iter().map(str::to_owned).collect()
    }

    /// Logs that this relay has become active, or stands by.
    fn tell_standing(&self) {
        let (shared, is_active) = (self.shared, self.planner.is_active);
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
    pub(super) fn undo(&mut self, undo: Undo) -> DatabaseResult<()> {
        let custody = &self.shared.custody;
        match undo {
            Undo::Look(doubt) => {
                let at_work = match &doubt.ran_by {
                    RanBy::Only(processes) if self.db.end_processes(processes)? => AtWork::Yes,
                    RanBy::Any if doubt.may_run(clock::now()) => AtWork::Unknown,
                    RanBy::Only(_) | RanBy::Any => AtWork::No,
                };
                let newest = self.db.newest(self.shared.moment())?;
                let newest = newest.unwrap_or(i64::MAX);
                self.planner.looked(clock::now(), at_work, newest);
            }
            Undo::Part(range) => {
                let lease = self.planner.lease;
                let Some(known) = custody.begin_release(lease, range) else {
                    self.planner.undo_is_put_off(clock::now());
                    return Ok(());
                };
                let began = clock::now();
                let moment = self.shared.moment();
                let released = self.db.release_unknown(lease, range, &known, moment);
                custody.end_release();
                let took = clock::since(began);
                self.planner.undone(clock::now(), range, released?, took);
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
        self.shared.custody.end_doubt(&doubt);
    }
}
