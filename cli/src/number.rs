//! Whole numbers on the command line, within limits.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A parser of whole numbers within these limits, such as `1_000_000` or `1000000`.
pub fn whole<T>(limits: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.replace('_', "").parse().ok();
        number
            .filter(|number| limits.contains(number))
            .ok_or_else(|| {
                let (least, most) = (limits.start(), limits.end());
                format!("not a whole number from {least} to {most}")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_beyond_the_limits_is_refused_with_the_limits() {
        let number = whole(1..=1_000_u32);
        assert_eq!(number("1_000"), Ok(1000));
        for text in ["0", "1001", "-1", "x", "", "1.5", "99999999999999999999"] {
            let error = number(text).expect_err(text);
            assert_eq!(error, "not a whole number from 1 to 1000");
        }
    }
}
