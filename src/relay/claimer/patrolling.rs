//! A step of the patrol, and what takes too long.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Claimer, Next};
use crate::error::DatabaseError;
use crate::relay::intake::Rooms;
use crate::relay::lanes::{Seen, To};
use crate::relay::patrol::STEP;
use crate::store::brief::{briefly, is_over_time};
use crate::store::range::Range;
use crate::store::relay::claim::{self, Lane};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::Candidate;
use crate::store::relay::patrol::{self, Free};

/// What is about to be claimed.
#[derive(Default)]
struct Picked {
    plain: Vec<i64>,
    keyed: Vec<Candidate>,
    /// There was no room for others.
    has_left: bool,
}

impl Claimer<'_> {
    /// Whether a claim has failed because it took too long.
    pub(super) fn took_too_long(&self, error: &DatabaseError, began: Instant) -> bool {
        let limit = self.shared.claim_limit;
        matches!(error, DatabaseError::Statement(error) if is_over_time(error, began.elapsed(), limit))
    }

    /// A claim of these lanes took too long: they go on where fewer dead entries are, and the patrol looks
    /// at the rest.
    pub(super) fn leave_to_patrol(&mut self, asked: &[Lane], took: Duration) {
        log::warn!(event = "claim_slow", lanes = asked.len(), seconds = took.as_secs_f64(); "a claim took longer than it may: an old transaction may keep what was settled in the index. Messages are looked for in parts");
        self.lanes.were_too_slow(asked, took, &self.clock);
        self.patrol.want();
    }

    /// A step of the patrol: claims what is free in a range.
    pub(super) fn patrol(
        &mut self,
        lease: LeaseId,
        range: Range,
        limit: Option<usize>,
        rooms: &Rooms,
    ) -> Result<Next, DatabaseError> {
        let (name, expired) = (&self.shared.config.table, &self.expired);
        let (began, moment) = (Instant::now(), self.shared.moment());
        let found = self.session.run(|conn| {
            briefly(conn, moment, |conn| {
                patrol::free(conn, name, expired, range, STEP)
            })
        })?;
        let Some(found) = found else {
            self.patrol.was_too_wide(range, began.elapsed());
            return Ok(Next::Again);
        };
        self.learn_streams(&found);
        let upto = found.get(STEP - 1).map_or(range.upto, |last| last.sequence);
        let picked = self.pick_free(&found, limit, rooms);
        let has_left = match self.claim_free(lease, &picked) {
            Ok(has_all) => picked.has_left || !has_all,
            Err(error) if self.took_too_long(&error, began) => {
                self.patrol.was_too_wide(range, began.elapsed());
                return Ok(Next::Again);
            }
            Err(error) => return Err(error),
        };
        self.patrol.read(upto, began.elapsed(), has_left);
        Ok(Next::Again)
    }

    /// Streams that no look has found in its time.
    fn learn_streams(&mut self, free: &[Free]) {
        let seen = Seen {
            found: free.iter().map(Free::found).collect(),
            is_all: false,
            slow: Some(self.shared.moment()),
        };
        self.lanes.take_over(seen, &self.shared.routes, &self.clock);
    }

    fn pick_free(&self, found: &[Free], limit: Option<usize>, rooms: &Rooms) -> Picked {
        let mut picked = Picked::default();
        let mut taken: HashMap<To, usize> = HashMap::new();
        let most = limit.unwrap_or(usize::MAX);
        for free in found {
            let stream = free.found().stream;
            if self.lanes.kept_back().has(&stream.topic) {
                continue;
            }
            let to = self.way(&stream.topic.topic, &stream.topic.destination);
            let count = taken.entry(to).or_default();
            if *count >= rooms.of(to) || picked.plain.len() + picked.keyed.len() >= most {
                picked.has_left |= self.shared.is_open(to);
                continue;
            }
            *count += 1;
            match stream.is_keyed {
                false => picked.plain.push(free.sequence),
                true => picked.keyed.push(Candidate {
                    sequence: free.sequence,
                    goes_to: self.goes_to(to).to_owned(),
                }),
            }
        }
        picked
    }

    /// `false`: another relay is claiming keyed messages just now, or some were left for their size.
    fn claim_free(&mut self, lease: LeaseId, picked: &Picked) -> Result<bool, DatabaseError> {
        let mut has_all = true;
        if !picked.plain.is_empty() {
            let (name, began) = (&self.shared.config.table, Instant::now());
            let batch = self.claiming(lease, |conn, claimant| {
                claim::claim_chosen(conn, name, claimant, &picked.plain)
            })?;
            self.look.found_nothing &= batch.claimed.is_empty();
            self.take(batch.claimed, began.elapsed(), lease);
            has_all &= !batch.is_cut;
        }
        let began = Instant::now();
        let Some(batch) = self.claim_picked(lease, &picked.keyed)? else {
            return Ok(false);
        };
        self.take(batch.claimed, began.elapsed(), lease);
        Ok(has_all && !batch.is_cut)
    }
}
