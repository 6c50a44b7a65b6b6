//! Statements around the claims: what the relay looks for, and what it gives back.

use super::Claimer;
use crate::clock;
use crate::relay::database::{Answer, Database};
use crate::relay::doubt::Doubt;
use crate::relay::pauses::{self, disable, is_removed};
use crate::relay::planner::{Part, Survey, Wait};
use crate::relay::registered::Bad;
use crate::relay::wanted::Want;
use crate::store::relay::lease::LeaseId;
use crate::store::relay::pause::Paused;

impl<D: Database> Claimer<'_, D> {
    /// Looks for topics, for leases that are over and for pauses.
    pub(super) fn survey(&mut self, survey: Survey) -> Answer<()> {
        let moment = self.shared.moment();
        let found = (self.db).survey(self.planner.lease(), &survey.streams, moment);
        if found.is_err() {
            self.planner.survey_failed();
        }
        let (mut found, paused) = found?;
        let shared = self.shared;
        for lease in &found.shortened {
            log::info!(event = "session_gone", lease = lease; "another relay has lost its connection: taking its messages over soon, unless it comes back (lease {lease})");
        }
        found.is_active |= !shared.config.single_active;
        self.look_at_registered(&paused)?;
        found.kept_back = pauses::learn(shared, &paused);
        found.held = shared.held_leases();
        if self.planner.is_other_server(found.server) {
            log::info!(event = "server_changed"; "the database was restarted or failed over: checking which messages it shows as held by this relay");
            shared.begin_doubt(Doubt::of_another_server(self.planner.lease()));
            self.planner.lost_answer();
        }
        let was_active = self.planner.is_active();
        if self.planner.surveyed(clock::now(), survey, found) {
            shared.signals.count.ring();
        }
        if was_active != self.planner.is_active() {
            self.tell_standing();
        }
        Ok(())
    }

    /// Learns what has changed of registered destinations. Those that cannot be used are disabled.
    fn look_at_registered(&mut self, paused: &[Paused]) -> Answer<()> {
        let registered = &self.shared.registered;
        if !registered.is_on() {
            return Ok(());
        }
        let removed = paused.iter().filter(|row| is_removed(row));
        let removed = removed.map(|row| row.name.clone()).collect();
        if registered.set_removed(removed) {
            self.planner.registered(registered.registry());
        }
        self.look_at_rows()
    }

    /// The same, without those that are gone.
    pub(super) fn look_at_rows(&mut self) -> Answer<()> {
        let (shared, registered) = (self.shared, &self.shared.registered);
        let changes = self.db.registered(&registered.registry())?;
        if let (Some(changes), Some(all)) = (changes, shared.bulkheads.last()) {
            let (bad, is_changed) = registered.change(changes, all, &shared.routes);
            if is_changed {
                self.planner.registered(registered.registry());
            }
            let (locked, bad): (Vec<_>, Vec<_>) = bad.into_iter().partition(|one| one.is_locked);
            if let Some(Bad { name, why, .. }) = locked.first() {
                let count = locked.len();
                log::error!(event = "secret_unreadable", destination = name, destinations = count, reason = why; "cannot decrypt the secrets of {count} registered destinations: holding their messages for a relay that can. For example {name}: {why}");
            }
            for one in bad {
                disable(&mut self.db, one.as_seen(), &one.why)?;
            }
        }
        Ok(())
    }

    /// Says that this relay has become, or ceases to be, the one that works.
    fn tell_standing(&self) {
        let (shared, is_active) = (self.shared, self.planner.is_active());
        shared.threads.set_standing_by(!is_active);
        if is_active {
            log::info!(event = "active", outbox:% = shared.config.table; "this relay is active now");
        } else {
            shared.signals.sleep.end();
            log::info!(event = "standby", outbox:% = shared.config.table; "another relay is active: standing by");
        }
    }

    /// Waits until everything known is settled, and finds out whether a claim without an answer is at work in
    /// the server still. Then its lease is ended; otherwise what it took is given back.
    pub(super) fn resolve(&mut self, doubt: Doubt) -> Answer<Option<Wait>> {
        let (shared, lease) = (self.shared, doubt.lease);
        shared.wanted.want(Want::Settled);
        // The doubt of that moment: a settler may have lost its answer since, and settled all the same.
        let (Some(aside), Some(doubt)) = shared.only_aside() else {
            return Ok(Some(self.planner.wait_for_settles(clock::now())));
        };
        shared.wanted.no_more(Want::Settled);
        let is_at_work = self.db.end_if_at_work(doubt)?;
        self.planner.begin_undo(lease, aside);
        if is_at_work {
            shared.end_doubt(lease);
            shared.lease.lost(lease);
            shared.signals.pulse.ring();
        }
        Ok(None)
    }

    /// Gives back a part of what a lease holds that nobody knows of.
    pub(super) fn undo(&mut self, part: &Part) -> Answer<()> {
        let began = clock::now();
        let count = self.db.release_unknown(part, self.shared.moment())?;
        self.planner.undone(part, count, clock::since(began));
        Ok(())
    }

    pub(super) fn end_doubt(&self, lease: LeaseId, given_back: Option<usize>) {
        if let Some(count) = given_back {
            // That nothing was found is no news to act on: each restart of the server ends so.
            let level = if count == 0 {
                log::Level::Info
            } else {
                log::Level::Warn
            };
            log::log!(level, event = "claim_undone", lease = lease.0, messages = count; "gave back {count} messages that the database showed as held by this relay, and that it did not know of");
        }
        self.shared.wanted.no_more(Want::Settled);
        self.shared.end_doubt(lease);
    }
}
