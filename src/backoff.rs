//! How long a message waits before its next attempt.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The delay between attempts: exponential with jitter, or a table.
///
/// Written `exponential(5s, 1h)` or `5s,10s,20s,40s`.
///
/// ```
/// use diesel_outbox::Backoff;
/// use std::time::Duration;
///
/// let backoff: Backoff = "5s,10s,20s".parse()?;
/// assert_eq!(backoff.delay(2, 0.0), Duration::from_secs(10));
/// assert_eq!(backoff.delay(9, 0.0), Duration::from_secs(20));
/// # Ok::<(), diesel_outbox::BadBackoff>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backoff {
    /// `base` doubled with each attempt up to `cap`, then "equal jitter": half of it is certain,
    /// the other half is random, so that messages that failed together do not return together.
    /// (Marc Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.)
    Exponential {
        /// Before jitter, the delay after the first failed attempt.
        base: Duration,
        /// The longest delay.
        cap: Duration,
    },
    /// One delay for each attempt, exactly as written; the last one is used from then on.
    Table(Vec<Duration>),
}

impl Backoff {
    /// The delay after the `attempts`-th failed attempt (1, 2, …).
    ///
    /// Pure: `random`, from 0.0 up to 1.0, is the only source of chance.
    pub fn delay(&self, attempts: u32, random: f64) -> Duration {
        let earlier = attempts.saturating_sub(1);
        match self {
            Self::Exponential { base, cap } => {
                let doubled = base.saturating_mul(2_u32.saturating_pow(earlier));
                let half = doubled.min(*cap) / 2;
                half + half.mul_f64(random.clamp(0.0, 1.0))
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
        Self::Exponential {
            base: Duration::from_secs(5),
            cap: Duration::from_secs(3600),
        }
    }
}

impl FromStr for Backoff {
    type Err = BadBackoff;

    fn from_str(text: &str) -> Result<Self, BadBackoff> {
        let text = text.trim();
        let duration = |part: &str| {
            humantime::parse_duration(part.trim())
                .map_err(|error| BadBackoff(format!("{:?}: {error}", part.trim())))
        };
        if let Some(arguments) = text.strip_prefix("exponential") {
            let (base, cap) = arguments
                .trim()
                .strip_prefix('(')
                .and_then(|rest| rest.strip_suffix(')'))
                .and_then(|inner| inner.split_once(','))
                .ok_or_else(|| BadBackoff("expected exponential(base, cap)".to_owned()))?;
            let (base, cap) = (duration(base)?, duration(cap)?);
            if base.is_zero() || cap < base {
                return Err(BadBackoff(
                    "the base has to be longer than zero and no longer than the cap".to_owned(),
                ));
            }
            return Ok(Self::Exponential { base, cap });
        }
        let delays = text
            .split(',')
            .map(duration)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self::Table(delays))
    }
}

impl fmt::Display for Backoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exponential { base, cap } => write!(
                f,
                "exponential({}, {})",
                humantime::format_duration(*base),
                humantime::format_duration(*cap)
            ),
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

/// A backoff that cannot be understood, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bad backoff: {0} (write exponential(5s, 1h) or 5s,10s,20s)")]
pub struct BadBackoff(String);

#[cfg(test)]
mod tests {
    use proptest::prelude::{
        Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
    };

    use super::*;

    fn durations() -> impl Strategy<Value = Duration> {
        (1_u64..10_000_000).prop_map(Duration::from_millis)
    }

    fn backoffs() -> impl Strategy<Value = Backoff> {
        prop_oneof![
            (durations(), durations()).prop_map(|(a, b)| Backoff::Exponential {
                base: a.min(b),
                cap: a.max(b)
            }),
            proptest::collection::vec(durations(), 1..8).prop_map(Backoff::Table),
            Just(Backoff::default()),
        ]
    }

    proptest! {
        #[test]
        fn an_exponential_delay_stays_between_half_the_step_and_the_cap(
            base in durations(), cap in durations(), attempts in any::<u32>(), random in 0.0..1.0,
        ) {
            let (base, cap) = (base.min(cap), base.max(cap));
            let delay = Backoff::Exponential { base, cap }.delay(attempts, random);
            prop_assert!(delay >= base / 2 - Duration::from_nanos(1));
            prop_assert!(delay <= cap);
        }

        #[test]
        fn without_chance_a_delay_never_shrinks_with_attempts(
            base in durations(), cap in durations(), attempts in 1_u32..100, random in 0.0..1.0,
        ) {
            let backoff = Backoff::Exponential { base: base.min(cap), cap: base.max(cap) };
            prop_assert!(backoff.delay(attempts + 1, random) >= backoff.delay(attempts, random));
        }

        #[test]
        fn a_table_gives_its_own_entries_and_then_the_last(
            delays in proptest::collection::vec(durations(), 1..8), attempts in 1_u32..20, random in 0.0..1.0,
        ) {
            let expected = delays[(attempts as usize - 1).min(delays.len() - 1)];
            prop_assert_eq!(Backoff::Table(delays).delay(attempts, random), expected);
        }

        #[test]
        fn what_is_shown_is_what_is_read(backoff in backoffs()) {
            prop_assert_eq!(backoff.to_string().parse::<Backoff>(), Ok(backoff));
        }

        #[test]
        fn any_text_gives_a_backoff_or_an_error(text in ".{0,40}") {
            let _ = text.parse::<Backoff>();
        }
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
        ] {
            let error = text.parse::<Backoff>().expect_err(text).to_string();
            assert!(error.contains("exponential(5s, 1h)"), "{error}");
        }
    }
}
