//! Rounds over all keys or sequences, a page at a time.

use std::time::{Duration, Instant};

use super::pace::{Last, LastTwo};

/// The current round with its place, and the last completed round.
#[derive(Debug, Default)]
pub(super) struct Rounds<P> {
    pub(super) in_flight: Option<(P, Round)>,
    pub(super) last: Option<Round>,
    /// The last completed rounds.
    pub(super) times: LastTwo,
}

#[derive(Debug)]
pub(super) struct Round {
    pub(super) began: Instant,
    /// The end of the last step, and the time of all steps together.
    pub(super) last: Last,
    /// Whether the round has skipped messages for want of room.
    pub(super) has_left: bool,
}

impl<P: Default> Rounds<P> {
    pub(super) fn begin(&mut self, now: Instant) {
        let round = Round {
            began: now,
            last: Last {
                ended: now,
                took: Duration::ZERO,
            },
            has_left: false,
        };
        self.in_flight = Some((P::default(), round));
    }

    /// The place of the current round.
    pub(super) fn place(&self) -> Option<&P> {
        self.in_flight.as_ref().map(|(place, _)| place)
    }

    /// A step was made. Returns the place to update.
    pub(super) fn step(&mut self, took: Duration, has_left: bool) -> Option<&mut P> {
        let (place, round) = self.in_flight.as_mut()?;
        round.last.took += took;
        round.has_left |= has_left;
        Some(place)
    }

    /// The last step has ended the round.
    pub(super) fn end(&mut self, now: Instant) {
        if let Some((_, mut round)) = self.in_flight.take() {
            round.last.ended = now;
            self.times.add(round.last);
            self.last = Some(round);
        }
    }

    /// Whether a round that began since then has ended without skipping messages.
    pub(super) fn is_done_since(&self, since: Instant) -> bool {
        let is_after = |last: &Round| last.began >= since && !last.has_left;
        self.last.as_ref().is_some_and(is_after)
    }
}
