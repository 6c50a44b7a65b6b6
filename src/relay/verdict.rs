//! What is written down of a message, and when it is tried again.

use std::time::Duration;

use crate::backoff::Backoff;
use crate::dispatch::{Failure, Outcome, Pause, Response};
use crate::status::ReasonCode;

/// What is to be written down of a message.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    Delivered(Response),
    /// Delivered to nobody: no registered destination wants it.
    Nobody,
    Deduplicated,
    /// Waits for as long as this. Counts as so many attempts: 1, or 0 where nothing was sent.
    Retry(Failure, Duration, i32),
    /// Counts as so many attempts: 1, or 0 where nothing was sent.
    Dead(Failure, i32),
    /// It becomes a message for each of these destinations.
    Split(Vec<String>),
    Released,
}

impl Verdict {
    /// What follows from a send. `attempts` were made before it.
    pub(crate) fn of_outcome(outcome: Outcome, attempts: u32, retries: &Retries) -> Self {
        match outcome {
            Outcome::Delivered(response) => Self::Delivered(response),
            Outcome::Retry(failure) => Self::of_failure(failure, attempts, retries),
            Outcome::Wait(failure) => {
                let made = attempts.saturating_add(1);
                let delay = failure
                    .retry_after
                    .unwrap_or_else(|| delay(&failure, made, retries));
                Self::Retry(failure, delay, 0)
            }
            Outcome::Dead(failure) => Self::Dead(failure, 1),
        }
    }

    /// Its time is over, and it was not sent.
    pub(super) fn expired() -> Self {
        let error = "its time was over before it was sent";
        Self::Dead(Failure::new(ReasonCode::Expired, error), 0)
    }

    /// After a failed attempt: another one later, or the end. `attempts` were made before it.
    pub(crate) fn of_failure(failure: Failure, attempts: u32, retries: &Retries) -> Self {
        let made = attempts.saturating_add(1);
        // Where an operator has to act, the message is kept for him.
        let is_kept = failure.pause == Some(Pause::UntilResumed);
        if made >= retries.max_attempts && !is_kept {
            return Self::Dead(failure, 1);
        }
        let delay = delay(&failure, made, retries);
        Self::Retry(failure, delay, 1)
    }
}

/// How often and when a message is tried again.
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
                    Verdict::Retry(_, delay, 1) => delay,
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
