//! A token bucket: the rate limit of a destination.

use std::time::{Duration, Instant};

use crate::config::Rate;

/// The tokens of a rate limit. Has no clock: the time is a parameter.
#[derive(Debug)]
pub(super) struct Bucket {
    rate: Rate,
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    /// A full bucket.
    pub(super) fn new(rate: Rate, now: Instant) -> Self {
        let burst = f64::from(rate.burst.max(1));
        Self {
            rate,
            per_second: rate.per_second,
            burst,
            tokens: burst,
            filled: now,
        }
    }

    /// Sets the number of relays that share the rate.
    pub(super) fn share(&mut self, relays: u32) {
        let relays = f64::from(relays.max(1));
        self.per_second = self.rate.per_second / relays;
        self.burst = (f64::from(self.rate.burst) / relays).max(1.0);
    }

    /// Takes a token, or returns the time until the next token.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + passed * self.per_second).min(self.burst);
        self.filled = now;
        // The sum of small fractions may be slightly less than 1.
        if self.tokens >= 1.0 - 1e-9 {
            self.tokens -= 1.0;
            return Ok(());
        }
        let wait = (1.0 - self.tokens) / self.per_second;
        Err(Duration::try_from_secs_f64(wait).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;

    proptest! {
        #[test]
        fn no_span_of_time_has_more_than_its_rate_and_one_burst(
            per_second in 0.5_f64..2000.0,
            pauses in proptest::collection::vec(0_u64..300, 1..200),
        ) {
            let start = Instant::now();
            let rate = Rate::per_second(per_second);
            let mut bucket = Bucket::new(rate, start);
            let mut taken: Vec<Duration> = Vec::new();
            let mut at = Duration::ZERO;
            for pause in pauses {
                at += Duration::from_millis(pause);
                while let Err(wait) = bucket.take(start + at) {
                    at += wait + Duration::from_nanos(1);
                }
                taken.push(at);
            }
            for (first, from) in taken.iter().enumerate() {
                for (last, to) in taken.iter().enumerate().skip(first) {
                    let most = f64::from(rate.burst) + per_second * (*to - *from).as_secs_f64() + 1e-6;
                    prop_assert!((last - first + 1) as f64 <= most.floor() + 1.0);
                }
            }
        }
    }

    #[test]
    fn two_relays_have_half_of_the_rate_each() {
        let now = Instant::now();
        let mut bucket = Bucket::new(Rate::per_second(20.0), now);
        bucket.share(2);
        assert_eq!(bucket.take(now), Ok(()));
        assert_eq!(bucket.take(now), Err(Duration::from_millis(100)));
        bucket.share(1);
        assert_eq!(bucket.take(now), Err(Duration::from_millis(50)));
    }

    #[test]
    fn after_a_burst_the_next_one_waits() {
        let now = Instant::now();
        let mut bucket = Bucket::new(Rate::per_second(20.0), now);
        assert_eq!(bucket.take(now), Ok(()));
        assert_eq!(bucket.take(now), Ok(()));
        let wait = bucket.take(now).expect_err("the burst is used up");
        assert!(wait > Duration::from_millis(49) && wait < Duration::from_millis(51));
        assert_eq!(bucket.take(now + wait), Ok(()));
    }
}
