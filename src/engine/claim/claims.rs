//! The claimer's claims.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Claimer;
use super::hand_over::By;
use super::sql::claim::{Batch, Claimant, Claimed, Lane, Position, Runs, Stream};
use super::sql::search::Ask;
use crate::clock;
use crate::engine::directory::Reading;
use crate::engine::host::database::{Database, DatabaseResult, Taken, Which};
use crate::engine::plan::pace::Last;
use crate::engine::plan::{
    Brought, Claims, Finished, FoundMessages, OfKeys, Picked, SearchOutcome, View,
};
use crate::engine::send::bulkhead::claim_bytes;
use crate::error::DatabaseError;
use crate::sql::brief::{Tried, has_timed_out};

impl<D: Database> Claimer<'_, D> {
    /// Runs two claims with separate results. The messages of the first claim are handed over even if the second claim
    /// fails.
    pub(super) fn claim(
        &mut self,
        plain: &[Lane],
        keyed: &[Lane],
        room: usize,
    ) -> DatabaseResult<()> {
        let mut left = room;
        if !plain.is_empty() {
            left -= self
                .claim_lanes(plain, left, Which::Plain(plain, left))?
                .min(left);
        }
        if !keyed.is_empty() && left > 0 {
            let goes_to = |lane: &Lane| self.planner.directory.goes_to(&lane.stream.topic);
            let goes_to: Vec<String> = keyed.iter().map(goes_to).collect();
            self.claim_lanes(keyed, left, Which::Due(keyed, &goes_to, left))?;
        }
        Ok(())
    }

    /// Returns the number of claimed messages.
    fn claim_lanes(
        &mut self,
        asked: &[Lane],
        room: usize,
        which: Which<'_>,
    ) -> DatabaseResult<usize> {
        let began = clock::now();
        let taken = self.claiming(which);
        let taken = self.unless_too_slow(taken, began)?;
        let took = clock::since(began);
        let Some((batch, of_keys, reached)) = taken else {
            self.planner.claim_was_too_slow(clock::now(), asked, took);
            return Ok(0);
        };
        let brought = Brought {
            room,
            batch: &batch,
            of_keys,
            reached: &reached,
            took,
        };
        self.planner.claimed(clock::now(), asked, &brought);
        let count = batch.claimed.len();
        self.take(batch, took)?;
        Ok(count)
    }

    /// Asks for messages, and claims those that the planner picks.
    pub(super) fn search(&mut self, ask: Ask, view: &View) -> DatabaseResult<()> {
        let began = clock::now();
        let (outcome, result) = match self.find_and_claim(&ask, view, began) {
            Ok(outcome) => (outcome, Ok(())),
            Err(error) => (SearchOutcome::Failed, Err(error)),
        };
        let last = Last::since(began);
        let finished = Finished { ask, outcome, last };
        self.planner.searched(finished);
        result
    }

    fn find_and_claim(
        &mut self,
        ask: &Ask,
        view: &View,
        began: Instant,
    ) -> DatabaseResult<SearchOutcome> {
        let (leases, moment) = (self.planner.expired(), self.shared.moment());
        let Some(page) = self.db.find(leases, ask, moment)? else {
            return Ok(SearchOutcome::TooSlow);
        };
        let picked = self.planner.pick(clock::now(), ask, &page, view);
        let claims = self.claim_picked(&picked);
        Ok(match self.unless_too_slow(claims, began)? {
            None => SearchOutcome::TooSlow,
            Some(claims) => SearchOutcome::Done(Box::new(FoundMessages {
                page,
                picked,
                claims,
            })),
        })
    }

    fn claim_picked(&mut self, picked: &Picked) -> DatabaseResult<Claims> {
        let mut claims = Claims::default();
        let plain = (!picked.plain.is_empty()).then_some(Which::Chosen(&picked.plain));
        let keyed = (!picked.keyed.is_empty()).then_some(Which::First(&picked.keyed));
        for which in plain.into_iter().chain(keyed) {
            let began = clock::now();
            let (batch, of_keys, _) = self.claiming(which)?;
            claims.of_keys = of_keys;
            let sequence = |one: &Claimed| one.message.sequence.0;
            claims.claimed.extend(batch.claimed.iter().map(sequence));
            claims.is_cut |= batch.is_cut;
            self.take(batch, clock::since(began))?;
        }
        Ok(claims)
    }

    /// Runs a claim. A claim whose result is lost may have succeeded, or may still be running. Returns also where the claim
    /// stopped reading keyed lanes.
    fn claiming(
        &mut self,
        which: Which<'_>,
    ) -> DatabaseResult<(Batch, OfKeys, HashMap<Stream, Position>)> {
        let lease = self.planner.lease;
        let is_keyed = matches!(which, Which::Due(..) | Which::First(_));
        let runs = is_keyed.then(|| self.shared.runs()).flatten();
        let directory = &self.shared.directory;
        let (roster, read_to) = (directory.roster(), directory.read_to());
        let claimant = Claimant {
            namesakes: roster.namesakes(),
            read_to: read_to.as_deref(),
            runs: runs.as_ref().map(|runs| runs as &dyn Runs),
            lease,
            expired: self.planner.expired(),
            bytes: claim_bytes(&self.shared.bulkheads),
        };
        let count_look = || {
            if matches!(which, Which::Due(..)) {
                self.shared.count_keyed_look();
            }
        };
        count_look();
        let result = self.db.claim(claimant, which);
        count_look();
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            let backend = self.db.after().backend;
            self.shared.custody.begin_doubt(lease, backend.into());
        }
        let Taken { batch, reached } = result?;
        let of_keys = match (is_keyed, &batch) {
            (false, _) => OfKeys::None,
            (true, Some(_)) => OfKeys::Done,
            (true, None) => OfKeys::Beaten(fastrand::f64()),
        };
        Ok((batch.unwrap_or_default(), of_keys, reached))
    }

    /// The result of a claim. `None`: the claim took too long.
    fn unless_too_slow<T>(
        &self,
        claim: DatabaseResult<T>,
        began: Instant,
    ) -> DatabaseResult<Option<T>> {
        let (took, limit) = (clock::since(began), self.shared.claim_limit);
        match claim {
            Err(DatabaseError::Statement(error)) if has_timed_out(&error, took, limit) => Ok(None),
            claim => claim.map(Some),
        }
    }

    /// Hands claimed messages over. If members must be read for some of them and that fails, these are released, and the error
    /// pauses the claimer: it would claim them again at once.
    fn take(&mut self, batch: Batch, took: Duration) -> DatabaseResult<()> {
        if batch.claimed.is_empty() {
            return Ok(());
        }
        let (shared, lease) = (self.shared, self.planner.lease);
        shared.signals.sleep.end();
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        shared.count(|stats| {
            stats.claim_micros = stats.claim_micros.saturating_add(micros);
            stats.claims += 1;
        });
        shared.metrics.claim_seconds.record(took.as_secs_f64());
        let mut read = Ok(());
        let jobs = shared.took(batch, lease, |unsure| match self.read(unsure) {
            Ok(reading) => reading,
            Err(error) => {
                read = Err(error);
                Reading::NotAsked
            }
        });
        self.hand_over(By::Claimer, jobs);
        read
    }

    /// Reads the members, because the fate of these messages depends on that.
    fn read(&mut self, unsure: &[&Claimed]) -> DatabaseResult<Reading> {
        let named = unsure.iter().map(|one| one.message.destination.as_str());
        let waiting = self.without_destination(named);
        Ok(match self.read_members(&waiting, None)? {
            Tried::Done(()) => Reading::Fresh,
            Tried::Locked => Reading::Locked,
        })
    }
}
