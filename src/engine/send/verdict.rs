//! The verdict on a message: the result to record, and the time of a retry.

use std::time::Duration;

use crate::backoff::Backoff;
use crate::dispatch::{Failure, Outcome, Pause, Response};
pub(crate) use crate::engine::settle::sql::settle::Attempt;
use crate::engine::settle::sql::split::Parts;
use crate::status::ReasonCode;

/// The result to record for a message.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    Delivered(Response),
    /// Settled as delivered without a send: it becomes an event of a feed.
    Stored,
    /// Settled as delivered without a send: nobody wants the message.
    NoSubscriber,
    Deduplicated(i64),
    /// Retry after this delay.
    Retry(Failure, Duration, Attempt),
    Dead(Failure, Attempt),
    /// Fan out: insert a message for each of these destinations.
    Split(Parts),
    Released,
}

impl Verdict {
    /// The verdict after a send. `attempts` is the number of earlier attempts.
    pub(crate) fn of_outcome(outcome: Outcome, attempts: u32, retries: &Retries) -> Self {
        match outcome {
            Outcome::Delivered(response) => Self::Delivered(response),
            Outcome::Retry(failure) => Self::of_failure(failure, attempts, retries),
            Outcome::Wait(failure) => {
                let made = attempts.saturating_add(1);
                let delay = failure
                    .retry_after
                    .unwrap_or_else(|| delay(&failure, made, retries));
                Self::Retry(failure, delay, Attempt::NotCounted)
            }
            Outcome::Dead(failure) => Self::Dead(failure, Attempt::Counted),
        }
    }

    /// The verdict on a message that expired before its send.
    pub(crate) fn expired() -> Self {
        let failure = Failure::new(ReasonCode::Expired, "expired before delivery");
        Self::Dead(failure, Attempt::NotCounted)
    }

    /// The verdict after a failed attempt: a retry, or a dead letter. `attempts` is the number of earlier attempts.
    pub(crate) fn of_failure(failure: Failure, attempts: u32, retries: &Retries) -> Self {
        let made = attempts.saturating_add(1);
        // If an operator must act, the message is kept until then.
        let is_kept = failure.pause == Some(Pause::UntilResumed);
        if made >= retries.max_attempts && !is_kept {
            return Self::Dead(failure, Attempt::Counted);
        }
        let delay = delay(&failure, made, retries);
        Self::Retry(failure, delay, Attempt::Counted)
    }
}

/// How often and when a message is retried.
#[derive(Debug, Clone)]
pub(crate) struct Retries {
    pub(crate) max_attempts: u32,
    pub(crate) backoff: Backoff,
}

fn delay(failure: &Failure, attempts: u32, retries: &Retries) -> Duration {
    let delay = retries.backoff.delay(attempts, fastrand::f64());
    failure.retry_after.map_or(delay, |asked| asked.max(delay))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::backoff::Backoff;

    /// R21
    #[test]
    fn messages_that_failed_together_do_not_return_together() {
        let retries = Retries {
            max_attempts: 20,
            backoff: Backoff::default(),
        };
        let delays: HashSet<Duration> = (0..50)
            .map(|_| {
                let failure = Failure::new(ReasonCode::Connect, "");
                match Verdict::of_failure(failure, 3, &retries) {
                    Verdict::Retry(_, delay, Attempt::Counted) => delay,
                    other => panic!("{other:?}"),
                }
            })
            .collect();
        assert!(delays.len() > 25, "{delays:?}");
        for delay in delays {
            assert!(delay >= Duration::from_secs(20) && delay <= Duration::from_secs(40));
        }
    }
}
