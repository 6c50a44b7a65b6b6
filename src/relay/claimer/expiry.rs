//! Messages that no relay serves die, too, when their time is over.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Claimer, Next};
use crate::error::DatabaseError;
use crate::relay::lanes::{SWEEP_SHARE, To};
use crate::relay::shared::Shared;
use crate::store::relay::claim::{Batch, Position, Stream};
use crate::store::relay::lease::LeaseId;
use crate::store::relay::ordered::{self, Candidate};
use crate::store::relay::unserved;

/// How often a round begins.
const INTERVAL: Duration = Duration::from_secs(10);

/// Rounds over what no relay serves, a step at a time.
#[derive(Debug)]
pub(super) struct Expiry {
    /// What is left of the round, and where the first of it goes on.
    streams: VecDeque<Stream>,
    after: Position,
    /// The next round, or the next step of this one, begins no sooner.
    next: Instant,
}

impl Expiry {
    pub(super) fn new() -> Self {
        Self {
            streams: VecDeque::new(),
            after: Position::START,
            next: Instant::now(),
        }
    }

    /// The next step, if it is time for one.
    fn step(&mut self, shared: &Shared) -> Option<(Stream, Position)> {
        if Instant::now() < self.next {
            return None;
        }
        if self.streams.is_empty() {
            let topics = shared.unrouted().into_iter().map(|one| one.topic);
            let nowhere = topics.filter(|topic| {
                To::of(&shared.routes, &topic.topic, &topic.destination) == To::Nowhere
            });
            let both = |topic| {
                [false, true].map(|is_keyed| Stream {
                    topic: Clone::clone(&topic),
                    is_keyed,
                })
            };
            self.streams.extend(nowhere.flat_map(both));
            self.after = Position::START;
        }
        if self.streams.is_empty() {
            // Somebody may have none of it in a moment.
            self.next = Instant::now() + shared.config.poll_interval.min(INTERVAL);
        }
        Some((self.streams.front()?.clone(), self.after))
    }

    /// When the next step of a round is due.
    pub(super) fn goes_on_at(&self) -> Option<Instant> {
        (!self.streams.is_empty()).then_some(self.next)
    }

    /// A step has ended there; `None`: the stream has no more.
    fn learn(&mut self, reached: Option<Position>, took: Duration) {
        self.next = Instant::now() + SWEEP_SHARE * took;
        self.after = reached.unwrap_or(Position::START);
        if reached.is_none() {
            self.streams.pop_front();
            if self.streams.is_empty() {
                self.next = self.next.max(Instant::now() + INTERVAL);
            }
        }
    }
}

impl Claimer<'_> {
    /// Takes messages whose time is over and that no relay serves, a few at a time: they die.
    pub(super) fn expire_unserved(
        &mut self,
        lease: LeaseId,
    ) -> Result<Option<Next>, DatabaseError> {
        let Some((stream, after)) = self.expiry.step(self.shared) else {
            return Ok(None);
        };
        let name = &self.shared.config.table;
        let began = Instant::now();
        let part = self
            .session
            .run(|conn| unserved::expired(conn, name, &stream, after))?;
        let candidate = |sequence| Candidate {
            sequence,
            goes_to: String::new(),
        };
        let candidates: Vec<Candidate> = part.sequences.into_iter().map(candidate).collect();
        if !candidates.is_empty() {
            let batch = self.claiming(lease, |conn, claimant| {
                ordered::claim(conn, name, claimant, &candidates)
            })?;
            let Some(Batch { claimed, is_cut }) = batch else {
                return Ok(Some(Next::AgainSoon));
            };
            self.take(claimed, began.elapsed(), lease);
            if is_cut {
                // The rest stands behind the same place.
                return Ok(Some(Next::Again));
            }
        }
        self.expiry.learn(part.reached, began.elapsed());
        Ok(Some(Next::Again))
    }
}
