//! Looks for what is committed late.

use std::time::{Duration, Instant};

use super::lanes::SWEEP_SHARE;
use crate::store::relay::claim::Position;
use crate::store::relay::late::{LookForLate, Writers};

/// Messages that one look finds.
pub(in crate::relay) const STEP: usize = 500;
/// A round begins no sooner than this after the last one.
const INTERVAL: Duration = Duration::from_millis(200);
/// A look for streams of the newest messages goes back so many sequences.
const NEWEST: i64 = 5_000;
/// A relay that has just begun looks at so many of the newest sequences.
const AT_FIRST: i64 = 10_000;

/// Looks at the newest sequences.
///
/// A message has its place in a lane by the time from which on it is available, mostly the time at which its
/// transaction began. Claims may have passed that place when the message is committed. Its sequence tells more:
/// those that were given before some moment have all come when the transactions have ended that wrote at that
/// moment. So a round reads what stands behind the last sequence of which this is known, and no more, whatever else
/// waits in the outbox.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// Up to this one all sequences have come, and were looked at since; before this is known, most of them have.
    behind: Option<i64>,
    is_known: bool,
    /// What is known once all transactions before this one have ended: all up to that sequence has come.
    next: Option<(i64, i64)>,
    /// The newest sequence that was seen, and that the last round knew of. A transaction gets its number right after
    /// its first sequence: what was seen by the round before had one.
    newest: Option<i64>,
    known: Option<i64>,
    /// Where the round is that is under way, and the writers when it began.
    under_way: Option<(i64, Writers)>,
    /// When the last round began, when the last look ended, how long it took, and the one before.
    began: Option<Instant>,
    last: Option<(Instant, Duration)>,
    before: Duration,
}

impl Late {
    /// A message of this sequence was committed.
    pub(super) fn saw(&mut self, sequence: i64) {
        self.newest = self.newest.max(Some(sequence));
    }

    /// The newest messages are behind this one.
    pub(super) fn before_newest(&self) -> i64 {
        self.newest
            .map_or(i64::MAX, |newest| newest.saturating_sub(NEWEST))
    }

    /// The look that is to be made now. Claims have passed nothing that is due since `passed`; `None`: nothing at
    /// all.
    pub(super) fn next(&self, now: Instant, passed: Option<Position>) -> Option<LookForLate> {
        let is_due = self.due_at().is_none_or(|at| now >= at);
        let is_of_use = self.is_of_use(passed);
        let place = self.under_way.map(|(place, _)| place);
        (is_due && is_of_use).then(|| LookForLate {
            behind: place.or(self.behind),
            due_before: passed.unwrap_or(Position::START).available_at,
            known: self.newest.unwrap_or(i64::MIN),
        })
    }

    /// When the next look may be made.
    fn due_at(&self) -> Option<Instant> {
        let (ended, took) = self.last?;
        // A single one that took long may have waited for something else.
        let took = took.min(self.before);
        let interval = match self.under_way {
            Some(_) => Duration::ZERO,
            None => INTERVAL,
        };
        Some(ended + interval.max(SWEEP_SHARE * took))
    }

    fn is_of_use(&self, passed: Option<Position>) -> bool {
        passed.is_some() || self.behind.is_none()
    }

    /// When a look may be made, unless a round has ended that began since then.
    pub(super) fn owed_at(&self, since: Instant, passed: Option<Position>) -> Option<Instant> {
        let is_done = self.under_way.is_none() && self.began >= Some(since);
        self.due_at().filter(|_| !is_done && self.is_of_use(passed))
    }

    /// A look has found these writers, and read up to this sequence; `None`: to the end. `true`: from now on nothing
    /// is missed; what was committed before may have been.
    pub(super) fn learn(
        &mut self,
        now: Instant,
        upto: Option<i64>,
        writers: Writers,
        took: Duration,
    ) -> bool {
        self.before = self.last.map_or(Duration::ZERO, |(_, took)| took);
        self.last = Some((now, took));
        if self.under_way.is_none() {
            self.began = Some(now);
        }
        let writers = self
            .under_way
            .take()
            .map_or(writers, |(_, writers)| writers);
        if let Some(upto) = upto {
            self.under_way = Some((upto, writers));
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

    /// A look took too long: they begin anew, and the patrol finds what they miss meanwhile.
    pub(super) fn was_too_slow(&mut self, now: Instant, took: Duration) {
        *self = Self {
            newest: self.newest,
            began: Some(now),
            last: Some((now, took)),
            before: took,
            is_known: true,
            ..Self::default()
        };
    }

    /// Looks begin anew: sequences may have come that none has seen.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOK: Duration = Duration::from_millis(1);
    const PASSED: Option<Position> = Some(Position {
        available_at: 5,
        sequence: i64::MIN,
    });

    fn writers(oldest: i64, next: i64) -> Writers {
        Writers { oldest, next }
    }

    /// R8: a look begins behind what has come, and never behind what may still come.
    #[test]
    fn a_look_begins_behind_the_last_sequence_of_which_all_before_have_come() {
        let (mut late, mut now) = (Late::default(), Instant::now());
        let mut look = |late: &mut Late, found: Writers| {
            now += INTERVAL;
            let look = late.next(now, PASSED).expect("it is time");
            (look.behind, late.learn(now, None, found, TOOK))
        };
        assert_eq!(
            look(&mut late, writers(7, 9)),
            (None, false),
            "it only asks"
        );
        late.saw(20_000);
        // Transaction 7 may have given any sequence up to 20,000.
        assert_eq!(look(&mut late, writers(7, 9)), (Some(i64::MIN), false));
        late.saw(20_010);
        assert_eq!(look(&mut late, writers(7, 12)), (Some(i64::MIN), false));
        // All before 12 have ended.
        assert_eq!(look(&mut late, writers(12, 14)), (Some(i64::MIN), true));
        assert_eq!(look(&mut late, writers(13, 14)).0, Some(20_000));
        assert_eq!(look(&mut late, writers(14, 15)), (Some(20_000), false));
        assert_eq!(look(&mut late, writers(14, 15)), (Some(20_010), false));
    }

    #[test]
    fn a_relay_that_begins_looks_at_the_newest() {
        let (mut late, now) = (Late::default(), Instant::now());
        let first = late.next(now, None).expect("it knows nothing");
        assert_eq!((first.behind, first.known), (None, i64::MIN));
        late.saw(1_000_000);
        late.learn(now, None, writers(1, 1), TOOK);
        let later = now + INTERVAL;
        assert_eq!(late.next(later, None), None, "no claim has passed anything");
        let look = late.next(later, PASSED).expect("it is time");
        assert_eq!(look.behind, Some(1_000_000 - AT_FIRST));
        assert_eq!((look.due_before, look.known), (5, 1_000_000));
    }

    #[test]
    fn looks_take_a_part_of_the_time_and_are_owed() {
        let (mut late, now) = (Late::default(), Instant::now());
        assert_eq!(late.owed_at(now, PASSED), None);
        let took = Duration::from_millis(100);
        late.learn(now, None, writers(1, 1), took);
        assert_eq!(
            late.owed_at(now + TOOK, PASSED),
            Some(now + INTERVAL),
            "once"
        );
        late.learn(now, None, writers(1, 1), took);
        assert_eq!(late.next(now + INTERVAL, PASSED), None);
        assert_eq!(late.owed_at(now, PASSED), None, "it was made");
        let since = now + TOOK;
        assert_eq!(late.owed_at(since, PASSED), Some(now + SWEEP_SHARE * took));
        assert_eq!(
            late.owed_at(since, None),
            None,
            "no claim has passed anything"
        );
        late.was_too_slow(since, took);
        let later = since + SWEEP_SHARE * took;
        let look = late.next(later, PASSED).expect("it is time");
        assert_eq!(look.behind, None, "it begins anew");
    }

    /// What was read first may have come since the end of a round was read.
    #[test]
    fn a_round_of_several_looks_knows_the_writers_of_its_first_one() {
        let (mut late, mut now) = (Late::default(), Instant::now());
        late.saw(3);
        let mut look = |late: &mut Late, upto, found| {
            now += INTERVAL;
            let look = late.next(now, PASSED).expect("it is time");
            late.learn(now, upto, found, TOOK);
            look.behind
        };
        look(&mut late, None, writers(5, 6));
        look(&mut late, None, writers(5, 6));
        assert_eq!(look(&mut late, Some(2), writers(5, 7)), Some(3 - AT_FIRST));
        assert_eq!(look(&mut late, None, writers(7, 7)), Some(2), "it goes on");
        assert_eq!(look(&mut late, None, writers(7, 7)), Some(3 - AT_FIRST));
        assert_eq!(look(&mut late, None, writers(7, 7)), Some(3));
    }
}
