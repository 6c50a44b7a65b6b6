//! Expired messages that no relay serves: they are claimed and dead-lettered, too.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pace::Pace;
use super::search::{Finished, Search, SearchOutcome, SearchPass, WalkAgain};
use crate::engine::claim::sql::claim::{Position, Stream, Topic};
use crate::engine::claim::sql::page::SearchPlace;
use crate::engine::claim::sql::search::Ask;

/// The time between rounds.
const INTERVAL: Duration = Duration::from_secs(10);

/// Rounds over the streams that no relay serves, a page at a time.
#[derive(Debug, Default)]
pub(super) struct UnservedSearch {
    /// The topics of the next round.
    pub(super) topics: Vec<Topic>,
    /// The streams left in this round, and the position in the first of them, if it was read in part.
    streams: VecDeque<Stream>,
    after: Option<Position>,
    /// The earliest time of the next page, or of the next round.
    next: Option<Instant>,
}

impl UnservedSearch {
    /// The messages of the first stream were read up to this place; `None`: to the end.
    fn read(&mut self, place: Option<SearchPlace>) {
        self.after = match place {
            Some(SearchPlace::Behind(position)) => Some(position),
            _ => None,
        };
        if self.after.is_none() {
            self.streams.pop_front();
        }
    }
}

impl Search for UnservedSearch {
    fn ask(&mut self, pass: &SearchPass) -> Option<Ask> {
        if pass.is_limited || self.next.is_some_and(|next| pass.now < next) {
            return None;
        }
        if self.streams.is_empty() {
            let both = |topic: &Topic| {
                [false, true].map(|is_keyed| Stream {
                    topic: topic.clone(),
                    is_keyed,
                })
            };
            self.streams = self.topics.iter().flat_map(both).collect();
        }
        let stream = self.streams.front()?.clone();
        Some(Ask::Expired(stream, self.after.unwrap_or(Position::START)))
    }

    fn learn(&mut self, finished: Finished) -> Option<WalkAgain> {
        let last = finished.last;
        match finished.outcome {
            // The rest is behind the same position.
            SearchOutcome::Done(done) if done.claims.of_keys.is_beaten() || done.claims.is_cut => {}
            SearchOutcome::Done(done) => self.read(done.page.next),
            SearchOutcome::TooSlow | SearchOutcome::Failed => {}
        }
        let interval = match self.streams.is_empty() {
            true => INTERVAL,
            false => Duration::ZERO,
        };
        self.next = Some(Pace::of_search(interval).next(last));
        None
    }

    fn again_at(&self, pass: &SearchPass) -> Option<Instant> {
        self.next
            .filter(|_| !pass.is_limited && !self.streams.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::super::pace::{Last, REST};
    use super::super::picks::{Claims, Picked};
    use super::super::search::FoundMessages;
    use super::*;
    use crate::engine::claim::sql::page::Page;

    fn step(unserved: &mut UnservedSearch, now: Instant) -> Option<(Stream, Position)> {
        match unserved.ask(&SearchPass::at(now))? {
            Ask::Expired(stream, after) => Some((stream, after)),
            other => panic!("{other:?}"),
        }
    }

    fn learn(
        unserved: &mut UnservedSearch,
        now: Instant,
        reached: Option<Position>,
        took: Duration,
    ) {
        let ask = Ask::Expired(unserved.streams[0].clone(), Position::START);
        let page = Page {
            next: reached.map(SearchPlace::Behind),
            ..Page::default()
        };
        let outcome = SearchOutcome::Done(Box::new(FoundMessages {
            page,
            picked: Picked::default(),
            claims: Claims::default(),
        }));
        unserved.learn(Finished {
            ask,
            outcome,
            last: Last { ended: now, took },
        });
    }

    #[test]
    fn a_round_takes_a_step_at_a_time_and_rests_between() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut unserved = UnservedSearch::default();
        assert_eq!(step(&mut unserved, now), None, "no topic is unserved");
        unserved.topics.push(Topic::new("a", ""));
        let (plain, after) = step(&mut unserved, now).expect("a step");
        assert!(!plain.is_keyed && after == Position::START);
        let here = Position::of_time(7);
        learn(&mut unserved, now, Some(here), second);
        assert_eq!(
            step(&mut unserved, now),
            None,
            "steps take only a share of the time"
        );
        let at = unserved
            .again_at(&SearchPass::at(now))
            .expect("another step");
        assert_eq!(at, now + REST * second);
        assert_eq!(step(&mut unserved, at), Some((plain.clone(), here)));
        learn(&mut unserved, at, None, Duration::ZERO);
        let (keyed, after) = step(&mut unserved, at).expect("the keyed stream");
        assert!(keyed.is_keyed && after == Position::START);
        learn(&mut unserved, at, None, Duration::ZERO);
        assert_eq!(
            unserved.again_at(&SearchPass::at(at)),
            None,
            "the round has ended"
        );
        assert_eq!(step(&mut unserved, at), None, "rounds rest between");
        assert_eq!(
            step(&mut unserved, at + INTERVAL),
            Some((plain, Position::START))
        );
    }
}
