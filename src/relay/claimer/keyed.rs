//! Claiming messages with ordering keys: where their lanes go on, and what the walk finds.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::{Claimer, Next};
use crate::error::DatabaseError;
use crate::relay::intake::Rooms;
use crate::relay::lanes::To;
use crate::relay::walk::{self, Step};
use crate::store::brief::briefly;
use crate::store::relay::claim::{Batch, Claimed, Lane, Topic};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::{self, Candidate};

/// What is about to be claimed.
#[derive(Default)]
struct Picked {
    candidates: Vec<Candidate>,
    /// Their keys.
    keys: Vec<ordered::Key>,
    /// Passed over: their destinations have no room.
    without_room: Vec<(To, ordered::Key)>,
    /// Not looked at any more.
    beyond: Vec<ordered::Key>,
}

impl<'a> Claimer<'a> {
    pub(super) fn claim_keyed(
        &mut self,
        lease: LeaseId,
        room: usize,
        asked: &[Lane],
    ) -> Result<Next, DatabaseError> {
        let goes_to = |lane: &Lane| {
            let Topic { topic, destination } = &lane.stream.topic;
            self.goes_to(self.way(topic, destination))
        };
        let goes_to: Vec<&str> = asked.iter().map(goes_to).collect();
        let name = &self.shared.config.table;
        let began = Instant::now();
        self.shared.count_keyed_look();
        let harvest = self.claiming(lease, |conn, claimant| {
            let found = ordered::due(conn, name, claimant, asked, &goes_to)?;
            let (mut due, mut reached) = (Vec::new(), HashMap::new());
            for (lane, found) in asked.iter().zip(found) {
                due.extend(found.candidates);
                reached.extend(found.reached.map(|at| (lane.stream.clone(), at)));
            }
            due.truncate(room);
            let batch = match due.is_empty() {
                true => Some(Batch::default()),
                false => ordered::claim(conn, name, claimant, &due)?,
            };
            if batch.as_ref().is_some_and(|batch| batch.is_cut) {
                // What was left stands before that place.
                reached.clear();
            }
            Ok(batch.map(|batch| (batch, reached)))
        });
        self.shared.count_keyed_look();
        let harvest = match harvest {
            Err(error) if self.took_too_long(&error, began) => {
                self.leave_to_patrol(asked, began.elapsed());
                return Ok(Next::Again);
            }
            harvest => harvest?,
        };
        self.contended(harvest.is_none());
        let Some(harvest) = harvest else {
            self.look.found_nothing = false;
            return Ok(Next::AgainSoon);
        };
        self.learn_and_take(lease, room, asked, harvest, began.elapsed());
        Ok(Next::Again)
    }

    /// A step of the walk over all keys.
    pub(super) fn step(
        &mut self,
        lease: LeaseId,
        from: &ordered::Key,
        limit: Option<usize>,
        rooms: &Rooms,
    ) -> Result<Next, DatabaseError> {
        let name = &self.shared.config.table;
        let (began, expired) = (Instant::now(), &self.expired);
        let moment = self.shared.moment();
        let page = self.session.run(|conn| {
            briefly(conn, moment, |conn| {
                ordered::walk(conn, name, expired, from, walk::STEP)
            })
        })?;
        let Some(page) = page else {
            return Ok(self.end_round(began.elapsed()));
        };
        let step = page.last.map_or(Step::End, Step::At);
        let picked = self.pick(page.heads, limit, rooms);
        let claimed = match self.claim_picked(lease, &picked.candidates) {
            Ok(Some(batch)) => self.leave_cut(&picked, batch),
            Ok(None) => return Ok(Next::AgainSoon),
            Err(error) if self.took_too_long(&error, began) => {
                return Ok(self.end_round(began.elapsed()));
            }
            Err(error) => return Err(error),
        };
        // Ends where the first of a destination has no room left.
        let step = picked.beyond.into_iter().next().map_or(step, Step::At);
        let has_left = !picked.without_room.is_empty();
        let took = began.elapsed();
        self.walk.learn(step, took, has_left);
        self.take(claimed, took, lease);
        Ok(Next::Again)
    }

    /// A step took too long, and would take as long again: the next round begins when it may.
    fn end_round(&mut self, took: Duration) -> Next {
        self.walk.learn(Step::End, took, false);
        self.patrol.want();
        Next::Again
    }

    /// A look at keys that were freed.
    pub(super) fn look_at(
        &mut self,
        lease: LeaseId,
        keys: Vec<ordered::Key>,
        limit: Option<usize>,
        rooms: &Rooms,
    ) -> Result<Next, DatabaseError> {
        let name = &self.shared.config.table;
        let (began, expired) = (Instant::now(), &self.expired);
        let page = self
            .session
            .run(|conn| ordered::first_of(conn, name, expired, &keys));
        let picked = page.map(|page| self.pick(page.heads, limit, rooms));
        let result = picked.and_then(|picked| {
            let claimed = self.claim_picked(lease, &picked.candidates)?;
            Ok((picked, claimed))
        });
        let (picked, claimed) = match result {
            Ok((picked, Some(batch))) => {
                let claimed = self.leave_cut(&picked, batch);
                (picked, claimed)
            }
            Ok((_, None)) => {
                self.walk.freed(keys);
                return Ok(Next::AgainSoon);
            }
            Err(error) => {
                // One of them may be the reason.
                self.walk.want_round();
                return Err(error);
            }
        };
        self.walk.wait_with(picked.without_room);
        self.walk.freed(picked.beyond);
        self.take(claimed, began.elapsed(), lease);
        Ok(Next::Again)
    }

    /// `None`: another relay is claiming just now.
    pub(super) fn claim_picked(
        &mut self,
        lease: LeaseId,
        candidates: &[Candidate],
    ) -> Result<Option<Batch>, DatabaseError> {
        if candidates.is_empty() {
            return Ok(Some(Batch::default()));
        }
        let name = &self.shared.config.table;
        let batch = self.claiming(lease, |conn, claimant| {
            ordered::claim(conn, name, claimant, candidates)
        })?;
        self.contended(batch.is_none());
        self.look.found_nothing &= batch.as_ref().is_some_and(|one| one.claimed.is_empty());
        Ok(batch)
    }

    /// The keys of what a claim has left for its size are looked at again. Returns what it has brought.
    fn leave_cut(&mut self, picked: &Picked, batch: Batch) -> Vec<Claimed> {
        if batch.is_cut {
            let claimed = batch.claimed.iter().map(|one| one.message.sequence.0);
            let claimed: HashSet<i64> = claimed.collect();
            let picked = picked.candidates.iter().zip(&picked.keys);
            let left = picked.filter(|(one, _)| !claimed.contains(&one.sequence));
            self.walk.freed(left.map(|(_, key)| key.clone()));
        }
        batch.claimed
    }

    /// A keyed claim was made, or another relay's was in its way.
    fn contended(&mut self, is_lost: bool) {
        match is_lost {
            true => self.contention.lost(Instant::now(), fastrand::f64()),
            false => self.contention.won(),
        }
    }

    /// Those for which there is room, up to the first of a destination that has none left.
    fn pick(&self, heads: Vec<ordered::Head>, limit: Option<usize>, rooms: &Rooms) -> Picked {
        let mut picked = Picked::default();
        let mut taken: HashMap<To, usize> = HashMap::new();
        let most = limit.unwrap_or(usize::MAX);
        let mut heads = heads.into_iter();
        while let Some(head) = heads.next() {
            let to = self.way(&head.topic.topic, &head.topic.destination);
            if self.lanes.kept_back().has(&head.topic) {
                continue;
            }
            let room = rooms.of(to);
            let count = taken.entry(to).or_default();
            if room == 0 {
                if self.shared.is_open(to) {
                    picked.without_room.push((to, head.key));
                }
            } else if *count >= room || picked.candidates.len() >= most {
                picked.beyond.push(head.key);
                picked.beyond.extend(heads.map(|head| head.key));
                break;
            } else {
                *count += 1;
                picked.keys.push(head.key);
                picked.candidates.push(Candidate {
                    sequence: head.sequence,
                    goes_to: self.goes_to(to).to_owned(),
                });
            }
        }
        picked
    }

    /// The destination by its name.
    pub(super) fn goes_to(&self, to: To) -> &'a str {
        match to {
            To::Bulkhead(number) => &self.shared.bulkheads[number].name,
            To::Split | To::Nowhere => "",
        }
    }
}
