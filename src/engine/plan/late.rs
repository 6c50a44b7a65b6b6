//! The search for late messages: committed after claims had passed their position.

use std::time::{Duration, Instant};

use super::pace::{Last, LastTwo, Pace};
use super::search::{Finished, Search, SearchOutcome, SearchPass, WalkAgain};
use crate::engine::claim::sql::claim::Position;
use crate::engine::claim::sql::late::LookForLate;
use crate::engine::claim::sql::page::{Moment, SearchPlace, Writers};
use crate::engine::claim::sql::search::Ask;

/// A round begins no sooner than this after the last one.
const INTERVAL: Duration = Duration::from_millis(200);
/// How many sequences a query for the streams of the newest messages goes back.
const NEWEST: i64 = 5_000;
/// How many of the newest sequences a starting relay queries.
const AT_FIRST: i64 = 10_000;

/// Rounds of queries over the newest sequences.
///
/// The position of a message in its lane is the time from which the message is available: mostly the start of its
/// transaction. Claims may have passed that position when the transaction commits. The sequence is a better guide. When
/// every transaction that wrote at some moment has ended, every sequence given before that moment is visible or will
/// never exist. So a round reads only the messages after the last sequence for which this is known, whatever else waits
/// in the outbox.
// Why: docs/decisions.md#late-messages
#[derive(Debug, Default)]
pub(super) struct Late {
    /// All sequences up to this one are visible and were queried since. Before `is_known`, this is a guess.
    behind: Option<i64>,
    is_known: bool,
    /// A transaction number and a sequence: once all earlier transactions have ended, all sequences up to it are
    /// visible.
    next: Option<(i64, i64)>,
    /// The newest sequence seen, and the newest one that the last round knew. A transaction gets its number right after
    /// its first sequence, so the sequences that the last round knew have a transaction number by now.
    newest: Option<i64>,
    known: Option<i64>,
    /// The position of the current round, and the writers at its start.
    in_flight: Option<(i64, Writers)>,
    /// When the last round began.
    began: Option<Instant>,
    /// The last queries.
    last: LastTwo,
}

impl Late {
    /// A message of this sequence was committed.
    pub(super) fn saw(&mut self, sequence: i64) {
        self.newest = self.newest.max(Some(sequence));
    }

    /// The newest messages come after this sequence.
    pub(super) fn before_newest(&self) -> i64 {
        self.newest
            .map_or(i64::MAX, |newest| newest.saturating_sub(NEWEST))
    }

    /// When the next query may be made.
    fn due_at(&self) -> Option<Instant> {
        let last = self.last.last()?;
        let interval = match self.in_flight {
            Some(_) => Duration::ZERO,
            None => INTERVAL,
        };
        Some(Pace::of_search(interval).next(last))
    }

    fn is_of_use(&self, passed: Option<Position>) -> bool {
        passed.is_some() || self.behind.is_none()
    }

    /// A query has found these writers and read up to this sequence; `None`: to the end. Returns `true` if no late
    /// message is missed from now on; earlier ones may have been missed.
    fn read(&mut self, last: Last, upto: Option<i64>, writers: Writers) -> bool {
        self.last.add(last);
        if self.in_flight.is_none() {
            self.began = Some(last.ended);
        }
        let writers = self
            .in_flight
            .take()
            .map_or(writers, |(_, writers)| writers);
        if let Some(upto) = upto {
            self.in_flight = Some((upto, writers));
            return false;
        }
        let mut is_first = false;
        let at_first = || (self.newest).map_or(i64::MIN, |newest| newest.saturating_sub(AT_FIRST));
        self.behind = self.behind.or_else(|| Some(at_first()));
        if let Some((before, upto)) = self.next
            && writers.oldest >= before
        {
            is_first = !std::mem::replace(&mut self.is_known, true);
            self.behind = Some(upto);
            self.next = None;
        }
        self.next = self.next.or(self.known.map(|known| (writers.next, known)));
        self.known = self.newest;
        is_first
    }

    /// A query took too long: the search starts over, and the patrol finds the messages that it misses meanwhile.
    fn was_too_slow(&mut self, last: Last) {
        *self = Self {
            newest: self.newest,
            began: Some(last.ended),
            last: LastTwo::slow(last),
            is_known: true,
            ..Self::default()
        };
    }

    /// Starts over: unknown sequences may have become visible.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }
}

impl Search for Late {
    fn ask(&mut self, pass: &SearchPass) -> Option<Ask> {
        let is_due = self.due_at().is_none_or(|at| pass.now >= at);
        let place = self.in_flight.map(|(place, _)| place);
        let look = LookForLate {
            behind: place.or(self.behind),
            due_before: pass.passed.unwrap_or(Position::START).available_at,
            known: self.newest.unwrap_or(i64::MIN),
        };
        (is_due && self.is_of_use(pass.passed)).then_some(Ask::Late(look))
    }

    fn learn(&mut self, finished: Finished) -> Option<WalkAgain> {
        let last = finished.last;
        match finished.outcome {
            SearchOutcome::Done(done) => {
                let Moment { newest, writers } = done.page.moment?;
                newest.into_iter().for_each(|newest| self.saw(newest));
                let upto = match done.page.next {
                    Some(SearchPlace::After(sequence)) => Some(sequence),
                    _ => None,
                };
                // Sweeps find the messages without a key.
                let is_first = self.read(last, upto, writers);
                return is_first.then_some(WalkAgain::Now);
            }
            SearchOutcome::TooSlow => self.was_too_slow(last),
            SearchOutcome::Failed => {}
        }
        None
    }

    /// At once, unless a round that began since then has ended.
    fn again_at(&self, pass: &SearchPass) -> Option<Instant> {
        let is_done = self.in_flight.is_none() && self.began >= Some(pass.since);
        self.due_at()
            .filter(|_| !is_done && self.is_of_use(pass.passed))
    }
}

#[cfg(test)]
mod tests {
    use super::super::pace::REST;
    use super::*;

    const TOOK: Duration = Duration::from_millis(1);
    const PASSED: Option<Position> = Some(Position {
        available_at: 5,
        sequence: i64::MIN,
    });

    fn last(ended: Instant, took: Duration) -> Last {
        Last { ended, took }
    }

    /// The query of a pass.
    fn next(late: &mut Late, now: Instant, passed: Option<Position>) -> Option<LookForLate> {
        match late.ask(&pass(now, now, passed))? {
            Ask::Late(look) => Some(look),
            other => panic!("{other:?}"),
        }
    }

    fn pass(now: Instant, since: Instant, passed: Option<Position>) -> SearchPass {
        SearchPass {
            since,
            passed,
            ..SearchPass::at(now)
        }
    }

    fn writers(oldest: i64, next: i64) -> Writers {
        Writers { oldest, next }
    }

    /// R8: a query starts after sequences that are visible, never after one that may still become visible.
    #[test]
    fn a_look_begins_behind_the_last_sequence_of_which_all_before_have_come() {
        let (mut late, mut now) = (Late::default(), Instant::now());
        let mut look = |late: &mut Late, found: Writers| {
            now += INTERVAL;
            let look = next(late, now, PASSED).expect("a query is due");
            (look.behind, late.read(last(now, TOOK), None, found))
        };
        assert_eq!(
            look(&mut late, writers(7, 9)),
            (None, false),
            "it queries only the writers"
        );
        late.saw(20_000);
        // Transaction 7 may hold any sequence up to 20,000.
        assert_eq!(look(&mut late, writers(7, 9)), (Some(i64::MIN), false));
        late.saw(20_010);
        assert_eq!(look(&mut late, writers(7, 12)), (Some(i64::MIN), false));
        // All transactions before 12 have ended.
        assert_eq!(look(&mut late, writers(12, 14)), (Some(i64::MIN), true));
        assert_eq!(look(&mut late, writers(13, 14)).0, Some(20_000));
        assert_eq!(look(&mut late, writers(14, 15)), (Some(20_000), false));
        assert_eq!(look(&mut late, writers(14, 15)), (Some(20_010), false));
    }

    #[test]
    fn a_relay_that_begins_looks_at_the_newest() {
        let (mut late, now) = (Late::default(), Instant::now());
        let first = next(&mut late, now, None).expect("a first query");
        assert_eq!((first.behind, first.known), (None, i64::MIN));
        late.saw(1_000_000);
        late.read(last(now, TOOK), None, writers(1, 1));
        let later = now + INTERVAL;
        assert_eq!(
            next(&mut late, later, None),
            None,
            "claims have passed no message"
        );
        let look = next(&mut late, later, PASSED).expect("a query is due");
        assert_eq!(look.behind, Some(1_000_000 - AT_FIRST));
        assert_eq!((look.due_before, look.known), (5, 1_000_000));
    }

    #[test]
    fn looks_take_a_part_of_the_time_and_are_owed() {
        let (mut late, now) = (Late::default(), Instant::now());
        assert_eq!(late.again_at(&pass(now, now, PASSED)), None);
        let took = Duration::from_millis(100);
        late.read(last(now, took), None, writers(1, 1));
        assert_eq!(
            late.again_at(&pass(now, now + TOOK, PASSED)),
            Some(now + INTERVAL),
            "one slow query does not count"
        );
        late.read(last(now, took), None, writers(1, 1));
        assert_eq!(next(&mut late, now + INTERVAL, PASSED), None);
        assert_eq!(
            late.again_at(&pass(now, now, PASSED)),
            None,
            "the query was made"
        );
        let since = now + TOOK;
        assert_eq!(
            late.again_at(&pass(since, since, PASSED)),
            Some(now + REST * took)
        );
        assert_eq!(
            late.again_at(&pass(since, since, None)),
            None,
            "claims have passed no message"
        );
        late.was_too_slow(last(since, took));
        let later = since + REST * took;
        let look = next(&mut late, later, PASSED).expect("a query is due");
        assert_eq!(look.behind, None, "the search starts over");
    }

    /// While a round reads its last part, a message may become visible in its first part.
    #[test]
    fn a_round_of_several_looks_knows_the_writers_of_its_first_one() {
        let (mut late, mut now) = (Late::default(), Instant::now());
        late.saw(3);
        let mut look = |late: &mut Late, upto, found| {
            now += INTERVAL;
            let look = next(late, now, PASSED).expect("a query is due");
            late.read(last(now, TOOK), upto, found);
            look.behind
        };
        look(&mut late, None, writers(5, 6));
        look(&mut late, None, writers(5, 6));
        assert_eq!(look(&mut late, Some(2), writers(5, 7)), Some(3 - AT_FIRST));
        assert_eq!(
            look(&mut late, None, writers(7, 7)),
            Some(2),
            "the round continues"
        );
        assert_eq!(look(&mut late, None, writers(7, 7)), Some(3 - AT_FIRST));
        assert_eq!(look(&mut late, None, writers(7, 7)), Some(3));
    }
}
