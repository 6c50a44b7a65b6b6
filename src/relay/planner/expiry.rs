//! Expired messages that no relay serves: they are claimed and dead-lettered, too.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::lanes::SWEEP_SHARE;
use crate::store::relay::claim::{Position, Stream, Topic};

/// The time between rounds.
const INTERVAL: Duration = Duration::from_secs(10);

/// Rounds over the streams that no relay serves, a step at a time.
#[derive(Debug)]
pub(super) struct Expiry {
    /// The streams left in this round, and the position in the first of them.
    streams: VecDeque<Stream>,
    after: Position,
    /// The earliest time of the next step, or of the next round.
    next: Option<Instant>,
}

impl Default for Expiry {
    fn default() -> Self {
        Self {
            streams: VecDeque::new(),
            after: Position::START,
            next: None,
        }
    }
}

impl Expiry {
    fn is_time(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Whether a round is due. The caller then passes the unserved topics to [`begin`](Self::begin).
    pub(super) fn wants_a_round(&self, now: Instant) -> bool {
        self.streams.is_empty() && self.is_time(now)
    }

    /// Starts a round over topics that no relay serves. If there are none, asks again soon: the list may change.
    pub(super) fn begin(&mut self, now: Instant, topics: Vec<Topic>, moment: Duration) {
        let both = |topic: Topic| {
            [false, true].map(|is_keyed| Stream {
                topic: topic.clone(),
                is_keyed,
            })
        };
        self.streams = topics.into_iter().flat_map(both).collect();
        self.after = Position::START;
        if self.streams.is_empty() {
            self.next = Some(now + moment.min(INTERVAL));
        }
    }

    /// The next step, if a step is due.
    pub(super) fn step(&self, now: Instant) -> Option<(Stream, Position)> {
        let stream = self.streams.front().filter(|_| self.is_time(now))?;
        Some((stream.clone(), self.after))
    }

    /// When the next step of a round is due.
    pub(super) fn goes_on_at(&self) -> Option<Instant> {
        self.next.filter(|_| !self.streams.is_empty())
    }

    /// A step ended at this position; `None`: at the end of the stream.
    pub(super) fn learn(&mut self, now: Instant, reached: Option<Position>, took: Duration) {
        let mut next = now + SWEEP_SHARE * took;
        self.after = reached.unwrap_or(Position::START);
        if reached.is_none() {
            self.streams.pop_front();
            if self.streams.is_empty() {
                next = next.max(now + INTERVAL);
            }
        }
        self.next = Some(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_takes_a_step_at_a_time_and_rests_between() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut expiry = Expiry::default();
        assert!(expiry.wants_a_round(now));
        expiry.begin(now, Vec::new(), second);
        assert!(!expiry.wants_a_round(now), "no topic is unserved");
        assert!(expiry.wants_a_round(now + second));
        let topic = Topic {
            topic: "a".to_owned(),
            destination: String::new(),
        };
        expiry.begin(now + second, vec![topic], second);
        let now = now + second;
        let (plain, after) = expiry.step(now).expect("a step");
        assert!(!plain.is_keyed && after == Position::START);
        let here = Position::of_time(7);
        expiry.learn(now, Some(here), second);
        assert_eq!(
            expiry.step(now),
            None,
            "steps take only a share of the time"
        );
        let at = expiry.goes_on_at().expect("another step");
        assert_eq!(at, now + SWEEP_SHARE * second);
        assert_eq!(expiry.step(at), Some((plain, here)));
        expiry.learn(at, None, Duration::ZERO);
        let (keyed, after) = expiry.step(at).expect("the keyed stream");
        assert!(keyed.is_keyed && after == Position::START);
        expiry.learn(at, None, Duration::ZERO);
        assert_eq!(expiry.goes_on_at(), None, "the round has ended");
        assert!(!expiry.wants_a_round(at) && expiry.wants_a_round(at + INTERVAL));
    }
}
