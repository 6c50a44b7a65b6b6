//! The claimer's claims.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Claimer;
use super::hand_over::By;
use crate::clock;
use crate::error::DatabaseError;
use crate::relay::bulkhead::claim_bytes;
use crate::relay::database::{Answer, Database};
use crate::relay::doubt::Doubt;
use crate::relay::filters::Filtering;
use crate::relay::planner::{Brought, PATROL_STEP, View};
use crate::store::brief::is_over_time;
use crate::store::range::Range;
use crate::store::relay::claim::{Batch, Claimant, Claimed, Lane, Position, Stream};
use crate::store::relay::late::LookForLate;
use crate::store::relay::ordered::{Candidate, Key};

impl<D: Database> Claimer<'_, D> {
    /// Runs two claims with separate results. The messages of the first claim are handed over even if the second claim
    /// fails.
    pub(super) fn claim(&mut self, plain: &[Lane], keyed: &[Lane], room: usize) -> Answer<()> {
        let count = match plain.is_empty() {
            true => 0,
            false => self.claim_plain(plain, room)?,
        };
        if keyed.is_empty() || count >= room {
            return Ok(());
        }
        self.claim_keyed(keyed, room - count)
    }

    /// Returns the number of claimed messages.
    fn claim_plain(&mut self, asked: &[Lane], room: usize) -> Answer<usize> {
        let began = clock::now();
        let batch = self.claiming(|db, by| db.claim(by, asked, room));
        let Some(batch) = self.unless_too_slow(batch, began)? else {
            (self.planner).was_too_slow(clock::now(), asked, clock::since(began));
            return Ok(0);
        };
        let count = batch.claimed.len();
        self.learn_and_take(asked, room, batch, &HashMap::new(), began);
        Ok(count)
    }

    fn claim_keyed(&mut self, asked: &[Lane], room: usize) -> Answer<()> {
        let goes_to = |lane: &Lane| self.planner.goes_to(&lane.stream.topic);
        let goes_to: Vec<String> = asked.iter().map(goes_to).collect();
        let began = clock::now();
        self.shared.count_keyed_look();
        let harvest = self.claiming(|db, by| db.claim_due(by, asked, &goes_to, room));
        self.shared.count_keyed_look();
        let Some((batch, reached)) = self.unless_too_slow(harvest, began)? else {
            (self.planner).was_too_slow(clock::now(), asked, clock::since(began));
            return Ok(());
        };
        self.tell_contention(batch.as_ref());
        match batch {
            Some(batch) => self.learn_and_take(asked, room, batch, &reached, began),
            None => self.planner.was_beaten(),
        }
        Ok(())
    }

    fn learn_and_take(
        &mut self,
        asked: &[Lane],
        room: usize,
        batch: Batch,
        reached: &HashMap<Stream, Position>,
        began: Instant,
    ) {
        let brought = Brought {
            asked,
            room,
            batch: &batch,
            reached,
            took: clock::since(began),
        };
        self.planner.claimed(clock::now(), &brought);
        self.take(batch.claimed, clock::since(began));
    }

    /// Takes a step of the walk over all keys.
    pub(super) fn walk(&mut self, from: &Key, view: &View) -> Answer<()> {
        let (began, moment) = (clock::now(), self.shared.moment());
        let page = self.db.walk(self.planner.expired(), from, moment)?;
        let Some(page) = page else {
            (self.planner).walk_was_too_slow(clock::now(), clock::since(began));
            return Ok(());
        };
        let picked = self.planner.pick(page.heads, view);
        let batch = self.claim_picked(&picked.candidates);
        let Some(batch) = self.unless_too_slow(batch, began)? else {
            (self.planner).walk_was_too_slow(clock::now(), clock::since(began));
            return Ok(());
        };
        match batch {
            Some(batch) => {
                let took = clock::since(began);
                (self.planner).walked(clock::now(), page.last, picked, &batch, took);
                self.take(batch.claimed, took);
            }
            None => self.planner.was_beaten(),
        }
        Ok(())
    }

    /// Queries freed keys, and claims their first messages.
    pub(super) fn look_at(&mut self, keys: Vec<Key>, view: &View) -> Answer<()> {
        let began = clock::now();
        let page = self.db.first_of(self.planner.expired(), &keys);
        let picked = page.map(|page| self.planner.pick(page.heads, view));
        let result = picked.and_then(|picked| {
            let batch = self.claim_picked(&picked.candidates)?;
            Ok((picked, batch))
        });
        match result {
            Ok((picked, Some(batch))) => {
                self.planner.looked_at_keys(picked, &batch);
                self.take(batch.claimed, clock::since(began));
                Ok(())
            }
            Ok((_, None)) => {
                self.planner.look_at_keys_again(keys);
                self.planner.was_beaten();
                Ok(())
            }
            Err(error) => {
                self.planner.keys_failed();
                Err(error)
            }
        }
    }

    /// Queries messages that were committed late. They are claimed like released messages.
    pub(super) fn look_for_late(&mut self, look: LookForLate) -> Answer<()> {
        let (began, moment) = (clock::now(), self.shared.moment());
        let found = self.db.late(self.planner.expired(), look, moment)?;
        let took = clock::since(began);
        match found {
            Some(found) => self.planner.found_late(clock::now(), found, took),
            None => self.planner.late_was_too_slow(clock::now(), took),
        }
        Ok(())
    }

    /// Takes a step of the patrol: claims the free messages in a range.
    pub(super) fn patrol(&mut self, range: Range, view: &View) -> Answer<()> {
        let (began, moment) = (clock::now(), self.shared.moment());
        let found = self.db.free(self.planner.expired(), range, moment)?;
        let Some(found) = found else {
            (self.planner).range_was_too_wide(clock::now(), range, clock::since(began));
            return Ok(());
        };
        self.planner.found_free(clock::now(), &found);
        let last = found.get(PATROL_STEP - 1);
        let upto = last.map_or(range.upto, |last| last.sequence);
        let picked = self.planner.pick_free(&found, view);
        let has_all = self.claim_free(&picked.plain, &picked.keyed);
        let Some(has_all) = self.unless_too_slow(has_all, began)? else {
            (self.planner).range_was_too_wide(clock::now(), range, clock::since(began));
            return Ok(());
        };
        let has_left = picked.has_left || !has_all;
        (self.planner).patrolled(clock::now(), upto, clock::since(began), has_left);
        Ok(())
    }

    /// `false`: another relay is claiming keyed messages, or some messages were left out because of their size.
    fn claim_free(&mut self, plain: &[i64], keyed: &[Candidate]) -> Answer<bool> {
        let mut has_all = true;
        if !plain.is_empty() {
            let began = clock::now();
            let batch = self.claiming(|db, by| db.claim_chosen(by, plain))?;
            has_all = !batch.is_cut;
            self.planner.claimed_free(&batch);
            self.take(batch.claimed, clock::since(began));
        }
        let began = clock::now();
        let Some(batch) = self.claim_picked(keyed)? else {
            return Ok(false);
        };
        self.take(batch.claimed, clock::since(began));
        Ok(has_all && !batch.is_cut)
    }

    /// Claims expired messages that no relay serves, a few at a time, to dead-letter them.
    pub(super) fn expire(&mut self, stream: &Stream, after: Position) -> Answer<()> {
        let began = clock::now();
        let part = self.db.expired(stream, after)?;
        let candidate = |sequence| Candidate {
            sequence,
            goes_to: String::new(),
        };
        let candidates: Vec<Candidate> = part.sequences.into_iter().map(candidate).collect();
        let Some(batch) = self.claim_picked(&candidates)? else {
            self.planner.was_beaten();
            return Ok(());
        };
        let is_cut = batch.is_cut;
        self.take(batch.claimed, clock::since(began));
        // After a cut claim, the rest is behind the same position.
        if !is_cut {
            (self.planner).expired_upto(clock::now(), part.reached, clock::since(began));
        }
        Ok(())
    }

    /// `None`: another relay is claiming keyed messages.
    fn claim_picked(&mut self, candidates: &[Candidate]) -> Answer<Option<Batch>> {
        if candidates.is_empty() {
            return Ok(Some(Batch::default()));
        }
        let batch = self.claiming(|db, by| db.claim_keyed(by, candidates))?;
        self.tell_contention(batch.as_ref());
        Ok(batch)
    }

    fn tell_contention(&mut self, batch: Option<&Batch>) {
        (self.planner).contended(clock::now(), fastrand::f64(), batch);
    }

    /// Runs a claim. A claim whose result is lost may have succeeded, or may still be running.
    fn claiming<T>(&mut self, claim: impl FnOnce(&mut D, Claimant<'_>) -> Answer<T>) -> Answer<T> {
        let lease = self.planner.lease();
        let claimant = Claimant {
            lease,
            expired: self.planner.expired(),
            max_attempts: self.shared.config.max_attempts,
            bytes: claim_bytes(&self.shared.bulkheads),
        };
        let result = claim(&mut self.db, claimant);
        if result.as_ref().is_err_and(DatabaseError::is_without_answer) {
            let backend = self.db.backend();
            self.shared.begin_doubt(Doubt { lease, backend });
            self.planner.lost_answer();
        }
        result
    }

    /// The result of a claim. `None`: the claim took too long.
    fn unless_too_slow<T>(&self, claim: Answer<T>, began: Instant) -> Answer<Option<T>> {
        let limit = self.shared.claim_limit;
        match claim {
            Err(DatabaseError::Statement(error))
                if is_over_time(&error, clock::since(began), limit) =>
            {
                Ok(None)
            }
            claim => claim.map(Some),
        }
    }

    fn take(&mut self, claimed: Vec<Claimed>, took: Duration) {
        if claimed.is_empty() {
            return;
        }
        let (shared, lease) = (self.shared, self.planner.lease());
        shared.signals.sleep.end();
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        shared.count(|stats| {
            stats.claim_micros = stats.claim_micros.saturating_add(micros);
            stats.claims += 1;
        });
        shared.metrics.claim_seconds.record(took.as_secs_f64());
        let met = self.look_up(&claimed);
        let registry = shared.registered.registry();
        let is_filtered = |one: &Claimed| Filtering::is_for(&registry, one);
        let (filtered, others) = claimed.into_iter().partition(is_filtered);
        self.filter(filtered, lease);
        let jobs = shared.took(others, lease, met);
        self.hand_over(By::Claimer, jobs);
    }
}
