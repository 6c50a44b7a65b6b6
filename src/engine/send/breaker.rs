//! The arithmetic of a circuit breaker: which sends count, and for how long the breaker opens.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::config::Breaker;
use crate::dispatch::Outcome;
use crate::status::ReasonCode;

/// The number of parts of a window. A part expires as a whole.
const PARTS: u32 = 10;

/// The sends of the recent past. Has no clock: the time is a parameter.
#[derive(Debug)]
pub(super) struct Window {
    settings: Breaker,
    /// The start of each part, its sends and its failures.
    parts: VecDeque<(Instant, u32, u32)>,
    /// The first of the failures since the last success, and their number.
    run: Option<(Instant, u32)>,
}

/// The breaker also opens after this many failures without a success, if they last for [`RUN_WINDOWS`]: a destination
/// that hangs, or gets few messages, never has enough sends in one window.
const RUN_FAILURES: u32 = 5;
const RUN_WINDOWS: u32 = 2;

impl Window {
    pub(super) fn new(settings: Breaker) -> Self {
        Self {
            settings,
            parts: VecDeque::new(),
            run: None,
        }
    }

    /// Counts a failed send. `true`: too many sends have failed.
    pub(super) fn count_failure(&mut self, now: Instant) -> bool {
        self.count(0, 1, now);
        let (since, failures) = self.run.get_or_insert((now, 0));
        *failures = failures.saturating_add(1);
        let lasts = now.saturating_duration_since(*since);
        let is_long =
            *failures >= RUN_FAILURES && lasts >= self.settings.window.saturating_mul(RUN_WINDOWS);
        is_long || self.is_tripped()
    }

    /// Counts successful sends.
    pub(super) fn count_good(&mut self, sends: u32, now: Instant) {
        self.count(sends, 0, now);
        self.run = None;
    }

    fn count(&mut self, good: u32, failed: u32, now: Instant) {
        let length = self.settings.window / PARTS;
        let age = |part: &(Instant, u32, u32)| now.saturating_duration_since(part.0);
        if self.parts.back().is_none_or(|part| age(part) >= length) {
            self.parts.retain(|part| age(part) < self.settings.window);
            self.parts.push_back((now, 0, 0));
        }
        if let Some((_, sends, failures)) = self.parts.back_mut() {
            *sends = sends.saturating_add(good + failed);
            *failures = failures.saturating_add(failed);
        }
    }

    fn is_tripped(&self) -> bool {
        let total = |part: fn(&(Instant, u32, u32)) -> u32| -> u64 {
            self.parts.iter().map(|p| u64::from(part(p))).sum()
        };
        let (sends, failures) = (total(|p| p.1), total(|p| p.2));
        #[allow(clippy::cast_precision_loss, reason = "no window has that many sends")]
        let ratio = failures as f64 / sends.max(1) as f64;
        sends >= u64::from(self.settings.min_sends) && ratio >= self.settings.failure_ratio
    }

    /// How long the breaker is open the `openings`-th time in a row (1, 2, …).
    pub(super) fn open_time(&self, openings: u32) -> Duration {
        let Breaker { open, open_cap, .. } = self.settings;
        let doubled = 2_u32.saturating_pow(openings.saturating_sub(1));
        open.saturating_mul(doubled).min(open_cap)
    }

    /// Forgets all sends.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.run = None;
    }
}

/// What an outcome shows about the destination as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    /// The destination works.
    Good,
    /// The destination fails.
    Bad,
    /// This relay could not send, for reasons of its own.
    NoWay,
    /// Nothing: the outcome concerns the message.
    None,
}

/// What an outcome shows about the destination.
pub(crate) fn sign(outcome: &Outcome) -> Sign {
    match outcome {
        Outcome::Delivered(_) => Sign::Good,
        Outcome::Wait(_) => Sign::NoWay,
        Outcome::Dead(failure) if failure.response.status.is_some() => Sign::Good,
        Outcome::Dead(_) => Sign::None,
        Outcome::Retry(failure) => match failure.code {
            ReasonCode::Dns
            | ReasonCode::Connect
            | ReasonCode::Tls
            | ReasonCode::TokenServer
            | ReasonCode::Timeout
            | ReasonCode::ConnectionLost
            | ReasonCode::Protocol
            | ReasonCode::Redirect
            | ReasonCode::ServerError
            | ReasonCode::Gone => Sign::Bad,
            // With a `Retry-After`, the pause applies instead of the breaker.
            ReasonCode::RateLimited if failure.pause.is_none() => Sign::Bad,
            ReasonCode::ClientError => match failure.response.status {
                Some(408 | 409 | 413 | 425) => Sign::None,
                _ => Sign::Bad,
            },
            _ => Sign::None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::{Failure, Response};

    fn settings() -> Breaker {
        Breaker {
            min_sends: 10,
            window: Duration::from_secs(10),
            ..Breaker::default()
        }
    }

    #[test]
    fn it_opens_when_half_of_enough_sends_have_failed() {
        let now = Instant::now();
        let mut window = Window::new(settings());
        window.count_good(5, now);
        for _ in 0..4 {
            assert!(!window.count_failure(now), "too few sends");
        }
        assert!(window.count_failure(now));
    }

    #[test]
    fn sends_before_the_window_do_not_count() {
        let now = Instant::now();
        let mut window = Window::new(settings());
        for _ in 0..9 {
            window.count_failure(now);
        }
        assert!(!window.count_failure(now + Duration::from_secs(11)));
    }

    /// R50: at one send in 4 s, or with 4 concurrent sends that each hang for 10 s, no window ever has 10 sends.
    #[test]
    fn it_opens_when_all_of_a_few_sends_fail_for_long() {
        let mut window = Window::new(settings());
        let now = Instant::now();
        let at = |n: u32| now + Duration::from_secs(4) * n;
        for n in 0..5 {
            assert!(!window.count_failure(at(n)), "for {} s", 4 * n);
        }
        assert!(window.count_failure(at(5)));
        window.count_good(1, at(5));
        assert!(!window.count_failure(at(6)), "a success ends the run");
        assert!(!window.count_failure(at(60)), "too few");
    }

    #[test]
    fn few_failures_among_many_sends_do_not_open_it() {
        let mut window = Window::new(settings());
        let now = Instant::now();
        for n in 0..1000_u32 {
            let at = now + Duration::from_millis(u64::from(n) * 5);
            window.count_good(2, at);
            assert!(!window.count_failure(at), "{n}");
        }
    }

    #[test]
    fn the_open_time_doubles_up_to_its_cap() {
        let mut settings = settings();
        settings.open = Duration::from_secs(1);
        settings.open_cap = Duration::from_secs(5);
        let window = Window::new(settings);
        let seconds: Vec<u64> = (1..=4).map(|n| window.open_time(n).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 5]);
        assert_eq!(window.open_time(u32::MAX).as_secs(), 5);
    }

    #[test]
    fn an_outcome_of_the_message_says_nothing_of_the_destination() {
        let retry = |code, status| {
            let mut failure = Failure::new(code, "");
            failure.response = Response::new(status, None);
            Outcome::Retry(failure)
        };
        for (outcome, expected) in [
            (retry(ReasonCode::Timeout, None), Sign::Bad),
            (retry(ReasonCode::ServerError, Some(500)), Sign::Bad),
            (retry(ReasonCode::ClientError, Some(404)), Sign::Bad),
            (retry(ReasonCode::ClientError, Some(409)), Sign::None),
            (retry(ReasonCode::RateLimited, Some(429)), Sign::Bad),
            (retry(ReasonCode::Panic, None), Sign::None),
            (retry(ReasonCode::NoRoute, None), Sign::None),
            (
                Outcome::Wait(Failure::new(ReasonCode::Proxy, "")),
                Sign::NoWay,
            ),
            (
                Outcome::Dead(Failure::new(ReasonCode::InvalidHeader, "")),
                Sign::None,
            ),
        ] {
            assert_eq!(sign(&outcome), expected, "{outcome:?}");
        }
    }
}
