//! Statements around the claims: what the relay looks for, and what it gives back.

use std::time::Instant;

use super::Claimer;
use crate::error::DatabaseError;
use crate::relay::doubt::Doubt;
use crate::relay::pauses;
use crate::relay::planner::{Part, Streams, Survey, Surveyed};
use crate::relay::wanted::Want;
use crate::store::brief::briefly;
use crate::store::relay::lease::{self, LeaseId};
use crate::store::relay::streams::{streams, streams_beside};
use crate::store::relay::{connection, pause, settle};

impl Claimer<'_> {
    /// Looks for topics, for leases that are over and for pauses.
    pub(super) fn survey(&mut self, survey: Survey) -> Result<(), DatabaseError> {
        let (name, lease) = (&self.shared.config.table, self.planner.lease());
        let moment = self.shared.moment();
        let found = self.session.run(|conn| {
            let began = Instant::now();
            let streams = match &survey.streams {
                Streams::All => briefly(conn, moment, |conn| streams(conn, name))?,
                Streams::Beside(known) => {
                    briefly(conn, moment, |conn| streams_beside(conn, name, known))?
                }
                Streams::None => None,
            };
            let took = began.elapsed();
            let ended = lease::ended(conn, name)?;
            let standing = lease::standing(conn, name, lease)?;
            let found = Surveyed {
                streams,
                took,
                ended,
                is_active: standing.is_active,
                time: standing.now,
                ..Surveyed::default()
            };
            Ok((found, pause::all(conn, name)?))
        });
        if found.is_err() {
            self.planner.survey_failed();
        }
        let (mut found, paused) = found?;
        let shared = self.shared;
        found.is_active |= !shared.config.single_active;
        found.kept_back = pauses::learn(shared, &paused);
        found.held = shared.held_leases();
        let was_active = self.planner.is_active();
        if self.planner.surveyed(Instant::now(), survey, found) {
            shared.count_now();
        }
        if was_active != self.planner.is_active() {
            self.tell_standing();
        }
        Ok(())
    }

    /// Says that this relay has become, or ceases to be, the one that works.
    fn tell_standing(&self) {
        let (shared, is_active) = (self.shared, self.planner.is_active());
        shared.progress.set_standing_by(!is_active);
        if is_active {
            log::info!(event = "active", outbox:% = shared.config.table; "this relay does the work now");
        } else {
            shared.stay_awake();
            log::info!(event = "standby", outbox:% = shared.config.table; "another relay does the work: standing by");
        }
    }

    /// Waits until everything known is settled, and finds out whether a claim without an answer is at work in
    /// the server still. Then its lease is ended; otherwise what it took is given back.
    pub(super) fn resolve(&mut self, doubt: Doubt) -> Result<(), DatabaseError> {
        let (shared, lease) = (self.shared, doubt.lease);
        shared.wanted.want(Want::Settled);
        // The doubt of that moment: a settler may have lost its answer since, and settled all the same.
        let (Some(aside), Some(doubt)) = shared.only_aside() else {
            self.wait_until(self.planner.next_poll(Instant::now()));
            return Ok(());
        };
        shared.wanted.no_more(Want::Settled);
        let name = &shared.config.table;
        let is_at_work = self.session.run(|conn| {
            let is_at_work = match doubt.backend {
                Some(backend) => connection::is_at_work(conn, backend)?,
                None => true,
            };
            if is_at_work {
                lease::expire(conn, name, lease)?;
            }
            Ok(is_at_work)
        })?;
        self.planner.begin_undo(lease, aside);
        if is_at_work {
            shared.end_doubt(lease);
            shared.lease.lost(lease);
            shared.beat_now();
        }
        Ok(())
    }

    /// Gives back a part of what a lease holds that nobody knows of.
    pub(super) fn undo(&mut self, part: &Part) -> Result<(), DatabaseError> {
        let (name, moment) = (&self.shared.config.table, self.shared.moment());
        let began = Instant::now();
        let count = self.session.run(|conn| {
            briefly(conn, moment, |conn| {
                settle::release_unknown(conn, name, part.lease, &part.known, part.range)
            })
        })?;
        self.planner.undone(part, count, began.elapsed());
        Ok(())
    }

    pub(super) fn end_doubt(&self, lease: LeaseId, given_back: Option<usize>) {
        if let Some(count) = given_back {
            log::warn!(event = "claim_undone", lease = lease.0, messages = count; "a claim had no answer: what it took was given back");
        }
        self.shared.wanted.no_more(Want::Settled);
        self.shared.end_doubt(lease);
    }
}
