//! A pass over the whole outbox, a range of sequences at a time.

use std::time::Duration;

use crate::sql::range::Range;

/// The width of the first range after zero.
const FIRST_WIDTH: i64 = 4096;
/// After a range that took less than this, beside the time of the fastest one, the next range is eight times as wide.
const SHORT: Duration = Duration::from_millis(5);
/// After a range that took longer than this, beside the time of the fastest one, the next range is half as wide, but not
/// narrower than the first: only a range that the server has cancelled makes it so.
const LONG: Duration = Duration::from_millis(50);

/// One pass over all sequences, or over some.
///
/// A range bounds the rows that its statement reads, including dead rows that an old snapshot keeps in the index. A
/// `LIMIT` does not count those dead rows.
#[derive(Debug)]
pub(super) struct Ranges {
    next: Option<Range>,
    width: i64,
    /// The time of the fastest range. The way to the server and back is part of each: on a long way, no range is short.
    fastest: Duration,
    /// The last sequence before the next of `then`.
    end: i64,
    then: std::vec::IntoIter<Range>,
}

impl Default for Ranges {
    /// All sequences.
    fn default() -> Self {
        Self::until(i64::MAX)
    }
}

impl Ranges {
    /// Starts at the beginning. Sequences below 1 exist only if an operator has written them by hand.
    pub(super) fn until(end: i64) -> Self {
        Self {
            next: Some(Range {
                after: i64::MIN,
                upto: end.min(0),
            }),
            width: FIRST_WIDTH,
            fastest: Duration::MAX,
            end,
            then: Vec::new().into_iter(),
        }
    }

    /// Reads ranges again, each at once if it does not take too long.
    pub(super) fn again(ranges: Vec<Range>) -> Self {
        let mut again = Self {
            then: ranges.into_iter(),
            ..Self::default()
        };
        again.begin_next();
        again
    }

    fn begin_next(&mut self) {
        self.next = self.then.next();
        if let Some(range) = self.next {
            self.width = range.upto.saturating_sub(range.after);
            self.end = range.upto;
        }
    }

    /// The range to read now; `None`: everything was read.
    pub(super) fn next(&self) -> Option<Range> {
        self.next
    }

    /// The current range was read up to this sequence, in this time.
    pub(super) fn read(&mut self, upto: i64, took: Duration) {
        self.fastest = self.fastest.min(took);
        let longer = took.saturating_sub(self.fastest);
        self.width = match longer {
            _ if longer < SHORT => self.width.saturating_mul(8),
            _ if longer <= LONG => self.width.saturating_mul(2),
            _ => (self.width / 2).max(FIRST_WIDTH.min(self.width)),
        };
        match upto < self.end {
            true => self.next = Some(self.behind(upto)),
            false => self.begin_next(),
        }
    }

    /// The current range took too long and returned nothing.
    pub(super) fn was_too_wide(&mut self) {
        if let Some(range) = self.next {
            let width = i128::from(range.upto) - i128::from(range.after);
            self.width = i64::try_from(width / 8).unwrap_or(i64::MAX).max(1);
            self.next = Some(self.behind(range.after));
        }
    }

    fn behind(&self, after: i64) -> Range {
        Range {
            after,
            upto: after.saturating_add(self.width).min(self.end),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of statements of a pass over the sequences `rows`, if the server reads `each_millisecond` rows in a
    /// millisecond and cancels a statement after a second, on a way of so many milliseconds.
    fn statements(
        rows: std::ops::Range<i128>,
        each_millisecond: i128,
        mut way: impl FnMut() -> u64,
    ) -> usize {
        let mut ranges = Ranges::default();
        let mut last = i64::MIN;
        let mut count = 0;
        while let Some(range) = ranges.next() {
            count += 1;
            assert_eq!(range.after, last, "no sequence is skipped");
            let end = rows.end.min(i128::from(range.upto) + 1);
            let read = (end - rows.start.max(i128::from(range.after) + 1)).max(0);
            let took = u64::try_from(read / each_millisecond).expect("a time");
            if took > 1000 {
                ranges.was_too_wide();
            } else {
                last = range.upto;
                ranges.read(range.upto, Duration::from_millis(took + way()));
            }
            assert!(count < 100_000, "the pass has no end: {range:?}");
        }
        assert_eq!(last, i64::MAX);
        count
    }

    #[test]
    fn a_pass_takes_few_statements_and_none_that_reads_too_much() {
        let empty = statements(0..0, 1000, || 0);
        assert!(empty < 25, "{empty}");
        // Ten million rows, far from the beginning: 50 to 100 ms each.
        let many = statements(3_000_000_000..3_010_000_000, 1000, || 0);
        assert!((100..2100).contains(&many), "{many}");
        // A server so slow that one row takes a tenth of a second.
        let slow = statements(1_000_000..1_000_010, 1, || 0).max(1);
        assert!(slow < 200, "{slow}");
    }

    /// R65: a transaction goes to the server and back four times. A pass that took each range for a long one had no end.
    #[test]
    fn a_pass_ends_on_a_long_way_to_the_server_too() {
        for way in [6, 80, 600] {
            let empty = statements(0..0, 1000, || way);
            assert!(empty < 25, "{way} ms: {empty}");
            let many = statements(5_000_000..5_100_000, 1000, || way);
            assert!(many < 60, "{way} ms: {many}");
        }
        let mut rng = fastrand::Rng::with_seed(1);
        let empty = statements(0..0, 1000, || 40 + rng.u64(0..80));
        assert!(empty < 200, "{empty}");
    }

    #[test]
    fn a_pass_ends_with_the_last_sequence() {
        for end in [-5, 0, 70, 5000] {
            let (mut ranges, mut last) = (Ranges::until(end), i64::MIN);
            while let Some(range) = ranges.next() {
                assert_eq!(range.after, last);
                last = range.upto;
                ranges.read(last, LONG * 9);
            }
            assert_eq!(last, end);
        }
    }

    #[test]
    fn ranges_are_read_again_and_no_others() {
        let range = |after, upto| Range { after, upto };
        let (first, second) = (range(4096, 8192), range(i64::MIN, 0));
        let mut ranges = Ranges::again(vec![first, second]);
        assert_eq!(ranges.next(), Some(first));
        ranges.was_too_wide();
        let part = ranges.next().expect("a part");
        assert_eq!(part, range(4096, 4096 + 512));
        let mut last = first.after;
        while let Some(part) = ranges.next().filter(|part| *part != second) {
            assert_eq!(part.after, last);
            last = part.upto;
            ranges.read(last, SHORT);
        }
        assert_eq!((last, ranges.next()), (first.upto, Some(second)));
        ranges.read(second.upto, SHORT);
        assert_eq!(ranges.next(), None);
        assert_eq!(Ranges::again(Vec::new()).next(), None);
    }
}
