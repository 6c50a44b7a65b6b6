//! Rounds over everything, a step at a time.

use std::time::{Duration, Instant};

/// The round that is under way, with the place where it is, and the last one that came to its end.
#[derive(Debug)]
pub(super) struct Rounds<P> {
    pub(super) under_way: Option<(P, Round)>,
    pub(super) last: Option<Round>,
}

#[derive(Debug)]
pub(super) struct Round {
    pub(super) began: Instant,
    pub(super) ended: Instant,
    /// All steps together.
    pub(super) took: Duration,
    /// It has passed over something for want of room.
    pub(super) has_left: bool,
}

impl<P> Default for Rounds<P> {
    fn default() -> Self {
        Self {
            under_way: None,
            last: None,
        }
    }
}

impl<P> Rounds<P> {
    pub(super) fn begin(&mut self, now: Instant, place: P) {
        let round = Round {
            began: now,
            ended: now,
            took: Duration::ZERO,
            has_left: false,
        };
        self.under_way = Some((place, round));
    }

    /// Where the one is that is under way.
    pub(super) fn place(&self) -> Option<&P> {
        self.under_way.as_ref().map(|(place, _)| place)
    }

    /// A step was made from this place.
    pub(super) fn step(&mut self, took: Duration, has_left: bool) -> Option<&mut P> {
        let (place, round) = self.under_way.as_mut()?;
        round.took += took;
        round.has_left |= has_left;
        Some(place)
    }

    /// The last step was the end.
    pub(super) fn end(&mut self, now: Instant) {
        if let Some((_, round)) = self.under_way.take() {
            self.last = Some(Round {
                ended: now,
                ..round
            });
        }
    }

    /// The one that is under way, or else the last one.
    pub(super) fn latest(&mut self) -> Option<&mut Round> {
        let under_way = self.under_way.as_mut().map(|(_, round)| round);
        under_way.or(self.last.as_mut())
    }

    /// Whether one that began since then has come to its end, and has left nothing.
    pub(super) fn is_done_since(&self, since: Instant) -> bool {
        let is_after = |last: &Round| last.began >= since && !last.has_left;
        self.last.as_ref().is_some_and(is_after)
    }
}
