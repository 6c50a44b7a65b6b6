//! Backoff: how long a message waits before its next attempt.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The delay between attempts: exponential with jitter, or a table.
///
/// Written `exponential(5s, 1h)`, `exponential(5s, 1h, jitter 20%)` or `5s,10s,20s,40s`.
///
/// ```
/// use diesel_outbox::Backoff;
/// use std::time::Duration;
///
/// let backoff: Backoff = "5s,10s,20s".parse()?;
/// assert_eq!(backoff.delay(2, 0.0), Duration::from_secs(10));
/// assert_eq!(backoff.delay(9, 0.0), Duration::from_secs(20));
///
/// let backoff = Backoff::exponential(Duration::from_secs(5), Duration::from_secs(3600)).jitter(20);
/// assert_eq!(backoff.to_string(), "exponential(5s, 1h, jitter 20%)");
/// assert_eq!(backoff.delay(2, 0.0), Duration::from_secs(8));
/// assert_eq!(backoff.delay(2, 1.0), Duration::from_secs(10));
/// # Ok::<(), diesel_outbox::BadBackoff>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backoff {
    /// Starts at `base` and doubles with each attempt, up to `cap`. A share of each delay is random, so
    /// messages that failed together are not retried together.
    /// (Marc Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.)
    Exponential {
        /// The delay after the first failed attempt, before jitter.
        base: Duration,
        /// The maximum delay.
        cap: Duration,
        /// The random share of the delay, in percent (0 to 100). Defaults to 50 ("equal jitter").
        jitter: u8,
    },
    /// One delay for each attempt, without jitter. Later attempts use the last delay.
    Table(Vec<Duration>),
}

/// Percent.
const DEFAULT_JITTER: u8 = 50;

impl Backoff {
    /// A delay that starts at `base` and doubles with each attempt, up to `cap`. Half of each delay is random.
    pub fn exponential(base: Duration, cap: Duration) -> Self {
        Self::Exponential {
            base,
            cap,
            jitter: DEFAULT_JITTER,
        }
    }

    /// Sets the random share of an exponential delay, in percent (0 to 100). Larger values count as 100.
    /// Defaults to 50. A table has no jitter and stays unchanged.
    #[must_use]
    pub fn jitter(mut self, percent: u8) -> Self {
        if let Self::Exponential { jitter, .. } = &mut self {
            *jitter = percent.min(100);
        }
        self
    }

    /// The delay after the `attempts`-th failed attempt (1, 2, …).
    ///
    /// A pure function: the randomness comes from `random` (0.0 to 1.0).
    pub fn delay(&self, attempts: u32, random: f64) -> Duration {
        let earlier = attempts.saturating_sub(1);
        match self {
            Self::Exponential { base, cap, jitter } => {
                let doubled = base.saturating_mul(2_u32.saturating_pow(earlier));
                let step = doubled.min(*cap);
                let most = step / 100 * u32::from(*jitter).min(100);
                let less = most.mul_f64(1.0 - random.clamp(0.0, 1.0)).min(most);
                step - less
            }
            Self::Table(delays) => {
                let last = delays.len().saturating_sub(1);
                let index = usize::try_from(earlier).unwrap_or(last).min(last);
                delays.get(index).copied().unwrap_or_default()
            }
        }
    }
}

impl Default for Backoff {
    /// `exponential(5s, 1h)`.
    fn default() -> Self {
        Self::exponential(Duration::from_secs(5), Duration::from_secs(3600))
    }
}

impl FromStr for Backoff {
    type Err = BadBackoff;

    fn from_str(text: &str) -> Result<Self, BadBackoff> {
        let text = text.trim();
        let duration = |part: &str| {
            humantime::parse_duration(part.trim())
                .map_err(|_| BadBackoff(format!("{:?} is not a duration such as 5s", part.trim())))
        };
        if let Some(arguments) = text.strip_prefix("exponential") {
            let expected = || BadBackoff("expected exponential(base, cap)".to_owned());
            let (base, rest) = arguments
                .trim()
                .strip_prefix('(')
                .and_then(|rest| rest.strip_suffix(')'))
                .and_then(|inner| inner.split_once(','))
                .ok_or_else(expected)?;
            let (cap, jitter) = match rest.split_once(',') {
                Some((cap, jitter)) => (cap, percent(jitter)?),
                None => (rest, DEFAULT_JITTER),
            };
            let (base, cap) = (duration(base)?, duration(cap)?);
            if base.is_zero() || cap < base {
                return Err(BadBackoff(
                    "the base must be longer than zero and at most the cap".to_owned(),
                ));
            }
            return Ok(Self::exponential(base, cap).jitter(jitter));
        }
        let delays = text
            .split(',')
            .map(duration)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self::Table(delays))
    }
}

/// `jitter 20%`
fn percent(text: &str) -> Result<u8, BadBackoff> {
    text.trim()
        .strip_prefix("jitter")
        .and_then(|rest| rest.trim().strip_suffix('%'))
        .and_then(|number| number.trim_end().parse().ok())
        .filter(|percent| *percent <= 100)
        .ok_or_else(|| {
            BadBackoff(format!(
                "expected jitter 0% to jitter 100%, not {:?}",
                text.trim()
            ))
        })
}

impl fmt::Display for Backoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exponential { base, cap, jitter } => {
                let (base, cap) = (
                    humantime::format_duration(*base),
                    humantime::format_duration(*cap),
                );
                write!(f, "exponential({base}, {cap}")?;
                if *jitter != DEFAULT_JITTER {
                    write!(f, ", jitter {jitter}%")?;
                }
                f.write_str(")")
            }
            Self::Table(delays) => {
                for (index, delay) in delays.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    write!(f, "{comma}{}", humantime::format_duration(*delay))?;
                }
                Ok(())
            }
        }
    }
}

/// A backoff that cannot be parsed, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad backoff: {0} (write exponential(5s, 1h), exponential(5s, 1h, jitter 20%) or 5s,10s,20s)"
)]
pub struct BadBackoff(String);

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    fn durations() -> impl Strategy<Value = Duration> {
        (1_u64..10_000_000).prop_map(Duration::from_millis)
    }

    fn backoffs() -> impl Strategy<Value = Backoff> {
        prop_oneof![
            (durations(), durations(), 0..=100_u8).prop_map(|(a, b, jitter)| Backoff::exponential(
                a.min(b),
                a.max(b)
            )
            .jitter(jitter)),
            proptest::collection::vec(durations(), 1..8).prop_map(Backoff::Table),
            Just(Backoff::default()),
        ]
    }

    /// Equal, except for rounding.
    fn is_close(a: Duration, b: Duration) -> bool {
        a.abs_diff(b) <= Duration::from_micros(1).max(b / 1_000_000)
    }

    proptest! {
        /// R21, R41
        #[test]
        fn the_jitter_takes_its_share_of_the_step_and_no_more(
            base in durations(), jitter in 0..=100_u8, attempts in 1_u32..8, random in 0.0..1.0,
        ) {
            // No step reaches the cap.
            let backoff = Backoff::exponential(base, base * 1000).jitter(jitter);
            let step = base * 2_u32.pow(attempts - 1);
            let certain = step.mul_f64(1.0 - f64::from(jitter) / 100.0);
            prop_assert!(is_close(backoff.delay(attempts, 0.0), certain));
            prop_assert_eq!(backoff.delay(attempts, 1.0), step);
            let expected = certain + step.saturating_sub(certain).mul_f64(random);
            prop_assert!(is_close(backoff.delay(attempts, random), expected));
            prop_assert!(backoff.delay(attempts, random) <= step);
        }

        /// R21
        #[test]
        fn each_step_is_twice_the_one_before_until_the_cap(
            base in durations(), doublings in 0_u32..20, jitter in 0..=100_u8, random in 0.0..1.0,
        ) {
            let cap = base * 2_u32.pow(doublings);
            let backoff = Backoff::exponential(base, cap).jitter(jitter);
            for attempts in 1..=doublings {
                let (this, next) = (backoff.delay(attempts, random), backoff.delay(attempts + 1, random));
                prop_assert!(is_close(next, this * 2), "{this:?} {next:?}");
            }
            let last = backoff.delay(doublings + 1, random);
            for attempts in [doublings + 2, doublings + 40, u32::MAX] {
                prop_assert_eq!(backoff.delay(attempts, random), last);
                prop_assert_eq!(backoff.delay(attempts, 1.0), cap);
            }
        }

        #[test]
        fn a_table_gives_its_own_entries_and_then_the_last(
            delays in proptest::collection::vec(durations(), 1..8), attempts in 1_u32..20, random in 0.0..1.0,
        ) {
            let expected = delays[(attempts as usize - 1).min(delays.len() - 1)];
            prop_assert_eq!(Backoff::Table(delays).delay(attempts, random), expected);
        }

        #[test]
        fn a_shown_backoff_is_read_back(backoff in backoffs()) {
            prop_assert_eq!(backoff.to_string().parse::<Backoff>(), Ok(backoff));
        }

        #[test]
        fn any_text_gives_a_backoff_or_an_error(text in ".{0,40}") {
            let _ = text.parse::<Backoff>();
        }
    }

    /// R41
    #[test]
    fn the_share_of_jitter_is_read_from_text() {
        let backoff = |text: &str| text.parse::<Backoff>().expect(text);
        let (base, cap) = (Duration::from_secs(5), Duration::from_secs(3600));
        let half = Backoff::exponential(base, cap);
        assert_eq!(backoff("exponential(5s, 1h)"), half);
        assert_eq!(backoff("exponential(5s, 1h, jitter 50%)"), half);
        assert_eq!(
            backoff("exponential(5s,1h,jitter 20 %)"),
            half.clone().jitter(20)
        );
        assert_eq!(
            backoff("exponential(5s, 1h, jitter 0%)").delay(1, 0.0),
            base
        );
        assert_eq!(
            backoff("exponential(5s, 1h, jitter 100%)").delay(1, 0.0),
            Duration::ZERO
        );
        assert_eq!(half.delay(1, 0.0), base / 2);
    }

    #[test]
    fn a_bad_backoff_is_an_error_that_shows_the_forms() {
        for text in [
            "",
            "soon",
            "5",
            "5s,,6s",
            "exponential(5s)",
            "exponential(1h, 5s)",
            "exponential(0s, 5s)",
            "exponential(5s, 1h, 20%)",
            "exponential(5s, 1h, jitter)",
            "exponential(5s, 1h, jitter 20)",
            "exponential(5s, 1h, jitter 101%)",
            "exponential(5s, 1h, jitter -1%)",
            "exponential(5s, 1h, jitter 20%, 3)",
            "exponential(5s, 1h,)",
        ] {
            let error = text.parse::<Backoff>().expect_err(text).to_string();
            assert!(error.contains("exponential(5s, 1h)"), "{error}");
        }
    }
}
