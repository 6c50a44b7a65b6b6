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
use crate::relay::filtering::Filtering;
use crate::relay::planner::{Brought, Claims, Outcome, Picked, SearchKind, View};
use crate::store::brief::has_timed_out;
use crate::store::relay::claim::{Batch, Claimant, Claimed, Lane, Position, Stream};
use crate::store::relay::search::Ask;

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
        if let Some(batch) = batch {
            self.learn_and_take(asked, room, batch, &reached, began);
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

    /// Asks for messages, and claims those that the planner picks.
    pub(super) fn search(&mut self, by: SearchKind, ask: Ask, view: &View) -> Answer<()> {
        let began = clock::now();
        let result = self.find_and_claim(&ask, view, began);
        let (outcome, result) = match result {
            Ok(outcome) => (outcome, Ok(())),
            Err(error) => (Outcome::Failed, Err(error)),
        };
        let took = clock::since(began);
        (self.planner).searched(clock::now(), (by, ask), outcome, took);
        result
    }

    fn find_and_claim(&mut self, ask: &Ask, view: &View, began: Instant) -> Answer<Outcome> {
        let (leases, moment) = (self.planner.expired(), self.shared.moment());
        let Some(page) = self.db.find(leases, ask, moment)? else {
            return Ok(Outcome::TooSlow);
        };
        let picked = self.planner.pick(clock::now(), ask, &page, view);
        let claims = self.claim_picked(&picked);
        Ok(match self.unless_too_slow(claims, began)? {
            None => Outcome::TooSlow,
            Some(claims) => Outcome::Done {
                page,
                picked,
                claims,
            },
        })
    }

    fn claim_picked(&mut self, picked: &Picked) -> Answer<Claims> {
        let mut claims = Claims::default();
        if !picked.plain.is_empty() {
            let began = clock::now();
            let batch = self.claiming(|db, by| db.claim_chosen(by, &picked.plain))?;
            self.take_into(&mut claims, batch, began);
        }
        if !picked.keyed.is_empty() {
            let began = clock::now();
            let batch = self.claiming(|db, by| db.claim_keyed(by, &picked.keyed))?;
            self.tell_contention(batch.as_ref());
            match batch {
                Some(batch) => self.take_into(&mut claims, batch, began),
                None => claims.is_beaten = true,
            }
        }
        Ok(claims)
    }

    fn take_into(&mut self, claims: &mut Claims, batch: Batch, began: Instant) {
        let sequence = |one: &Claimed| one.message.sequence.0;
        claims.claimed.extend(batch.claimed.iter().map(sequence));
        claims.is_cut |= batch.is_cut;
        self.take(batch.claimed, clock::since(began));
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
                if has_timed_out(&error, clock::since(began), limit) =>
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
