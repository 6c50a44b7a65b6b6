//! Numbers of JSON as exact decimals.

use std::cmp::Ordering;

/// The significant digits that fit into a `u64`.
const LEADING: usize = 19;
/// Exponents are cut to this size. So many digits are in no payload, and a pattern has smaller exponents: a number that is
/// cut stays larger, or nearer to zero, than each number of a pattern.
const MOST_EXPONENT: i32 = 1_000_000_000;

/// A number, exactly: `0.DIGITS × 10^point`. One number has one form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decimal {
    is_negative: bool,
    /// Of zero: the least.
    point: i32,
    /// The first significant digits, as if there were [`LEADING`].
    leading: u64,
    /// The other digits, without zeros at the end.
    rest: Box<[u8]>,
}

impl Decimal {
    /// Reads a number as JSON has it.
    pub(super) fn read(text: &str) -> Self {
        let size = text.strip_prefix('-').unwrap_or(text);
        let (digits, exponent) = size.split_once(['e', 'E']).unwrap_or((size, "0"));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let digits = || {
            whole
                .bytes()
                .chain(fraction.bytes())
                .map(|digit| digit & 15)
        };
        let zeros = digits().take_while(|digit| *digit == 0).count();
        let mut significant = digits().skip(zeros);
        let leading = (0..LEADING).fold(0, |number: u64, _| {
            number * 10 + u64::from(significant.next().unwrap_or(0))
        });
        if leading == 0 {
            return Self::zero();
        }
        let mut rest: Vec<u8> = significant.collect();
        let end = rest.iter().rposition(|digit| *digit != 0);
        rest.truncate(end.map_or(0, |last| last + 1));
        let before_point = |digits: usize| i32::try_from(digits).unwrap_or(MOST_EXPONENT);
        Self {
            is_negative: text.starts_with('-'),
            point: exponent_of(exponent)
                .saturating_add(before_point(whole.len()))
                .saturating_sub(before_point(zeros)),
            leading,
            rest: rest.into(),
        }
    }

    fn zero() -> Self {
        Self {
            is_negative: false,
            point: i32::MIN,
            leading: 0,
            rest: Box::default(),
        }
    }

    /// The bytes that a comparison reads, at most.
    pub(super) fn bytes(&self) -> usize {
        self.rest.len()
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        let size = |one: &Self| (one.point, one.leading);
        let by_size = || (size(self).cmp(&size(other))).then_with(|| self.rest.cmp(&other.rest));
        match (self.is_negative, other.is_negative) {
            (false, false) => by_size(),
            (true, true) => by_size().reverse(),
            (false, true) => Ordering::Greater,
            (true, false) => Ordering::Less,
        }
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn exponent_of(text: &str) -> i32 {
    let cut = if text.starts_with('-') {
        -MOST_EXPONENT
    } else {
        MOST_EXPONENT
    };
    let exponent = text.parse().unwrap_or(cut);
    exponent.clamp(-MOST_EXPONENT, MOST_EXPONENT)
}
