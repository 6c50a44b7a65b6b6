//! Since when a registered destination has failed: what the sends of this relay show, and what the table says.
//!
//! The table holds the time of the first failure since the last success, whatever the rate of traffic. The relays write
//! only changes: the first failure, and the first success after it. So a success at one relay clears what another
//! relay has written, and a relay that alone cannot reach the destination disables nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Gate;
use crate::clock;
use crate::dispatch::{Failure, Outcome, Pause};
use crate::relay::breaker::{Sign, sign};
use crate::status::ReasonCode;

/// After a recovery, a new failure is written no sooner than this: a destination that fails now and then costs few
/// writes.
const BETWEEN_WRITES: Duration = Duration::from_secs(60);
/// Without an answer of any destination for this long, this relay may have no network. Then a send without a connection
/// shows nothing about its destination.
const ALONE: Duration = Duration::from_secs(600);

/// When any registered destination has last answered this relay.
#[derive(Debug)]
pub(in crate::relay) struct Answers {
    origin: Instant,
    /// Milliseconds since the origin, plus one; 0: never.
    last: AtomicU64,
}

impl Answers {
    pub(in crate::relay) fn new() -> Self {
        Self {
            origin: clock::now(),
            last: AtomicU64::new(0),
        }
    }

    pub(super) fn note(&self, outcome: &Outcome, now: Instant) {
        let is_answer = match outcome {
            Outcome::Delivered(_) => true,
            Outcome::Retry(failure) | Outcome::Wait(failure) | Outcome::Dead(failure) => {
                failure.response.status.is_some()
            }
        };
        if is_answer {
            let millis = now.saturating_duration_since(self.origin).as_millis();
            let millis = u64::try_from(millis).unwrap_or(u64::MAX - 1);
            self.last.store(millis + 1, Ordering::Relaxed);
        }
    }

    /// Whether a destination has answered lately, so the network of this relay works.
    fn are_there(&self, now: Instant) -> bool {
        let last = self.last.load(Ordering::Relaxed).checked_sub(1);
        last.is_some_and(|millis| {
            let at = self.origin + Duration::from_millis(millis);
            now.saturating_duration_since(at) < ALONE
        })
    }
}

/// What the result of a send shows about the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shows {
    Works,
    Fails,
    Nothing,
}

fn shows(outcome: &Outcome, answers: &Answers, now: Instant) -> Shows {
    let of_failure = |failure: &Failure| match failure {
        one if one.response.status.is_some() => Shows::Fails,
        one if one.may_be_ours => match answers.are_there(now) {
            true => Shows::Fails,
            false => Shows::Nothing,
        },
        _ if sign(outcome) == Sign::Bad => Shows::Fails,
        _ => Shows::Nothing,
    };
    match outcome {
        Outcome::Delivered(_) => Shows::Works,
        Outcome::Retry(failure) | Outcome::Dead(failure) => of_failure(failure),
        Outcome::Wait(_) => Shows::Nothing,
    }
}

/// Whether the receiver says that the endpoint is gone, and the destination takes that as its end.
pub(super) fn is_gone(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Retry(failure)
        if failure.code == ReasonCode::Gone && failure.pause == Some(Pause::UntilResumed))
}

/// A change that the row of the destination must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::relay) enum RowNews {
    /// All sends have failed since this time.
    Fails(Instant),
    /// A send has succeeded.
    Works,
    /// All sends have failed for so long that the destination is to be disabled.
    HasFailedLong,
    /// The receiver says that the endpoint is gone, so the destination is to be disabled.
    Gone,
}

/// A duration, measured at a time.
#[derive(Debug, Clone, Copy)]
struct Age {
    was: Duration,
    at: Instant,
}

impl Age {
    fn now(self, now: Instant) -> Duration {
        self.was + now.saturating_duration_since(self.at)
    }
}

/// Whether a registered destination fails.
#[derive(Debug)]
pub(super) struct Failing {
    answers: Arc<Answers>,
    disable_after: Duration,
    /// The first failure since the last success, at this relay.
    since: Option<Instant>,
    /// For how long the destination has failed according to the table.
    in_table: Option<Age>,
    recovered: Option<Instant>,
    pub(super) news: Option<RowNews>,
}

impl Failing {
    pub(super) fn new(answers: Arc<Answers>, disable_after: Duration) -> Self {
        Self {
            answers,
            disable_after,
            since: None,
            in_table: None,
            recovered: None,
            news: None,
        }
    }

    /// Whether the next success must be noticed.
    pub(super) fn is_failing(&self) -> bool {
        self.since.is_some() || self.in_table.is_some()
    }

    /// Learns the result of a send.
    pub(super) fn record(&mut self, outcome: &Outcome, now: Instant) {
        if self.news == Some(RowNews::Gone) || is_gone(outcome) {
            self.news = Some(RowNews::Gone);
            return;
        }
        match shows(outcome, &self.answers, now) {
            Shows::Nothing => {}
            Shows::Works => {
                self.since = None;
                self.news = self.in_table.map(|_| RowNews::Works);
            }
            Shows::Fails => {
                let since = *self.since.get_or_insert(now);
                let wrote_lately = |at: Instant| now.saturating_duration_since(at) < BETWEEN_WRITES;
                self.news = match self.in_table {
                    Some(age) if age.now(now) >= self.disable_after => Some(RowNews::HasFailedLong),
                    // A success that is not written yet came before this failure.
                    Some(_) if self.news == Some(RowNews::Works) => Some(RowNews::Works),
                    None if !self.recovered.is_some_and(wrote_lately) => {
                        Some(RowNews::Fails(since))
                    }
                    Some(_) | None => None,
                };
            }
        }
    }

    /// Learns for how long the destination has failed according to the table.
    fn learn(&mut self, age: Option<Duration>, now: Instant) {
        if age.is_none() && self.in_table.is_some() {
            // Another relay's success counts as one of this relay.
            (self.since, self.recovered) = (None, Some(now));
        }
        self.in_table = age.map(|was| Age { was, at: now });
    }
}

impl Gate {
    /// The same gate, for a registered destination, whose row shows since when it has failed.
    pub(in crate::relay) fn with_row(
        self,
        answers: &Arc<Answers>,
        disable_after: Duration,
    ) -> Self {
        let failing = Failing::new(Arc::clone(answers), disable_after);
        self.lock().failing = Some(failing);
        Self {
            answers: Some(Arc::clone(answers)),
            ..self
        }
    }

    /// Takes the change to record in the row.
    pub(in crate::relay) fn take_row_news(&self) -> Option<RowNews> {
        self.lock().failing.as_mut()?.news.take()
    }

    /// Keeps a change that could not be recorded.
    pub(in crate::relay) fn keep_row_news(&self, news: RowNews) {
        if let Some(failing) = &mut self.lock().failing {
            failing.news.get_or_insert(news);
        }
    }

    /// Learns for how long the destination has failed according to the table.
    pub(in crate::relay) fn learn_row(&self, age: Option<Duration>, now: Instant) {
        let mut state = self.lock();
        if let Some(failing) = &mut state.failing {
            failing.learn(age, now);
            self.fails.store(failing.is_failing(), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::Response;
    use crate::status::ReasonCode;

    const AFTER: Duration = Duration::from_secs(100);

    fn failing() -> (Failing, Instant) {
        let answers = Arc::new(Answers::new());
        let now = answers.origin;
        (Failing::new(answers, AFTER), now)
    }

    fn failed(code: ReasonCode, status: Option<u16>) -> Outcome {
        let mut failure = Failure::new(code, "");
        failure.response = Response::new(status, None);
        Outcome::Retry(failure)
    }

    fn unreached() -> Outcome {
        let mut failure = Failure::new(ReasonCode::Dns, "");
        failure.may_be_ours = true;
        Outcome::Retry(failure)
    }

    fn delivered() -> Outcome {
        Outcome::Delivered(Response::default())
    }

    /// R50
    #[test]
    fn any_answer_but_success_and_a_hanging_receiver_are_failures() {
        for (outcome, fails) in [
            (failed(ReasonCode::ServerError, Some(500)), true),
            (failed(ReasonCode::ClientError, Some(404)), true),
            (failed(ReasonCode::RateLimited, Some(429)), true),
            (failed(ReasonCode::Timeout, None), true),
            (failed(ReasonCode::ConnectionLost, None), true),
            (failed(ReasonCode::Panic, None), false),
            (failed(ReasonCode::BlockedAddress, None), false),
            (unreached(), false),
            (Outcome::Wait(Failure::new(ReasonCode::Proxy, "")), false),
            (delivered(), false),
        ] {
            let (mut one, now) = failing();
            one.record(&outcome, now);
            assert_eq!(
                one.news,
                fails.then_some(RowNews::Fails(now)),
                "{outcome:?}"
            );
        }
        let rejected = Failure {
            response: Response::new(Some(400), None),
            ..Failure::new(ReasonCode::Rejected, "")
        };
        let (mut one, now) = failing();
        one.record(&Outcome::Dead(rejected), now);
        assert_eq!(one.news, Some(RowNews::Fails(now)));
    }

    /// R50: without any answer, the network of this relay may be the cause.
    #[test]
    fn an_unreachable_receiver_fails_only_beside_another_that_answers() {
        let (mut one, now) = failing();
        one.record(&unreached(), now);
        assert_eq!(one.news, None);
        one.answers
            .note(&failed(ReasonCode::ServerError, Some(500)), now);
        one.record(&unreached(), now);
        assert_eq!(one.news, Some(RowNews::Fails(now)));
        let (mut one, now) = failing();
        one.answers.note(&delivered(), now);
        one.record(&unreached(), now + ALONE);
        assert_eq!(one.news, None, "the answer was long ago");
    }

    #[test]
    fn only_the_first_failure_and_the_first_success_are_written() {
        let (mut one, now) = failing();
        let fails = failed(ReasonCode::ServerError, Some(500));
        one.record(&fails, now);
        assert_eq!(one.news.take(), Some(RowNews::Fails(now)));
        one.learn(Some(Duration::ZERO), now);
        let second = Duration::from_secs(1);
        one.record(&fails, now + second);
        assert_eq!(one.news, None);
        one.record(&delivered(), now + 2 * second);
        one.record(&fails, now + 3 * second);
        assert_eq!(
            one.news.take(),
            Some(RowNews::Works),
            "it was not written yet"
        );
        one.learn(None, now + 3 * second);
        one.record(&delivered(), now + 4 * second);
        assert_eq!(one.news, None);
        // A destination that fails now and then.
        one.record(&fails, now + 5 * second);
        assert_eq!(one.news, None);
        let later = now + 5 * second + BETWEEN_WRITES;
        one.record(&fails, later);
        assert_eq!(one.news, Some(RowNews::Fails(now + 5 * second)));
    }

    /// R50: the success of another relay counts.
    #[test]
    fn only_a_destination_that_fails_for_all_relays_is_disabled() {
        let (mut one, now) = failing();
        let fails = failed(ReasonCode::Timeout, None);
        one.record(&fails, now);
        one.learn(Some(Duration::ZERO), now);
        one.record(&fails, now + AFTER / 2);
        one.news = None;
        one.learn(None, now + AFTER / 2);
        one.record(&fails, now + AFTER);
        assert_ne!(one.news, Some(RowNews::HasFailedLong));
        // As another relay has written, before this relay was started.
        one.learn(Some(AFTER), now + AFTER);
        one.record(&fails, now + AFTER);
        assert_eq!(one.news, Some(RowNews::HasFailedLong));
    }
}
